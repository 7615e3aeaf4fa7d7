"""An independent computation to test against: attention and feed-forward in plain PyTorch, from a state dict.

Nothing here uses surgeon or the modeling code of transformers, so that a mistake in either shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]


class Reference:
    """One causal language model, full attention over unpadded tokens, float32.

    `attention(k, x)` and `feed_forward(k, x)` are the sublayers A_k and F_k with their norm inside; `logits(x)` is the
    final norm and the head.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.w = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        self.config = model.config
        self.opt = self.config.model_type == "opt"
        self.prefix = "model.decoder." if self.opt else "model."

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.w[name + ".weight"].T
        return y + self.w[name + ".bias"] if name + ".bias" in self.w else y

    def norm(self, name: str, x: Tensor) -> Tensor:
        if self.opt:
            centred = x - x.mean(-1, keepdim=True)
            scaled = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-5)
            return scaled * self.w[name + ".weight"] + self.w[name + ".bias"]
        scaled = x / torch.sqrt((x**2).mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return scaled * self.w[name + ".weight"]

    def embed(self, ids: Tensor) -> Tensor:
        x = self.w[self.prefix + "embed_tokens.weight"][ids]
        if self.opt:
            x = x + self.w[self.prefix + "embed_positions.weight"][torch.arange(ids.shape[1]) + 2]
        return x

    def logits(self, x: Tensor) -> Tensor:
        name = self.prefix + ("final_layer_norm" if self.opt else "norm")
        return self.norm(name, x) @ self.w["lm_head.weight"].T

    def rotate(self, x: Tensor) -> Tensor:
        """Rotary positions on (batch, heads, tokens, head_dim)."""
        half = x.shape[-1] // 2
        theta = self.config.rope_parameters["rope_theta"]
        angles = torch.arange(x.shape[-2])[:, None] * theta ** (-torch.arange(half) / half)[None]
        first, second = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def attention(self, k: int, x: Tensor) -> Tensor:
        at = f"{self.prefix}layers.{k}."
        normed = self.norm(at + ("self_attn_layer_norm" if self.opt else "input_layernorm"), x)
        heads = self.config.num_attention_heads
        width = self.w[at + "self_attn.q_proj.weight"].shape[0] // heads
        q, key, v = (self.heads(self.linear(f"{at}self_attn.{n}_proj", normed), width) for n in "qkv")
        if at + "self_attn.q_norm.weight" in self.w:
            q, key = self.norm(at + "self_attn.q_norm", q), self.norm(at + "self_attn.k_norm", key)
        if not self.opt:
            q, key = self.rotate(q), self.rotate(key)
        group = q.shape[1] // key.shape[1]
        out = []
        for head in range(q.shape[1]):
            scores = q[:, head] @ key[:, head // group].transpose(-1, -2) / math.sqrt(width)
            future = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
            out.append(scores.masked_fill(future, -math.inf).softmax(-1) @ v[:, head // group])
        return self.linear(at + ("self_attn.out_proj" if self.opt else "self_attn.o_proj"), torch.cat(out, -1))

    @staticmethod
    def heads(x: Tensor, width: int) -> Tensor:
        return x.view(*x.shape[:-1], -1, width).transpose(1, 2)

    def feed_forward(self, k: int, x: Tensor) -> Tensor:
        at = f"{self.prefix}layers.{k}."
        if self.opt:
            return self.linear(at + "fc2", self.linear(at + "fc1", self.norm(at + "final_layer_norm", x)).relu())
        normed = self.norm(at + "post_attention_layernorm", x)
        gate = self.linear(at + "mlp.gate_proj", normed)
        return self.linear(at + "mlp.down_proj", gate * gate.sigmoid() * self.linear(at + "mlp.up_proj", normed))

    def averaged(self, layers: list[int], into: int) -> Reference:
        """A copy in which one layer has the average of several layers' weights."""
        other = object.__new__(Reference)
        other.__dict__.update(self.__dict__, w=dict(self.w))
        for name in self.w:
            at = f"{self.prefix}layers.{into}."
            if name.startswith(at):
                parts = [self.w[name.replace(at, f"{self.prefix}layers.{k}.")] for k in layers]
                other.w[name] = torch.stack(parts).mean(0)
        return other
