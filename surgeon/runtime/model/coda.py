"""Drafting by the coda of the first rack: a few layers, a norm and a head behind it, on one rank.

Rack 0 is a stretch of the program's nodes, so that what its attentions cache of a token is what the whole program would
cache. The coda's attentions have slots of their own behind the program's. Whatever passes through the program passes
through the coda's layers as well: then both have cached the same tokens, and a draft can begin anywhere.

What rack 0 gives of drafted tokens is kept, so that the pass that verifies them runs the rest of the program only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from surgeon.checkpoint.tensor_file import TensorFile
from surgeon.models.weights import ModelWeights
from surgeon.runtime.batching.sequence import Row, asked_of
from surgeon.runtime.model.attending import Pass, Weighting
from surgeon.runtime.model.dynamic import DynamicPasses
from surgeon.runtime.model.ends import Index, final_norm
from surgeon.runtime.model.layers import Rebuild
from surgeon.runtime.model.paged_cache import PagedCache
from surgeon.runtime.model.phase import Phase
from surgeon.runtime.model.program import RankProgram
from surgeon.runtime.model.rank_model import RankModel, Results
from surgeon.runtime.plan.specification import CodaPlan


class RankCoda:
    """What one rank has of the coda.

    Attributes:
        nodes: how many of the model's program make up rack 0.
        layers: the coda's own.
        vocabulary: with the coda's head.
    """

    def __init__(self, plan: CodaPlan, model: RankModel) -> None:
        self.nodes = plan.nodes
        self._slots = len(model.attentions())
        source = ModelWeights(TensorFile(plan.file), plan.plan.family, plan.plan.head_dim)
        self.layers = RankProgram(plan.plan, model.collectives, model.device)
        self.layers.load(source)
        self.vocabulary = model.vocabulary.with_head(source, plan.plan, model.device)
        self._norm = final_norm(source, plan.plan, model.device)

    def rebuilds(self) -> dict[int, Rebuild]:
        """As of a `RankProgram`, by slots behind the model's."""
        return {self._slots + slot: rebuild for slot, rebuild in self.layers.rebuilds().items()}

    def stream_after(self, stream: Tensor, shared: Pass, counts: Phase) -> Tensor:
        """The stream after the coda's layers, (tokens, hidden), of the one after rack 0."""
        self.layers.counts = counts

        def attend(slot: int, queries: Tensor, kept: Tensor, weighting: Weighting) -> Tensor:
            return shared.attend(self._slots + slot, queries, kept, weighting)

        return self.layers.stream_after(stream, Pass(attend, shared.angles))

    def logits(self, stream: Tensor) -> Tensor:
        """This rank's logits, (tokens, its rows of the vocabulary)."""
        return self.vocabulary.logits(self._norm(stream))


class DraftingPasses(DynamicPasses):
    """Computes any pass, and those that draft tokens for a later one."""

    def __init__(self, model: RankModel, coda: RankCoda) -> None:
        super().__init__(model)
        self.coda = coda
        self._drafted: list[Tensor] = []  # streams after rack 0, (texts, hidden), a token of each text in every one

    def draft(self, rows: Sequence[Row], cache: PagedCache) -> Results:
        """One pass through rack 0 and its coda, which extends the cache by one token of each of some texts.

        Rows are those of texts in an order that stays the same until the `step` that verifies what was drafted, and
        those that are done with drafting come last. What rack 0 gives is kept for that step.
        """
        behind_rack, behind_coda = self._through_rack(*self.laid_out(rows, cache))
        self._drafted.append(behind_rack)
        places, wanted = asked_of(rows)
        chosen = self.model.chosen(self.coda.logits(behind_coda[places]), wanted) if wanted else ([], None)
        return Results(*chosen, [])

    def stream(self, rows: Sequence[Row], cache: PagedCache, places: list[int] | None = None) -> Tensor:
        """The stream after the program, (tokens, hidden), of the rows' tokens or of those at some places."""
        drafted, fresh = [row for row in rows if row.drafted], [row for row in rows if not row.drafted]
        all_rows, streams = self.laid_out(rows, cache), list[Tensor]()
        if drafted:
            taken, self._drafted = self._drafted, []
            tokens = [one[text] for text, row in enumerate(drafted) for one in taken[: len(row.tokens)]]
            streams.append(torch.stack(tokens))
        if fresh:
            behind_rack, _ = self._through_rack(*(self.laid_out(fresh, cache) if drafted else all_rows))
            streams.append(behind_rack)
        stream, (_, _, shared) = streams[0] if len(streams) == 1 else torch.cat(streams), all_rows
        return self.model.stream_after(stream, shared, self.coda.nodes, places=places)

    def _through_rack(self, tokens: Tensor, positions: Index, shared: Pass) -> tuple[Tensor, Tensor]:
        """The streams after rack 0 and after its coda, (tokens, hidden) each; both cache what they need."""
        model = self.model
        stream = model.stream_after(model.embedded(tokens, positions), shared, end=self.coda.nodes)
        return stream, self.coda.stream_after(stream, shared, model.counts)
