"""Attentions and MLPs of low rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from surgeon.language.operations.applied import AppliedOperation, Edit
from surgeon.language.operations.lowrank import Calibration, Method, rank_for
from surgeon.language.program import Program
from surgeon.language.sublayer import KINDS, ROLES
from surgeon.searches.spaces.base import (
    HALVES,
    TIMES,
    WEIGHTS,
    Claim,
    Space,
    claims_of_ranks,
    from_every_layer,
    join_stretches,
    register,
)
from surgeon.searches.spaces.shares import ShareSpace

if TYPE_CHECKING:
    from surgeon.opened import Model


@register
@dataclass(eq=False)
class LowRanks(ShareSpace):
    """The matrices of a layer's attention or MLP as two factors each, with a share of their parameters: mlp:0.6.

    A matrix of which factors would save nothing stays whole, and an attention or MLP of which all do has no edits.
    Factors are plain ones (truncated SVD), in the search and in its recipe. Where a search is given a spectrum,
    `MatrixRanks` stands in its place.
    """

    name = "rank"
    summary = "attentions and MLPs of low rank, with 0.8, 0.6 or 0.4 of their parameters (rank:0.9/0.5: with others)"
    place = 60
    serves = ("wire_bytes", *WEIGHTS, *TIMES)
    of_what = "parameters"
    needless = "two factors with such shares of its matrices' parameters save nothing"
    shares: tuple[float, ...] = (0.8, 0.6, 0.4)

    def keep_share(self, model: Model, kind: str, share: float) -> tuple[tuple[str, int], ...]:
        """Ranks of the matrices that two factors are smaller than."""
        shapes = model.layer_shapes.matrices
        ranks = {
            role: rank_for(share, *shapes[role]) for role in ROLES[HALVES[kind][0]] if role in shapes
        }
        return tuple((role, rank) for role, rank in ranks.items() if rank is not None)

    def of_share(
        self, layers: tuple[range, ...], kind: str, share: float, model: Model
    ) -> AppliedOperation:
        roles = [role for role, _ in self.keep_share(model, kind, share)]
        return AppliedOperation("lowrank", layers, {"weights": roles, "keep": share})


@dataclass(eq=False)
class MatrixRanks(Space):
    """The space `rank` where a spectrum is known: edits are of one matrix and one rank, down:96.

    Attributes:
        measured: by layer and role the ranks that save parameters, the highest first.
        method: of the factors.
        calibration: the text that they go by.
    """

    name = LowRanks.name
    summary = LowRanks.summary
    place = LowRanks.place
    _: KW_ONLY
    measured: Mapping[tuple[int, str], tuple[int, ...]]
    method: Method
    calibration: Calibration

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameters of the operation beside the ranks."""
        text = {} if self.method == "plain" else {"calibration": dict(self.calibration)}
        return {"method": self.method, **text}

    def edits(self, model: Model) -> Iterator[Edit]:  # noqa: ARG002
        for (layer, role), ranks in self.measured.items():
            yield from (self._edit(layer, role, rank) for rank in ranks)

    def claims(self, edit: Edit) -> frozenset[Claim]:
        role, _ = _read(edit)
        return claims_of_ranks(edit, next(kind for kind in KINDS if role in ROLES[kind]), [role])

    def operations(
        self,
        edits: Sequence[Edit],
        program: Program,  # noqa: ARG002
        model: Model,  # noqa: ARG002
    ) -> tuple[AppliedOperation, ...]:
        """One for each unbroken stretch of layers."""
        chosen = {(edit.first, role): rank for edit in edits for role, rank in [_read(edit)]}
        found = []
        for stretch in join_stretches({edit.layers for edit in edits}):
            there = {role for layer, role in chosen if layer in stretch}
            roles = [role for roles in ROLES.values() for role in roles if role in there]
            ranks = {role: [chosen.get((layer, role)) for layer in stretch] for role in roles}
            found.append(AppliedOperation("lowrank", (stretch,), {"ranks": ranks, **self.parameters}))
        return tuple(found)

    def stretches(self, model: Model) -> Iterator[list[Edit]]:  # noqa: ARG002
        """The highest rank of every matrix from every layer on, and so on: attentions, MLPs, and both."""
        for place in range(max(map(len, self.measured.values()), default=0)):
            every = ((*where, own[place]) for where, own in self.measured.items() if place < len(own))
            edits = {self._edit(*one): one[1] for one in every}
            for roles in (*ROLES.values(), {*edits.values()}):
                yield from from_every_layer(edit for edit, role in edits.items() if role in roles)

    def _edit(self, layer: int, role: str, rank: int) -> Edit:
        return Edit(layer, layer + 1, self.name, f"{role}:{rank}")


def _read(edit: Edit) -> tuple[str, int]:
    role, _, rank = edit.option.partition(":")
    return role, int(rank)
