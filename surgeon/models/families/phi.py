"""Phi's: Phi-1 to 2, Phi3."""

from dataclasses import replace
from typing import Any

from surgeon.models.families.base import AttentionWindow, Dropouts, Norms, Positions
from surgeon.models.families.llama import LLAMA
from surgeon.models.families.specs import attention_projections, gated_projections, plain_projections


def _reason_against(config: Any) -> str | None:
    if config.qk_layernorm:
        return "its heads have layer norms with shifts (qk_layernorm is true, as in none of Phi-1, 1.5 and 2)"
    return None


PHI = replace(
    LLAMA,
    name="Phi",
    model_type="phi",
    summary="attention beside a plain MLP behind one layer norm, biases everywhere, partly rotary.",
    final_norm="model.final_layernorm",
    attention=replace(LLAMA.attention, projections=attention_projections("self_attn", o="dense")),
    mlp=replace(
        LLAMA.mlp,
        stages=(LLAMA.attention.stages[0], "mlp"),
        projections=plain_projections("mlp.fc1", "mlp.fc2"),
    ),
    norms=Norms("layer", "layer_norm_eps"),
    positions=Positions(partial=True),
    dropout=Dropouts("resid_pdrop", embedding="embd_pdrop"),
    head_bias=True,
    steps_per_layer=1,
    unsupported=_reason_against,
)


PHI3 = replace(
    LLAMA,
    name="Phi3",
    model_type="phi3",
    summary="Llama's functions with q, k, v packed into one projection, and gate and up into another.",
    attention=replace(
        LLAMA.attention,
        projections=attention_projections("self_attn", "qkv_proj"),
        # It tells queries, keys and values apart by these counts.
        counts=("config.num_attention_heads", "num_key_value_heads"),
    ),
    mlp=replace(LLAMA.mlp, projections=gated_projections("mlp", "gate_up_proj")),
    positions=Positions(partial=True, computes_anew=True),
    dropout=Dropouts("resid_pdrop"),
    window=AttentionWindow("sliding_window"),
)
