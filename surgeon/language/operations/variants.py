"""Programs by name, for comparing what they cost: what an operation makes of a stretch of the unedited model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from surgeon.language.operations.base import VARIANTS, Variant, show_range
from surgeon.language.program import Program
from surgeon.words import did_you_mean

DENSE = "dense"  # the unedited program
UPPER_BOUND = "upper-bound"  # the program compared with, on ranks that do not wait for each other
# The same, of half of the tokens at a time while the others' reductions are on their way.
HALVES = "halves"
RUN_OTHERWISE = (HALVES, UPPER_BOUND)
SPARED = 2  # layers at either end that the papers leave alone


def variant_names() -> tuple[str, ...]:
    """All variants, in the order in which they are listed."""
    return (DENSE, *VARIANTS, *RUN_OTHERWISE)


def is_variant(name: str) -> bool:
    """True for the name of a variant (`tracks:4` for tracks that meet every 4 layers)."""
    return name in (DENSE, *RUN_OTHERWISE) or _find_declared(name) is not None


def variant(name: str, dense: Program, layers: range, ranks: int) -> Program:
    """The program of that name.

    Args:
        dense: the unedited model's.
        layers: that the operation is applied to.
        ranks: for tracks and desync, which have a slice for each.

    Raises:
        ValueError: if there is no such variant, or the operation refuses the layers.
    """
    if name == DENSE:
        return dense
    declared = _find_declared(name)
    if declared is None:
        raise ValueError(f"there is no program {name!r} to build; {did_you_mean(name, variant_names())}")
    if declared.ranks is not None and ranks < 2:
        raise ValueError(f"{name} has a slice of the layers for each rank; use 2 ranks or more")
    try:
        return _build(name, declared, dense, layers, ranks)
    except ValueError as error:
        raise ValueError(f"{name} of layers {show_range(layers)}: {error}") from error


def variant_of(
    name: str, num_layers: int, steps_per_layer: int, layers: range | None = None
) -> Callable[[int], Program]:
    """A variant of a model, by the number of ranks.

    Args:
        layers: that it changes; all but the first and last two by default.

    Raises:
        ValueError: if there are no such layers; when it is called, as `variant`.
    """
    stretch = layers or range(SPARED, num_layers - SPARED)
    if name != DENSE and not stretch:
        raise ValueError(
            f"the model has {num_layers} layers, and variants leave the first and last {SPARED} alone; "
            f"say which to change, as in layers 0:{num_layers}"
        )
    return partial(variant, name, Program.dense(num_layers, steps_per_layer), stretch)


def _build(name: str, declared: Variant, dense: Program, layers: range, ranks: int) -> Program:
    if declared.over is not None:
        dense = _build(declared.over, VARIANTS[declared.over], dense, layers, ranks)
    given = {**declared.parameters, **_number_in(name, declared)}
    if declared.ranks is not None:
        given[declared.ranks] = ranks
    return declared.function(dense, layers, **given)


def _find_declared(name: str) -> Variant | None:
    for shown, declared in VARIANTS.items():
        if name == shown or (declared.argument is not None and name.startswith(_before_number(shown))):
            return declared
    return None


def _before_number(name: str) -> str:
    return name.partition(":")[0] + ":"


def _number_in(name: str, declared: Variant) -> dict[str, int]:
    """The parameter that is given behind a variant's name, if it has one."""
    if declared.argument is None:
        return {}
    start = _before_number(name)
    number = name.removeprefix(start)
    if not number.isdecimal() or int(number) < 1:
        raise ValueError(f"write {declared.meaning}, as in {start}4")
    return {declared.argument: int(number)}
