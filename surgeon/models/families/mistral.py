"""Mistral: Llama's layout; some versions have a sliding attention window in every layer."""

from dataclasses import replace

from surgeon.models.families.llama import LLAMA

MISTRAL = replace(LLAMA, name="Mistral", model_type="mistral", window="sliding_window")
