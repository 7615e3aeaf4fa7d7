"""Mixtures that keep some of their experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

from surgeon.language.operations.applied import AppliedOperation, Edit
from surgeon.language.program import Program
from surgeon.language.sublayer import FEED_FORWARD, Sublayer
from surgeon.searches.spaces.base import (
    TIMES,
    WEIGHTS,
    Claim,
    Space,
    claims_of_ranks,
    from_every_layer,
    layers_joined,
    register,
)

if TYPE_CHECKING:
    from surgeon.opened import Model

Orders = Mapping[int, Sequence[int]]  # of layers' experts, the most salient first

SHARES = (0.75, 0.5)  # of its experts that a mixture keeps, where no numbers are named
# So many of the least salient kept experts may be exchanged for left-out ones.
EDGE = 2


@register
@dataclass(eq=False)
class KeptExperts(Space):
    """A mixture that keeps some experts: an edit's option has their numbers.

    Those of the highest saliency on the text of the search (REAP), and choices that exchange one of the last that stay
    for one of the first that go. A mixture that keeps some experts has no ranks.

    Attributes:
        kept: how many of them; None: as `SHARES` say.
        orders: by saliency; in other layers, experts stand in their own order.
    """

    name = "experts"
    summary = "mixtures with 3/4 or 1/2 of their experts (experts:4: with so many; experts:6/4)"
    place = 57
    of_mixtures = True
    serves = ("experts", *WEIGHTS, *TIMES)
    kept: tuple[int, ...] | None = None
    orders: Orders = field(default_factory=dict)

    @classmethod
    def read(cls, argument: str) -> dict[str, Any]:
        if not argument:
            return {}
        numbers = argument.split("/")
        if not all(one.isdecimal() and 0 < int(one) < 10**6 for one in numbers):
            raise ValueError(
                f"{cls.name}:{argument} should say how many experts a mixture keeps, as in {cls.name}:4 or "
                f"{cls.name}:6/4"
            )
        return {"kept": tuple(sorted({int(one) for one in numbers}, reverse=True))}

    def edits(self, model: Model) -> Iterator[Edit]:
        for layer in range(model.num_layers):
            mixture = model.layer_shapes.layer_of(Sublayer(FEED_FORWARD, (layer,))).mixture
            count = 0 if mixture is None else mixture.experts
            wanted = self.kept or dict.fromkeys(max(1, round(share * count)) for share in SHARES)
            order = [*self.orders.get(layer, range(count))]
            for kept in (number for number in wanted if number < count):
                first = order[:kept]
                # The first ones of the order, then these with one near the edge exchanged.
                chosen = [first]
                for gone, come in product(reversed(first[-EDGE:]), order[kept : kept + EDGE]):
                    chosen.append([come, *(one for one in first if one != gone)])
                for experts in chosen:
                    yield Edit(layer, layer + 1, self.name, ",".join(map(str, sorted(experts))))

    def claims(self, edit: Edit) -> frozenset[Claim]:
        return claims_of_ranks(edit, FEED_FORWARD) | {("the experts", edit.first)}

    def operations(
        self,
        edits: Sequence[Edit],
        program: Program,  # noqa: ARG002
        model: Model,  # noqa: ARG002
    ) -> tuple[AppliedOperation, ...]:
        """One for each unbroken stretch of layers, with each one's experts."""
        kept = {edit.first: [int(one) for one in edit.option.split(",")] for edit in edits}
        stretches = layers_joined(kept)
        return tuple(
            AppliedOperation(self.name, (one,), {"keep": [kept[k] for k in one]}) for one in stretches
        )

    def stretches(self, model: Model) -> Iterator[list[Edit]]:
        """The most salient experts of each layer, from every layer on."""
        first: dict[tuple[int, int], Edit] = {}
        for edit in self.edits(model):
            first.setdefault((edit.option.count(","), edit.first), edit)
        for commas in dict.fromkeys(count for count, _ in first):
            yield from from_every_layer(edit for (count, _), edit in first.items() if count == commas)

    def obstacle(self, model: Model) -> str:
        mixtures = (
            model.layer_shapes.layer_of(Sublayer(FEED_FORWARD, (k,))).mixture
            for k in range(model.num_layers)
        )
        most = max((one.experts for one in mixtures if one is not None), default=0)
        if most:
            return f"its mixtures have {most} experts"
        return "none of its layers is a mixture of experts"
