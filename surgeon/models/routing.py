"""Routing: the experts that a mixture sends each token to, and their weights.

The runtime, analyses and tests ask here (the runtime's kernel for CPUs is held to it), and it is held to the routers of
`transformers`. Importing it imports no torch.

Shapes: T tokens, E experts, k experts of a token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

Scores = Literal["softmax", "softmax of chosen", "sigmoid"]
LEAST_TOTAL = 1e-20  # that chosen scores are divided by, which sigmoids may be as small as


@dataclass(frozen=True)
class Routing:
    """A configuration's choice of experts.

    Attributes:
        top_k: experts of a token; all of them where there are fewer.
        scores: an expert's share in the softmax over all experts, or over the chosen ones (which is the former, divided
            by their sum), or the sigmoid of its own logit.
        normalise: whether the chosen ones' scores are divided by their sum.
        scale: a factor on weights after that.
        groups: of equally many neighbouring experts, of which only the best `top_groups` are chosen from (DeepSeek-V3,
            section 2.1.2).
        group_best: a group is as good as so many of its best experts together.
    """

    top_k: int
    scores: Scores = "softmax"
    normalise: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1

    @property
    def divides(self) -> bool:
        """Tell whether the weights of a token's experts come to `scale` together."""
        return self.normalise or self.scores == "softmax of chosen"

    def count_chosen(self, experts: int) -> int:
        """Count the experts of a token, of so many."""
        return min(self.top_k, experts)


class Routed(NamedTuple):
    """Destinations of tokens.

    Attributes:
        experts: (T, k), int64, the best first.
        weights: of their outputs, (T, k), float32.
    """

    experts: Tensor
    weights: Tensor


def route(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> Routed:
    """Choose experts for each token; nothing waits for a GPU.

    Args:
        logits: of the router, (T, E), in any dtype.
        correction: (E,), added to scores where they are compared, not to weights (DeepSeek-V3, section 2.1.2).

    Raises:
        ValueError: as `check_groups`.
    """
    if routing.scores == "sigmoid":
        scores = logits.float().sigmoid()
    else:
        scores = logits.float().softmax(-1)
    if correction is None:
        compared = scores
    else:
        compared = scores + correction.float()
    if routing.groups > 1:
        # Experts of groups that are not chosen from get minus infinity.
        check_groups(compared.shape[-1], routing)
        by_group = compared.view(*compared.shape[:-1], routing.groups, -1)
        value = by_group.topk(routing.group_best, dim=-1).values.sum(-1)
        left_out = (
            value.new_ones(value.shape)
            .scatter(-1, value.topk(routing.top_groups, dim=-1).indices, 0.0)
            .bool()
        )
        compared = by_group.masked_fill(left_out[..., None], float("-inf")).flatten(-2)
    chosen = compared.topk(routing.count_chosen(logits.shape[-1]), dim=-1).indices
    weights = scores.gather(-1, chosen)
    if routing.divides:
        weights = weights / (weights.sum(-1, keepdim=True) + LEAST_TOTAL)
    return Routed(chosen, weights if routing.scale == 1 else weights * routing.scale)


def check_groups(experts: int, routing: Routing) -> None:
    """Refuse numbers of experts that groups cannot have.

    Raises:
        ValueError: if the experts do not divide into the groups, or the groups chosen from have too few.
    """
    groups = routing.groups
    least = routing.group_best
    if experts % groups or experts // groups < least:
        raise ValueError(
            f"{experts} experts do not divide into {groups} groups of {least} or more; keep equally many of each group"
        )
    if groups > 1 and experts // groups * routing.top_groups < routing.top_k:
        raise ValueError(
            f"{routing.top_groups} groups of {experts // groups} experts have fewer than the {routing.top_k} that a "
            "token is sent to; keep more of each group"
        )


def check_kept(kept: Sequence[int], experts: int, routing: Routing) -> None:
    """Refuse to keep some of so many experts where they leave other groups.

    Raises:
        ValueError: if it has unlike numbers of them from the groups, or as `check_groups`.
    """
    of_each = Counter(expert * routing.groups // experts for expert in kept)
    if len(of_each) < routing.groups or len(set(of_each.values())) > 1:
        raise ValueError(
            f"its router chooses among {routing.groups} groups of {experts // routing.groups} experts; keep equally "
            f"many of each, not {[of_each[group] for group in range(routing.groups)]}"
        )
    check_groups(len(kept), routing)
