"""Attentions with fewer heads, and MLPs with fewer neurons."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surgeon.language.operations.applied import AppliedOperation, Edit
from surgeon.language.operations.width import USUAL, count_of
from surgeon.language.sublayer import Sublayer
from surgeon.searches.spaces.base import HALVES, TIMES, WEIGHTS, Claim, claims_of_slices, register
from surgeon.searches.spaces.shares import ShareSpace, kind_of

if TYPE_CHECKING:
    from surgeon.opened import Model


@register
@dataclass(eq=False)
class Widths(ShareSpace):
    """A layer's attention or MLP with a share of its KV groups or neurons: mlp:0.5.

    Those are kept that matter most on the text of the search, by Wanda's criterion; the recipe names the text. Where
    there are enough of them, ranks get equally many. A narrowed part has no ranks, and no slices, which might not
    divide.
    """

    name = "width"
    summary = "attentions and MLPs with 0.75, 0.5 or 0.25 of their KV groups and neurons (width:0.8/0.6: with others)"
    place = 55
    serves = ("kv_bytes", *WEIGHTS, *TIMES)
    of_what = "KV groups and neurons"
    needless = "such shares of its KV groups and neurons are all of them"
    shares: tuple[float, ...] = (0.75, 0.5, 0.25)

    def claims(self, edit: Edit) -> frozenset[Claim]:
        return super().claims(edit) | claims_of_slices(edit, kind_of(edit))

    def edits(self, model: Model) -> Iterator[Edit]:
        shapes = model.layer_shapes
        for edit in super().edits(model):
            if all(
                kind_of(edit) in shapes.layer_of(Sublayer(kind_of(edit), (layer,))).units
                for layer in edit.layers
            ):
                yield edit

    def keep_share(self, model: Model, kind: str, share: float) -> int:
        """Number of units kept; 0 for all of them, or if they cannot be told apart."""
        (of,) = HALVES[kind]
        units = model.layer_shapes.units.get(of)
        if units is None:
            return 0
        count = count_of(share, of, units)
        count -= count % self.ranks if count > self.ranks else 0
        if count < units:
            return count
        return 0

    def of_share(
        self, layers: tuple[range, ...], kind: str, share: float, model: Model
    ) -> AppliedOperation:
        parameters: dict[str, Any] = {"by": USUAL} | (
            {} if self.text is None else {"calibration": dict(self.text)}
        )
        what = {"attention": "heads", "mlp": "neurons"}[kind]
        return AppliedOperation(
            "width", layers, {what: self.keep_share(model, kind, share), **parameters}
        )
