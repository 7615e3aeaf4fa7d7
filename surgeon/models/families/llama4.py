"""Llama 4: attentions over chunks, layers without positions, and mixtures whose experts read weighed inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from surgeon.models.families.base import Family, Growth
from surgeon.models.families.llama import LLAMA
from surgeon.models.families.specs import MixtureSpec, Projection, SublayerSpec
from surgeon.models.routing import Routing


def _routing(config: Any) -> Routing:
    return Routing(int(config.num_experts_per_tok), "sigmoid")


def _shared_neurons(config: Any) -> int:
    return int(config.intermediate_size)


def _gated(inside: str, before: str = "", unit: Any = "neurons") -> tuple[Projection, ...]:
    """Gate, up and down projections of one MLP."""
    roles = ("gate", "up", "down")
    return tuple(Projection(f"{before}{one}", f"{inside}.{one}_proj", unit, one != "down") for one in roles)


def _experts(role: str, name: str) -> Projection:
    path = f"feed_forward.experts.{name}"
    return Projection(role, path, "neurons", role != "down", transposed=True, stacked=True)


def _query_growth(config: Any) -> Growth | None:
    if not config.attn_temperature_tuning:
        return None
    return Growth(float(config.attn_scale), int(config.floor_scale), ahead=1)


def _plain_head_norms(config: Any) -> bool:
    return bool(config.use_qk_norm)


def _variant(family: Family, config: Any) -> Family:
    dense = [layer for layer in range(config.num_hidden_layers) if layer not in config.moe_layers]
    return replace(family, layer_specs=tuple(("F", layer, _DENSE) for layer in dense))


def _follow_mlp(config: Any, sources: Sequence[int]) -> dict[str, Any]:
    return {"moe_layers": [place for place, source in enumerate(sources) if source in config.moe_layers]}


def _unsupported(config: Any) -> str | None:
    layers = config.num_hidden_layers
    listed = len(config.no_rope_layers)
    if listed != layers:
        return f"no_rope_layers has an entry for each of {listed} layers, and there are {layers}"
    if config.attention_chunk_size:
        return None
    return "its configuration has no attention_chunk_size"


_DENSE: SublayerSpec = replace(
    LLAMA.mlp, modules=("feed_forward",), projections=_gated("feed_forward"), width="intermediate_size_mlp"
)
_MIXTURE: SublayerSpec = replace(
    LLAMA.mlp,
    modules=("feed_forward",),
    projections=(
        _experts("gate", "gate_up_proj"),
        _experts("up", "gate_up_proj"),
        _experts("down", "down_proj"),
        *_gated("feed_forward.shared_expert", "shared_", "shared_neurons"),
    ),
    counts=("experts.intermediate_size", "experts.expert_dim"),
    mixture=MixtureSpec(
        router="feed_forward.router",
        experts="feed_forward.experts",
        count="num_local_experts",
        routing=_routing,
        counts=("feed_forward.num_experts", "feed_forward.experts.num_experts", "feed_forward.router.num_experts"),
        top_k=("feed_forward.top_k", "feed_forward.router.top_k"),
        shared=_shared_neurons,
        weighs_inputs=True,
        logits=1,
    ),
)

LLAMA4 = replace(
    LLAMA,
    name="Llama 4",
    model_type="llama4_text",
    mlp=_MIXTURE,
    rotary_neighbours=True,
    rotary_layers="no_rope_layers",  # 1 for a layer that has them, whatever the name says
    layer_lists=("layer_types", "no_rope_layers"),
    window="attention_chunk_size",
    window_layers="layer_types",
    chunked=True,
    query_growth=_query_growth,
    grows_unturned=True,
    plain_head_norms=_plain_head_norms,
    variant=_variant,
    follow_mlp=_follow_mlp,
    unsupported=_unsupported,
)
