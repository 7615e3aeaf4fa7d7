"""The cells of a scan: one program for every operation and every contiguous stretch of layers (paper, figure 4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from surgeon.errors import did_you_mean
from surgeon.operations import merge, pair, parallel, prune, shuffle
from surgeon.program import Program

# Named as the paper's figure 4 names them, in its order.
SCANNED: dict[str, Callable[..., Program]] = {
    "shuffle": shuffle,
    "prune": prune,
    "merge": merge,
    "parallel": parallel,
    "2-parallel": partial(pair, form="par", size=2),
}
SEEDED = ("shuffle",)


@dataclass(frozen=True)
class Cell:
    """One measurement of a scan.

    Attributes:
        first, last: the ends of the stretch of layers the operation was applied to, both included, from 0.
        program: what the model runs then.
    """

    operation: str
    first: int
    last: int
    program: Program


def check_operations(names: list[str]) -> list[str]:
    """The operations asked for, each once, in the paper's order.

    Raises:
        ValueError: naming the unknown one, and the one that was probably meant.
    """
    for name in names:
        if name not in SCANNED:
            raise ValueError(f"unknown operation {name!r} to scan; {did_you_mean(name, SCANNED)}")
    return [name for name in SCANNED if name in names]


def stretches(num_layers: int) -> Iterator[range]:
    """Every contiguous stretch of layers, by first and then by last layer."""
    return (range(first, end) for first in range(num_layers) for end in range(first + 1, num_layers + 1))


def scan_cells(operations: list[str], num_layers: int, seed: int, steps_per_layer: int = 2) -> list[Cell]:
    """All cells of these heatmaps, in the order of the table: by operation, first layer, last layer."""
    dense = Program.dense(num_layers, steps_per_layer)
    cells = []
    for name in operations:
        function = partial(SCANNED[name], seed=seed) if name in SEEDED else SCANNED[name]
        cells += [Cell(name, s.start, s.stop - 1, function(dense, layers=s)) for s in stretches(num_layers)]
    return cells
