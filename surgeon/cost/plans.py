"""Plans of models that are known by their shapes, like those that `runtime.plan.checks.make_plan` makes of files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from surgeon.language.program import Program
from surgeon.language.sublayer import FEED_FORWARD, Sublayer
from surgeon.models.edit import check_layers
from surgeon.models.shapes import ModelShapes
from surgeon.models.weights import require_sliceable
from surgeon.runtime.plan.division import cached_latent, check_division, different, shared_units, why_not
from surgeon.runtime.plan.mixtures import Mixtures, MixtureSize
from surgeon.runtime.plan.specification import Plan


def plan_on_paper(
    shapes: ModelShapes,
    program: Program,
    ranks: int,
    max_tokens: int,
    dtype: str,
    low_rank: Any,
    kv: Any,
    sliced: bool = False,
) -> Plan:
    """What ranks would be told of a model; what decides about numbers and not about costs is left out.

    Args:
        sliced: as `Plan.sliced`.

    Raises:
        ValueError: if the program names what the model does not have, heads or neurons do not divide among the
            ranks, or texts are longer than the model's positions.
    """
    check_layers(program, shapes.layers)
    shapes.family.require_ranked(program)
    for sublayer in set(program.sublayers()):
        spec = shapes.family.spec(sublayer.kind, sublayer.layers[0])
        if sublayer.piece is not None:
            require_sliceable(spec, shapes.family)
        for role, _ in sublayer.ranks:
            spec.projection(role)  # a gate that the model lacks, say
        replace(sublayer, piece=None).parameters(shapes.layer_shapes)  # refuses ranks above those of the matrices
    mixtures = mixtures_of(shapes)
    units = shared_units(shapes.units, shapes.latent)
    check_division(different(program, units, mixtures), units, ranks, mixtures, sliced)
    if max_tokens > shapes.positions:
        raise ValueError(
            f"prompt and output together are {max_tokens} tokens, and {shapes.name} has {shapes.positions} positions; "
            "shorten the prompt or ask for fewer tokens"
        )
    return Plan(
        folder=Path(),
        model_type=shapes.family.model_type,
        program=str(program),
        ranks=ranks,
        head_dim=shapes.head_dim,
        epsilon=0.0,
        activation="",
        rotaries=(),
        hidden=shapes.hidden,
        vocabulary=shapes.vocabulary,
        layers=shapes.layers,
        max_tokens=max_tokens,
        tied=shapes.tied,
        ends=(),
        dtype=dtype,
        windows=shapes.windows,
        low_rank=low_rank,
        kv=kv,
        mixtures=mixtures,
        latent=cached_latent(shapes.latent),
        sliced=sliced,
        described=shapes.family,
    )


def divides(shapes: ModelShapes, program: Program, ranks: int) -> bool:
    """Whether heads and neurons divide among so many ranks."""
    mixtures = mixtures_of(shapes)
    units = shared_units(shapes.units, shapes.latent)
    return why_not(different(program, units, mixtures), units, ranks, mixtures) is None


def mixtures_of(shapes: ModelShapes) -> Mixtures:
    """Which layers are mixtures of experts, by the configuration alone; ranks share them as is cheaper."""

    def size(layer: int) -> MixtureSize | None:
        own = shapes.layer_shapes.of(Sublayer(FEED_FORWARD, (layer,)))
        if own.mixture is None:
            return None
        return MixtureSize(own.mixture.experts, own.units[FEED_FORWARD])

    return Mixtures.of(size, shapes.layers)
