"""A rank's stretch of a program, where ranks have stretches one behind the other: streams come in, streams go on.

The first rank embeds tokens, the last one predicts, and the others do neither, and have no rows of the vocabulary.
Where the first one has a coda, whatever passes through its stretch passes through the coda's layers as well, so that
both have cached the same tokens. Passes are computed as those of a whole model are: recorded, where they can be.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import torch
from torch import Tensor

from surgeon.runtime.batching.sequence import Row, Wanted
from surgeon.runtime.batching.windows import Windows, blocks_for
from surgeon.runtime.comm.collectives import Alone
from surgeon.runtime.model.attending import Pass
from surgeon.runtime.model.dynamic import DynamicPasses
from surgeon.runtime.model.ends import Index
from surgeon.runtime.model.engine import Figures, RankEngine, ways_through
from surgeon.runtime.model.paged_cache import PagedCache
from surgeon.runtime.model.phase import Phase
from surgeon.runtime.model.rank_model import Way
from surgeon.runtime.plan.memory import cache_groups
from surgeon.runtime.plan.specification import Plan

ROWS = 1024  # of single tokens, whose stream lies always in the same memory, which recorded passes have the address of
TRIALS = 5


class StretchEngine(RankEngine):
    """What one rank has of a model whose ranks have stretches of its program.

    Attributes:
        pace: seconds that a pass takes at least for every node, of the coda's too: as if ranks had machines of their
            own, on which that is what reading weights takes. What is missing is slept.
    """

    def __init__(self, plan: Plan, rank: int, device: torch.device) -> None:
        super().__init__(plan.of_rank(rank)[0], Alone(), device)
        groups = cache_groups(plan)
        self._division = groups.slots[rank], groups.windows
        self.ways = (*ways_through(self, None)[:-1], StretchPasses(self))
        self.pace = 0.0
        self._drafting = self.coda is not None
        self._fixed = self.vocabulary.like.new_empty(0 if plan.of_rank(rank)[0].embeds else ROWS, plan.hidden)
        self._arriving = self._fixed

    def cache_division(self) -> tuple[Sequence[int], Windows]:
        """Those of the whole model, whose texts have the same blocks on all ranks."""
        return self._division

    def arrive(self, stream: Tensor | None) -> None:
        """Take the stream, (tokens, hidden), of the next pass; None on the first rank, which embeds its tokens."""
        if stream is not None:
            small = len(stream) <= ROWS
            self._arriving = self._fixed[: len(stream)].copy_(stream) if small else stream

    def embedded(self, tokens: Tensor, positions: Index) -> Tensor:
        """The stream before the stretch, (tokens, hidden)."""
        return super().embedded(tokens, positions) if self.plan.embeds else self._arriving[: len(tokens)]

    def ended(self, stream: Tensor, shared: Pass) -> Tensor:
        """Logits on the last rank; else the stream, and beside it what it is behind the coda, if there is one."""
        if self.plan.predicts:
            return self.own_logits(stream)
        if self.coda is None or not self._drafting:
            return stream
        return torch.cat([stream, self.coda.stream_after(stream, shared, self.counts)], -1)

    @torch.inference_mode()
    def onward(self, rows: Sequence[Row], cache: PagedCache) -> tuple[Tensor, Tensor | None]:
        """One pass, which extends the cache: the stream for the next rank, and that behind the coda, if there is one.

        Both are (tokens, hidden), and what the next pass may overwrite.
        """
        decodes = all(row.start and len(row.tokens) == 1 for row in rows)
        with self._counted(self.figures.decode if decodes else self.figures.prefill, rows):
            found = self._way(rows).logits(rows, cache)
        stream, behind = found[:, : self.plan.hidden], found[:, self.plan.hidden :]
        return stream, behind if behind.shape[1] else None

    @torch.inference_mode()
    def drafted(self, behind: Tensor, greedy: bool) -> Tensor:
        """What a coda predicts of the stream behind it, (rows, hidden): tokens, (rows,), or logits, (rows, V)."""
        assert self.coda is not None, "only a coda drafts"
        logits = self.coda.logits(behind)
        return self.coda.vocabulary.best(logits, Phase().vocabulary) if greedy else logits

    def alone(self, texts: int, tokens: int) -> float:
        """Seconds that a token takes of a rank that has all of the program, for the stretch of this one.

        It is one of a pass over so many texts of so many tokens, as tried now, in a cache of its own, without the coda.
        """
        blocks, drafting, figures = blocks_for(tokens), self._drafting, self.figures
        cache, row = self.new_cache(blocks), Row(tokens - 1, [0], ([(0, blocks)],), Wanted.BEST, prompt=tokens - 1)
        self._drafting, self.figures, seconds = False, Figures(), []
        for _ in range(1 + TRIALS):  # the first may be recorded
            self.pause()
            self.arrive(None if self.plan.embeds else self.vocabulary.like.new_zeros(texts, self.plan.hidden))
            began = time.perf_counter()
            if self.plan.predicts:
                self.step([row] * texts, cache)
            else:
                self.onward([row] * texts, cache)
            seconds.append(time.perf_counter() - began)
        self._drafting, self.figures = drafting, figures
        self.pause()
        return median(seconds[1:]) / texts

    @contextmanager
    def _counted(self, phase: Phase, rows: Sequence[Row]) -> Iterator[None]:
        nodes = len(self.program)
        if self.coda is not None and self._drafting:
            nodes += len(self.coda.layers.program)
        end = time.perf_counter() + self.pace * nodes
        with super()._counted(phase, rows):
            yield
            time.sleep(max(0.0, end - time.perf_counter()))

    def _way(self, rows: Sequence[Row]) -> Way:
        return super()._way(rows) if sum(len(row.tokens) for row in rows) <= ROWS else self.ways[-1]


class StretchPasses(DynamicPasses):
    """Computes any pass through a stretch."""

    def logits(self, rows: Sequence[Row], cache: PagedCache) -> Tensor:
        """What the stretch gives of all tokens (`StretchEngine.ended`)."""
        tokens, positions, shared = self.laid_out(rows, cache)
        model = self.model
        return model.ended(model.stream_after(model.embedded(tokens, positions), shared), shared)
