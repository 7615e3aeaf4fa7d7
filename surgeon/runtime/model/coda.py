"""The coda of the first rack on one rank: a few layers behind the rack, a norm and a head, which draft tokens."""

from __future__ import annotations

from torch import Tensor

from surgeon.checkpoint.tensor_file import TensorFile
from surgeon.models.weights import ModelWeights
from surgeon.runtime.model.attending import Pass, Weighting
from surgeon.runtime.model.ends import final_norm
from surgeon.runtime.model.layers import Rebuild
from surgeon.runtime.model.program import RankProgram
from surgeon.runtime.model.rank_model import RankModel
from surgeon.runtime.plan.specification import CodaPlan


class RankCoda(RankProgram):
    """The coda's program; its attentions have the slots of the cache behind those of the rack.

    Args:
        rack: on the same rank.

    Attributes:
        vocabulary: with the coda's head.
    """

    def __init__(self, plan: CodaPlan, rack: RankModel) -> None:
        super().__init__(plan.plan, rack.collectives, rack.device)
        source = ModelWeights(TensorFile(plan.file), self.plan.family, self.plan.head_dim)
        self.load(source)
        self.vocabulary = rack.vocabulary.with_head(source, self.plan, self.device)
        self._first_slot = len(rack.attentions())
        self._norm = final_norm(source, self.plan, self.device)

    def rebuilds(self) -> dict[int, Rebuild]:
        """What makes keys and values of what is cached in rank space, by slot."""
        return {self._first_slot + slot: rebuild for slot, rebuild in super().rebuilds().items()}

    def behind(self, stream: Tensor, shared: Pass, places: list[int] | None = None) -> Tensor:
        """The stream behind the coda's layers, (tokens, hidden), given that behind the rack.

        Args:
            places: of the tokens whose stream is wanted, all by default.
        """

        def attend(slot: int, queries: Tensor, kept: Tensor, weighting: Weighting) -> Tensor:
            return shared.attend(self._first_slot + slot, queries, kept, weighting)

        return self.stream_after(stream, Pass(attend, shared.angles, waits=shared.waits), places=places)

    def logits(self, stream: Tensor) -> Tensor:
        """This rank's logits, (tokens, its rows of the vocabulary), of the stream behind the coda's layers."""
        return self.vocabulary.logits(self._norm(stream))
