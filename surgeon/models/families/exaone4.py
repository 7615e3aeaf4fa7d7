"""EXAONE-4: norms behind sublayers only, norms of heads; where some layers have windows, only these have positions."""

from dataclasses import replace
from typing import Any

from surgeon.models.families.base import Family
from surgeon.models.families.olmo3 import OLMO3


def _variant(family: Family, config: Any) -> Family:
    return replace(family, rotary_in_windows=config.sliding_window is not None)


EXAONE4 = replace(
    OLMO3,
    name="EXAONE-4",
    model_type="exaone4",
    attention=replace(OLMO3.attention, norms_all_heads=False),
    variant=_variant,
)
