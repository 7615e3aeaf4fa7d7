"""Checks of what a program's ranks have to share, and of the slices that it names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from surgeon.language.program import Program
from surgeon.language.sublayer import ATTENTION, Sublayer
from surgeon.models.families.specs import Latent, Units
from surgeon.models.weights import indivisible
from surgeon.runtime.plan.balance import Mixtures
from surgeon.runtime.plan.placement import work_of
from surgeon.runtime.plan.specification import Plan

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


def check_slices(program: Program, units_of: UnitsOf) -> None:
    """Refuse slices that a program names and that would not be equal."""
    for sublayer in dict.fromkeys(program.sublayers()):
        if reason := indivisible(sublayer, units_of(sublayer)):
            raise ValueError(reason)


def check_division(program: Program, units_of: UnitsOf, ranks: int, mixtures: Mixtures) -> None:
    """Refuse slices that would not be equal, and more ranks than a program has heads and neurons."""
    check_slices(program, units_of)
    heads = 0
    neurons = 0
    for sublayer in dict.fromkeys(program.sublayers()):
        units = units_of(sublayer)
        if sublayer.kind == ATTENTION:
            heads = max(heads, units.get("heads", 0))
        else:
            mixture = mixtures.size(sublayer)
            neurons = max(neurons, units["neurons"] * (1 if mixture is None else mixture.experts))
    check_ranks(ranks, heads, neurons)


def check_ranks(ranks: int, heads: int, neurons: int) -> None:
    """Refuse more ranks than heads and neurons of a layer together."""
    if ranks > heads + neurons:
        raise ValueError(
            f"{ranks} ranks cannot share this model, whose layers have {heads} heads and {neurons} neurons to share; "
            f"use at most {heads + neurons}"
        )


def require_equal_heads(plan: Plan, units_of: UnitsOf) -> None:
    """Refuse ranks that would have unequal parts of an attention; vLLM's ranks have caches of one shape."""
    for part in (
        part for rank in range(plan.ranks) for work in work_of(plan, rank) for part in work.parts
    ):
        if part.slot is None:
            continue
        units = units_of(part.sublayer)
        heads = units["heads"]
        kv_heads = units.get("kv_heads", heads)
        _, count = part.sublayer.piece or (0, 1)
        if heads % count or (kv_heads % count and count % kv_heads):
            raise ValueError(
                f"vLLM has equal parts of an attention on its ranks, and {heads} heads over {kv_heads} KV heads "
                f"({replace(part.sublayer, piece=None, ranks=())}) do not divide into {count}; set another "
                "--tensor-parallel-size, or let surgeon serve run it"
            )
