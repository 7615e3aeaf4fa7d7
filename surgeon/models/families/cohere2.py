"""Cohere2: Cohere with windows in most layers; the others have no positions."""

from dataclasses import replace

from surgeon.models.families.cohere import COHERE

COHERE2 = replace(
    COHERE,
    name="Cohere2",
    model_type="cohere2",
    rotary_in_windows=True,
    window="sliding_window",
    window_layers="layer_types",
)
