"""A model's program as runs of whole layers, each with the stream that it reads: its own track's, where it has tracks.

A run is a stretch of neighbouring layers that one list of the program's nodes, its own or a branch's, has whole and in
order. The unedited program is one run of all layers; of native tracks every branch of every block is one.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from surgeon.analysis.engine.walk import LayerPass, Walk
from surgeon.errors import shown
from surgeon.language.execute import State, advance, land
from surgeon.language.operations.within import parts_of
from surgeon.language.program import Fork, Node, Program

Branch = tuple[Node, ...]


@dataclass(frozen=True)
class RunLayer:
    """A whole layer as a program reaches it.

    Attributes:
        run: the layers of the run that it is in.
        passed: the layer on the stream that it reads.
        without: that stream without what the layer before it has added: the one before it in its run, or where tracks
            have just met, the last one of its own track. None where there is no such layer.
    """

    run: range
    layer: int
    passed: LayerPass
    without: Tensor | None


def runs_of(program: Program, steps_per_layer: int) -> list[range]:
    """All runs, in the order in which the program has them.

    Raises:
        ValueError: if there is none.
    """
    found = list(_runs(program.nodes, steps_per_layer))
    if not found:
        raise ValueError(f"the model runs no layer whole: its program is {shown(str(program), 200)}")
    return found


def layers_run(walk: Walk, program: Program) -> Iterator[RunLayer]:
    """Run a program on a walk's windows, and give its whole layers as it comes to them.

    What is not a whole layer runs too, and is not given.

    Raises:
        ValueError: naming the sublayer of a whole layer whose output is not finite.
    """
    yield from _list_run(walk, program.nodes, State(walk.start), None)


class _After:
    """Where a list of nodes has come to.

    Attributes:
        ended: what the last layers have added: that of a run that has just ended, or for each branch of a fork that of
            the run at its end; None for a branch that ends with something else.
    """

    def __init__(self, state: State, ended: tuple[Tensor | None, ...]) -> None:
        self.state, self.ended = state, ended


def _list_run(walk: Walk, nodes: Branch, state: State, before: Tensor | None) -> Generator[RunLayer, None, _After]:
    """The layers of a list of nodes.

    Args:
        before: what the layer before the first node has added to the stream, if that is known.
    """
    after = _After(state, (before,))
    for part in parts_of(nodes, 1 if walk.reads_same else 2):
        if isinstance(part, range):
            after = yield from _run(walk, part, after)
        elif isinstance(part, Fork):
            after = yield from _fork_run(walk, part, after)
        else:
            after = _After(advance(after.state, part, walk.machine), ())
    return after


def _run(walk: Walk, run: range, after: _After) -> Generator[RunLayer, None, _After]:
    landed = land(after.state)
    (added,) = after.ended if len(after.ended) == 1 else (None,)
    stream, total = landed.stream, landed.added
    without = None if added is None else stream - added
    del landed, after, added
    for layer in run:
        passed = walk.dense_layer(layer, stream)
        reached = [RunLayer(run, layer, passed, without)]
        stream, without = passed.after, passed.before
        if layer == run[-1]:
            # The last output stays pending, for a late step that may follow.
            last, read = (passed.update, passed.before) if walk.reads_same else (passed.mlp, passed.middle)
            update, landing = passed.update, None if walk.reads_same else passed.attention
        else:
            landing = passed.update
        if total is not None and landing is not None:
            total = total + landing
        del passed, landing
        yield reached.pop()  # whose tensors are gone as soon as nobody has them
    return _After(State(read, lambda: last, total), (update,))


def _fork_run(walk: Walk, fork: Fork, after: _After) -> Generator[RunLayer, None, _After]:
    landed = land(after.state)
    known = after.ended if len(after.ended) == len(fork.branches) else (None,) * len(fork.branches)
    outputs, ended = list[Tensor](), list[Tensor | None]()
    for branch, before in zip(fork.branches, known, strict=True):
        start = State(landed.stream, added=torch.zeros_like(landed.stream))
        found = yield from _list_run(walk, branch, start, before)
        added = land(found.state).added
        assert added is not None
        outputs.append(added)
        ended.append(found.ended[0] if len(found.ended) == 1 else None)
    output = reduce(torch.add, outputs)
    return _After(State(landed.stream, lambda: output, landed.added), tuple(ended))


def _runs(nodes: Branch, steps_per_layer: int) -> Iterator[range]:
    for part in parts_of(nodes, steps_per_layer):
        if isinstance(part, range):
            yield part
        elif isinstance(part, Fork):
            for branch in part.branches:
                yield from _runs(branch, steps_per_layer)
