"""Declarations of operations: the maps of a scan and the variants of a bench that each gives.

Scans, benches, their help texts and reports read the two tables, so that an operation is named in its own file only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeVar

from surgeon.language.program import Program
from surgeon.language.sublayer import LayerShapes

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
    def seeded(self) -> bool:
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
