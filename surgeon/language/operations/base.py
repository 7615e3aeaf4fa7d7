"""Operations: typed functions from a program and a stretch of layers to a program.

An operation is one short file with one decorated function; its signature is its parameters, in recipes too. It never
sees weights or models, only the program: whether layers are still free to be edited is read off the program itself. One
that has to know how large matrices are has a parameter `shapes`, which is no part of recipes either.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast

from surgeon.errors import show_value
from surgeon.language.operations.declare import (
    HEATMAPS,
    VARIANTS,
    Heatmap,
    Variant,
    apply,
    check_free,
    declare,
)
from surgeon.language.program import Node, Program, Step, layer_nodes
from surgeon.language.sublayer import ATTENTION, FEED_FORWARD, KINDS, LayerShapes, Sublayer

if TYPE_CHECKING:
    from pydantic import BaseModel

F = TypeVar("F", bound=Callable[..., Program])
Half = Literal["both", "attention", "mlp"]  # which part of layers an operation is about
KINDS_OF: dict[Half, frozenset[str]] = {
    "both": frozenset(KINDS),
    "attention": frozenset({ATTENTION}),
    "mlp": frozenset({FEED_FORWARD}),
}
_GIVEN = ("program", "layers", "shapes")  # to an operation by whoever applies it
_LAYERS = re.compile(r"\s*(\d{1,9})\s*:\s*(\d{1,9})\s*")


class OperationFunction(Protocol):
    """program, layers (a stretch, as a range), perhaps shapes, and parameters of its own -> the edited program."""

    __name__: str
    __doc__: str | None

    def __call__(self, program: Program, layers: range, **parameters: Any) -> Program: ...


@dataclass(frozen=True)
class Operation:
    """A registered operation.

    Attributes:
        anywhere: whether it changes sublayers wherever they stand, in forks, too, and moves none.
    """

    function: OperationFunction
    anywhere: bool = False

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def summary(self) -> str:
        """The first line of its description."""
        return inspect.getdoc(self.function).split("\n")[0]  # type: ignore[union-attr]

    def apply(
        self, program: Program, layers: range, shapes: LayerShapes | None = None, **parameters: Any
    ) -> Program:
        """The edited program; `shapes` and errors as `declare.apply`."""
        return apply(self.function, program, layers, shapes, **parameters)

    @cached_property
    def parameters(self) -> type[BaseModel]:
        """The model that its parameters are checked against; made when needed, because pydantic is slow to load."""
        from pydantic import ConfigDict, create_model

        fields: dict[str, Any] = {}
        for name, parameter in inspect.signature(self.function, eval_str=True).parameters.items():
            if name not in _GIVEN:
                if parameter.default is inspect.Parameter.empty:
                    default = ...
                else:
                    default = parameter.default
                fields[name] = (parameter.annotation, default)
        return create_model(self.name, __config__=ConfigDict(extra="forbid", strict=True), **fields)

    @property
    def heatmaps(self) -> dict[str, Heatmap]:
        """The maps of a scan that it declares, by name."""
        return {name: one for name, one in HEATMAPS.items() if one.function is self.function}

    @property
    def variants(self) -> dict[str, Variant]:
        """The variants of a bench that it declares, by name."""
        return {name: one for name, one in VARIANTS.items() if one.function is self.function}


OPERATIONS: dict[str, Operation] = {}


def operation(
    *,
    heatmaps: Mapping[str, Heatmap] | None = None,
    variants: Mapping[str, Variant] | None = None,
    anywhere: bool = False,
) -> Callable[[F], F]:
    """Register a function as an operation under its own name, with the maps and variants that it gives, by theirs.

    Whoever calls it may write the layers as a recipe does: "4:30" is layers 4 to 29.

    Args:
        anywhere: as `Operation` has it.

    Raises:
        ValueError: if another operation has one of the names.
    """

    def register(function: F) -> F:
        @wraps(function)
        def edit(program: Program, layers: range | str, *args: Any, **parameters: Any) -> Program:
            stretch = parse_range(layers) if isinstance(layers, str) else layers
            return function(program, stretch, *args, **parameters)

        name = function.__name__
        check_free(name, edit, OPERATIONS[name].function if name in OPERATIONS else None)
        declare(HEATMAPS, heatmaps or {}, edit)
        declare(VARIANTS, variants or {}, edit)
        OPERATIONS[name] = Operation(edit, anywhere)
        return cast("F", edit)

    return register


@dataclass(frozen=True)
class Stretch:
    """Whole, unedited layers, wherever a program runs them one after the other.

    Attributes:
        layers: the nodes of each layer, in order.
        around: what stands before them, between the places where they run if there are several, and after them.
    """

    layers: tuple[tuple[Node, ...], ...]
    around: tuple[tuple[Node, ...], ...]

    def replaced_by(self, *nodes: Node) -> Program:
        """The program with other nodes in the stretch's place, everywhere."""
        made, *others = self.around
        for after in others:
            made += nodes + after
        return Program(made)


def find_stretch(program: Program, layers: range) -> Stretch:
    """Find layers that are still whole and in order in the program.

    Raises:
        ValueError: if the range is empty, out of the program's range, or an earlier operation changed a layer of it.
    """
    for steps_per_layer in (2, 1) if layers else ():
        wanted = tuple(layer_nodes(layer, steps_per_layer) for layer in layers)
        around = _around(tuple(node for nodes in wanted for node in nodes), layers[0], program.nodes)
        if len(around) > 1:
            return Stretch(wanted, around)
    require_present(program, layers)
    raise ValueError(
        f"layers {show_range(layers)} overlap with what an earlier operation changed: "
        f"the program no longer runs them whole and in order; use layers that no other operation touches"
    )


def _around(run: tuple[Node, ...], first: int, nodes: tuple[Node, ...]) -> tuple[tuple[Node, ...], ...]:
    """Split nodes at the places of this run, which begins with the layer `first`.

    All nodes, where there is no such place.
    """
    pieces = list[tuple[Node, ...]]()
    end = 0
    for start, node in enumerate(nodes):
        if start < end or not isinstance(node, Step) or node.sublayers[0].layers != (first,):
            continue  # seen sooner than by comparing steps, which searches would do millions of times
        if nodes[start : start + len(run)] == run:
            pieces.append(nodes[end:start])
            end = start + len(run)
    return (*pieces, nodes[end:])


def require_present(program: Program, layers: range) -> None:
    """Refuse an empty range, or one that reaches beyond the program's layers.

    Raises:
        ValueError: with the range, and the one that would be right.
    """
    if not layers:
        raise ValueError(
            f"layers {show_range(layers)} are empty: the end comes after the first, as in 4:30 for 4 to 29"
        )
    present = program.layers
    last = max(present, default=-1)
    if layers[-1] > last:
        raise ValueError(
            f"layers {show_range(layers)} are out of range: the model's layers are 0:{last + 1} (0 to {last})"
        )
    gone = [layer for layer in layers if layer not in present]
    if gone:
        raise ValueError(
            f"layers {show_range(layers)} overlap with what an earlier operation removed: layer {gone[0]}"
        )


def show_range(layers: range) -> str:
    """A range as Python slices it: 4:30."""
    return f"{layers.start}:{layers.stop}"


def parse_range(text: Any) -> range:
    """A range of layers as Python slices it: "4:30" is layers 4 to 29.

    Raises:
        ValueError: if it is anything else.
    """
    if isinstance(text, int):
        raise ValueError(
            'layers must stand in quotes, as in "4:30": without them YAML reads 4:30 as a number'
        )
    match = _LAYERS.fullmatch(str(text))
    if match is None or int(match[1]) >= int(match[2]):
        raise ValueError(
            f'layers {show_value(text)} are no range; write "4:30" for layers 4 to 29 (layers count from 0)'
        )
    return range(int(match[1]), int(match[2]))


def average_sublayers(sublayers: list[Sublayer]) -> Sublayer:
    """Make a sublayer with the average of several sublayers' weights."""
    return Sublayer(
        sublayers[0].kind, tuple(layer for sublayer in sublayers for layer in sublayer.layers)
    )
