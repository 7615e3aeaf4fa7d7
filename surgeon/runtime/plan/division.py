"""Division of a program's heads and neurons among ranks, and the numbers of ranks that would do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from surgeon.language.program import Program
from surgeon.language.sublayer import ATTENTION, Sublayer
from surgeon.models.families.specs import Latent
from surgeon.models.weights import indivisible
from surgeon.models.weights.layout import Units
from surgeon.runtime.plan.mixtures import NO_MIXTURES, Mixtures
from surgeon.runtime.plan.placement import rank_work

MOST_SUGGESTED = 64  # where numbers of ranks that would do are listed

UnitsOf = Callable[[Sublayer], Units]  # how many heads and KV heads, or neurons, a sublayer has


def shared_units(units_of: UnitsOf, latent: Latent | None) -> UnitsOf:
    """Units that ranks share of sublayers: of latent attentions, heads."""

    def units(sublayer: Sublayer) -> Units:
        found = units_of(sublayer)
        if latent is None or sublayer.kind != ATTENTION:
            return found
        return {"heads": latent.heads}

    return units


def cached_latent(latent: Latent | None) -> Latent | None:
    """Refuse latent attentions whose values are wider than their keys."""
    if latent is not None and latent.value > latent.width:
        raise ValueError(
            f"v_head_dim {latent.value} in config.json is above the {latent.width} features of a key, which ranks cache"
        )
    return latent


def check_division(
    program: Program,
    units_of: UnitsOf,
    ranks: int,
    mixtures: Mixtures = NO_MIXTURES,
    sliced: bool = False,
) -> None:
    """Refuse slices, and numbers of ranks, that heads or neurons do not divide into."""
    for sublayer in dict.fromkeys(program.sublayers()):
        if sublayer.piece is None:
            reason = None
        else:
            reason = indivisible(sublayer, units_of(sublayer), replicate=False)
        if reason:
            raise ValueError(reason)
    reason = why_not(program, units_of, ranks, mixtures, sliced)
    if reason is None:
        return
    alike = different(program, units_of, mixtures)
    fits = [
        str(n)
        for n in range(1, MOST_SUGGESTED + 1)
        if why_not(alike, units_of, n, mixtures, sliced) is None
    ]
    either = (
        " or ".join([", ".join(fits[:-1]), fits[-1]] if len(fits) > 1 else fits) or "no number of ranks"
    )
    raise ValueError(f"{ranks} ranks cannot share this model: {reason}; {either} can")


def different(program: Program, units_of: UnitsOf, mixtures: Mixtures = NO_MIXTURES) -> Program:
    """The nodes that differ in more than which layers they are of: each node is shared by itself."""
    first: dict[str, tuple[int, ...]] = {}  # layers, by what counts

    def as_first(sublayer: Sublayer) -> Sublayer:
        counts = units_of(replace(sublayer, piece=None)), mixtures.size(replace(sublayer, experts=None))
        return replace(sublayer, layers=first.setdefault(f"{sublayer.kind} {counts}", sublayer.layers))

    return Program(tuple(dict.fromkeys(program.renamed(as_first).nodes)))


def why_not(
    program: Program,
    units_of: UnitsOf,
    ranks: int,
    mixtures: Mixtures = NO_MIXTURES,
    sliced: bool = False,
) -> str | None:
    """Say why so many ranks cannot share a program; None if they can."""
    try:
        works = (work for rank in range(ranks) for work in rank_work(program, rank, ranks, sliced))
        parts = {(part.sublayer, len(part.sharers)) for work in works for part in work.parts}
    except ValueError as error:  # a fork that does not spread over the ranks
        return str(error)
    reasons: dict[Sublayer, str | None] = {}
    for part, members in sorted(parts, key=str):
        units = units_of(part)
        if mixtures.whole_experts(part, members) is not None:
            units = {unit: count for unit, count in units.items() if unit != "neurons"}
        reasons[part] = indivisible(part, units, replicate=True) or reasons.get(part)
    first_of_kind = {part.kind: reason for part, reason in reversed(reasons.items()) if reason}
    return " and ".join(first_of_kind[kind] for kind in sorted(first_of_kind)) or None
