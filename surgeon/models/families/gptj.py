"""GPT-J: attention beside a plain MLP behind one layer norm; neighbouring features turn, in a part of each head's."""

import math
from dataclasses import replace
from typing import Any

from surgeon.models.families.gpt2 import GPT2
from surgeon.models.families.phi import PHI
from surgeon.models.families.specs import Projection


def _unsupported(config: Any) -> str | None:
    turned = config.rotary_dim
    most = config.hidden_size // config.num_attention_heads
    if not 0 < turned <= most or turned % 2:
        return f"rotary_dim must be an even number, of a head's {most} features, not {turned}"
    return None


def _rope(config: Any) -> dict[str, Any]:
    turned = config.rotary_dim
    features = config.hidden_size // config.num_attention_heads
    part = turned / features
    if int(features * part) < turned:  # it was rounded down
        part = math.nextafter(part, 1.0)
    return {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": part}


def _unfused(fused: Any) -> dict[str, Any]:
    return {"rotary_dim": int(fused.head_dim * fused.rope_parameters["partial_rotary_factor"])}


GPTJ = replace(
    PHI,
    name="GPT-J",
    model_type="gptj",
    layers="transformer.h",
    embedding="transformer.wte",
    final_norm="transformer.ln_f",
    attention=replace(
        GPT2.attention,
        projections=(
            Projection("q", "attn.q_proj", "heads"),
            Projection("k", "attn.k_proj", "heads"),
            Projection("v", "attn.v_proj", "heads"),
            Projection("o", "attn.out_proj", "heads", reads_stream=False),
        ),
        counts=("num_attention_heads",),
    ),
    mlp=replace(
        PHI.mlp,
        norm=GPT2.attention.norm,
        projections=(
            Projection("up", "mlp.fc_in", "neurons"),
            Projection("down", "mlp.fc_out", "neurons", reads_stream=False),
        ),
    ),
    norm_epsilon=GPT2.norm_epsilon,
    activation=GPT2.activation,
    intermediate=GPT2.intermediate,
    rope=_rope,
    rotary_neighbours=True,
    layer_counts=GPT2.layer_counts,
    dropout=None,
    module_dropout=GPT2.module_dropout,
    attention_dropout=GPT2.attention_dropout,
    heads_fill_stream=True,
    returns_tuple=True,
    unsupported=_unsupported,
    unfused=_unfused,
)
