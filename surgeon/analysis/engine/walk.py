"""Walking through a model layer by layer, keeping each sublayer's output.

A program of its own is walked through as runs of whole layers, each with the stream that it reads: its own track's,
where it has tracks. A run is a stretch of neighbouring layers that one list of the program's nodes, its own or a
branch's, has whole and in order. The unedited program is one run of all layers; of native tracks every branch of every
block is one.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedModel

from surgeon.analysis.engine.machine import PlanMachine, cache_bytes
from surgeon.language.execute import Branch, State, advance, land
from surgeon.language.operations.applied import parts_of
from surgeon.language.program import Fork
from surgeon.language.sublayer import ATTENTION, FEED_FORWARD, Sublayer
from surgeon.models.families import family_of
from surgeon.models.weights import FactorSource

HEAD_NOT_FINITE = (
    "the unedited model's predictions are not finite: check the final norm and the output head"
)


@dataclass(frozen=True)
class LayerPass:
    """One layer's pass over a stream, each tensor (windows, tokens, hidden).

    Attributes:
        before: the stream that the attention reads.
        attention, mlp: what they add.
        middle: the stream that the feed-forward reads; `before` itself where both read the same (GPT-NeoX).
    """

    before: Tensor
    attention: Tensor
    middle: Tensor
    mlp: Tensor

    @property
    def update(self) -> Tensor:
        return self.attention + self.mlp

    @property
    def after(self) -> Tensor:
        return self.before + self.attention + self.mlp


class Walk:
    """Some windows of text on an unedited model: runs any layer's sublayers on any stream of their shape.

    Args:
        ids: (windows, tokens), all of them real tokens.
        like: a walk over windows of the same shape, with the same masks and positions.

    Attributes:
        ids: those windows, on the model's device.
        start: the embedded stream, (windows, tokens, hidden).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        ids: Tensor,
        like: Walk | None = None,
        factors: FactorSource | None = None,
    ) -> None:
        self.ids = ids.to(model.device)
        machine = PlanMachine(model, self.ids, cache_bytes(model), factors)
        self.start = machine.stream
        self.machine: PlanMachine = machine if like is None else like.machine
        self.reads_same = family_of(model.config).steps_per_layer == 1
        if not self.start.isfinite().all():
            raise ValueError(
                "the unedited model's embedded tokens are not finite; check the embedding's weights"
            )

    def attention(self, layer: int, stream: Tensor) -> Tensor:
        """Run a layer's attention on this stream, its norm included."""
        return self.machine.sublayer(Sublayer(ATTENTION, (layer,)), stream)

    def mlp(self, layer: int, stream: Tensor) -> Tensor:
        return self.machine.sublayer(Sublayer(FEED_FORWARD, (layer,)), stream)

    def layer(self, layer: int, stream: Tensor) -> LayerPass:
        attention = self.attention(layer, stream)
        middle = stream if self.reads_same else stream + attention
        return LayerPass(stream, attention, middle, self.mlp(layer, middle))

    def dense_layer(self, layer: int, stream: Tensor) -> LayerPass:
        """A layer's pass over the unedited model's stream; ValueError names the sublayer that is not finite."""
        passed = self.layer(layer, stream)
        for kind, output in ((ATTENTION, passed.attention), (FEED_FORWARD, passed.mlp)):
            if not output.isfinite().all():
                raise not_finite(f"{kind}{layer}")
        return passed


def walks(
    model: PreTrainedModel, ids: Tensor, at_once: int, factors: FactorSource | None = None
) -> Iterator[Walk]:
    """Walks over all windows, so many at a time; masks and positions are made once for each shape."""
    first: dict[torch.Size, Walk] = {}
    for chunk in torch.split(ids, at_once):
        walk = Walk(model, chunk, first.get(chunk.shape), factors)
        first.setdefault(chunk.shape, walk)
        yield walk


def not_finite(where: object) -> ValueError:
    """The error for an unedited model that computes NaN or infinity, first in this sublayer or step."""
    return ValueError(
        f"the unedited model's numbers are not finite: NaN or infinity appears first in {where}; "
        "check that layer's weights"
    )


@torch.inference_mode()
def raise_not_finite(model: PreTrainedModel, ids: Tensor) -> NoReturn:
    """Raise ValueError naming where numbers stop being finite in an unedited model."""
    walk = Walk(model, ids)
    stream = walk.start
    for layer in range(model.config.num_hidden_layers):
        stream = walk.dense_layer(layer, stream).after
    raise ValueError(HEAD_NOT_FINITE)


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


class _After(NamedTuple):
    """The end of a list of nodes.

    Attributes:
        ended: the sum that the last run of layers added, or for each branch of a fork that of the run at its end;
            None for a branch that ends otherwise.
    """

    state: State
    ended: tuple[Tensor | None, ...]


def layers_run(
    walk: Walk, nodes: Branch, state: State | None = None, before: Tensor | None = None
) -> Generator[RunLayer, None, _After]:
    """Run a list of nodes on a walk's windows, and yield its whole layers as it comes to them.

    Args:
        state: before them; by default the embedded stream.
        before: what the layer before them has added, if that is known.
    """
    after = _After(state or State(walk.start), (before,))
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
    stream = landed.stream
    total = landed.added
    without = None if added is None else stream - added
    del landed, after, added
    for layer in run:
        passed = walk.dense_layer(layer, stream)
        reached = [RunLayer(run, layer, passed, without)]
        stream = passed.after
        without = passed.before
        if layer == run[-1]:
            # The last output stays pending, for a late step that may follow.
            last, read = (
                (passed.update, passed.before) if walk.reads_same else (passed.mlp, passed.middle)
            )
            update = passed.update
            landing = None if walk.reads_same else passed.attention
        else:
            landing = passed.update
        if total is not None and landing is not None:
            total = total + landing
        del passed, landing
        yield reached.pop()  # whose tensors are gone as soon as nobody has them
    return _After(State(read, lambda: last, total), (update,))


def _fork_run(walk: Walk, fork: Fork, after: _After) -> Generator[RunLayer, None, _After]:
    landed = land(after.state)
    if len(after.ended) == len(fork.branches):
        known = after.ended
    else:
        known = (None,) * len(fork.branches)
    outputs = list[Tensor]()
    ended = list[Tensor | None]()
    for branch, before in zip(fork.branches, known, strict=True):
        start = State(landed.stream, added=torch.zeros_like(landed.stream))
        found = yield from layers_run(walk, branch, start, before)
        added = land(found.state).added
        assert added is not None
        outputs.append(added)
        ended.append(found.ended[0] if len(found.ended) == 1 else None)
    output = reduce(torch.add, outputs)
    return _After(State(landed.stream, lambda: output, landed.added), tuple(ended))
