"""Operations: typed functions from a program and a stretch of layers to a program.

An operation is one short file with one decorated function; its signature is its parameters, in recipes too. It never
sees weights or models, only the program: whether layers are still free to be edited is read off the program itself. One
that has to know how large matrices are has a parameter `shapes`, which is no part of recipes either.

It also declares the maps of a scan and the variants of a bench that it gives. Scans, benches, their help texts and
reports read the two tables of these.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, wraps
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from surgeon.language.program import Node, Program, Step, layer_nodes
from surgeon.language.sublayer import ATTENTION, FEED_FORWARD, KINDS, LayerShapes, Sublayer
from surgeon.words import show_value

if TYPE_CHECKING:
    from pydantic import BaseModel

LAST = 1000  # the place of what does not say where it stands


def _refuse_call(*_: Any, **__: Any) -> Program:
    raise AssertionError("a declaration is applied by its table's entry, which @operation makes")


@dataclass(frozen=True)
class Heatmap:
    """A map of a scan: the operation, with these parameters, on every stretch of layers.

    Or on every layer alone, with every value of a parameter, which are the map's columns then.

    Attributes:
        title: as pictures and pages name it.
        parameters: of the operation.
        varied: the parameter whose values are the columns, if they are not the stretches' last layers.
        values: of that parameter, in the columns' order; or what says them of a model's layer.
        across: what pictures call the columns, where that is not the parameter's name.
        place: where it stands among all maps; those at the same place stand in the order of their names.
        paper: whether it is in figure 4 of the Layer Parallelism paper; those are scanned unless others are asked for.
        group: how many layers it takes together; the layers of a stretch that fill no group stay as they are.
        removes: whether it leaves out layers or parts of them.
        late: whether the stretch's first layer, too, misses what the layer before it adds.
        curves: whether it is drawn by where the stretch ends, too (figure 7 of the paper).
        style: of its points and lines in charts.
        verb: what it does to a layer ("remove"), if it is one of the ways to a shorter model that people ask for first.
        note: what help texts say of it behind its name.
        function: the operation; filled in by the decorator.
    """

    title: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    varied: str | None = None
    values: tuple[float, ...] | Callable[[LayerShapes, int], tuple[float, ...]] = ()
    across: str = ""
    place: int = LAST
    paper: bool = False
    group: int = 1
    removes: bool = False
    late: bool = False
    curves: bool = False
    style: int = 0
    verb: str = ""
    note: str = ""
    function: Callable[..., Program] = _refuse_call

    @property
    def is_seeded(self) -> bool:
        """True if the operation draws at random: its cells are then means over several seeds."""
        return "seed" in inspect.signature(self.function).parameters and "seed" not in self.parameters

    def columns(self, layer: int, shapes: LayerShapes | None) -> tuple[float, ...]:
        """The parameter's values for a layer; none where they follow from shapes that are not given."""
        if not callable(self.values):
            return self.values
        if shapes is None:
            return ()
        return self.values(shapes, layer)

    def __call__(
        self, program: Program, layers: range, shapes: LayerShapes | None = None, **more: Any
    ) -> Program:
        """The program after the operation; `shapes` and errors as `apply`."""
        return apply(self.function, program, layers, shapes, **self.parameters, **more)


@dataclass(frozen=True)
class Variant:
    """A program that a bench knows by a name: the operation, with these parameters, on a stretch of a model.

    Attributes:
        parameters: of the operation.
        place: where it stands among all variants; those at the same place stand in the order of their names.
        argument: the parameter whose value, a whole number from 1 on, is given behind the name: `tracks:4` for the
            variant `tracks:D`.
        meaning: of that number, for errors: "how many layers a track has".
        ranks: the parameter that gets the number of ranks, where the program has a slice of the layers for each.
        over: the variant that the operation is applied on top of, instead of the unedited program.
        note: what help texts say of it behind its name.
        function: the operation; filled in by the decorator.
    """

    parameters: Mapping[str, Any] = field(default_factory=dict)
    place: int = LAST
    argument: str | None = None
    meaning: str = ""
    ranks: str | None = None
    over: str | None = None
    note: str = ""
    function: Callable[..., Program] = _refuse_call


HEATMAPS: dict[str, Heatmap] = {}
VARIANTS: dict[str, Variant] = {}

Declared = TypeVar("Declared", Heatmap, Variant)


def apply(
    function: Callable[..., Program],
    program: Program,
    layers: range,
    shapes: LayerShapes | None,
    **parameters: Any,
) -> Program:
    """The program after an operation.

    Args:
        shapes: of the model's layers, for operations that ask for them.

    Raises:
        ValueError: if it does not fit the program, or needs shapes that are not given.
    """
    if not _takes_shapes(function):
        return function(program, layers, **parameters)
    if shapes is None:
        raise ValueError(
            f"{function.__name__} depends on the shapes of the model's layers, which are not given here"
        )
    return function(program, layers, shapes=shapes, **parameters)


@cache  # searches apply operations thousands of times
def _takes_shapes(function: Callable[..., Program]) -> bool:
    return "shapes" in inspect.signature(function).parameters


def declare(
    table: dict[str, Declared], declared: Mapping[str, Declared], function: Callable[..., Program]
) -> None:
    """Enter what an operation declares, and keep the table in the order of places, whoever is imported first.

    Raises:
        ValueError: if another operation has declared one of the names.
    """
    for name, one in declared.items():
        check_free(name, function, table[name].function if name in table else None)
        table[name] = replace(one, function=function)
    ordered = sorted(table.items(), key=lambda entry: (entry[1].place, entry[0]))
    table.clear()
    table.update(ordered)


def check_free(name: str, function: Callable[..., Any], present: Callable[..., Any] | None) -> None:
    """Refuse a name that another function has; the same function may come again, when its module is loaded again.

    Raises:
        ValueError: naming the other function.
    """
    if present is not None and _home(present) != _home(function):
        raise ValueError(
            f"{_home(function)} cannot be called {name!r}: {_home(present)} is; choose another name"
        )


def _home(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def describe_name(name: str, note: str) -> str:
    """A name as help texts list it."""
    if note:
        return f"{name} ({note})"
    return name


F = TypeVar("F", bound=Callable[..., Program])
Half = Literal["both", "attention", "mlp"]  # which part of layers an operation is about
KINDS_OF: dict[Half, frozenset[str]] = {
    "both": frozenset(KINDS),
    "attention": frozenset({ATTENTION}),
    "mlp": frozenset({FEED_FORWARD}),
}
_GIVEN = ("program", "layers", "shapes")  # to an operation by whoever applies it
_LAYERS = re.compile(r"\s*(\d{1,9})\s*:\s*(\d{1,9})\s*")


@dataclass(frozen=True)
class Operation:
    """A registered operation.

    Attributes:
        function: program, layers (a stretch), perhaps shapes, and parameters of its own -> the edited program.
        anywhere: whether it changes sublayers wherever they stand, in forks, too, and moves none.
    """

    function: Callable[..., Program]
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
