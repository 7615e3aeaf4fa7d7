"""Attentions and MLPs of low rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surgeon.language.operations.applied import AppliedOperation
from surgeon.language.operations.lowrank import rank_for
from surgeon.language.sublayer import ROLES
from surgeon.searches.spaces.base import HALVES, TIMES, WEIGHTS, register
from surgeon.searches.spaces.shares import ShareSpace

if TYPE_CHECKING:
    from surgeon.opened import Model


@register
class LowRanks(ShareSpace):
    """The matrices of a layer's attention or MLP as two factors each, with a share of their parameters: mlp:0.6.

    A matrix of which factors would save nothing stays whole, and an attention or MLP of which all do has no edits. The
    factors that a search measures are plain ones (truncated SVD), made on the fly as in scans, and so are those of the
    recipe that it writes. Where a search is given a spectrum, `measured_ranks.MatrixRanks` stands in its place.
    """

    name = "rank"
    summary = "attentions and MLPs of low rank, with 0.8, 0.6 or 0.4 of their parameters (rank:0.9/0.5: with others)"
    place = 60
    serves = ("wire_bytes", *WEIGHTS, *TIMES)
    usual = (0.8, 0.6, 0.4)
    of_what = "parameters"

    def kept(self, model: Model, kind: str, share: float) -> tuple[tuple[str, int], ...]:
        """The ranks of the matrices that two factors are smaller than."""
        shapes = model.shapes.layer_shapes.matrices
        ranks = {role: rank_for(share, *shapes[role]) for role in ROLES[HALVES[kind][0]] if role in shapes}
        return tuple((role, rank) for role, rank in ranks.items() if rank is not None)

    def of_share(self, layers: tuple[range, ...], kind: str, share: float, model: Model) -> AppliedOperation:
        roles = [role for role, _ in self.kept(model, kind, share)]
        return AppliedOperation("lowrank", layers, {"weights": roles, "keep": share})

    def obstacle(self, model: Model) -> str:  # noqa: ARG002
        return "two factors with such shares of its matrices' parameters save nothing"
