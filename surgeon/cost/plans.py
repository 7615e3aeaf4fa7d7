"""Plans of models that are known by their shapes, like those that `runtime.plan.checks.make_plan` makes of files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from surgeon.language.program import Program
from surgeon.models.edit import check_layers
from surgeon.models.shapes import ModelShapes
from surgeon.models.weights import require_sliceable
from surgeon.runtime.plan.division import check_division, different, why_not
from surgeon.runtime.plan.specification import Plan


def plan_on_paper(
    shapes: ModelShapes, program: Program, ranks: int, max_tokens: int, dtype: str, low_rank: Any, kv: Any
) -> Plan:
    """What ranks would be told of a model; what decides about numbers and not about costs is left out.

    Raises:
        ValueError: if the program names what the model does not have, heads or neurons do not divide among the
            ranks, or texts are longer than the model's positions.
    """
    check_layers(program, shapes.layers)
    shapes.family.require_no_mixture("its costs are not predicted yet")
    for sublayer in set(program.sublayers()):
        spec = shapes.family.spec(sublayer.kind, sublayer.layers[0])
        if sublayer.piece is not None:
            require_sliceable(spec, shapes.family)
        for role, _ in sublayer.ranks:
            spec.projection(role)  # a gate that the model lacks, say
        replace(sublayer, piece=None).parameters(shapes.layer_shapes)  # refuses ranks above those of the matrices
    check_division(different(program, shapes.units), shapes.units, ranks)
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
        described=shapes.family,
    )


def divides(shapes: ModelShapes, program: Program, ranks: int) -> bool:
    """Whether heads and neurons divide among so many ranks."""
    return why_not(different(program, shapes.units), shapes.units, ranks) is None
