"""The same configuration, smaller: its shape, on fewer and shorter windows.

What counts things stays: layers, heads, KV heads, tracks, experts, racks, codas, steps. Widths (of the stream, of a
head, of neurons) are multiplied by the scale s, so that the layers' parameters come to about s^2 of what they were, and
so are the tokens of a step: tokens for each parameter stay, and the schedule goes over the run as it did. Windows are
multiplied by s, too, but are not made shorter than 128 tokens; what is left falls on the batch. The learning rate,
which wider models take lower, is divided by the root of s. The vocabulary becomes the tokenizer's.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import sqrt
from typing import Any

from transformers import CONFIG_MAPPING

from surgeon.errors import shown
from surgeon.models.families import FAMILIES
from surgeon.training.scratch.config import ScratchConfig
from surgeon.training.scratch.tracks import WIDTH_STEP, layer_of_each_width

SHORTEST_WINDOW = 128


def parse_scale(text: str) -> float:
    """A scale such as 1/64 or 0.125.

    Raises:
        ValueError: if it is no number above 0 and at most 1.
    """
    try:
        scale = float(Fraction(text))
    except (ValueError, ZeroDivisionError):
        scale = 0.0
    if not 0 < scale <= 1:
        raise ValueError(f"a scale is above 0 and at most 1, such as 1/64 or 0.125, not {shown(text)}")
    return scale


def scaled(config: ScratchConfig, scale: float, steps: int | None = None) -> ScratchConfig:
    """A configuration of the same shape whose widths are so many times as large.

    Args:
        scale: above 0, at most 1.
        steps: in place of the configuration's; the warm-up keeps its share of them.

    Raises:
        ValueError: if the architecture is not known or its entries fit no model, with file and line.
    """
    settings = config.settings
    tokens = settings.batch * config.window * scale**2
    window = max(min(config.window, SHORTEST_WINDOW), round(config.window * scale))
    shorter: dict[str, Any] = {"batch": max(1, round(tokens / window)), "micro_batch": None}
    if steps is not None:
        before = settings.steps or steps
        shorter |= {"steps": steps, "warmup": round(settings.warmup * steps / before)}
    smaller = replace(settings, learning_rate=settings.rate / sqrt(scale), **shorter)
    return replace(config, model=_narrower(config, scale), window=window, settings=smaller)


def _narrower(config: ScratchConfig, scale: float) -> dict[str, Any]:
    """The entries of the model, narrower; heads stay, and their width is even, as rotary positions need it."""
    entries = {name: value for name, value in config.model.items() if name not in ("model_type", "vocab_size")}
    model_type = config.model.get("model_type")
    with config.under("model"):
        if model_type not in FAMILIES:
            raise ValueError(f"model_type {shown(model_type)} is not known, and so not what its widths are called")
        family = FAMILIES[model_type]
        try:
            full: Any = CONFIG_MAPPING[model_type](**entries)
        except Exception as error:  # whatever it trips over is a fault of the entries
            raise ValueError(f"it cannot be scaled: {error}") from error
    heads = family.units(full)["heads"]
    width = family.head_dim(full)
    head = 2 * max(1, round(width * scale / 2))
    filled = heads * width == full.hidden_size
    stream = heads * head if filled else _rounded(full.hidden_size * scale)
    narrow: dict[str, Any] = (
        {"hidden_size": stream} | ({} if filled else {"head_dim": head}) | family.entries.follow_width(full, stream)
    )
    for name in layer_of_each_width(full, family):
        narrow[name] = _rounded(scale * (getattr(full, name) or 4 * full.hidden_size))  # as GPT-2 fills it in
    same: dict[str, str] = full.attribute_map  # names that entries have beside their own
    given = {same.get(name, name): name for name in entries}
    kept = {name: value for name, value in config.model.items() if name != "vocab_size"}
    return kept | {given.get(same.get(name, name), name): value for name, value in narrow.items()}


def _rounded(width: float) -> int:
    return WIDTH_STEP * max(1, round(width / WIDTH_STEP))
