"""The coda of the first rack on one rank: a few layers, a norm and a head behind it, by which tokens are drafted.

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
from surgeon.runtime.batching.sequence import Row
from surgeon.runtime.comm.collectives import Collectives
from surgeon.runtime.model.ends import Vocabulary, final_norm
from surgeon.runtime.model.layers import Pass, Weighting
from surgeon.runtime.model.program import Phase, RankProgram
from surgeon.runtime.plan.specification import CodaPlan


class RankCoda:
    """What one rank has of the coda, and the streams of tokens that are being drafted.

    Attributes:
        nodes: how many of the engine's program make up rack 0.
        layers: the coda's own.
        vocabulary: with the coda's head.
    """

    def __init__(
        self, plan: CodaPlan, slots: int, vocabulary: Vocabulary, collectives: Collectives, device: torch.device
    ) -> None:
        """Load it.

        Args:
            slots: of the cache, that the engine's program has.
            vocabulary: of the engine.
        """
        self.nodes = plan.nodes
        self._slots = slots
        source = ModelWeights(TensorFile(plan.file), plan.plan.family, plan.plan.head_dim)
        self.layers = RankProgram(plan.plan, collectives, device)
        self.layers.load(source)
        self.vocabulary = vocabulary.with_head(source, plan.plan, device)
        self._norm = final_norm(source, plan.plan, device)
        self._streams: list[Tensor] = []

    def stream_after(self, stream: Tensor, shared: Pass, counts: Phase) -> Tensor:
        """The stream after the coda's layers, (tokens, hidden), of the one after rack 0."""
        self.layers.counts = counts

        def attend(slot: int, queries: Tensor, kept: Tensor, weighting: Weighting) -> Tensor:
            return shared.attend(self._slots + slot, queries, kept, weighting)

        return self.layers.stream_after(stream, Pass(attend, shared.rotation))

    def logits(self, stream: Tensor) -> Tensor:
        """This rank's logits, (tokens, its rows of the vocabulary)."""
        return self.vocabulary.logits(self._norm(stream))

    def keep(self, stream: Tensor) -> None:
        """Have the stream after rack 0, (texts, hidden), of a token of each text that tokens are drafted for.

        Texts come in the same order in every pass, and those that are done with drafting last.
        """
        self._streams.append(stream)

    def take(self, rows: Sequence[Row]) -> Tensor:
        """The kept streams of drafted rows, (tokens, hidden), row by row; they are forgotten."""
        streams, self._streams = self._streams, []
        kept = [stream[text] for text, row in enumerate(rows) for stream in streams[: len(row.tokens)]]
        return torch.stack(kept)
