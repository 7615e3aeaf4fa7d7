"""The arithmetic of one slice of a sublayer, of the embedding and of the head, in plain PyTorch.

Shapes: T tokens of a pass, of all its sequences one after another, D head_dim, H heads and K KV heads of the slice, h
the stream's width, R the ranks of k and v together where both are two factors.

Multi-head latent attention (DeepSeek-V2, section 2.1) is as any attention, but for how its queries and keys are made.
Keys and values of all heads are made of one small normed latent of a token, queries of another one or of the stream; a
part of its own turns with positions, of keys one that all heads have in common. Here that part lies before the others
in every head, and values are filled up with zeros to the width of keys, as are the columns that write to the stream. So
keys and values are cached, turned and attended to as those of every attention. Each rank has some of the heads, and
makes the latents by itself.

In `LatentMaps` D is the features of a query or key, R of them turn, and V are those of a value.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from surgeon.models.families import SublayerSpec
from surgeon.models.families.specs import Clamp, Growth, Latent
from surgeon.models.weights import Tensors
from surgeon.runtime.kernels.functions import Kernels, Weighting, Window, kernels_for, triton_kernels_for
from surgeon.runtime.kernels.triton import Placing
from surgeon.runtime.model.attending import AllAngles, Pass, mean_squares, place_
from surgeon.runtime.model.linear import (
    Linear,
    Maps,
    Sharing,
    count_outputs,
    second_factor,
    whole_map,
)
from surgeon.runtime.plan.specification import Plan

EPSILON = 1e-6  # of the latents' norms, whatever the configuration says of others


class LatentMaps:
    """The maps of a slice of a latent attention; called, it makes queries, keys and values of the normed stream.

    Args:
        stored: the whole attention's tensors, named as its module has them ("q_b_proj.weight").
        piece: (index, count) of the slice of the heads; None for all.

    Attributes:
        tensors: for `Attention`, which counts heads by them.
        later: roles whose second factors are left out.
    """

    later: frozenset[str] = frozenset()
    by_kernels = False  # what heads have in common is copied to each of them

    def __init__(
        self, stored: Tensors, latent: Latent, plan: Plan, piece: tuple[int, int] | None
    ) -> None:
        heads = latent.share(piece)
        self.latent = latent
        self.heads = heads.stop - heads.start
        turned = torch.arange(latent.turned)
        if latent.neighbours:  # as `rotate_` pairs them: the first of each pair, then the others
            turned = torch.cat([turned[::2], turned[1::2]])
        wide = latent.width - latent.turned  # features of a key that do not turn
        order = torch.cat([wide + turned, torch.arange(wide)]).to(stored["o_proj.weight"].device)
        through = "q_a_proj.weight" in stored
        name = "q_b_proj" if through else "q_proj"
        queries = stored[f"{name}.weight"].view(latent.heads, latent.width, -1)[heads, order]
        expanded = stored["kv_b_proj.weight"].view(latent.heads, wide + latent.value, -1)[heads]
        keys, values = expanded.split([wide, latent.value], 1)
        compressed = stored["kv_a_proj_with_mqa.weight"]
        rank = len(compressed) - latent.turned
        rows = torch.cat([torch.arange(rank), rank + turned]).to(order.device)
        self.key_gain = stored["kv_a_layernorm.weight"]
        firsts = [compressed[rows]]
        bias = stored.get("kv_a_proj_with_mqa.bias")
        if bias is not None:
            bias = bias[rows]
        biases: list[Tensor | None] = [bias]
        self.query_gain: Tensor | None = None
        self.queries: Linear | None = None
        if through:
            self.query_gain = stored["q_a_layernorm.weight"]
            firsts.append(stored["q_a_proj.weight"])
            biases.append(stored.get("q_a_proj.bias"))
            self.queries = Linear([queries.flatten(0, 1)], [None])
        else:
            firsts.append(queries.flatten(0, 1))
            biases.append(None)
        self.first = Linear(firsts, biases)
        self.widths = [rank, latent.turned, len(firsts[1])]
        self.expand = Linear([keys.flatten(0, 1), values.flatten(0, 1)], [None, None])
        output = stored["o_proj.weight"].unflatten(1, (latent.heads, latent.value))[:, heads]
        written = {"o.weight": F.pad(output, (0, latent.width - latent.value)).flatten(1)}
        if "o_proj.bias" in stored and (piece is None or piece[0] == 0):  # of slices, one adds it
            written["o.bias"] = stored["o_proj.bias"]
        self._written = written
        self._scale = plan.arithmetic.output_scale
        own = stored["norm.weight"].new_empty(self.heads * latent.width, 0)
        self.tensors: Tensors = {"norm.weight": stored["norm.weight"], "q.weight": own, "k.weight": own}

    def in_projections(self, roles: list[str]) -> LatentMaps:  # noqa: ARG002 - always all of them
        """Queries, keys and values, (T, h) to (T, 3 * H * D)."""
        return self

    def out_projection(self, role: str) -> Linear:
        """(T, H * D) to (T, h)."""
        return whole_map(self._written, [role], self._scale)

    def __call__(self, x: Tensor) -> Tensor:
        """(T, h) to (T, 3 * H * D)."""
        latent = self.latent
        heads = self.heads
        tokens = len(x)
        compressed, turned, queries = self.first(x).split(self.widths, -1)
        if self.queries is not None:
            assert self.query_gain is not None
            queries = self.queries(F.rms_norm(queries, self.query_gain.shape, self.query_gain, EPSILON))
        expanded = self.expand(F.rms_norm(compressed, self.key_gain.shape, self.key_gain, EPSILON))
        keys, values = expanded.split([heads * (latent.width - latent.turned), heads * latent.value], -1)
        common = turned[:, None].expand(-1, heads, -1)
        keys = keys.reshape(tokens, heads, latent.width - latent.turned)
        whole = torch.cat([common, keys], -1).flatten(1)
        values = values.reshape(tokens, heads, latent.value)
        filled = F.pad(values, (0, latent.width - latent.value)).flatten(1)
        return torch.cat([queries, whole, filled], -1)


Activation = Callable[[Tensor], Tensor]

# What transformers calls them; ranks import transformers, which takes seconds, only for others.
ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


def activation(name: str) -> Activation:
    """Return the activation that `transformers` knows by this name."""
    if name in ACTIVATIONS:
        return ACTIVATIONS[name]
    from transformers.activations import ACT2FN

    function: Activation = ACT2FN[name]
    return function


def torch_dtype(plan: Plan) -> torch.dtype:
    """Return the dtype that the plan is computed in."""
    found = getattr(torch, plan.dtype)
    assert isinstance(found, torch.dtype)
    return found


def plan_kernels(plan: Plan, like: Tensor) -> Kernels | None:
    """Return the kernels, where they compute with a plan's streams; gains may be wider than these.

    Args:
        like: on the same device.
    """
    if torch_dtype(plan) == torch.float32:
        return kernels_for(like)
    return None


def gain_of(stored: Tensor, plan: Plan) -> Tensor:
    """Return the factor of an RMS norm, of its stored gain."""
    if plan.family.norms.unit_offset:  # 1 + a small number would lose the small one's digits in 16 bits
        return 1 + stored.to(torch.promote_types(stored.dtype, torch.float32))
    return stored


class Norm:
    """An RMS norm, or a layer norm where there is a shift or the family says so."""

    def __init__(self, tensors: Tensors, path: str, plan: Plan) -> None:
        self.gain = gain_of(tensors[f"{path}.weight"], plan)
        self.shift = tensors.get(f"{path}.bias")
        self.epsilon = plan.arithmetic.epsilon
        self.rms = plan.family.norms.kind == "rms"
        self.kernels = plan_kernels(plan, self.gain) if self.rms else None
        self.by_kernels = self.kernels is not None
        self._triton = triton_kernels_for(self.gain)
        self._ahead: tuple[Tensor, Tensor] | None = None  # a sum, and its norm

    def add(self, stream: Tensor, output: Tensor) -> Tensor:
        """Add to a stream, (T, h) each.

        Kernels for GPUs norm the sum in the same launch, for the call that will ask for the norm of this very tensor.
        """
        if self._triton is None:
            return stream + output
        self._ahead = self._triton.norm(
            stream, self.gain, self.shift, self.epsilon, not self.rms, output
        )
        return self._ahead[0]

    def __call__(self, x: Tensor) -> Tensor:
        if self._triton is not None:
            of, normed = self._ahead or (None, x)
            self._ahead = None
            if of is x:
                return normed
            return self._triton.norm(x, self.gain, self.shift, self.epsilon, not self.rms)[1]
        if self.kernels is not None:
            return self.kernels.rms_norm(x, self.gain, self.epsilon)
        if self.rms:
            return F.rms_norm(x.to(self.gain.dtype), self.gain.shape, self.gain, self.epsilon).to(
                x.dtype
            )
        return F.layer_norm(x, self.gain.shape, self.gain, self.shift, self.epsilon)


class Unnormed:
    """Stands for the norm of a sublayer that reads the stream as it is."""

    by_kernels = True

    def add(self, stream: Tensor, output: Tensor) -> Tensor:
        return stream + output

    def __call__(self, x: Tensor) -> Tensor:
        return x


def plain_norm(plan: Plan, device: torch.device) -> Norm:
    """A layer norm without parameters."""
    return Norm(
        {"norm.weight": torch.ones(plan.hidden, dtype=torch_dtype(plan), device=device)}, "norm", plan
    )


def norm_before(tensors: Tensors, spec: SublayerSpec, plan: Plan) -> Norm | Unnormed:
    """Make the norm among a sublayer's stages that lies before its modules."""
    if "norm" not in spec.stream_norms:
        return Unnormed()
    if plan.family.norms.kind == "plain":
        return plain_norm(plan, next(iter(tensors.values())).device)
    return Norm(tensors, "norm", plan)


class Attention:
    """A slice of an attention sublayer, the norm before it inside, (T, h) to (T, h); the output is its part of the sum.

    A norm behind the sublayer (Gemma2) needs the whole sum.

    Attributes:
        heads, kv_heads: of the slice, which has none where ranks are more than heads.
        rebuild: makes keys and values of the cache's numbers where the maps leave out the second factors of k and v.
    """

    def __init__(
        self,
        tensors: Tensors,
        maps: Maps | LatentMaps,
        spec: SublayerSpec,
        plan: Plan,
        window: int | None,
        rotary: int | None,
        sharing: Sharing | None = None,
        shares: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        """Take what the maps leave.

        Args:
            window: in tokens.
            rotary: index among the plan's rotary positions, if it has any.
            sharing: the ranks that have slices of the same attention, if there are several.
            shares: the slice's parts of all queries and of all keys.
        """
        self.qkv = maps.in_projections(["q", "k", "v"])
        self.o = maps.out_projection("o")
        self.rotary = rotary
        growth = spec.head_stage(Growth)
        grows = growth is not None and not (growth.unturned and rotary is not None)
        self.query_factor = plan.arithmetic.query_factor if grows else None
        self.head_dim = plan.head_dim
        self.heads = count_outputs(tensors, "q") // plan.head_dim
        self.kv_heads = count_outputs(tensors, "k") // plan.head_dim
        sinks = tensors["sinks"].float().contiguous() if "sinks" in tensors else None
        seen = None if window is None else Window(window, plan.family.window.chunked)
        self.weighting = Weighting(
            plan.arithmetic.attention_scale, seen, plan.arithmetic.attention_softcap, sinks
        )
        self.epsilon = plan.arithmetic.epsilon
        clamp = spec.head_stage(Clamp)
        self.bound = None if clamp is None else clamp.bound
        self.rebuild: Rebuild | None = None
        self.joins_heads = spec.joins_heads
        self.sharing = sharing
        # A number alone can be recorded (runtime/kernels/recording.py).
        self.shares: float | Tensor = shares[0]
        if shares[0] != shares[1]:
            self.shares = torch.tensor(shares, device=next(iter(tensors.values())).device)
        gains = self._head_gains(tensors, spec, plan)
        if {"k", "v"} <= maps.later:
            self.rebuild = Rebuild(tensors, plan, gains[1] if gains else None, rotary, self.bound)
        self.norm = norm_before(tensors, spec, plan)
        kept = gains if self.rebuild is None else gains[:1]  # keys are normed when they are rebuilt
        self.head_gain = torch.cat(kept).contiguous() if kept else None
        computed = self.qkv, self.o, self.norm
        self.by_kernels = (
            all(one.by_kernels for one in computed) and self.rebuild is None and self.bound is None
        )

    def _head_gains(self, tensors: Tensors, spec: SublayerSpec, plan: Plan) -> list[Tensor]:
        """Return the gains of heads of queries, (H, D), and of keys, (K, D); nothing without such norms."""
        counts = self.heads, self.kv_heads
        if spec.head_norm.gains is None:
            return []
        if spec.head_norm.gains == "none":
            like = next(iter(tensors.values()))
            return [like.new_ones(count, self.head_dim) for count in counts if self.rotary is not None]
        gains = (gain_of(tensors[f"{role}_norm.weight"], plan) for role in "qk")
        by_head = (gain.view(-1, self.head_dim) for gain in gains)  # one for all heads, or for each
        return [gain.expand(count, -1) for gain, count in zip(by_head, counts, strict=True)]

    def __call__(self, stream: Tensor, slot: int, forward: Pass) -> Tensor:
        qkv = self.qkv(self.norm(stream))
        if self.bound is not None:
            here = qkv if self.rebuild is None else qkv[:, : self.heads * self.head_dim]
            here.clamp_(-self.bound, self.bound)
        squares = None
        if self.joins_heads:
            # Ranks that share the attention send each other theirs, weighed by how many heads they have.
            if self.heads:
                squares = mean_squares(qkv, self.heads * self.head_dim, self.kv_heads * self.head_dim)
            else:
                dtype = torch.promote_types(qkv.dtype, torch.float32)
                squares = qkv.new_zeros(len(qkv), 2, dtype=dtype)
            if self.sharing is not None:
                squares = self.sharing.sum(squares * self.shares, exactly=True)
        if not self.heads:
            return self.o(qkv[:, :0])
        angles = None if self.rotary is None else forward.angles[self.rotary]
        placing = Placing(self.head_gain, self.epsilon, angles, squares)
        if self.query_factor is not None:
            queries = qkv[:, : self.heads * self.head_dim].unflatten(-1, (-1, self.head_dim))
            place_(queries, Placing(None, self.epsilon, forward.angles[self.query_factor]))
        if self.rebuild is None:
            by_head = qkv.unflatten(-1, (-1, self.head_dim))
            if forward.attend_raw is not None:
                return self.o(forward.attend_raw(slot, by_head, self.heads, placing, self.weighting))
            turned = by_head[:, : self.heads + self.kv_heads]
            kept = by_head[:, self.heads :]
        else:
            width = self.heads * self.head_dim
            turned = qkv[:, :width].unflatten(-1, (-1, self.head_dim))
            kept = qkv[:, width:]
        place_(turned, placing, self.heads)
        return self.o(forward.attend(slot, turned[:, : self.heads], kept, self.weighting))


class Rebuild:
    """Makes keys and values of an attention's slice from outputs of the first factors of k and v.

    Args:
        tensors: of the slice, by role.
        head_gain: of the norms of its keys, if any, (K, D).
        rotary: index among the plan's rotary positions, if keys have any.
        bound: of keys and values, before keys are normed.

    Attributes:
        columns: outputs of the first factors of k and of v.
        width: numbers of a token's keys, and of its values.
    """

    def __init__(
        self,
        tensors: Tensors,
        plan: Plan,
        head_gain: Tensor | None,
        rotary: int | None,
        bound: float | None,
    ) -> None:
        self.seconds = [second_factor(tensors, role, packs=False) for role in "kv"]
        self.columns = [tensors[f"{role}.first.weight"].shape[0] for role in "kv"]
        self.width = count_outputs(tensors, "k")
        self.head_dim = plan.head_dim
        self.epsilon = plan.arithmetic.epsilon
        self.bound = bound
        self.head_gain = None if head_gain is None else head_gain.contiguous()
        self.rotary = rotary

    def __call__(self, kept: Tensor, angles: AllAngles, out: Tensor) -> tuple[Tensor, Tensor]:
        """Make keys and values of N tokens, (N, K, D) each, from (N, R).

        Args:
            angles: of their positions.
            out: memory for them, (2, N, K * D).
        """
        for second, part, room in zip(self.seconds, kept.split(self.columns, -1), out, strict=True):
            second(part, room)
        if self.bound is not None:
            out.clamp_(-self.bound, self.bound)
        keys, values = out.unflatten(-1, (-1, self.head_dim))
        place_(
            keys,
            Placing(self.head_gain, self.epsilon, None if self.rotary is None else angles[self.rotary]),
        )
        return keys, values


class FeedForward:
    """A slice of a feed-forward, the norm before it inside, (T, h) to (T, h); the output is its part of the sum."""

    def __init__(self, tensors: Tensors, maps: Maps, plan: Plan, norm: Norm | Unnormed) -> None:
        self.norm = norm
        self.gated = any(name.startswith("gate.") for name in tensors)
        self.up = maps.in_projections(["gate", "up"] if self.gated else ["up"])
        self.down = maps.out_projection("down")
        self.activation = activation(plan.arithmetic.activation)
        like = next(iter(tensors.values()))
        kernels = triton_kernels_for(like) or plan_kernels(plan, like)
        self.gate = (
            kernels.gate_of(plan.arithmetic.activation) if self.gated and kernels is not None else None
        )
        self.by_kernels = (
            all(one.by_kernels for one in (self.up, self.down, self.norm)) and self.gate is not None
        )

    def __call__(self, stream: Tensor) -> Tensor:
        return self.of_normed(self.norm(stream))

    def of_normed(self, x: Tensor) -> Tensor:
        wide = self.up(x)
        if self.gate is not None:
            return self.down(self.gate(wide))
        if self.gated:
            gate, up = wide.chunk(2, dim=-1)
            return self.down(self.activation(gate) * up)
        return self.down(self.activation(wide))
