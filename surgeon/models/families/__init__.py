"""The architectures surgeon can operate on."""

from __future__ import annotations

from typing import Any

from surgeon.models.families.base import Family
from surgeon.models.families.fused import FUSED
from surgeon.models.families.registry import FAMILIES
from surgeon.models.families.specs import Projection, SublayerSpec

__all__ = [
    "FAMILIES",
    "Family",
    "Projection",
    "SublayerSpec",
    "Unsupported",
    "family_named",
    "family_of",
]


class Unsupported(ValueError):
    """Something of an architecture that surgeon cannot operate on; the message says why."""


def family_named(model_type: str) -> Family:
    """Return the family with this `model_type`, or `FUSED`.

    Raises:
        Unsupported: if there is none, saying which there are.
    """
    if model_type == FUSED.model_type:
        return FUSED
    if model_type.startswith("surgeon_"):  # as a checkpoint's modeling file names what it edits
        raise Unsupported(
            "the model was opened by the code in a checkpoint of surgeon's; open the folder with surgeon.load, "
            "or give the folder (save_pretrained writes what has changed)"
        )
    if model_type not in FAMILIES:
        names = sorted((family.name for family in FAMILIES.values()), key=str.lower)
        raise Unsupported(
            f"architecture {model_type!r} is not supported (supported: {', '.join(names)}); "
            'docs/extending.md, "Adding a family", shows how to add one in a short file'
        )
    return FAMILIES[model_type]


def family_of(config: Any) -> Family:
    """Return the family of a `transformers` configuration.

    Raises:
        Unsupported: if there is none, or the configuration uses something of the architecture that cannot be edited.
    """
    family = family_named(config.model_type)
    reason = family.unsupported(config)
    if reason is not None:
        raise Unsupported(f"this {family.name} model cannot be operated on: {reason}")
    return family.variant(family, config)
