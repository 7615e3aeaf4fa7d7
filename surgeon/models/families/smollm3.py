"""SmolLM3: Llama's layout; some layers have no positions at all, and windows if configured."""

from dataclasses import replace
from typing import Any

from surgeon.models.families.llama import LLAMA


def _unsupported(config: Any) -> str | None:
    listed = len(config.no_rope_layers)
    layers = config.num_hidden_layers
    if listed != layers:
        return f"no_rope_layers has an entry for each of {listed} layers, and there are {layers}"
    return None


SMOLLM3 = replace(
    LLAMA,
    name="SmolLM3",
    model_type="smollm3",
    rotary_layers="no_rope_layers",  # 1 for a layer that has them, whatever the name says
    layer_lists=("layer_types", "no_rope_layers"),
    window="sliding_window",
    window_layers="layer_types",
    unsupported=_unsupported,
)
