"""Cells of a scan: one change of the model for every operation and every contiguous stretch of layers.

Maps over a parameter's values have a cell for every single layer and every value.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from surgeon.analysis.engine.sharing import simplify
from surgeon.errors import did_you_mean, show_value
from surgeon.language.operations import OPERATIONS
from surgeon.language.operations.applied import changed_within
from surgeon.language.operations.base import HEATMAPS, Heatmap, show_range
from surgeon.language.program import Program
from surgeon.language.sublayer import LayerShapes

# The maps of a scan that names none.
SCANNED = tuple(name for name, heatmap in HEATMAPS.items() if heatmap.paper)
ALL = "all"


@dataclass(frozen=True)
class Cell:
    """One entry of a heatmap.

    Attributes:
        first, last: the ends of the stretch of layers, both included, from 0.
        programs: of the changed model; several for a cell that is the mean over random permutations.
        seeds: of the permutations, one for each program; empty where nothing is random.
        value: of the parameter that the map varies, if it varies one.
    """

    operation: str
    first: int
    last: int
    programs: tuple[Program, ...]
    seeds: tuple[int, ...] = ()
    value: float | None = None

    @property
    def layers(self) -> range:
        return range(self.first, self.last + 1)

    @cached_property
    def measured(self) -> tuple[Program, ...]:
        """Programs that compute the same as these, and are run in their place."""
        return tuple(map(simplify, self.programs))

    @property
    def program(self) -> Program:
        """The changed model's program, of several permutations the first one."""
        return self.programs[0]


@dataclass(frozen=True)
class Selection:
    """The cells that one command asks for; made by `select`, which checks it.

    Attributes:
        operations: names of heatmaps, in their order.
        layers: only stretches inside this range.
        every: stretches begin at multiples of this from the range's start, and their lengths are multiples of it.
        max_length: the longest stretch, in layers.
        permutations: how many seeds a cell of what is random (`shuffle`) is the mean over.
    """

    operations: tuple[str, ...]
    layers: range
    every: int
    max_length: int
    permutations: int

    def stretches(self) -> Iterator[range]:
        """The stretches of layers, by first and then by last layer."""
        for first in self.layers[:: self.every]:
            longest = min(self.max_length, self.layers.stop - first)
            yield from (
                range(first, first + length) for length in range(self.every, longest + 1, self.every)
            )

    def places(
        self, heatmap: Heatmap, shapes: LayerShapes | None
    ) -> Iterator[tuple[range, float | None]]:
        """A map's places: every stretch, or each layer at which one begins with every value of the parameter."""
        if heatmap.varied is None:
            yield from ((stretch, None) for stretch in self.stretches())
        else:
            firsts = dict.fromkeys(stretch.start for stretch in self.stretches())
            for first in firsts:
                yield from ((range(first, first + 1), value) for value in heatmap.columns(first, shapes))

    def to_json(self) -> dict[str, Any]:
        """Write it as in `scan.json` and the journal."""
        layers = show_range(self.layers)
        return vars(self) | {"operations": list(self.operations), "layers": layers}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Selection:
        first, _, end = values["layers"].partition(":")
        layers = range(int(first), int(end))
        return cls(**values | {"operations": tuple(values["operations"]), "layers": layers})


def select(
    operations: Sequence[str],
    num_layers: int,
    *,
    layers: range | None = None,
    every: int = 1,
    max_length: int | None = None,
    permutations: int = 1,
) -> Selection:
    """Select cells of these heatmaps; arguments as in `Selection`, without them every stretch of layers.

    Raises:
        ValueError: if there is no such operation, the range leaves the model's layers, a number is below 1, or no
            stretch is left.
    """
    names = check_operations(operations)
    if layers is None:
        layers = range(num_layers)
    shown = show_range(layers)
    if not layers:
        raise ValueError(
            f"layers {shown} are empty: the end comes after the first, as in 4:30 for 4 to 29"
        )
    if layers.start < 0 or layers.stop > num_layers:
        raise ValueError(f"layers {shown} are out of range: the model's layers are 0:{num_layers}")
    for option, number in (("every", every), ("max_length", max_length), ("permutations", permutations)):
        if number is not None and number < 1:
            raise ValueError(f"{option} must be at least 1, not {number}")
    if every > len(layers):
        raise ValueError(
            f"every {every} is more than the {len(layers)} layers of {shown}; no stretch is that long"
        )
    longest = min(max_length or len(layers), len(layers))
    if longest < every:
        raise ValueError(
            f"max_length {longest} is less than every {every}: stretches have that length at least"
        )
    return Selection(tuple(names), layers, every, longest, permutations)


def check_operations(names: Sequence[str]) -> list[str]:
    """List the maps asked for, each once, in the order of `HEATMAPS`; "all" stands for every one.

    An operation without a map of its own (width) stands for all maps that it has.
    """
    several = {
        name: one.heatmaps for name, one in OPERATIONS.items() if one.heatmaps and name not in HEATMAPS
    }
    known = {name: (name,) for name in HEATMAPS} | several | {ALL: (*HEATMAPS,)}
    for name in names:
        if name not in known:
            raise ValueError(f"unknown operation {name!r} to scan; {did_you_mean(name, known)}")
    asked = {one for name in names for one in known[name]}
    return [name for name in HEATMAPS if name in asked]


def permutation_seeds(seed: int, count: int) -> tuple[int, ...]:
    """The seeds of a cell's permutations: the scan's own, then others drawn from it. More begin with fewer."""
    return seed, *(random.Random(f"{seed}:{number}").getrandbits(31) for number in range(1, count))


def selected_cells(
    selections: Sequence[Selection],
    num_layers: int,
    seed: int,
    steps_per_layer: int = 2,
    shapes: LayerShapes | None = None,
    program: Program | None = None,
) -> list[Cell]:
    """The cells that any of these selections asks for, each once, in the order of the table.

    Cells of `shuffle` are means over as many permutations as the selection that asks for the most. A program of the
    model's own has cells where it runs a stretch of layers whole and in order, in a branch of a fork if it has forks.
    """
    seeds = permutation_seeds(seed, max(selection.permutations for selection in selections))
    cells = []
    names = dict.fromkeys(name for selection in selections for name in selection.operations)
    for name, heatmap in HEATMAPS.items():
        asked = (
            selection.places(heatmap, shapes) for selection in selections if name in selection.operations
        )
        # The sort is stable, so that values stay in the order of the columns.
        wanted = dict.fromkeys(place for places in asked for place in places)
        for layers, value in sorted(wanted, key=lambda place: (place[0].start, place[0].stop)):
            varied: dict[str, Any] = {} if heatmap.varied is None else {heatmap.varied: value}
            apply = partial(heatmap, layers=layers, shapes=shapes, **varied)
            if heatmap.seeded:
                changes = [partial(apply, seed=one) for one in seeds]
            else:
                changes = [apply]
            start = program or Program.dense(num_layers, steps_per_layer)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                if program is None:
                    programs = [change(start) for change in changes]
                else:
                    found = (
                        changed_within(program, layers, steps_per_layer, change) for change in changes
                    )
                    programs = [one for one in found if one is not None]
            if programs and (value is None or programs[0] != start):  # a value may come to what there is
                for warning in said:
                    warnings.warn(warning.message, stacklevel=2)
                cell = Cell(name, layers.start, layers.stop - 1, tuple(programs), value=value)
                cells.append(replace(cell, seeds=seeds) if heatmap.seeded else cell)
    if not cells and program is not None and not all(callable(HEATMAPS[name].values) for name in names):
        raise ValueError(
            f"the model runs none of these layers whole and in order: its program is {show_value(str(program), 200)}"
        )
    if not cells:
        raise ValueError(f"the model has nothing that {' or '.join(names)} could change in these layers")
    return cells
