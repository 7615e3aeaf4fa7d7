"""Attention, and what comes before it: norms of queries and keys, rotary positions, the state of a pass.

Shapes: T tokens of a pass, of all its sequences one after another, D head_dim, H heads and K KV heads of the slice, R
the ranks of k and v together where both are two factors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from surgeon.models.weights import Tensors
from surgeon.runtime.kernels.functions import Weighting, kernels_for, triton_kernels_for
from surgeon.runtime.kernels.triton import Placing
from surgeon.runtime.plan.specification import Rotary

Angles = tuple[Tensor, Tensor]  # cosine and signed sine, (tokens, 1, up to D) each
AllAngles = tuple[Angles, ...]  # those of each of a plan's rotary positions


def place_(x: Tensor, placing: Placing, queries: int = 0) -> None:
    """Norm queries or keys, (T, heads, D), by head and turn them to their positions in place.

    Args:
        placing: gains are of these heads.
        queries: how many of the heads are queries', where all of these are normed together.
    """
    gain, epsilon, angles, squares = placing
    on_gpu = triton_kernels_for(x)
    kernels = kernels_for(x)
    if on_gpu is not None and x.stride(2) == 1 and x.stride(1) == x.shape[2]:
        if gain is not None or angles is not None:
            on_gpu.place_(x, placing, queries)
        return
    if kernels is not None and x.stride()[1:] == (x.shape[2], 1):
        kernels.place_(x, gain, epsilon, angles, squares, queries)
        return
    if gain is not None and squares is not None:
        roots = (squares + epsilon).rsqrt()
        of_heads = torch.cat(
            [roots[:, :1].expand(-1, queries), roots[:, 1:].expand(-1, x.shape[1] - queries)], 1
        )
        torch.mul(x * of_heads[..., None], gain, out=x)
    elif gain is not None:
        torch.mul(F.rms_norm(x, x.shape[-1:], None, epsilon), gain, out=x)
    if angles is not None:
        rotate_(x, *angles)


def mean_squares(qkv: Tensor, queries: int, keys: int) -> Tensor:
    """Mean squares of so many features of queries, and of the keys' behind them, of (T, all features): (T, 2)."""
    kernels = kernels_for(qkv) or triton_kernels_for(qkv)
    if kernels is not None:
        return kernels.mean_squares(qkv, queries, keys)
    parts = qkv.to(torch.promote_types(qkv.dtype, torch.float32)).split(
        [queries, keys, qkv.shape[1] - queries - keys], 1
    )
    return torch.stack([part.square().mean(1) for part in parts[:2]], 1)


def rotate_(x: Tensor, cosine: Tensor, signed_sine: Tensor) -> None:
    """Turn pairs of features (i, i + R/2) of (T, heads, D) in place; the sine's first half is negated beforehand.

    R is the width of the angles, up to D; features beyond it have no position.
    """
    width = cosine.shape[-1]
    turned = x[..., :width]
    other_half = turned.roll(width // 2, -1)
    turned.mul_(cosine).addcmul_(other_half, signed_sine)


def in_halves(tensors: Tensors, width: int, head_dim: int) -> Tensors:
    """Order the features of queries and keys as `rotate_` pairs them; their products do not depend on it.

    Args:
        tensors: an attention's, by role.
        width: how many features of a head turn, neighbours as a pair.
    """
    order = torch.cat(
        [torch.arange(0, width, 2), torch.arange(1, width, 2), torch.arange(width, head_dim)]
    )
    found = dict(tensors)
    for name in (
        f"{role}{part}"
        for role in "qk"
        for part in (".weight", ".second.weight", ".bias", "_norm.weight")
    ):
        if name in found:
            dim = found[name].dim() - 1 if "norm" in name else 0
            heads = found[name].unflatten(dim, (-1, head_dim))
            found[name] = heads.index_select(dim + 1, order.to(heads.device)).flatten(dim, dim + 1)
    return found


def centre_heads(tensors: Tensors, head_dim: int) -> Tensors:
    """Centre the features of each head of an attention's queries and keys: means of 0."""
    found = dict(tensors)
    for name in (f"{role}{part}" for role in "qk" for part in (".weight", ".second.weight", ".bias")):
        if name in found:
            heads = found[name].unflatten(0, (-1, head_dim))
            found[name] = (heads - heads.float().mean(1, keepdim=True)).to(heads.dtype).flatten(0, 1)
    return found


def rotation(rotary: Rotary, tokens: int, like: Tensor) -> Angles:
    """Cosine and signed sine, (tokens, 1, features that turn) each, of the first positions, each as a text's last."""
    positions = torch.arange(tokens, device=like.device)
    return rotate_angles(rotary, positions, positions + 1, like)


def rotate_angles(rotary: Rotary, positions: Tensor, lengths: Tensor, like: Tensor) -> Angles:
    """Cosine and signed sine of any tokens, by their positions, (T,), and the lengths of their texts, (T,)."""
    frequencies = torch.tensor(rotary.inverse_frequencies, dtype=torch.float32, device=like.device)
    if rotary.beyond is not None:
        longer = torch.tensor(rotary.longer_frequencies, dtype=torch.float32, device=like.device)
        powers = torch.arange(len(longer), device=like.device) / max(1, len(longer) - 1)
        stretched = 1 + rotary.stretch * (lengths / rotary.beyond - 1)
        is_long = lengths > rotary.beyond
        frequencies = torch.where(
            is_long[:, None], longer * stretched.clamp(min=1)[:, None] ** -powers, frequencies
        )
    scale: float | Tensor = rotary.scale
    if rotary.growth is not None:
        lengths_before = torch.floor((positions + rotary.growth.ahead) / rotary.growth.length)
        scale = scale * (1 + rotary.growth.rate * torch.log1p(lengths_before))[:, None]
    angles = positions[:, None].float() * frequencies
    cosine = angles.cos() * scale
    sine = angles.sin() * scale
    halves = torch.cat([cosine, cosine], -1), torch.cat([-sine, sine], -1)
    return halves[0][:, None].to(like.dtype), halves[1][:, None].to(like.dtype)


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
    # The heads of a KV group as if they were queries.
    together = queries.unflatten(1, (kv_heads, -1)).flatten(2, 3)
    scores = (together @ keys.transpose(-1, -2)) * weighting.factor(queries.shape[-1])
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
