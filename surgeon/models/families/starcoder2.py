"""StarCoder2: Llama's attention with layer norms that have shifts, a plain MLP, biases; all layers may have windows."""

from dataclasses import replace
from typing import Any

from surgeon.models.families.llama import LLAMA
from surgeon.models.families.specs import Projection


def _unfused(fused: Any) -> dict[str, Any]:
    return {"use_bias": fused.qkv_bias or fused.o_bias or fused.up_bias or fused.down_bias}


STARCODER2 = replace(
    LLAMA,
    name="StarCoder2",
    model_type="starcoder2",
    mlp=replace(
        LLAMA.mlp,
        projections=(
            Projection("up", "mlp.c_fc", "neurons"),
            Projection("down", "mlp.c_proj", "neurons", reads_stream=False),
        ),
    ),
    norm_kind="layer",
    norm_epsilon="norm_epsilon",
    gated=False,
    module_dropout="residual_dropout",
    embedding_dropout="embedding_dropout",
    window="sliding_window",
    unfused=_unfused,
)
