"""Sums of the parts that ranks compute of a step's output.

Most steps have one sum, of what all ranks add to the stream, (T, h). Two things keep sublayers of a step apart: a norm
behind a sublayer (Gemma2), and a product of two factors, summed before the second one, of as many values as its rank.
Then each of the step's sublayers has a segment of its own in what is reduced, (T, all segments).

Shapes: T tokens of a pass, h the stream's width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from surgeon.language.execute import Partial
from surgeon.language.program import Step
from surgeon.language.sublayer import WRITING
from surgeon.runtime.model.layers import Norm
from surgeon.runtime.model.linear import LinearMap
from surgeon.runtime.plan.specification import NO_MIXTURES, Mixtures


def summed_in_rank_space(
    step: Step, hidden: int, normed: bool, mixtures: Mixtures = NO_MIXTURES
) -> frozenset[int]:
    """The sublayers of a step, by their numbers in it, whose parts are summed before their second factor.

    Args:
        hidden: the stream's width.
        normed: whether a norm stands behind each of the sublayers, so that they are summed apart in any case.
        mixtures: whose experts have a second factor each, so that they are summed behind it.
    """
    ranks = [
        next((rank for role, rank in one.ranks if role in WRITING and mixtures.size(one) is None), None)
        for one in step.sublayers
    ]
    if normed:
        return frozenset(index for index, rank in enumerate(ranks) if rank is not None and rank < hidden)
    # Together in the stream's space they take its width, however many they are.
    known = [rank for rank in ranks if rank is not None]
    if len(known) == len(ranks) and sum(known) < hidden:
        return frozenset(range(len(ranks)))
    return frozenset()


def summed_apart(step: Step, hidden: int, in_rank_space: frozenset[int], normed: bool) -> dict[int, int]:
    """Sublayers of a step that are summed by themselves, and how many values of a token; none for one sum of all."""
    ranks = {
        index: next(rank for role, rank in step.sublayers[index].ranks if role in WRITING)
        for index in in_rank_space
    }
    return {
        index: ranks.get(index, hidden)
        for index in range(len(step.sublayers))
        if normed or index in ranks
    }


@dataclass(frozen=True)
class Segment:
    """A part of what is reduced: the sum, (T, width), of members of a step, through a second factor and a norm."""

    members: frozenset[int]
    width: int
    second: LinearMap | None = None
    norm: Norm | None = None

    def finished(self, total: Tensor) -> Tensor:
        """Make the output, (T, h), of the sum, (T, width)."""
        output = total
        if self.second is not None:
            output = self.second(total)
        if self.norm is None:
            return output
        return self.norm(output)


class StepOutputs:
    """The segments of one step, on ranks that compute slices of its sublayers.

    Args:
        seconds: by number in the step, of sublayers that are summed in rank space.
        norms: by number in the step, of all sublayers or of none.
    """

    def __init__(
        self, step: Step, hidden: int, seconds: Mapping[int, LinearMap], norms: Mapping[int, Norm]
    ) -> None:
        self.segments = [
            Segment(frozenset([index]), width, seconds.get(index), norms.get(index))
            for index, width in summed_apart(step, hidden, frozenset(seconds), bool(norms)).items()
        ]
        if not self.segments:
            self.segments = [Segment(frozenset(range(len(step.sublayers))), hidden)]

    def partial(self, outputs: list[tuple[int, Tensor]]) -> Partial:
        """This rank's part of the step's output, of its parts' outputs by their sublayers' numbers."""
        first, *others = self.segments
        if not others and first.second is None and first.norm is None:
            return Partial(reduce(torch.add, (output for _, output in outputs)))
        parts = []
        for segment in self.segments:
            own = [output for index, output in outputs if index in segment.members]
            like = outputs[0][1]
            parts.append(reduce(torch.add, own) if own else like.new_zeros(len(like), segment.width))
        return Partial(parts[0] if len(parts) == 1 else torch.cat(parts, -1), self._finish)

    def _finish(self, totals: Tensor) -> Tensor:
        parts = totals.split([segment.width for segment in self.segments], -1)
        return reduce(
            torch.add,
            (segment.finished(part) for segment, part in zip(self.segments, parts, strict=True)),
        )
