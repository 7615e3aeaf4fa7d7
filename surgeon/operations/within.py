"""Operations on models that run a program of their own: native tracks, and whatever a checkpoint runs.

Operations change layers that a program runs whole and in order. In a program with forks a stretch of layers may lie in
one branch; then the operation changes the branch.
"""

from __future__ import annotations

from collections.abc import Callable

from surgeon.program import Fork, Node, Program, layer_nodes

Change = Callable[[Program], Program]


def changed_within(program: Program, layers: range, steps_per_layer: int, change: Change) -> Program | None:
    """The program with a change of one list of its nodes, its own or a branch's, that runs a stretch of layers.

    A branch of which nothing is left is gone, and so is a fork without branches.

    Args:
        change: given the whole list as a program.

    Returns:
        None where no list of nodes has these layers whole, in order, and one after the other.
    """
    wanted = tuple(node for layer in layers for node in layer_nodes(layer, steps_per_layer))
    nodes = _changed(program.nodes, wanted, change)
    return None if nodes is None else Program(nodes)


def _changed(nodes: tuple[Node, ...], wanted: tuple[Node, ...], change: Change) -> tuple[Node, ...] | None:
    if any(nodes[start : start + len(wanted)] == wanted for start in range(len(nodes) - len(wanted) + 1)):
        return change(Program(nodes)).nodes
    for place, fork in enumerate(nodes):
        for number, branch in enumerate(fork.branches if isinstance(fork, Fork) else ()):
            found = _changed(branch, wanted, change)
            if found is not None:
                assert isinstance(fork, Fork)
                branches = (*fork.branches[:number], *((found,) if found else ()), *fork.branches[number + 1 :])
                return (*nodes[:place], *((Fork(branches),) if branches else ()), *nodes[place + 1 :])
    return None
