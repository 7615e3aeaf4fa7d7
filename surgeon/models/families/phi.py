"""Phi-1 to Phi-2: attention beside a plain MLP behind one layer norm, biases everywhere, partly rotary."""

from dataclasses import replace
from typing import Any

from surgeon.models.families.llama import LLAMA
from surgeon.models.families.specs import Projection


def _unsupported(config: Any) -> str | None:
    if config.qk_layernorm:
        return "its heads have layer norms with shifts (qk_layernorm is true, as in none of Phi-1, 1.5 and 2)"
    return None


PHI = replace(
    LLAMA,
    name="Phi",
    model_type="phi",
    final_norm="model.final_layernorm",
    attention=replace(
        LLAMA.attention,
        projections=(*LLAMA.attention.projections[:3], Projection("o", "self_attn.dense", "heads", reads_stream=False)),
    ),
    mlp=replace(
        LLAMA.mlp,
        norm=LLAMA.attention.norm,
        projections=(
            Projection("up", "mlp.fc1", "neurons"),
            Projection("down", "mlp.fc2", "neurons", reads_stream=False),
        ),
    ),
    norm_kind="layer",
    norm_epsilon="layer_norm_eps",
    gated=False,
    partly_rotary=True,
    head_bias=True,
    dropout="resid_pdrop",
    embedding_dropout="embd_pdrop",
    steps_per_layer=1,
    unsupported=_unsupported,
)
