"""Run layers several times."""

from __future__ import annotations

from itertools import groupby

from surgeon.language.operations.base import Heatmap, operation, require_present, show_range
from surgeon.language.program import Fork, Node, Program

MOST_TIMES = 1024  # a number beyond is a mistake, which would fill the memory


@operation(heatmaps={"repeat": Heatmap("Repeat", place=12, style=7)})
def repeat(program: Program, layers: range, times: int = 2) -> Program:
    """Run the layers several times in a row, with the same weights: 4 5 4 5 for layers 4 and 5.

    What earlier operations made of the layers runs again as it is: pairs, late steps, factors. Branches of a fork that
    have other layers, too, such as tracks, repeat their own parts of these.

    Args:
        times: how often the layers run, 2 or more.

    Raises:
        ValueError: if `times` is below 2, the layers nowhere run in a row, or share a step with others.
    """
    if not 2 <= times <= MOST_TIMES:
        raise ValueError(
            f"times must be at least 2 and at most {MOST_TIMES}, not {times}; 2 runs the layers twice"
        )
    require_present(program, layers)
    return Program(_repeat_runs(program.nodes, layers, times))


def _repeat_runs(nodes: tuple[Node, ...], layers: range, times: int) -> tuple[Node, ...]:
    """The nodes of a program or a branch, with every run that has all they have of these layers as often as that."""
    wanted = Program(nodes).layers.intersection(layers)
    beside = tuple(_with_branches(node, layers, times) for node in nodes)
    made: list[Node] = []
    runs = [
        tuple(run)
        for _, run in groupby(beside, key=lambda node: wanted.issuperset(Program((node,)).layers))
    ]
    for run in runs:
        made += run * times if Program(run).layers == wanted else run
    if wanted and beside == tuple(made) == nodes:
        apart = [run for run in runs if wanted.issuperset(Program(run).layers)]
        raise ValueError(
            f"layers {show_range(layers)} do not run in a row: {apart[0][0]} runs apart from {apart[1][0]}; "
            "give layers that run one after the other"
        )
    return tuple(made)


def _with_branches(node: Node, layers: range, times: int) -> Node:
    """A node as it is, but for a fork that has other layers than these: its branches repeat what they have of them."""
    there = Program((node,)).layers
    if there.isdisjoint(layers) or there.issubset(layers):
        return node
    if isinstance(node, Fork):
        return Fork(tuple(_repeat_runs(branch, layers, times) for branch in node.branches))
    raise ValueError(
        f"layers {show_range(layers)} cut through {node}; take in all of its layers, or none"
    )
