"""A rank's stretch of a program, where ranks have stretches one behind the other: streams come in, streams go on.

The first rank embeds tokens, and predicts by the stream that the last one sends back; the others have no rows of the
vocabulary. Where the first one has a coda, whatever passes through its stretch passes through the coda's layers as
well, so that both have cached the same tokens. Passes are computed as those of a whole model are: recorded, where they
can be.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from surgeon.runtime.batching.sequence import Row, asked_of
from surgeon.runtime.batching.windows import Windows
from surgeon.runtime.comm.collectives import Alone
from surgeon.runtime.model.attending import Pass
from surgeon.runtime.model.dynamic import DynamicPasses
from surgeon.runtime.model.ends import Index
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.model.paged_cache import PagedCache
from surgeon.runtime.model.phase import Phase
from surgeon.runtime.model.rank_model import Results
from surgeon.runtime.plan.memory import cache_groups
from surgeon.runtime.plan.specification import Plan

ROWS = 1024  # of tokens, whose stream lies always in the same memory, which recorded passes have the address of


class StretchEngine(RankEngine):
    """What one rank has of a model whose ranks have stretches of its program.

    Attributes:
        is_last: whether the next rank is the first one, which asks for some places of the stream only.
    """

    def __init__(self, plan: Plan, rank: int, device: torch.device) -> None:
        super().__init__(plan.of_rank(rank)[0], Alone(), device)
        self.is_last = rank == plan.ranks - 1
        groups = cache_groups(plan)
        self._division = groups.slots[rank], groups.windows
        self._arriving = self._fixed = self.vocabulary.like.new_empty(ROWS if rank else 0, plan.hidden)

    def cache_division(self) -> tuple[Sequence[int], Windows]:
        """Those of the whole model, whose texts have the same blocks on all ranks."""
        return self._division

    def embedded(self, tokens: Tensor, positions: Index) -> Tensor:
        """The stream before the stretch, (tokens, hidden)."""
        if self.plan.has_vocabulary:
            return super().embedded(tokens, positions)
        return self._arriving[: len(tokens)]

    def ended(self, stream: Tensor, shared: Pass) -> Tensor:
        """The stream, and beside it what it is behind the coda, if there is one."""
        if self.coda is None:
            return stream
        self.coda.counts = self.counts
        return torch.cat([stream, self.coda.behind(stream, shared)], -1)

    @torch.inference_mode()
    def onward(self, rows: Sequence[Row], cache: PagedCache, stream: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """One pass, which extends the cache: the stream behind this rank's stretch, and that behind the coda.

        Both are (tokens, hidden), the latter without numbers where there is no coda, and what the next pass overwrites.

        Args:
            stream: before the stretch; None on the first rank, which embeds its tokens.
        """
        tokens = sum(len(row.tokens) for row in rows)
        way = self._way(rows) if tokens <= ROWS else self.ways[-1]
        if stream is not None:
            self._arriving = self._fixed[:tokens].copy_(stream) if tokens <= ROWS else stream
        decodes = all(row.start and len(row.tokens) == 1 for row in rows)
        with self._counted(self.figures.decode if decodes else self.figures.prefill, rows):
            found = way.logits(rows, cache)
        return found[:, : self.plan.hidden], found[:, self.plan.hidden :]

    @torch.inference_mode()
    def results(self, stream: Tensor, rows: Sequence[Row]) -> Results:
        """What rows bring, by the stream behind the whole program at the places that they ask for, (places, hidden)."""
        passes = self.ways[-1]
        assert isinstance(passes, DynamicPasses)
        return passes.results(stream, rows, asked_of(rows))

    @torch.inference_mode()
    def drafted(self, behind: Tensor) -> list[int]:
        """The likeliest tokens by the stream behind the coda, (rows, hidden); any where the logits are not finite."""
        assert self.coda is not None, "only a coda drafts"
        best = self.coda.vocabulary.best(self.coda.logits(behind), Phase().vocabulary)
        return [max(0, int(token)) for token in best]
