"""Positions in a configuration: layers with windows, angles, the longest text."""

from __future__ import annotations

import math
from typing import Any

from surgeon.models.families.base import Family

# What configs call layers whose attention has a window.
LOCAL = ("sliding_attention", "local", "chunked_attention")


def windowed_layers(family: Family, config: Any) -> list[bool]:
    """Tell of each layer whether its attention looks at a window only."""
    layers = int(config.num_hidden_layers)
    if family.window.tokens is None or getattr(config, family.window.tokens) is None:
        return [False] * layers
    if family.window.layers is None:
        return [True] * layers
    return [kind in LOCAL for kind in getattr(config, family.window.layers)]


def attention_windows(family: Family, config: Any, layers: int) -> tuple[int | None, ...]:
    """Count the tokens that each layer's attention looks at; nothing if all of them look at everything.

    Raises:
        ValueError: if the configuration does not say which layers have a window, or it is below 1.
    """
    if family.window.tokens is None or (window := getattr(config, family.window.tokens)) is None:
        return ()
    if family.window.layers is None:
        windowed = [True] * layers
    else:
        windowed = windowed_layers(family, config)
    if len(windowed) != layers:
        raise ValueError(
            f"{family.window.layers} in config.json has an entry for each of {len(windowed)} layers, and the "
            f"checkpoint holds {layers}; attention windows need one for each"
        )
    if not any(windowed):  # Qwen2-MoE's window is 0 then
        return ()
    if window < 1:
        raise ValueError(f"{family.window.tokens} must be at least 1 token, not {window}")
    return tuple(window if here else None for here in windowed)


def rotated_layers(family: Family, config: Any) -> list[bool]:
    """Tell of each layer whether its attention has rotary positions."""
    positions = family.positions
    if positions.in_windows:
        return windowed_layers(family, config)
    if positions.layers is None or getattr(config, positions.layers) is None:
        return [positions.rotary] * int(config.num_hidden_layers)
    return list(map(bool, getattr(config, positions.layers)))


def rope_kinds(family: Family, config: Any) -> list[str | None]:
    """Name each layer's rotary positions as the config does, where not all layers have the same; else None."""
    kinds = getattr(config, "layer_types", None) or []
    if any(kind in family.positions.rope(config) for kind in kinds):
        return list(kinds)
    return [None] * int(config.num_hidden_layers)


def rope_of(family: Family, config: Any, kind: str | None = None) -> dict[str, Any]:
    """Return a config's entries on the rotary positions of one of `rope_kinds`."""
    rope = family.positions.rope(config)
    if kind is not None:
        rope = rope[kind]
    return rope


def rotary_angles(
    family: Family, config: Any, kind: str | None = None
) -> tuple[tuple[float, ...], float]:
    """Return the angle of each pair of features per position, and the factor on cosine and sine.

    Args:
        kind: of `rope_kinds`.
    """
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = rope_of(family, config, kind)
    if rope["rope_type"] in ROPE_INIT_FUNCTIONS:
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, layer_type=kind)
        return tuple(frequencies.tolist()), float(scale)
    # Plain ones, in float32 as `transformers` has them: its own stand in modeling files, which take long to import.
    width = family.head_dim(config)
    if family.positions.partial:
        width = int(width * rope.get("partial_rotary_factor", 1.0))
    powers = torch.arange(0, width, 2, dtype=torch.float32) / width
    return tuple((1.0 / rope["rope_theta"] ** powers).tolist()), 1.0


def long_rotary_angles(
    family: Family, config: Any, kind: str | None = None
) -> tuple[int, tuple[float, ...], float] | None:
    """Return the rotary positions of long texts, as of `Longer`.

    Returns:
        The length beyond which they are others, the angle of each pair of features per position, and by how much of the
        length that is stretched; None where texts of all lengths turn alike.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = rope_of(family, config, kind)
    if rope["rope_type"] == "dynamic":
        return (
            int(config.max_position_embeddings),
            rotary_angles(family, config, kind)[0],
            float(rope["factor"]),
        )
    if rope["rope_type"] != "longrope":
        return None
    beyond = rope["original_max_position_embeddings"]
    frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=beyond + 1, layer_type=kind)
    return beyond, tuple(frequencies.tolist()), 0.0


def longest_text(family: Family, config: Any) -> int:
    """Count the tokens that a text may have under this config; learned positions are counted where they are stored."""
    if family.positions.rotary:
        rope = family.positions.rope(config) or {}
    else:
        rope = {}
    if rope.get("rope_type") == "dynamic":
        times = rope.get("factor")
    else:
        times = 1
    # `rotary_angles` cannot be had then.
    if not isinstance(times, int | float) or not 1 <= times < math.inf:
        times = 1
    return int(config.max_position_embeddings * times)
