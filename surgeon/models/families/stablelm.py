"""StableLM: Llama's layout with layer norms that have shifts, partly rotary; attention beside MLP if configured."""

from dataclasses import replace
from typing import Any

from surgeon.models.families.base import Family
from surgeon.models.families.llama import LLAMA


def _unsupported(config: Any) -> str | None:
    if config.qk_layernorm:
        return "it norms queries and keys with a gain for each head (qk_layernorm is true, as in StableLM 2 12B)"
    return None


def _variant(family: Family, config: Any) -> Family:
    """Some models of the family run attention and MLP side by side, behind one norm."""
    if not config.use_parallel_residual:
        return family
    return replace(family, steps_per_layer=1, mlp=replace(family.mlp, norm=family.attention.norm))


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
    unsupported=_unsupported,
    unfused=_unfused,
)
