"""OLMo3: OLMo2 with windows in most layers, and rotary positions by kind of layer."""

from dataclasses import replace

from surgeon.models.families.olmo2 import OLMO2

OLMO3 = replace(OLMO2, name="OLMo3", model_type="olmo3", window="sliding_window", window_layers="layer_types")
