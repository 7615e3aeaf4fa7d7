"""What a user names to be measured: a checkpoint, a recipe, a program, or a variant by its name."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from surgeon.analysis.factors.factor_plan import plan_factors
from surgeon.benchmarks.measure import Candidate
from surgeon.checkpoint.load import read_config, stored_program
from surgeon.checkpoint.read import Checkpoint, locate
from surgeon.cost.costed import apart, short_name
from surgeon.demo import MODEL_FOLDER
from surgeon.language.operations.variants import DENSE, UPPER_BOUND, is_variant, middle_layers, variant
from surgeon.language.program import Program
from surgeon.language.recipe import read_recipe
from surgeon.models.recipe_program import recipe_program
from surgeon.named import is_program, is_recipe
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.kept import can_be_low_rank, require_low_rank
from surgeon.runtime.plan.specification import Plan


@dataclass(frozen=True)
class Needs:
    """What all that is measured has in common.

    Attributes:
        tokens: of prompt and output together.
        device: "cpu" or "cuda".
        dtype, decoding, low_rank: as `make_plan` takes them.
        kv: too, but "lowrank" is for those that can.
    """

    ranks: int
    tokens: int
    device: str
    dtype: str = "auto"
    decoding: str = "auto"
    low_rank: str = "auto"
    kv: str = "auto"

    def plan(self, model: str | Path, program: str | None = None) -> Plan:
        """A checkpoint's plan, as `make_plan` makes it."""
        ways = self.dtype, self.decoding, self.low_rank
        kv = "auto" if self.kv == "lowrank" else self.kv
        plan = make_plan(model, self.ranks, self.tokens, program, self.device, *ways, kv=kv)
        low_rank = self.kv == "lowrank" and can_be_low_rank(Program.parse(plan.program))
        return replace(plan, kv="lowrank") if low_rank else plan


def open_candidates(
    model: str, compared: Sequence[str], needs: Needs, program: str | None = None, layers: range | None = None
) -> list[Candidate]:
    """The model first, then what is compared with it, all under different names.

    Args:
        model: a checkpoint folder, hub name, "demo", or recipe.
        compared: any of these, programs, or names of variants of the model's unedited program.
        program: of the model, instead of its own.
        layers: that variants change; all but the first and last two by default.

    Raises:
        FileNotFoundError: if there is no such model or recipe.
        ValueError: if one cannot be run by these ranks, or is a recipe for another model, saying why; if none of them
            can be run with the `kv` that is needed.
    """
    first = _open(model, needs, program)
    found = [first]
    for text in compared:
        if is_variant(text):
            found.append(_variant(text, first.plan, needs, layers))
        elif is_program(text):
            found.append(Candidate(short_name(text), needs.plan(first.plan.folder, text)))
        else:
            found.append(_open(text, needs))
    if needs.kv == "lowrank":
        require_low_rank(*(Program.parse(one.plan.program) for one in found))
    names = apart([one.name for one in found])
    return [replace(one, name=name) for one, name in zip(found, names, strict=True)]


def _open(text: str, needs: Needs, program: str | None = None) -> Candidate:
    if not is_recipe(text):
        plan = needs.plan(text, program)
        name = "demo" if plan.folder == MODEL_FOLDER else Path(text).resolve().name
        return Candidate(short_name(name), plan)
    if program is not None:
        raise ValueError(f"{text} is a recipe and has a program of its own; give --program with a checkpoint")
    recipe = read_recipe(Path(text))
    checkpoint = Checkpoint(locate(recipe.model))
    config = read_config(checkpoint)
    own = stored_program(checkpoint)
    edited = recipe_program(recipe, config, own)
    if plan_factors(recipe, config, own).is_calibrated:
        warnings.warn(
            f"{text}: ranks run plain factors, not those that the recipe calibrates: as fast, but not as good; export "
            "it and measure the checkpoint to run its own",
            stacklevel=2,
        )
    plan = needs.plan(recipe.model, str(edited))
    if recipe.weights is not None:
        checkpoint = Checkpoint(plan.folder)
        recipe.require_model(checkpoint.model_hash(), checkpoint.weights_hash())
    return Candidate(short_name(Path(text).stem), plan)


def _variant(name: str, first: Plan, needs: Needs, layers: range | None) -> Candidate:
    if name == UPPER_BOUND:
        return Candidate(name, first, connected=False)
    dense = Program.dense(first.layers, first.family.steps_per_layer)
    stretch = range(0) if name == DENSE else layers or middle_layers(first.layers)
    return Candidate(name, needs.plan(first.folder, str(variant(name, dense, stretch, needs.ranks))))
