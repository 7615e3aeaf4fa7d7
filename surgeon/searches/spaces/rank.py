"""Attentions and MLPs of low rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from surgeon.language.operations.applied import AppliedOperation
from surgeon.language.operations.lowrank import rank_for
from surgeon.language.program import ROLES, Program
from surgeon.results.edit import Edit
from surgeon.searches.spaces.base import (
    HALVES,
    Claim,
    Space,
    claims_of_ranks,
    from_every_layer,
    joined,
    register,
)

if TYPE_CHECKING:
    from surgeon.opened import Model


@register
class LowRanks(Space):
    """The matrices of a layer's attention or MLP as two factors each, with a share of their parameters: mlp:0.6.

    A matrix of which factors would save nothing stays whole, and an attention or MLP of which all do has no edits. The
    factors that a search measures are plain ones (truncated SVD), made on the fly as in scans, and so are those of the
    recipe that it writes. The recipe can name another method and a text for the same ranks (`method: whitened`, as
    `surgeon spectrum` writes it); what that changes the search has not seen.
    """

    name = "rank"
    summary = "attentions and MLPs of low rank, with 0.8, 0.6 or 0.4 of their parameters (rank:0.9/0.5: with others)"
    place = 60
    keeps: ClassVar[tuple[float, ...]] = (0.8, 0.6, 0.4)

    def __init__(self, keeps: Sequence[float] = keeps, ranks: int = 2) -> None:
        super().__init__(ranks)
        self.keeps_chosen = tuple(sorted(set(keeps), reverse=True))

    @classmethod
    def read(cls, argument: str) -> dict[str, Any]:
        if not argument:
            return {}
        try:
            keeps = [float(part) for part in argument.split("/")]
        except ValueError:
            keeps = []
        if not keeps or not all(0 < keep < 1 for keep in keeps):
            raise ValueError(
                f"rank:{argument} should name the shares of parameters that are kept, more than 0 and less than 1, as "
                "in rank:0.9/0.7/0.5"
            )
        return {"keeps": keeps}

    def options(self, model: Model) -> Iterator[str]:
        for kind in ("attention", "mlp"):
            by_ranks = {tuple(_ranks(model, kind, keep).items()): keep for keep in reversed(self.keeps_chosen)}
            # Of shares that come to the same ranks, the largest.
            yield from (f"{kind}:{keep!r}" for ranks, keep in reversed(by_ranks.items()) if ranks)

    def claims(self, edit: Edit) -> frozenset[Claim]:
        return claims_of_ranks(edit, HALVES[_read(edit)[0]][0])

    def operations(self, edits: Sequence[Edit], program: Program, model: Model) -> tuple[AppliedOperation, ...]:  # noqa: ARG002
        """One for attentions and one for MLPs, of each share."""
        found = []
        for kind, keep in sorted({_read(edit) for edit in edits}):
            layers = joined(edit.layers for edit in edits if _read(edit) == (kind, keep))
            found.append(AppliedOperation("lowrank", layers, {"weights": [*_ranks(model, kind, keep)], "keep": keep}))
        return tuple(found)

    def obstacle(self, model: Model) -> str:  # noqa: ARG002
        return "two factors with such shares of its matrices' parameters save nothing"

    def stretches(self, model: Model) -> Iterator[list[Edit]]:
        """One share for all, from every layer on: of attentions, of MLPs, and of both."""
        edits = [(edit, *_read(edit)) for edit in self.edits(model)]
        for wanted in dict.fromkeys(keep for _, _, keep in edits):
            for kinds in (("attention",), ("mlp",), ("attention", "mlp")):
                yield from from_every_layer(edit for edit, kind, keep in edits if keep == wanted and kind in kinds)


def _read(edit: Edit) -> tuple[str, float]:
    """An edit's kind and share."""
    kind, _, keep = edit.option.partition(":")
    return kind, float(keep)


def _ranks(model: Model, kind: str, keep: float) -> Mapping[str, int]:
    """The ranks of the matrices that two factors are smaller than."""
    shapes = model.shapes.layer_shapes.matrices
    ranks = {role: rank_for(keep, *shapes[role]) for role in ROLES[HALVES[kind][0]] if role in shapes}
    return {role: rank for role, rank in ranks.items() if rank is not None}
