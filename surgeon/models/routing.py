"""Which experts a mixture sends each token to, and with which weights.

The one definition: the runtime, analyses and tests ask here (its kernel for CPUs is held to it), and it is held to the
routers of `transformers`. Importing it imports no torch.

Shapes: T tokens, E experts, k experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

Scores = Literal["softmax", "sigmoid"]
GroupScore = Literal["max", "top2"]
LEAST_TOTAL = 1e-20  # that chosen scores are divided by, which sigmoids may be as small as


@dataclass(frozen=True)
class Routing:
    """How experts are chosen, of one configuration.

    Attributes:
        top_k: experts of a token; all of them where there are fewer.
        scores: what logits become: softmax over all experts, or a sigmoid each. A softmax over the chosen ones only
            (gpt-oss) is a softmax over all that is normalised.
        normalise: whether the chosen ones' scores are divided by their sum.
        scale: what weights are multiplied by after that.
        groups: of equally many experts, one after the other, of which only the best `kept_groups` are chosen from
            (DeepSeek-V3, section 2.1.2); 1 for no groups.
        group_score: a group is as good as its best expert, or as its best two together.
    """

    top_k: int
    scores: Scores = "softmax"
    normalise: bool = True
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    group_score: GroupScore = "max"

    def chosen(self, experts: int) -> int:
        """How many of so many experts a token is sent to."""
        return min(self.top_k, experts)


class Routed(NamedTuple):
    """Where tokens go.

    Attributes:
        experts: (T, k), int64, in no particular order.
        weights: of their outputs, (T, k), float32.
    """

    experts: Tensor
    weights: Tensor


def route(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> Routed:
    """Choose experts for each token; nothing waits for a GPU.

    Args:
        logits: of the router, (T, E), in any dtype.
        correction: (E,), added to scores where they are compared, not where they are weights (DeepSeek-V3, section
            2.1.2: its bias for balance without an auxiliary loss).

    Raises:
        ValueError: if the experts do not divide into the groups, or the groups chosen from have too few.
    """
    experts = logits.shape[1]
    scores = logits.float().softmax(-1) if routing.scores == "softmax" else logits.float().sigmoid()
    compared = scores if correction is None else scores + correction.float()
    if routing.groups > 1:
        compared = _within_groups(compared, routing)
    chosen = compared.topk(routing.chosen(experts), dim=-1, sorted=False).indices
    weights = scores.gather(-1, chosen)
    if routing.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + LEAST_TOTAL)
    return Routed(chosen, weights if routing.scale == 1 else weights * routing.scale)


def check_groups(experts: int, routing: Routing) -> None:
    """Refuse numbers of experts that groups cannot have.

    Raises:
        ValueError: if the experts do not divide into the groups, or the groups chosen from have too few.
    """
    groups, least = routing.groups, 2 if routing.group_score == "top2" else 1
    if groups > 1 and (experts % groups or experts // groups < least):
        raise ValueError(
            f"{experts} experts do not divide into {groups} groups of {least} or more; keep equally many of each group"
        )
    if groups > 1 and experts // groups * routing.kept_groups < routing.top_k:
        raise ValueError(
            f"{routing.kept_groups} groups of {experts // groups} experts have fewer than the {routing.top_k} that a "
            "token is sent to; keep more of each group"
        )


def _within_groups(compared: Tensor, routing: Routing) -> Tensor:
    """The same scores, minus infinity for experts of groups that are not chosen from."""
    check_groups(compared.shape[1], routing)
    by_group = compared.view(len(compared), routing.groups, -1)
    best = by_group.topk(2 if routing.group_score == "top2" else 1, dim=-1).values.sum(-1)
    kept = best.topk(routing.kept_groups, dim=-1).indices
    left_out = by_group.new_ones(by_group.shape[:2]).scatter(-1, kept, 0.0).bool()
    return by_group.masked_fill(left_out[..., None], float("-inf")).flatten(1)
