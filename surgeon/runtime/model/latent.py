"""Multi-head latent attention (DeepSeek-V2, section 2.1) as any attention, but for how its queries and keys are made.

Keys and values of all heads are made of one small normed latent of a token, queries of another one or of the stream; a
part of its own turns with positions, of keys one that all heads have in common. Here that part lies before the others
in every head, and values are filled up with zeros to the width of keys, as are the columns that write to the stream. So
keys and values are cached, turned and attended to as those of every attention. Each rank has some of the heads, and
makes the latents by itself.

Shapes: T tokens of a pass, H heads of the slice, D features of a query or key, R of them that turn, V of a value.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from surgeon.models.families.specs import Latent
from surgeon.models.weights import Tensors
from surgeon.runtime.model.linear import Linear, LinearMap, whole_map
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
        self._load_reading(stored, heads)
        output = stored["o_proj.weight"].unflatten(1, (latent.heads, latent.value))[:, heads]
        written = {"o.weight": F.pad(output, (0, latent.width - latent.value)).flatten(1)}
        if "o_proj.bias" in stored and (piece is None or piece[0] == 0):  # of slices, one adds it
            written["o.bias"] = stored["o_proj.bias"]
        self._written = written
        self._scale = plan.arithmetic.output_scale
        own = stored["norm.weight"].new_empty(self.heads * latent.width, 0)
        self.tensors: Tensors = {"norm.weight": stored["norm.weight"], "q.weight": own, "k.weight": own}

    def reading(self, roles: list[str]) -> LinearMap:  # noqa: ARG002 - always all of them
        """Queries, keys and values, (T, h) to (T, 3 * H * D)."""
        return self

    def writing(self, role: str) -> LinearMap:
        """(T, H * D) to (T, h)."""
        return whole_map(self._written, [role], self._scale)

    def _load_reading(self, stored: Tensors, heads: slice) -> None:
        latent = self.latent
        turned = torch.arange(latent.turned)
        if latent.neighbours:  # as `rotate_` pairs them: the first of each pair, then the others
            turned = torch.cat([turned[::2], turned[1::2]])
        wide = latent.width - latent.turned  # features of a key that do not turn
        order = torch.cat([wide + turned, torch.arange(wide)]).to(stored["o_proj.weight"].device)

        def own(weight: Tensor, width: int) -> Tensor:
            return weight.view(latent.heads, width, -1)[heads]

        through = "q_a_proj.weight" in stored
        name = "q_b_proj" if through else "q_proj"
        queries = own(stored[f"{name}.weight"], latent.width)[:, order].flatten(0, 1)
        expanded = own(stored["kv_b_proj.weight"], wide + latent.value)
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
        if through:
            self.query_gain = stored["q_a_layernorm.weight"]
            firsts.append(stored["q_a_proj.weight"])
            biases.append(stored.get("q_a_proj.bias"))
            self.queries: Linear | None = Linear([queries], [None])
        else:
            firsts.append(queries)
            biases.append(None)
            self.queries = None
        self.first = Linear(firsts, biases)
        self.widths = [rank, latent.turned, len(firsts[1])]
        self.expand = Linear([keys.flatten(0, 1), values.flatten(0, 1)], [None, None])

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
