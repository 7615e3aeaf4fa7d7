"""Programs by name, for comparing what they cost: what an operation makes of a stretch of the unedited model."""

from __future__ import annotations

from surgeon.errors import did_you_mean
from surgeon.operations import desync, fuse_attention_mlp, ladder, pair, tracks
from surgeon.operations.base import show_range
from surgeon.program import Program

UPPER_BOUND = "upper-bound"  # the program compared with, on ranks that do not wait for each other
TRACKS = "tracks:"
SPARED = 2  # layers at either end that the papers leave alone
VARIANTS = ("dense", "lp", "ladder", "ladder-over-lp", "fused", "tracks:D", "desync", UPPER_BOUND)


def is_variant(name: str) -> bool:
    """Whether it is a name of this list (`tracks:4` for tracks that meet every 4 layers)."""
    return name in VARIANTS or name.startswith(TRACKS)


def middle_layers(num_layers: int) -> range:
    """All layers but the first and last two.

    Raises:
        ValueError: if there are none.
    """
    if num_layers <= 2 * SPARED:
        raise ValueError(
            f"the model has {num_layers} layers, and variants leave the first and last {SPARED} alone; "
            f"say which to change, as in --layers 0:{num_layers}"
        )
    return range(SPARED, num_layers - SPARED)


def variant(name: str, dense: Program, layers: range, ranks: int) -> Program:
    """The program of that name.

    Args:
        dense: the unedited model's.
        layers: that the operation is applied to.
        ranks: for tracks and desync, which have a slice for each.

    Raises:
        ValueError: if there is no such variant, or the operation refuses the layers.
    """
    try:
        if name == "dense":
            return dense
        if name == "lp":
            return pair(dense, layers)
        if name == "ladder":
            return ladder(dense, layers)
        if name == "ladder-over-lp":
            return ladder(pair(dense, layers), layers)
        if name == "fused":
            return fuse_attention_mlp(dense, layers)
        if name == "desync" and ranks > 1:
            return desync(dense, layers, count=ranks)
        if name.startswith(TRACKS) and ranks > 1:
            return tracks(dense, layers, count=ranks, depth=_depth(name))
    except ValueError as error:
        raise ValueError(f"{name} of layers {show_range(layers)}: {error}") from error
    if is_variant(name) and name != UPPER_BOUND:
        raise ValueError(f"{name} has a slice of the layers for each rank; use --tp 2 or more")
    raise ValueError(f"there is no program {name!r} to build; {did_you_mean(name, VARIANTS)}")


def _depth(name: str) -> int:
    depth = name.removeprefix(TRACKS)
    if not depth.isdecimal() or int(depth) < 1:
        raise ValueError(f"write how many layers a track has, as in {TRACKS}4")
    return int(depth)
