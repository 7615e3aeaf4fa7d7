"""What a family is: where an architecture keeps its norms, attention, MLP and projections, and which flags it has.

A family is data. Code that needs a weight asks the family for a role ("q", "down"), never for a module by name, so
that adding an architecture is adding one description. See CONTRIBUTING.md, "Adding a family".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Unit = Literal["heads", "kv_heads", "neurons"]


@dataclass(frozen=True)
class Projection:
    """One linear map of a sublayer.

    Attributes:
        role: q, k, v, o, gate, up or down.
        path: of the module, from the layer ("self_attn.q_proj").
        unit: what its divided dimension consists of.
        reads_stream: True where it reads the normed stream (its output features are divided among slices, by rows of
            the weight), False where it writes to the stream (its input features are divided, by columns, and its bias
            belongs to one slice only).
    """

    role: str
    path: str
    unit: Unit
    reads_stream: bool = True


@dataclass(frozen=True)
class SublayerSpec:
    """Where a layer keeps one of its sublayers.

    Attributes:
        norm: path of the norm that it reads the stream through.
        modules: paths of the modules called one after the other on the normed stream; the first one of an attention
            gets the decoder's keyword arguments (mask, positions, cache).
        projections: its linear maps.
        head_norms: paths of per-head norms (Qwen3's q_norm and k_norm).
        head_counts: names of attributes of the attention module that count heads, to be corrected in a slice.
    """

    norm: str
    modules: tuple[str, ...]
    projections: tuple[Projection, ...]
    head_norms: tuple[str, ...] = ()
    head_counts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        name: as users know it.
        model_type: as `config.json` has it.
        layers: path of the decoder's list of layers, from the causal language model.
        embedding, final_norm, head: paths from the causal language model.
        attention, mlp: where a layer keeps its two sublayers.
        norm_kind: "rms" (a gain) or "layer" (a gain and a shift).
        norm_epsilon: the config attribute that holds the norms' epsilon, or the number itself.
        activation: the config attribute that names the MLP's activation.
        intermediate: the config attribute that holds the MLP's width.
        gated: whether the MLP multiplies an activated gate with an up projection.
        rotary: whether positions enter by rotary embedding in each attention.
        position_embedding: path of a learned position embedding, if any.
        position_offset: how many entries of it come before position 0 (OPT has 2).
        dropout: the config attribute with the dropout probability of sublayer outputs while training, if any.
        steps_per_layer: 2, or 1 where attention and MLP of a layer read the same stream (GPT-NeoX).
        unsupported: says why a config of this family cannot be operated on, or returns None.
    """

    name: str
    model_type: str
    layers: str
    embedding: str
    final_norm: str
    head: str
    attention: SublayerSpec
    mlp: SublayerSpec
    norm_kind: Literal["rms", "layer"]
    norm_epsilon: str | float
    activation: str
    intermediate: str
    gated: bool
    rotary: bool
    position_embedding: str | None = None
    position_offset: int = 0
    dropout: str | None = None
    steps_per_layer: int = 2
    unsupported: Callable[[Any], str | None] = lambda _: None

    def spec(self, kind: str) -> SublayerSpec:
        """The description of a sublayer of kind "A" or "F"."""
        return self.attention if kind == "A" else self.mlp

    def epsilon(self, config: Any) -> float:
        """The norms' epsilon under this config."""
        if isinstance(self.norm_epsilon, str):
            return float(getattr(config, self.norm_epsilon))
        return self.norm_epsilon

    def units(self, config: Any) -> dict[Unit, int]:
        """How many heads, KV heads and neurons a layer has under this config."""
        heads = int(config.num_attention_heads)
        return {
            "heads": heads,
            "kv_heads": int(getattr(config, "num_key_value_heads", None) or heads),
            "neurons": int(getattr(config, self.intermediate)),
        }

    def head_dim(self, config: Any) -> int:
        """The width of one head under this config."""
        return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
