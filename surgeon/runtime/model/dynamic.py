"""Passes of whatever shape their rows have: any number of texts, each with any number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from surgeon.runtime.batching.request import TokenLogprob
from surgeon.runtime.batching.sequence import AskedPlaces, Row, asked_of, halves_of
from surgeon.runtime.model.attending import Pass
from surgeon.runtime.model.ends import Index
from surgeon.runtime.model.paged_cache import PagedCache
from surgeon.runtime.model.paged_layout import PagedLayout, as_index
from surgeon.runtime.model.rank_model import RankModel, Results, Way

SCORED_TOKENS = 64  # whose logits are computed at a time: those of a long prompt would fill the memory


class DynamicPasses(Way):
    """Any passes."""

    def __init__(self, model: RankModel) -> None:
        self.model = model

    def fits(self, rows: Sequence[Row]) -> bool:  # noqa: ARG002 - whatever they are
        return True

    def step(self, rows: Sequence[Row], cache: PagedCache) -> Results:
        asked = asked_of(rows)
        return self.results(self.stream(rows, cache, asked.places), rows, asked)

    def results(self, stream: Tensor, rows: Sequence[Row], asked: AskedPlaces) -> Results:
        """Choose by the stream behind the program at the asked places, (places, hidden)."""
        places, wanted = asked
        last, predicting = stream.split([len(wanted), len(places) - len(wanted)])
        best, logits = self.model.chosen(self.model.own_logits(last), wanted) if wanted else ([], None)
        return Results(best, logits, self._scores(predicting, rows))

    def logits(self, rows: Sequence[Row], cache: PagedCache) -> Tensor:
        """Compute one pass; this rank's logits of all tokens."""
        tokens, positions, shared = self.laid_out(rows, cache)
        model = self.model
        return model.ended(model.stream_after(model.embedded(tokens, positions), shared))

    def stream(self, rows: Sequence[Row], cache: PagedCache, places: list[int] | None = None) -> Tensor:
        """The stream after the program, (tokens, hidden), of the rows' tokens or of those at some places."""
        tokens, positions, shared = self.laid_out(rows, cache)
        return self.model.stream_after(self.model.embedded(tokens, positions), shared, places)

    def laid_out(self, rows: Sequence[Row], cache: PagedCache) -> tuple[Tensor, Index, Pass]:
        """Lay out rows: their tokens, (tokens,), positions, and what their attentions share."""
        model = self.model
        tokens = torch.tensor(
            [token for row in rows for token in row.tokens], dtype=torch.long, device=model.device
        )
        angles = model.angles_up_to(max(row.end for row in rows))
        layout = PagedLayout(rows, cache, angles)
        return tokens, layout.positions, Pass(layout.attend, model.angles_of(rows, layout.positions))

    def _scores(self, stream: Tensor, rows: Sequence[Row]) -> list[list[TokenLogprob]]:
        """Score the targets of rows, given the stream before each, (all targets, hidden)."""
        model = self.model
        found = list[list[TokenLogprob]]()
        start = 0
        for _, targets, top in (row.targets for row in rows if row.targets is not None):
            found.append([])
            for begin in range(0, len(targets), SCORED_TOKENS):
                tokens = targets[begin : begin + SCORED_TOKENS]
                own = model.own_logits(stream[start + begin : start + begin + len(tokens)])
                found[-1] += model.vocabulary.score(own, tokens, top)
            start += len(targets)
        return found


class HalvedPasses(DynamicPasses):
    """Passes in two halves that take turns."""

    def fits(self, rows: Sequence[Row]) -> bool:
        return halves_of(rows) is not None

    def stream(self, rows: Sequence[Row], cache: PagedCache, places: list[int] | None = None) -> Tensor:
        halves = halves_of(rows)
        assert halves is not None, "rows without two halves fit no such pass"
        self.model.peers.counts.halved += 1
        tokens, _, passes = zip(*(self.laid_out(half, cache) for half in halves), strict=True)
        spans = [slice(row.start, row.end) for row in rows]
        embedded = self.model.embedded(torch.cat(tokens), as_index(spans, self.model.device))
        sizes = [len(half) for half in tokens]
        taking_turns = [replace(one, parts=len(passes)) for one in passes]
        if places is None:
            return torch.cat(self.model.program.streams_after(embedded.split(sizes), taking_turns))
        order = sorted(places)
        few = [[at for at in order if at < sizes[0]], [at - sizes[0] for at in order if at >= sizes[0]]]
        stream = torch.cat(
            self.model.program.streams_after(embedded.split(sizes), taking_turns, places=few)
        )
        if order == places:
            return stream
        return stream[[order.index(at) for at in places]]
