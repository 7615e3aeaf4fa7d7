"""The architectures surgeon can operate on."""

from __future__ import annotations

from typing import Any

from surgeon.families.base import Family, Projection, SublayerSpec
from surgeon.families.fused import FUSED
from surgeon.families.gemma2 import GEMMA2
from surgeon.families.gpt2 import GPT2
from surgeon.families.gpt_neo import GPT_NEO
from surgeon.families.gpt_neox import GPT_NEOX
from surgeon.families.llama import LLAMA
from surgeon.families.mistral import MISTRAL
from surgeon.families.opt import OPT
from surgeon.families.phi3 import PHI3
from surgeon.families.qwen2 import QWEN2
from surgeon.families.qwen3 import QWEN3

__all__ = ["FAMILIES", "Family", "Projection", "SublayerSpec", "family_named", "family_of"]

FAMILIES = {
    family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, PHI3, OPT, GPT2, GPT_NEO, GPT_NEOX)
}


def family_named(model_type: str) -> Family:
    """The family with this `model_type`, or the description of what `surgeon export` makes of all of them.

    Raises:
        ValueError: if there is none, saying which there are.
    """
    if model_type == FUSED.model_type:
        return FUSED
    if model_type not in FAMILIES:
        known = ", ".join(sorted(family.name for family in FAMILIES.values()))
        raise ValueError(
            f"architecture {model_type!r} is not supported (supported: {known}); "
            'CONTRIBUTING.md, "Adding a family", shows how to add one in a short file'
        )
    return FAMILIES[model_type]


def family_of(config: Any) -> Family:
    """The family of a `transformers` configuration.

    Raises:
        ValueError: if there is none, or the configuration uses something of the architecture that cannot be edited.
    """
    family = family_named(config.model_type)
    reason = family.unsupported(config)
    if reason is not None:
        raise ValueError(f"this {family.name} model cannot be operated on: {reason}")
    return family.variant(family, config)
