"""GPT-Neo: GPT-2's functions in plain linear layers, unscaled attention, and local windows in some layers."""

from collections.abc import Sequence
from typing import Any

from surgeon.models.families.base import Family
from surgeon.models.families.specs import Projection, SublayerSpec


def _follow(config: Any, sources: Sequence[int]) -> dict[str, Any]:
    return {"attention_types": [[[config.attention_layers[k]], 1] for k in sources]}


def _attention_scale(_: Any) -> float:
    return 1.0


def _unfused(fused: Any) -> dict[str, Any]:
    kinds = ["local" if kind == "sliding_attention" else "global" for kind in fused.layer_types]
    return {"attention_types": [[[kind], 1] for kind in kinds]}


GPT_NEO = Family(
    name="GPT-Neo",
    model_type="gpt_neo",
    layers="transformer.h",
    embedding="transformer.wte",
    final_norm="transformer.ln_f",
    head="lm_head",
    attention=SublayerSpec(
        norm="ln_1",
        modules=("attn",),
        projections=(
            Projection("q", "attn.attention.q_proj", "heads"),
            Projection("k", "attn.attention.k_proj", "heads"),
            Projection("v", "attn.attention.v_proj", "heads"),
            Projection("o", "attn.attention.out_proj", "heads", reads_stream=False),
        ),
        counts=("attention.num_heads",),
        cache_slot="attn.attention.layer_id",
    ),
    mlp=SublayerSpec(
        norm="ln_2",
        modules=("mlp",),
        projections=(
            Projection("up", "mlp.c_fc", "neurons"),
            Projection("down", "mlp.c_proj", "neurons", reads_stream=False),
        ),
    ),
    norm_kind="layer",
    norm_epsilon="layer_norm_epsilon",
    activation="activation_function",
    intermediate="intermediate_size",
    gated=False,
    rotary=False,
    position_embedding="transformer.wpe",
    window="window_size",
    window_layers="attention_layers",
    module_dropout="resid_dropout",
    embedding_dropout="embed_dropout",
    layer_counts=("num_hidden_layers", "num_layers", "attention_types"),
    layer_lists=("layer_types", "attention_layers"),
    attention_scale=_attention_scale,
    heads_fill_stream=True,
    returns_tuple=True,
    follow=_follow,
    unfused=_unfused,
)
