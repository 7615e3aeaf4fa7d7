"""gpt-oss: mixtures of experts with biases and clamped gates, and attentions whose heads have sinks."""

from dataclasses import replace
from typing import Any

from surgeon.models.families.base import MixtureSpec, Projection
from surgeon.models.families.llama import LLAMA
from surgeon.models.routing import Routing


def _routing(config: Any) -> Routing:
    return Routing(int(config.num_experts_per_tok), "softmax of chosen")


def _clamped_gate(config: Any) -> tuple[float, float]:
    return float(config.swiglu_alpha), float(config.swiglu_limit)


def _experts(role: str, name: str, reads_stream: bool = True) -> Projection:
    return Projection(
        role, f"mlp.experts.{name}", "neurons", reads_stream, interleaved=reads_stream, transposed=True, stacked=True
    )


GPT_OSS = replace(
    LLAMA,
    name="gpt-oss",
    model_type="gpt_oss",
    attention=replace(LLAMA.attention, sinks="self_attn.sinks"),
    mlp=replace(
        LLAMA.mlp,
        projections=(
            _experts("gate", "gate_up_proj"),
            _experts("up", "gate_up_proj"),
            _experts("down", "down_proj", False),
        ),
        counts=("experts.intermediate_size",),
        mixture=MixtureSpec(
            router="mlp.router",
            experts="mlp.experts",
            count="num_local_experts",
            routing=_routing,
            counts=("mlp.experts.num_experts", "mlp.router.num_experts"),
            top_k=("mlp.router.top_k",),
            clamped_gate=_clamped_gate,
        ),
    ),
    window="sliding_window",
    window_layers="layer_types",
)
