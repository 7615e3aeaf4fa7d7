"""Attention, and the state that all sublayers share in a pass.

Shapes: T tokens of a pass, of all its sequences one after another, D head_dim, H heads and K KV heads of the slice, R
the ranks of k and v together where both are two factors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from surgeon.runtime.kernels.functions import Weighting, kernels_for
from surgeon.runtime.kernels.triton.functions import Placing
from surgeon.runtime.model.rotary import AllAngles

# Puts new keys and, behind them, values, (T, 2 * K, D), or what they are rebuilt of, (T, R), into a slot of the cache;
# queries (T, H, D) to attended values (T, H * D).
Attend = Callable[[int, Tensor, Tensor, Weighting], Tensor]

# The same of queries, keys and values, (T, H + 2 * K, D), before heads are normed and turned, given H.
AttendRaw = Callable[[int, Tensor, int, Placing, Weighting], Tensor]


@dataclass
class Pass:
    """State that all sublayers share in one forward pass.

    Attributes:
        attend: over the sequences of the pass.
        angles: of its tokens.
        attend_raw: the same, where kernels norm, turn and keep in one launch.
        waits: whether the host may wait for the device.
        parts: of the batch that take turns, of which this is one; while sums of one travel others are computed.
    """

    attend: Attend
    angles: AllAngles
    attend_raw: AttendRaw | None = None
    waits: bool = True
    parts: int = 1


def attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    weighting: Weighting,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Attend with queries, (B, H, Q, D), over keys and values, (B, K, N, D), to values, (B, H, Q, D).

    The heads of a KV group may be given as queries of one head each: (B, K, H / K, D).

    Args:
        weighting: its window is in the mask, or in which keys are given.
        mask: (Q, N) or (B, 1, 1, N), true where a query looks at a key, or numbers to add to scores; None for
            everywhere.
        causal: in place of a mask: query i looks at keys 0 to i.
    """
    kv_heads = keys.shape[1]
    head_dim = queries.shape[-1]
    grouped = queries.shape[1] > kv_heads
    plain = weighting.softcap is None and weighting.sinks is None
    if plain and grouped and mask is not None and len(queries) == 1:
        # On GPUs a mask and grouped heads together would leave only the way that keeps all scores: KV heads are texts.
        alone = Weighting(weighting.scale)
        keys, values = (
            one[0][:, None].expand(-1, queries.shape[1] // kv_heads, -1, -1) for one in (keys, values)
        )
        return attention(queries[0].unflatten(0, (kv_heads, -1)), keys, values, alone, mask).flatten(
            0, 1
        )[None]
    if plain:
        return F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=causal,
            scale=weighting.scale,
            enable_gqa=grouped,
        )
    scale = head_dim**-0.5 if weighting.scale is None else weighting.scale
    # The heads of a KV group as if they were queries.
    together = queries.unflatten(1, (kv_heads, -1)).flatten(2, 3)
    scores = (together @ keys.transpose(-1, -2)) * scale
    scores = scores if weighting.softcap is None else softcap(scores, weighting.softcap)
    scores = scores.unflatten(2, (-1, queries.shape[2]))
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        mask = mask.unsqueeze(-3)  # the same for all heads of a KV group
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -torch.inf)
        else:
            scores = scores + mask
    if weighting.sinks is not None:
        # Else heads of a KV group are given as its queries.
        per_head = weighting.sinks.numel() == queries.shape[1]
        sinks = weighting.sinks.view(kv_heads, -1, 1 if per_head else queries.shape[2], 1).to(
            scores.dtype
        )
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(values.dtype)
    weights = weights[..., : keys.shape[2]]
    attended: Tensor = (
        (weights.flatten(2, 3) @ values).unflatten(2, (-1, queries.shape[2])).flatten(1, 2)
    )
    return attended


def softcap(numbers: Tensor, bound: float) -> Tensor:
    """Bound numbers, (T, any), perhaps in place, by bound * tanh(numbers / bound) (Gemma2)."""
    kernels = kernels_for(numbers)
    if kernels is not None and numbers.dim() == 2 and numbers.is_contiguous():
        kernels.softcap_(numbers, bound)
        return numbers
    capped: Tensor = (numbers / bound).tanh_().mul_(bound)
    return capped
