"""An independent computation to test against: attention and feed-forward in plain PyTorch, from a state dict.

Nothing here uses surgeon or the modeling code of transformers, so that a mistake in either shows.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import functional

ACTIVATIONS = {
    "silu": functional.silu,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
}


MSCALES = {"mscale": 1, "mscale_all_dim": 0}  # of yarn, where they are not given


def capped(x: Tensor, bound: float | None) -> Tensor:
    """Numbers between -bound and bound."""
    return x if bound is None else torch.tanh(x / bound) * bound


def rotary_frequencies(rope: dict[str, Any], width: int) -> tuple[Tensor, float]:
    """How far a pair of features turns from one position to the next, (width / 2,), and the factor on cosine and sine.

    For texts that stay within what the scaled types leave as it was (the first half of longrope's factors; all of
    dynamic's, which changes nothing there).
    """
    plain = rope["rope_theta"] ** (-torch.arange(0, width, 2) / width)
    kind, factor, first = (
        rope.get(key) for key in ("rope_type", "factor", "original_max_position_embeddings")
    )
    if kind == "linear":
        return plain / factor, 1.0
    # What turns often within the first context is kept, what turns seldom is slowed down.
    if kind == "llama3":
        turns = first * plain / (2 * math.pi)
        kept = (
            (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        ).clamp(0, 1)
        return plain * (kept + (1 - kept) / factor), 1.0
    # Likewise, between 32 turns and one, on a scale of feature pairs instead of turns.
    if kind == "yarn":
        low, high = (
            width * math.log(first / (n * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))
            for n in (32, 1)
        )
        low, high = max(math.floor(low), 0), min(math.ceil(high), width - 1)
        slowed = ((torch.arange(width // 2) - low) / (high - low if high != low else 1e-3)).clamp(0, 1)
        wide, deep = (
            0.1 * rope.get(name, default) * math.log(factor) + 1 for name, default in MSCALES.items()
        )
        return plain * (1 - slowed + slowed / factor), wide / deep
    if kind == "longrope":
        scale = math.sqrt(1 + math.log(factor) / math.log(first)) if factor > 1 else 1.0
        return plain / torch.tensor(rope["short_factor"]), scale
    assert kind in ("default", "dynamic"), kind
    return plain, 1.0


class Reference:
    """One causal language model over unpadded tokens, float32: Llama, Mistral, Qwen2 and Qwen3.

    `attention(k, x)` and `feed_forward(k, x)` are the sublayers A_k and F_k with their norm inside; `logits(x)` is the
    final norm and the head. Called with a model of another architecture, the class gives that one's computation.
    """

    layers, embedding, final_norm = "model.layers", "model.embed_tokens", "model.norm"
    attention_norm, mlp_norm = "input_layernorm", "post_attention_layernorm"
    output, up, down = "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"
    activation_name = "hidden_act"
    attention_roles = "qkvo"
    transposed = False  # whether weights are stored as (in, out)
    one_step = False  # whether a layer's attention and feed-forward read the same stream

    def __new__(cls, model: Any) -> Reference:
        return object.__new__(_CLASSES.get(model.config.model_type, Reference))

    def __init__(self, model: torch.nn.Module) -> None:
        self.w = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        self.config: Any = model.config
        # Of narrowed sublayers, by kind and layer: columns of o or down.
        self.kept: dict[tuple[str, int], Tensor] = {}
        self.num_heads: int = self.config.num_attention_heads
        self.head_dim: int = (
            getattr(self.config, "head_dim", None) or self.config.hidden_size // self.num_heads
        )

    def at(self, k: int, path: str) -> str:
        return f"{self.layers}.{k}.{path}"

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.w[name + ".weight"].T
        return y + self.w[name + ".bias"] if name + ".bias" in self.w else y

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x / torch.sqrt((x**2).mean(-1, keepdim=True) + self.config.rms_norm_eps) * self.gain(name)

    def gain(self, name: str) -> Tensor:
        return self.w[name + ".weight"]

    def embed(self, ids: Tensor) -> Tensor:
        return self.w[self.embedding + ".weight"][ids]

    def logits(self, x: Tensor) -> Tensor:
        return Reference.linear(self, "lm_head", self.norm(self.final_norm, x))

    def layer(self, k: int, x: Tensor) -> Tensor:
        """The stream after a whole unedited layer."""
        if self.one_step:
            return x + self.attention(k, x) + self.feed_forward(k, x)
        x = x + self.attention(k, x)
        return x + self.feed_forward(k, x)

    def attention(self, k: int, x: Tensor) -> Tensor:
        return self.after_attention(k, self.attended(k, self.norm(self.at(k, self.attention_norm), x)))

    def attended(self, k: int, x: Tensor) -> Tensor:
        """What the projection to the stream makes of a normed one."""
        q, key, v = self.qkv(k, x)
        group = q.shape[1] // key.shape[1]
        heads = [self.mix(k, q[:, h], key[:, h // group], v[:, h // group]) for h in range(q.shape[1])]
        return self.linear(self.at(k, self.output), torch.cat(heads, -1))

    def after_attention(self, k: int, x: Tensor) -> Tensor:  # noqa: ARG002
        return x

    def qkv(self, k: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values with their positions, each (batch, heads, tokens, head_dim)."""
        q, key, v = (self.heads(self.linear(self.at(k, f"self_attn.{n}_proj"), x)) for n in "qkv")
        if self.at(k, "self_attn.q_norm.weight") in self.w:
            q = self.norm(self.at(k, "self_attn.q_norm"), q)
            key = self.norm(self.at(k, "self_attn.k_norm"), key)
        return self.rotate(k, q), self.rotate(k, key), v

    def heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)

    def rope(self, k: int) -> dict[str, Any]:  # noqa: ARG002
        """What the configuration says of a layer's rotary positions."""
        rope: dict[str, Any] = self.config.rope_parameters
        return rope

    def rotate(self, k: int, x: Tensor) -> Tensor:
        """Rotary positions on (batch, heads, tokens, head_dim), on the first part of each head's features."""
        rope = self.rope(k)
        width = int(x.shape[-1] * rope.get("partial_rotary_factor", 1.0))
        half = width // 2
        frequencies, scale = rotary_frequencies(rope, width)
        angles = torch.arange(x.shape[-2])[:, None] * frequencies
        first, second, rest = x[..., :half], x[..., half:width], x[..., width:]
        cos, sin = angles.cos() * scale, angles.sin() * scale
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)

    def mix(self, k: int, q: Tensor, key: Tensor, v: Tensor) -> Tensor:
        """One head's attention, (batch, tokens, head_dim)."""
        scores = self.cap(q @ key.transpose(-1, -2) * self.scale())
        # How far back each key lies.
        ages = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])[None]
        window = self.window(k)
        hidden = (ages < 0) if window is None else (ages < 0) | (ages >= window)
        return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v

    def scale(self) -> float:
        return self.head_dim**-0.5

    def cap(self, scores: Tensor) -> Tensor:
        return scores

    def window(self, k: int) -> int | None:
        window: int | None = getattr(self.config, "sliding_window", None)
        types = getattr(self.config, "layer_types", None)
        return window if types is None or types[k] == "sliding_attention" else None

    def feed_forward(self, k: int, x: Tensor) -> Tensor:
        return self.gated(k, self.norm(self.at(k, self.mlp_norm), x))

    def gated(self, k: int, x: Tensor) -> Tensor:
        """What a gated MLP makes of a normed stream."""
        gate = self.activation(self.linear(self.at(k, "mlp.gate_proj"), x))
        return self.linear(self.at(k, self.down), gate * self.linear(self.at(k, "mlp.up_proj"), x))

    def activation(self, x: Tensor) -> Tensor:
        return ACTIVATIONS[getattr(self.config, self.activation_name)](x)

    def copied(self) -> Reference:
        """A copy whose tensors can be replaced."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, w=dict(self.w))
        return other

    def truncated(self, k: int, role: str, rank: int) -> Reference:
        """A copy in which a matrix of a layer has only its leading singular values; transposed or not, the same."""
        path, (rows, columns) = self.place(role)
        name = self.at(k, f"{path}.weight")
        left, values, right = numpy.linalg.svd(
            self.w[name][rows, columns].double().numpy(), full_matrices=False
        )
        other = self.copied()
        other.w[name] = self.w[name].clone()
        kept = (left[:, :rank] * values[:rank]) @ right[:rank]
        other.w[name][rows, columns] = torch.from_numpy(kept).to(self.w[name].dtype)
        return other

    def narrowed(self, k: int, kind: str, count: int) -> Reference:
        """A copy in which only so many KV groups of the largest weights, or any neurons, are not zero."""
        roles = (
            self.attention_roles
            if kind == "A"
            else [role for role in ("gate", "up", "down") if self.has(k, role)]
        )
        groups = self.kv_heads()
        inputs = {
            role: self.matrix(k, role) if role in ("o", "down") else self.matrix(k, role).T
            for role in roles
        }
        units = {
            role: w.reshape(len(w), groups if kind == "A" else w.shape[1], -1)
            for role, w in inputs.items()
        }
        sizes = torch.stack([(one.double() ** 2).sum((0, 2)) for one in units.values()]).sum(0)
        any_order = torch.randperm(len(sizes), generator=torch.Generator().manual_seed(2 * k + 1))
        kept = (sizes.argsort(descending=True) if kind == "A" else any_order)[:count].sort().values
        other, left = self.copied(), torch.zeros(1, len(sizes), 1).index_fill(1, kept, 1)
        for role, one in units.items():
            path, (rows, columns) = self.place(role)
            name, zeroed = self.at(k, f"{path}.weight"), (one * left).flatten(1)
            other.w[name] = other.w[name].clone()
            # What reads the stream has units in rows, and all of it is the other way round where it is transposed.
            other.w[name][rows, columns] = (
                zeroed if (role in ("o", "down")) != self.transposed else zeroed.T
            )
        features = units["o" if kind == "A" else "down"].shape[2]
        other.kept = self.kept | {
            (kind, k): (kept[:, None] * features + torch.arange(features)).flatten()
        }
        return other

    def kv_heads(self) -> int:
        """How many KV heads a layer has."""
        return getattr(self.config, "num_key_value_heads", None) or self.num_heads

    def has(self, k: int, role: str) -> bool:
        """Whether a layer has a matrix."""
        return self.at(k, f"{self.place(role)[0]}.weight") in self.w

    def matrix(self, k: int, role: str) -> Tensor:
        """A matrix of a layer, (out, in)."""
        path, (rows, columns) = self.place(role)
        stored = self.w[self.at(k, f"{path}.weight")][rows, columns]
        return stored.T if self.transposed else stored

    def place(self, role: str) -> tuple[str, tuple[Any, Any]]:
        """Where a matrix is: the module's path in a layer, and rows and columns of its weight as it is stored."""
        named = {"o": self.output, "down": self.down, "up": self.up, "gate": "mlp.gate_proj"}
        return named.get(role, f"self_attn.{role}_proj"), (slice(None), slice(None))

    def averaged(self, layers: list[int], into: int) -> Reference:
        """A copy in which one layer has the average of several layers' weights, where all have some of that name."""
        other, at = self.copied(), self.at(into, "")
        for name in self.w:
            own = [name.replace(at, self.at(k, "")) for k in layers]
            if name.startswith(at) and all(one in self.w for one in own):
                other.w[name] = torch.stack([self.w[one] for one in own]).mean(0)
        return other


class _Mixture(Reference):
    """Mixtures of experts, and dense layers among them."""

    router, normalised = "mlp.gate", True
    expert_names = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")

    def feed_forward(self, k: int, x: Tensor) -> Tensor:
        if self.at(k, f"{self.router}.weight") not in self.w:
            return super().feed_forward(k, x)
        normed = self.norm(self.at(k, self.mlp_norm), x).flatten(0, -2)
        total = torch.zeros_like(normed)
        for token, shares in enumerate(self.shares(self.linear(self.at(k, self.router), normed))):
            for expert, share in enumerate(shares):
                if share:
                    total[token] += share * self.expert(k, expert, normed[token])
        return total.view(x.shape)

    def shares(self, logits: Tensor) -> Tensor:
        """What each expert's output is multiplied with, (tokens, experts): zero for all but the best ones."""
        every = logits.softmax(-1)
        least = (
            every.sort(-1, descending=True)
            .values[:, : self.config.num_experts_per_tok]
            .min(-1, True)
            .values
        )
        best = every * (every >= least)
        return best / best.sum(-1, True) if self.normalised else best

    def expert(self, k: int, expert: int, x: Tensor) -> Tensor:
        both = self.w[self.at(k, "mlp.experts.gate_up_proj")][expert] @ x
        gate, up = both.chunk(2)
        return self.w[self.at(k, "mlp.experts.down_proj")][expert] @ (self.activation(gate) * up)

    def experts(self, k: int, kept: tuple[int, ...]) -> Reference:
        """A copy in which a layer has these of its experts."""
        other = self.copied()
        rows = [f"{self.router}.{name}" for name in ("weight", "bias", "e_score_correction_bias")]
        for name in (
            *rows,
            "mlp.e_score_correction_bias",
            *(f"mlp.experts.{name}" for name in self.expert_names),
        ):
            if (path := self.at(k, name)) in self.w:
                other.w[path] = self.w[path][list(kept)]
        return other


class _Qwen3Moe(_Mixture):
    @property
    def normalised(self) -> bool:  # type: ignore[override]
        return bool(self.config.norm_topk_prob)


class _Qwen2Moe(_Qwen3Moe):
    """A shared expert, which has a gate."""

    def feed_forward(self, k: int, x: Tensor) -> Tensor:
        output = super().feed_forward(k, x)
        if self.at(k, "mlp.gate.weight") not in self.w:
            return output
        normed = self.norm(self.at(k, self.mlp_norm), x)
        gate, up = (
            self.linear(self.at(k, f"mlp.shared_expert.{name}_proj"), normed) for name in ("gate", "up")
        )
        shared = self.linear(self.at(k, "mlp.shared_expert.down_proj"), self.activation(gate) * up)
        return output + torch.sigmoid(self.linear(self.at(k, "mlp.shared_expert_gate"), normed)) * shared


class _Qwen3Next(_Qwen2Moe):
    attention_roles = "qgkvo"

    def gain(self, name: str) -> Tensor:
        return 1 + self.w[name + ".weight"]

    def attended(self, k: int, x: Tensor) -> Tensor:
        if self.config.layer_types[k] == "linear_attention":
            return self.delta_net(k, x)
        q, key, v = self.qkv(k, x)
        gates = torch.sigmoid(self.heads(x @ self.matrix(k, "g").T))
        group = q.shape[1] // key.shape[1]
        heads = [
            self.mix(k, q[:, h], key[:, h // group], v[:, h // group]) * gates[:, h]
            for h in range(q.shape[1])
        ]
        return self.linear(self.at(k, self.output), torch.cat(heads, -1))

    def qkv(self, k: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, key, v = (self.heads(x @ self.matrix(k, role).T) for role in "qkv")
        q, key = (
            self.norm(self.at(k, "self_attn.q_norm"), q),
            self.norm(self.at(k, "self_attn.k_norm"), key),
        )
        return self.rotate(k, q), self.rotate(k, key), v

    def place(self, role: str) -> tuple[str, tuple[Any, Any]]:
        if role not in ("q", "g"):
            return super().place(role)
        rows = torch.arange(self.num_heads * 2 * self.head_dim).view(self.num_heads, 2, self.head_dim)
        return "self_attn.q_proj", (rows[:, "qg".index(role)].flatten(), slice(None))

    def delta_net(self, k: int, x: Tensor) -> Tensor:
        """A gated delta net, one token after the other (arXiv:2412.06464, equation 10)."""
        config, w = (
            self.config,
            {name: self.w.get(self.at(k, f"linear_attn.{name}")) for name in ("A_log", "dt_bias")},
        )
        wide, heads = config.linear_key_head_dim, config.linear_num_value_heads
        *mixed, z, b, a = self.mixed(k, x)
        channels = torch.cat([part.flatten(-2) for part in mixed], -1)
        kernel = self.w[self.at(k, "linear_attn.conv1d.weight")][:, 0]
        before = functional.pad(channels, (0, 0, kernel.shape[1] - 1, 0))
        turned = functional.silu(
            sum(before[:, i : i + x.shape[1]] * kernel[:, i] for i in range(kernel.shape[1]))
        )
        q, key, v = turned.split([part.shape[-1] * part.shape[-2] for part in mixed], -1)
        q, key = (
            part.unflatten(-1, (-1, wide)).repeat_interleave(heads // mixed[0].shape[-2], 2)
            for part in (q, key)
        )
        q, key = (part / torch.sqrt((part**2).sum(-1, keepdim=True) + 1e-6) for part in (q, key))
        v, rate = v.unflatten(-1, (heads, -1)), torch.sigmoid(b)
        kept = torch.exp(-torch.exp(w["A_log"]) * functional.softplus(a + w["dt_bias"]))
        state, found = x.new_zeros(len(x), heads, v.shape[-1], wide), []
        for t in range(x.shape[1]):
            state = state * kept[:, t, :, None, None]
            error = v[:, t] - (state @ key[:, t, :, :, None])[..., 0]
            state = state + rate[:, t, :, None, None] * error[..., None] * key[:, t, :, None]
            found.append((state @ q[:, t, :, :, None])[..., 0] / wide**0.5)
        output = torch.stack(found, 1)
        normed = output / torch.sqrt((output**2).mean(-1, keepdim=True) + config.rms_norm_eps)
        gated = normed * self.w[self.at(k, "linear_attn.norm.weight")] * functional.silu(z)
        return self.linear(self.at(k, "linear_attn.out_proj"), gated.flatten(-2))

    def mixed(self, k: int, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys, values and gates, (batch, tokens, heads, width); rates and decays, (batch, tokens, heads)."""
        config = self.config
        groups, width = config.linear_num_key_heads, config.linear_value_head_dim
        values = config.linear_num_value_heads // groups
        both = self.linear(self.at(k, "linear_attn.in_proj_qkvz"), x).unflatten(-1, (groups, -1))
        q, key, v, z = both.split([config.linear_key_head_dim] * 2 + [values * width] * 2, -1)
        b, a = (
            self.linear(self.at(k, "linear_attn.in_proj_ba"), x).unflatten(-1, (groups, -1)).chunk(2, -1)
        )
        v, z = (part.flatten(-2).unflatten(-1, (-1, width)) for part in (v, z))
        return q, key, v, z, b.flatten(-2), a.flatten(-2)


class _Qwen35(_Qwen3Next):
    normalised = True

    def mixed(self, k: int, x: Tensor) -> tuple[Tensor, ...]:
        config = self.config
        both, z, b, a = (
            self.linear(self.at(k, f"linear_attn.in_proj_{name}"), x) for name in ("qkv", "z", "b", "a")
        )
        keys, wide = (
            config.linear_num_key_heads * config.linear_key_head_dim,
            config.linear_value_head_dim,
        )
        q, key, v = both.split([keys, keys, config.linear_num_value_heads * wide], -1)
        q, key = (part.unflatten(-1, (-1, config.linear_key_head_dim)) for part in (q, key))
        return q, key, v.unflatten(-1, (-1, wide)), z.unflatten(-1, (-1, wide)), b, a


class _GptOss(_Mixture):
    router = "mlp.router"

    def attention(self, k: int, x: Tensor) -> Tensor:
        """Each head has a score for looking at nothing, its sink."""
        q, key, v = self.qkv(k, self.norm(self.at(k, self.attention_norm), x))
        ages = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])[None]
        window = self.window(k)
        hidden = (ages < 0) if window is None else (ages < 0) | (ages >= window)
        heads = []
        for h, sink in enumerate(self.w[self.at(k, "self_attn.sinks")]):
            group = h // (q.shape[1] // key.shape[1])
            scores = (q[:, h] @ key[:, group].transpose(-1, -2) * self.scale()).masked_fill(
                hidden, -math.inf
            )
            parts = scores.exp() / (scores.exp().sum(-1, keepdim=True) + sink.exp())
            heads.append(parts @ v[:, group])
        return self.linear(self.at(k, self.output), torch.cat(heads, -1))

    def expert(self, k: int, expert: int, x: Tensor) -> Tensor:
        weights = {name: self.w[self.at(k, f"mlp.experts.{name}")][expert] for name in self.expert_names}
        both = x @ weights["gate_up_proj"] + weights["gate_up_proj_bias"]
        limit = self.config.swiglu_limit
        gate, value = both[0::2].clamp(max=limit), both[1::2].clamp(-limit, limit) + 1
        inner = gate / (1 + torch.exp(-self.config.swiglu_alpha * gate)) * value
        return inner @ weights["down_proj"] + weights["down_proj_bias"]


class _DeepSeek(_Mixture):
    def attention(self, k: int, x: Tensor) -> Tensor:
        """Keys and values of all heads out of one small vector; one key for positions, which all heads share."""
        config, normed = self.config, self.norm(self.at(k, self.attention_norm), x)
        own, turned = config.qk_nope_head_dim, config.qk_rope_head_dim
        at = partial(self.at, k)
        if config.q_lora_rank is None:
            queries = self.linear(at("self_attn.q_proj"), normed)
        else:
            small = self.norm(
                at("self_attn.q_a_layernorm"), self.linear(at("self_attn.q_a_proj"), normed)
            )
            queries = self.linear(at("self_attn.q_b_proj"), small)
        latent, position = self.linear(at("self_attn.kv_a_proj_with_mqa"), normed).split(
            [config.kv_lora_rank, turned], -1
        )
        latent = self.norm(at("self_attn.kv_a_layernorm"), latent)
        each = self.linear(at("self_attn.kv_b_proj"), latent).unflatten(
            -1, (self.num_heads, own + config.v_head_dim)
        )
        queries = queries.unflatten(-1, (self.num_heads, own + turned))
        shared, heads = self.turn(position), []
        for h in range(self.num_heads):
            q = torch.cat([queries[..., h, :own], self.turn(queries[..., h, own:])], -1)
            key, value = torch.cat([each[..., h, :own], shared], -1), each[..., h, own:]
            scores = q @ key.transpose(-1, -2) * (own + turned) ** -0.5
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            heads.append(scores.masked_fill(later, -math.inf).softmax(-1) @ value)
        return self.linear(at("self_attn.o_proj"), torch.cat(heads, -1))

    def turn(self, x: Tensor) -> Tensor:
        """Neighbouring features turned as pairs, (batch, tokens, features)."""
        frequencies, _ = rotary_frequencies(self.config.rope_parameters, x.shape[-1])
        turns = torch.polar(torch.ones(()), torch.arange(x.shape[1])[:, None] * frequencies)
        return torch.view_as_real(
            torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turns
        ).flatten(-2)

    def feed_forward(self, k: int, x: Tensor) -> Tensor:
        self.layer_now = k
        output = super().feed_forward(k, x)
        if self.at(k, "mlp.gate.weight") not in self.w:
            return output
        normed = self.norm(self.at(k, self.mlp_norm), x)
        gate, up = (
            self.linear(self.at(k, f"mlp.shared_experts.{name}_proj"), normed) for name in ("gate", "up")
        )
        return output + self.linear(
            self.at(k, "mlp.shared_experts.down_proj"), self.activation(gate) * up
        )

    def shares(self, logits: Tensor) -> Tensor:
        config, third = self.config, self.config.model_type != "deepseek_v2"
        scores = logits.sigmoid() if third else logits.softmax(-1)
        ranked = (
            scores + self.w[self.at(self.layer_now, "mlp.gate.e_score_correction_bias")]
            if third
            else scores
        )
        found = torch.zeros_like(scores)
        for token, row in enumerate(ranked):
            numbers = range(len(row))
            groups = (
                config.n_group if (config.n_group or 1) > 1 and len(row) % config.n_group == 0 else 1
            )
            size = len(row) // groups
            best = sorted(range(groups), key=lambda g: -max(row[g * size : (g + 1) * size].tolist()))
            open_ones = (
                [e for e in numbers if e // size in best[: config.topk_group or 1]]
                if groups > 1
                else numbers
            )
            chosen = sorted(open_ones, key=lambda e: -row[e].item())[: config.num_experts_per_tok]
            found[token, chosen] = scores[token, chosen]
        if third and config.norm_topk_prob:
            found = found / found.sum(-1, True)
        return found * config.routed_scaling_factor


class _Glm4Moe(_DeepSeek):
    attention = Reference.attention


class _Llama4(_Mixture):
    """Chunks, positions in some layers, queries that grow in the others, and experts that read weighed tokens."""

    router, down = "feed_forward.router", "feed_forward.down_proj"

    def qkv(self, k: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, key, v = _unplaced(self, k, x)
        config = self.config
        if config.no_rope_layers[k]:
            q, key = (_Glm.rotate(self, k, one) for one in (q, key))  # type: ignore[arg-type]
            if config.use_qk_norm:
                q, key = (
                    one / torch.sqrt((one**2).mean(-1, True) + config.rms_norm_eps) for one in (q, key)
                )
        elif config.attn_temperature_tuning:
            times = (torch.arange(x.shape[1]) + 1) // config.floor_scale
            q = q * (1 + config.attn_scale * torch.log(1.0 + times))[:, None]
        return q, key, v

    def mix(self, k: int, q: Tensor, key: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[1])
        hidden = places[None] > places[:, None]
        if self.config.layer_types[k] == "chunked_attention":
            chunks = places // self.config.attention_chunk_size
            hidden = hidden | (chunks[None] != chunks[:, None])
        scores = q @ key.transpose(-1, -2) * self.scale()
        return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v

    def feed_forward(self, k: int, x: Tensor) -> Tensor:
        normed = self.norm(self.at(k, self.mlp_norm), x)
        if self.at(k, "feed_forward.router.weight") not in self.w:
            return self.mlp(self.at(k, "feed_forward"), normed)
        total = self.mlp(self.at(k, "feed_forward.shared_expert"), normed)
        for text, token in ((a, b) for a in range(x.shape[0]) for b in range(x.shape[1])):
            own = normed[text, token]
            logits = (self.w[self.at(k, "feed_forward.router.weight")] @ own).tolist()
            for expert in sorted(range(len(logits)), key=lambda e: -logits[e])[
                : self.config.num_experts_per_tok
            ]:
                total[text, token] += self.expert(k, expert, own / (1 + math.exp(-logits[expert])))
        return total

    def mlp(self, path: str, x: Tensor) -> Tensor:
        gate, up = (self.linear(f"{path}.{name}_proj", x) for name in ("gate", "up"))
        return self.linear(f"{path}.down_proj", self.activation(gate) * up)

    def expert(self, k: int, expert: int, x: Tensor) -> Tensor:
        gate, up = (x @ self.w[self.at(k, "feed_forward.experts.gate_up_proj")][expert]).chunk(2)
        return (self.activation(gate) * up) @ self.w[self.at(k, "feed_forward.experts.down_proj")][
            expert
        ]

    def experts(self, k: int, kept: tuple[int, ...]) -> Reference:
        other = self.copied()
        for name in ("router.weight", "experts.gate_up_proj", "experts.down_proj"):
            path = self.at(k, f"feed_forward.{name}")
            other.w[path] = self.w[path][list(kept)]
        return other

    def place(self, role: str) -> tuple[str, tuple[Any, Any]]:
        path, features = super().place(role)
        return path.replace("mlp.", "feed_forward."), features


class _Phi3(Reference):
    def place(self, role: str) -> tuple[str, tuple[Any, Any]]:
        groups, wide = self.config.num_key_value_heads * self.head_dim, self.config.intermediate_size
        queries = self.num_heads * self.head_dim
        rows = {
            "q": slice(0, queries),
            "k": slice(queries, queries + groups),
            "v": slice(queries + groups, None),
            "gate": slice(0, wide),
            "up": slice(wide, None),
        }
        if role not in rows:
            return super().place(role)
        return "self_attn.qkv_proj" if role in "qkv" else "mlp.gate_up_proj", (rows[role], slice(None))

    def qkv(self, k: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        groups = self.config.num_key_value_heads
        sizes = [n * self.head_dim for n in (self.num_heads, groups, groups)]
        q, key, v = map(self.heads, self.linear(self.at(k, "self_attn.qkv_proj"), x).split(sizes, -1))
        return self.rotate(k, q), self.rotate(k, key), v

    def feed_forward(self, k: int, x: Tensor) -> Tensor:
        both = self.linear(self.at(k, "mlp.gate_up_proj"), self.norm(self.at(k, self.mlp_norm), x))
        gate, up = both[..., : both.shape[-1] // 2], both[..., both.shape[-1] // 2 :]
        return self.linear(self.at(k, self.down), self.activation(gate) * up)


class _Glm(Reference):
    def place(self, role: str) -> tuple[str, tuple[Any, Any]]:
        if role not in ("gate", "up"):
            return super().place(role)
        wide = self.config.intermediate_size
        return "mlp.gate_up_proj", (slice(0, wide) if role == "gate" else slice(wide, None), slice(None))

    def rotate(self, k: int, x: Tensor) -> Tensor:
        """Features 2i and 2i + 1 turn as a pair, in the first part of each head's."""
        rope = self.rope(k)
        width = int(x.shape[-1] * rope.get("partial_rotary_factor", 1.0))
        frequencies, scale = rotary_frequencies(rope, width)
        angles = torch.arange(x.shape[-2])[:, None] * frequencies
        turned = torch.view_as_complex(x[..., :width].unflatten(-1, (-1, 2)).contiguous())
        turned = turned * torch.polar(torch.full_like(angles, scale), angles)
        return torch.cat([torch.view_as_real(turned).flatten(-2), x[..., width:]], -1)

    feed_forward = _Phi3.feed_forward


class _Glm4(_Glm):
    def after_attention(self, k: int, x: Tensor) -> Tensor:
        return self.norm(self.at(k, "post_self_attn_layernorm"), x)

    def feed_forward(self, k: int, x: Tensor) -> Tensor:
        return self.norm(self.at(k, "post_mlp_layernorm"), super().feed_forward(k, x))


class _Cohere(Reference):
    mlp_norm, one_step = "input_layernorm", True
    rotate = _Glm.rotate

    def norm(self, name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return (
            centred
            / torch.sqrt((centred**2).mean(-1, keepdim=True) + self.config.layer_norm_eps)
            * self.gain(name)
        )

    def gain(self, name: str) -> Tensor:
        gain = super().gain(name)
        return gain[:, None] if gain.dim() == 2 else gain  # of heads, which come before tokens

    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x) * self.config.logit_scale


class _Cohere2(_Cohere):
    def qkv(self, k: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().qkv(k, x) if self.window(k) is not None else _unplaced(self, k, x)


def _unplaced(of: Reference, k: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values that know nothing of their positions."""
    q, key, v = (of.heads(of.linear(of.at(k, f"self_attn.{n}_proj"), x)) for n in "qkv")
    return q, key, v


class _Ministral3(Reference):
    def qkv(self, k: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, key, v = super().qkv(k, x)
        rope = self.config.rope_parameters
        times = torch.arange(x.shape[1]) // rope["original_max_position_embeddings"]
        return q * (1 + rope["llama_4_scaling_beta"] * torch.log(1.0 + times))[:, None], key, v


class _SmolLM3(Reference):
    def qkv(self, k: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().qkv(k, x) if self.config.no_rope_layers[k] else _unplaced(self, k, x)


class _Granite(Reference):
    def embed(self, ids: Tensor) -> Tensor:
        return super().embed(ids) * self.config.embedding_multiplier

    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x) / self.config.logits_scaling

    def scale(self) -> float:
        return float(self.config.attention_multiplier)

    def after_attention(self, k: int, x: Tensor) -> Tensor:  # noqa: ARG002
        return x * self.config.residual_multiplier

    def feed_forward(self, k: int, x: Tensor) -> Tensor:
        return super().feed_forward(k, x) * self.config.residual_multiplier


class _Gemma(Reference):
    def gain(self, name: str) -> Tensor:
        return 1 + self.w[name + ".weight"]

    def embed(self, ids: Tensor) -> Tensor:
        return super().embed(ids) * self.config.hidden_size**0.5


class _Gemma2(_Gemma):
    mlp_norm, activation_name = "pre_feedforward_layernorm", "hidden_activation"

    def logits(self, x: Tensor) -> Tensor:
        return capped(super().logits(x), self.config.final_logit_softcapping)

    def scale(self) -> float:
        return float(self.config.query_pre_attn_scalar**-0.5)

    def cap(self, scores: Tensor) -> Tensor:
        return capped(scores, self.config.attn_logit_softcapping)

    def after_attention(self, k: int, x: Tensor) -> Tensor:
        return self.norm(self.at(k, "post_attention_layernorm"), x)

    def feed_forward(self, k: int, x: Tensor) -> Tensor:
        return self.norm(self.at(k, "post_feedforward_layernorm"), super().feed_forward(k, x))


class _Olmo(Reference):
    """No norms before sublayers, and one of the queries of all heads, and of all keys."""

    def attention(self, k: int, x: Tensor) -> Tensor:
        return self.after_attention(k, self.attended(k, x))

    def qkv(self, k: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, key, v = (self.linear(self.at(k, f"self_attn.{n}_proj"), x) for n in "qkv")
        q, key = self.all_normed(k, "q", q), self.all_normed(k, "k", key)
        return self.rotate(k, self.heads(q)), self.rotate(k, self.heads(key)), self.heads(v)

    def all_normed(self, k: int, role: str, x: Tensor) -> Tensor:
        """Heads that a narrowed layer has not, whose rows are zero (but for digits of factors), are not in the mean."""
        sizes = self.matrix(k, role).abs().sum(1)
        there = sizes > 1e-4 * sizes.max()
        mean = (x[..., there] ** 2).mean(-1, keepdim=True)
        return (
            x
            / torch.sqrt(mean + self.config.rms_norm_eps)
            * self.gain(self.at(k, f"self_attn.{role}_norm"))
        )

    def rope(self, k: int) -> dict[str, Any]:
        rope, kinds = self.config.rope_parameters, getattr(self.config, "layer_types", None)
        found: dict[str, Any] = rope if kinds is None else rope[kinds[k]]
        return found

    def after_attention(self, k: int, x: Tensor) -> Tensor:
        return self.norm(self.at(k, "post_attention_layernorm"), x)

    def feed_forward(self, k: int, x: Tensor) -> Tensor:
        return self.norm(self.at(k, "post_feedforward_layernorm"), self.gated(k, x))


class _FirstOlmo(Reference):
    def norm(self, name: str, x: Tensor) -> Tensor:  # noqa: ARG002 - it has nothing of its own
        return (x - x.mean(-1, keepdim=True)) / torch.sqrt(
            x.var(-1, unbiased=False, keepdim=True) + 1e-5
        )

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = super().linear(name, x)
        bound = self.config.clip_qkv
        clips = bound is not None and name.endswith(("q_proj", "k_proj", "v_proj"))
        return y.maximum(torch.tensor(-bound)).minimum(torch.tensor(bound)) if clips else y


class _Exaone4(_Olmo):
    def qkv(self, k: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return Reference.qkv(self, k, x)

    def rotate(self, k: int, x: Tensor) -> Tensor:
        """Only layers with a window have positions, if any has one."""
        turns = self.config.sliding_window is None or self.window(k) is not None
        return Reference.rotate(self, k, x) if turns else x

    def rope(self, k: int) -> dict[str, Any]:
        return Reference.rope(self, k)


class _Gemma3(_Gemma2):
    def rope(self, k: int) -> dict[str, Any]:
        rope: dict[str, Any] = self.config.rope_parameters[self.config.layer_types[k]]
        return rope

    def cap(self, scores: Tensor) -> Tensor:
        return scores


class _LayerNorms(Reference):
    """Architectures with centred norms that have a shift, and MLPs without a gate."""

    epsilon, activation_name = "layer_norm_epsilon", "activation_function"
    up, down = "mlp.c_fc", "mlp.c_proj"

    def norm(self, name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        epsilon = getattr(self.config, self.epsilon, 1e-5)
        scaled = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + epsilon)
        return (
            scaled * self.w[name + ".weight"] + self.w[name + ".bias"]
            if name + ".weight" in self.w
            else scaled
        )

    def feed_forward(self, k: int, x: Tensor) -> Tensor:
        normed = self.norm(self.at(k, self.mlp_norm), x)
        return self.linear(
            self.at(k, self.down), self.activation(self.linear(self.at(k, self.up), normed))
        )


class _StarCoder2(_LayerNorms):
    epsilon, activation_name = "norm_epsilon", "hidden_act"


class _Phi(_LayerNorms):
    mlp_norm, one_step = "input_layernorm", True
    final_norm, epsilon, activation_name = "model.final_layernorm", "layer_norm_eps", "hidden_act"
    output, up, down = "self_attn.dense", "mlp.fc1", "mlp.fc2"


class _StableLm(_LayerNorms):
    epsilon, activation_name, up, down = "layer_norm_eps", "hidden_act", "mlp.up_proj", "mlp.down_proj"
    feed_forward = Reference.feed_forward

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.one_step = self.config.use_parallel_residual
        self.mlp_norm = self.attention_norm if self.one_step else self.mlp_norm

    def qkv(self, k: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not self.config.qk_layernorm:
            return super().qkv(k, x)
        q, key, v = (self.heads(self.linear(self.at(k, f"self_attn.{n}_proj"), x)) for n in "qkv")
        return (
            self.rotate(k, self.each_normed(k, "q", q)),
            self.rotate(k, self.each_normed(k, "k", key)),
            v,
        )

    def each_normed(self, k: int, role: str, x: Tensor) -> Tensor:
        """Every head is normed with a gain of its own."""
        places = [
            self.at(k, f"self_attn.{role}_layernorm.norms.{head}.weight") for head in range(x.shape[1])
        ]
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + self.config.layer_norm_eps)
        return scaled * torch.stack([self.w[place] for place in places])[:, None]


class _GptJ(_LayerNorms):
    layers, embedding, final_norm = "transformer.h", "transformer.wte", "transformer.ln_f"
    attention_norm, mlp_norm, one_step = "ln_1", "ln_1", True
    output, up, down = "attn.out_proj", "mlp.fc_in", "mlp.fc_out"
    rotate = _Glm.rotate

    def place(self, role: str) -> tuple[str, tuple[Any, Any]]:
        return (f"attn.{role}_proj", (slice(None),) * 2) if role in "qkv" else super().place(role)

    def rope(self, k: int) -> dict[str, Any]:  # noqa: ARG002
        turned = self.config.rotary_dim / self.head_dim
        return {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": turned}

    def qkv(self, k: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, key, v = (self.heads(self.linear(self.at(k, f"attn.{n}_proj"), x)) for n in "qkv")
        return self.rotate(k, q), self.rotate(k, key), v


class _Opt(_LayerNorms):
    layers, embedding = "model.decoder.layers", "model.decoder.embed_tokens"
    final_norm, positions = "model.decoder.final_layer_norm", "model.decoder.embed_positions"
    attention_norm, mlp_norm, output = "self_attn_layer_norm", "final_layer_norm", "self_attn.out_proj"
    up, down = "fc1", "fc2"
    offset = 2

    def embed(self, ids: Tensor) -> Tensor:
        return (
            super().embed(ids)
            + self.w[self.positions + ".weight"][torch.arange(ids.shape[1]) + self.offset]
        )

    def rotate(self, k: int, x: Tensor) -> Tensor:  # noqa: ARG002
        return x


class _Gpt2(_Opt):
    layers, embedding, final_norm, positions = (
        "transformer.h",
        "transformer.wte",
        "transformer.ln_f",
        "transformer.wpe",
    )
    attention_norm, mlp_norm, output = "ln_1", "ln_2", "attn.c_proj"
    up, down = "mlp.c_fc", "mlp.c_proj"
    offset, transposed = 0, True

    def place(self, role: str) -> tuple[str, tuple[Any, Any]]:
        if role not in "qkv":
            return super().place(role)
        width = self.config.hidden_size
        first = "qkv".index(role) * width
        return "attn.c_attn", (slice(None), slice(first, first + width))

    def scale(self) -> float:
        return super().scale() if self.config.scale_attn_weights else 1.0

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.w[name + ".weight"] + self.w[name + ".bias"]

    def qkv(self, k: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, key, v = map(self.heads, self.linear(self.at(k, "attn.c_attn"), x).chunk(3, -1))
        return q / (k + 1) if self.config.scale_attn_by_inverse_layer_idx else q, key, v


class _GptNeo(_Gpt2):
    output, transposed = "attn.attention.out_proj", False
    linear = Reference.linear

    def place(self, role: str) -> tuple[str, tuple[Any, Any]]:
        return (
            (f"attn.attention.{role}_proj", (slice(None),) * 2)
            if role in "qkv"
            else Reference.place(self, role)
        )

    def qkv(self, k: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, key, v = (self.heads(self.linear(self.at(k, f"attn.attention.{n}_proj"), x)) for n in "qkv")
        return q, key, v

    def scale(self) -> float:
        return 1.0

    def window(self, k: int) -> int | None:
        types = [kind for kinds, times in self.config.attention_types for kind in list(kinds) * times]
        return int(self.config.window_size) if types[k] == "local" else None


class _GptNeoX(_LayerNorms):
    def place(self, role: str) -> tuple[str, tuple[Any, Any]]:
        if role not in "qkv":
            return super().place(role)
        by_head = torch.arange(3 * self.num_heads * self.head_dim).view(self.num_heads, 3, self.head_dim)
        return "attention.query_key_value", (by_head[:, "qkv".index(role)].flatten(), slice(None))

    layers, embedding, final_norm = "gpt_neox.layers", "gpt_neox.embed_in", "gpt_neox.final_layer_norm"
    output, epsilon, activation_name = "attention.dense", "layer_norm_eps", "hidden_act"
    up, down = "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.one_step = self.config.use_parallel_residual

    def qkv(self, k: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        packed = self.linear(self.at(k, "attention.query_key_value"), x)
        per_head = packed.view(*x.shape[:-1], self.num_heads, 3, self.head_dim)
        q, key, v = (per_head[..., i, :].transpose(1, 2) for i in range(3))
        return self.rotate(k, q), self.rotate(k, key), v


class _Falcon(_LayerNorms):
    layers, embedding, final_norm = "transformer.h", "transformer.word_embeddings", "transformer.ln_f"
    output, activation_name = "self_attention.dense", "activation"
    up, down = "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        new = self.config.new_decoder_architecture
        self.one_step = new or self.config.parallel_attn
        if new and self.config.num_ln_in_parallel_attn != 1:
            self.attention_norm, self.mlp_norm = "ln_attn", "ln_mlp"
        elif self.one_step:
            self.mlp_norm = self.attention_norm

    def kv_heads(self) -> int:
        one = self.config.multi_query and not self.config.new_decoder_architecture
        return 1 if one else int(self.config.num_kv_heads)

    def place(self, role: str) -> tuple[str, tuple[Any, Any]]:
        if role not in "qkv":
            return super().place(role)
        groups = self.kv_heads()
        lanes = torch.arange((self.num_heads + 2 * groups) * self.head_dim).view(
            groups, -1, self.head_dim
        )
        rows = {"q": lanes[:, :-2], "k": lanes[:, -2], "v": lanes[:, -1]}[role]
        return "self_attention.query_key_value", (rows.flatten(), slice(None))

    def qkv(self, k: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        packed = self.linear(self.at(k, "self_attention.query_key_value"), x)
        q, key, v = (self.heads(packed[..., self.place(role)[1][0]]) for role in "qkv")
        return self.rotate(k, q), self.rotate(k, key), v


class _Olmoe(_Qwen3Moe):
    qkv, all_normed = _Olmo.qkv, _Olmo.all_normed


class _MiniMaxM2(_Olmoe):
    """Experts are chosen by sigmoids and a correction, which their weights have not."""

    normalised = True

    def feed_forward(self, k: int, x: Tensor) -> Tensor:
        self.correction = self.w[self.at(k, "mlp.e_score_correction_bias")]
        return super().feed_forward(k, x)

    def shares(self, logits: Tensor) -> Tensor:
        scores, found = logits.sigmoid(), torch.zeros_like(logits)
        for own, row, ranked in zip(found, scores, scores + self.correction, strict=True):
            chosen = ranked.argsort(descending=True)[: self.config.num_experts_per_tok]
            own[chosen] = row[chosen] / row[chosen].sum()
        return found


_CLASSES: dict[str, type[Reference]] = {
    "mixtral": _Mixture,
    "llama4_text": _Llama4,
    "olmoe": _Olmoe,
    "gpt_oss": _GptOss,
    "deepseek_v2": _DeepSeek,
    "deepseek_v3": _DeepSeek,
    "glm4_moe": _Glm4Moe,
    "minimax_m2": _MiniMaxM2,
    "qwen2_moe": _Qwen2Moe,
    "qwen3_moe": _Qwen3Moe,
    "qwen3_next": _Qwen3Next,
    "qwen3_5_text": _Qwen35,
    "qwen3_5_moe_text": _Qwen35,
    "ministral3": _Ministral3,
    "smollm3": _SmolLM3,
    "granite": _Granite,
    "stablelm": _StableLm,
    "opt": _Opt,
    "phi": _Phi,
    "phi3": _Phi3,
    "glm": _Glm,
    "glm4": _Glm4,
    "cohere": _Cohere,
    "cohere2": _Cohere2,
    "exaone4": _Exaone4,
    "starcoder2": _StarCoder2,
    "gemma": _Gemma,
    "gemma2": _Gemma2,
    "gemma3_text": _Gemma3,
    "olmo": _FirstOlmo,
    "olmo2": _Olmo,
    "olmo3": _Olmo,
    "gpt2": _Gpt2,
    "gpt_neo": _GptNeo,
    "falcon": _Falcon,
    "gptj": _GptJ,
    "gpt_neox": _GptNeoX,
}
