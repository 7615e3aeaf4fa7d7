"""gpt-oss: mixtures of experts with biases and clamped gates, and attentions whose heads have sinks."""

from dataclasses import replace
from functools import partial
from typing import Any

from surgeon.models.families.base import AttentionWindow
from surgeon.models.families.llama import LLAMA
from surgeon.models.families.mixtures import MIXTURE, ROUTED
from surgeon.models.families.specs import route_by_config


def _clamped_gate(config: Any) -> tuple[float, float]:
    return float(config.swiglu_alpha), float(config.swiglu_limit)


GPT_OSS = replace(
    LLAMA,
    name="gpt-oss",
    model_type="gpt_oss",
    summary="mixtures of experts with biases and clamped gates, and attentions whose heads have sinks.",
    attention=replace(LLAMA.attention, sinks="self_attn.sinks"),
    mlp=replace(
        MIXTURE,
        # Files have experts stacked, too, matrices (in, out), and rows of gate and up in turn.
        projections=tuple(
            replace(one, stored=None, transposed=True, interleaved=one.reads_stream)
            for one in MIXTURE.projections
        ),
        counts=("experts.intermediate_size",),
        mixture=replace(
            ROUTED,
            router="mlp.router",
            count="num_local_experts",
            routing=partial(route_by_config, scores="softmax of chosen"),
            counts=("mlp.experts.num_experts", "mlp.router.num_experts"),
            top_k=("mlp.router.top_k",),
            clamped_gate=_clamped_gate,
        ),
    ),
    window=AttentionWindow("sliding_window", "layer_types"),
)
