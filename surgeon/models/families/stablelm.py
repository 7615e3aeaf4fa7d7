"""StableLM: Llama's layout with layer norms that have shifts, partly rotary; attention beside MLP if configured."""

from dataclasses import replace
from typing import Any

from surgeon.models.families.base import Family
from surgeon.models.families.llama import LLAMA


def _variant(family: Family, config: Any) -> Family:
    """Some models run attention and MLP side by side behind one norm; some norm every head with a gain of its own."""
    attention = family.attention
    mlp = family.mlp
    if config.qk_layernorm:
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
        norms = [f"self_attn.{role}_layernorm.norms.{head}" for role in heads for head in range(heads[role])]
        attention = replace(
            attention,
            beside=tuple(f"{norm}.weight" for norm in norms),
            kept="each of their heads has a norm of its own",
            apart="each of their heads has a norm of its own, which no rank has",
            numbers=_numbers,
        )
    if not config.use_parallel_residual:
        return replace(family, attention=attention)
    mlp = replace(mlp, norm=attention.norm)
    return replace(family, attention=attention, mlp=mlp, steps_per_layer=1, adds_in_turn=True)


def _numbers(config: Any) -> int:
    heads = config.num_attention_heads + config.num_key_value_heads
    return int(heads * config.hidden_size // config.num_attention_heads)


def _unfusable(config: Any) -> str | None:
    if config.qk_layernorm:
        return "layers stored side by side have no norm for each head"
    return None


def _unfused(fused: Any) -> dict[str, Any]:
    return {"use_qkv_bias": fused.qkv_bias, "use_parallel_residual": fused.parallel_residual}


STABLELM = replace(
    LLAMA,
    name="StableLM",
    model_type="stablelm",
    attention=replace(LLAMA.attention, counts=("num_heads", "num_key_value_heads")),
    mlp=replace(LLAMA.mlp, modules=("mlp", "dropout")),
    norm_kind="layer",
    norm_epsilon="layer_norm_eps",
    partly_rotary=True,
    mlp_dropout="hidden_dropout",
    heads_fill_stream=True,
    variant=_variant,
    unfusable=_unfusable,
    unfused=_unfused,
)
