"""Matrices of low rank, each by itself, as a spectrum has measured them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surgeon.findings.edit import Edit
from surgeon.language.operations.applied import AppliedOperation
from surgeon.language.operations.lowrank import Calibration, Method
from surgeon.language.program import Program
from surgeon.language.sublayer import KINDS, ROLES
from surgeon.searches.spaces.base import Claim, Space, claims_of_ranks, from_every_layer, joined
from surgeon.searches.spaces.rank import LowRanks

if TYPE_CHECKING:
    from surgeon.opened import Model


@dataclass(frozen=True)
class MeasuredRanks:
    """Ranks that a spectrum has measured.

    Attributes:
        ranks: by layer and role those that save parameters, the highest first.
        method: of the factors.
        calibration: the text that they go by.
    """

    ranks: Mapping[tuple[int, str], tuple[int, ...]]
    method: Method
    calibration: Calibration

    @property
    def parameters(self) -> dict[str, Any]:
        """Of the operation, beside the ranks."""
        text = {} if self.method == "plain" else {"calibration": dict(self.calibration)}
        return {"method": self.method, **text}


class MatrixRanks(Space):
    """What stands for the space `rank` where a spectrum is known: edits are of one matrix and one rank, down:96."""

    name = LowRanks.name
    summary = LowRanks.summary
    place = LowRanks.place

    def __init__(self, measured: MeasuredRanks, ranks: int = 2) -> None:
        super().__init__(ranks)
        self.measured = measured

    def edits(self, model: Model) -> Iterator[Edit]:  # noqa: ARG002
        for (layer, role), ranks in self.measured.ranks.items():
            yield from (self._edit(layer, role, rank) for rank in ranks)

    def claims(self, edit: Edit) -> frozenset[Claim]:
        role, _ = _read(edit)
        return claims_of_ranks(edit, next(kind for kind in KINDS if role in ROLES[kind]), [role])

    def operations(self, edits: Sequence[Edit], program: Program, model: Model) -> tuple[AppliedOperation, ...]:  # noqa: ARG002
        """One for each unbroken stretch of layers."""
        chosen = {(edit.first, role): rank for edit in edits for role, rank in [_read(edit)]}
        found = []
        for stretch in joined({edit.layers for edit in edits}):
            there = {role for layer, role in chosen if layer in stretch}
            roles = [role for roles in ROLES.values() for role in roles if role in there]
            ranks = {role: [chosen.get((layer, role)) for layer in stretch] for role in roles}
            found.append(AppliedOperation("lowrank", (stretch,), {"ranks": ranks, **self.measured.parameters}))
        return tuple(found)

    def stretches(self, model: Model) -> Iterator[list[Edit]]:  # noqa: ARG002
        """The highest rank of every matrix from every layer on, the next one, and so on: attentions, MLPs, and both."""
        for place in range(max(map(len, self.measured.ranks.values()), default=0)):
            every = ((*where, own[place]) for where, own in self.measured.ranks.items() if place < len(own))
            edits = {self._edit(*one): one[1] for one in every}
            for roles in (*ROLES.values(), {*edits.values()}):
                yield from from_every_layer(edit for edit, role in edits.items() if role in roles)

    def _edit(self, layer: int, role: str, rank: int) -> Edit:
        return Edit(layer, layer + 1, self.name, f"{role}:{rank}")


def _read(edit: Edit) -> tuple[str, int]:
    """An edit's role and rank."""
    role, _, rank = edit.option.partition(":")
    return role, int(rank)
