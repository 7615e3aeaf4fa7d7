"""Spaces in which attentions and MLPs keep a share of themselves."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from surgeon.language.operations.applied import AppliedOperation, Edit
from surgeon.language.program import Program
from surgeon.searches.spaces.base import (
    HALVES,
    Claim,
    Space,
    claims_of_ranks,
    from_every_layer,
    join_stretches,
)

if TYPE_CHECKING:
    from surgeon.opened import Model

KEEPING = ("attention", "mlp")


@dataclass(eq=False)
class ShareSpace(Space):
    """A space of attentions and MLPs that keep a share: mlp:0.6. Numbers behind the colon name others (rank:0.9/0.5).

    Attributes:
        of_what: they are shares, for messages.
        needless: the reason why a model has no edits, likewise.
        shares: those that are searched, the largest first.
    """

    of_what: ClassVar[str]
    needless: ClassVar[str]
    shares: tuple[float, ...] = ()

    @classmethod
    def read(cls, argument: str) -> dict[str, Any]:
        if not argument:
            return {}
        try:
            shares = [float(part) for part in argument.split("/")]
        except ValueError:
            shares = []
        if not shares or not all(0 < share < 1 for share in shares):
            raise ValueError(
                f"{cls.name}:{argument} should name the shares of {cls.of_what} that are kept, more than 0 and less "
                f"than 1, as in {cls.name}:0.9/0.7/0.5"
            )
        return {"shares": tuple(sorted(set(shares), reverse=True))}

    @abstractmethod
    def keep_share(self, model: Model, kind: str, share: float) -> Hashable:
        """The result of a share of a kind, equal for shares of equal results; false where nothing is saved."""

    @abstractmethod
    def of_share(
        self, layers: tuple[range, ...], kind: str, share: float, model: Model
    ) -> AppliedOperation:
        """The operation that leaves the attentions or MLPs of some layers a share."""

    def options(self, model: Model) -> Iterator[str]:
        for kind in KEEPING:
            # Of shares that come to the same, the largest.
            largest = {self.keep_share(model, kind, share): share for share in reversed(self.shares)}
            yield from (f"{kind}:{share!r}" for kept, share in reversed(largest.items()) if kept)

    def claims(self, edit: Edit) -> frozenset[Claim]:
        return claims_of_ranks(edit, kind_of(edit))

    def operations(
        self,
        edits: Sequence[Edit],
        program: Program,  # noqa: ARG002
        model: Model,
    ) -> tuple[AppliedOperation, ...]:
        """One for attentions and one for MLPs, of each share."""
        found = []
        for kind, share in sorted({_read(edit) for edit in edits}):
            layers = join_stretches(edit.layers for edit in edits if _read(edit) == (kind, share))
            found.append(self.of_share(layers, kind, share, model))
        return tuple(found)

    def obstacle(self, model: Model) -> str:  # noqa: ARG002
        return self.needless

    def stretches(self, model: Model) -> Iterator[list[Edit]]:
        """One share for all, from every layer on: of attentions, of MLPs, and of both."""
        edits = [(edit, *_read(edit)) for edit in self.edits(model)]
        for wanted in dict.fromkeys(share for _, _, share in edits):
            for kinds in (("attention",), ("mlp",), KEEPING):
                yield from from_every_layer(
                    edit for edit, kind, share in edits if share == wanted and kind in kinds
                )


def kind_of(edit: Edit) -> str:
    """The kind of the sublayer that an edit is of."""
    (kind,) = HALVES[_read(edit)[0]]
    return kind


def _read(edit: Edit) -> tuple[str, float]:
    kind, _, share = edit.option.partition(":")
    return kind, float(share)
