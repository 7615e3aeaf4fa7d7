"""Ministral: Mistral with windows in some layers."""

from dataclasses import replace

from surgeon.models.families.mistral import MISTRAL

MINISTRAL = replace(MISTRAL, name="Ministral", model_type="ministral", window_layers="layer_types")
