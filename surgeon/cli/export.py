"""`surgeon export`: write what a recipe describes as a checkpoint."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from surgeon.cli.grouped import grouped
from surgeon.cli.opening import warn
from surgeon.cli.options import MemoryOption, ResultsOption

if TYPE_CHECKING:
    from surgeon.analysis.factors.recipe_factors import RecipeFactors
    from surgeon.checkpoint.read import Checkpoint
    from surgeon.exports.export import ExportPlan
    from surgeon.exports.prove import Proof
    from surgeon.language.recipe import Recipe
    from surgeon.opened import Model


@dataclass(frozen=True)
class FactorArguments:
    """Where factors of a recipe are made, in the user's words; a group of options (see grouped.py)."""

    factors: Annotated[
        Path | None,
        typer.Option(
            help="Folder for factors that the recipe has calibrated on a text: made there, and kept. Default: one "
            "beside the output, which is removed once the checkpoint is written.",
            show_default=False,
        ),
    ] = None
    memory: MemoryOption = None

    def make(self, steps: Recipe, original: Model, output: Path, dtype: str | None) -> RecipeFactors | None:
        """The recipe's calibrated factors; None where it has none.

        Args:
            dtype: that weights will be stored in, where that is not the original's.

        Raises:
            FileNotFoundError, ValueError, OSError: as `make_recipe_factors`.
        """
        from surgeon.analysis.factors.recipe_factors import make_recipe_factors
        from surgeon.exports.export import DTYPES
        from surgeon.memory import parse_size

        memory = None if self.memory is None else parse_size(self.memory)
        kept = None if dtype is None else DTYPES[dtype]
        made = make_recipe_factors(steps, original, self._folder(output), memory, kept)
        if made is not None:
            warn(made.found.notes)
        return made

    def discard(self, output: Path) -> None:
        """Remove factors that have become part of a checkpoint, unless they are to be kept."""
        if self.factors is None:
            shutil.rmtree(self._folder(output))

    def _folder(self, output: Path) -> Path:
        return self.factors or output.with_name(f"{output.name}.factors")


@grouped
def export(
    recipe: Annotated[
        Path, typer.Argument(help="Recipe (YAML): a model and the operations on it.", show_default=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write.", show_default=False)],
    form: Annotated[
        Literal["auto", "plain", "fused", "program"],
        typer.Option(
            help="plain: an ordinary checkpoint of whole layers. fused: layers side by side stored as one wide layer "
            "(transformers and vLLM, with a small modeling file inside). program: anything else (transformers, "
            "likewise; vLLM, too, where it is low-rank only). auto: the first of these that is exact."
        ),
    ] = "auto",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Store weights in this dtype, not in the original's.", show_default=False),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Folder or hub name, instead of the recipe's model.", show_default=False)
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace an existing checkpoint: a folder with the surgeon.json of an export, or with a model's "
            "config.json and safetensors weights. One that holds anything else too (folders, files of yours) is kept.",
        ),
    ] = False,
    results: ResultsOption = None,
    *,
    calibrated: FactorArguments,
) -> None:
    """Write the recipe's model as a checkpoint that other software loads.

    The checkpoint is proven before it gets its name: run on random tokens, it gives the same logits as the original
    run with the recipe's program. surgeon.json inside says what was done and proven, and README.md, a model card, says
    it to people. Prints the folder's name.

    Tokenizer, chat templates, processors, generation settings and licence go along, and code that the model's
    configuration names: the tokenizer's in all forms, the model's own in the plain form. Other weights and what belongs
    to training do not; whatever else stays behind is named.

    A recipe that names the weights it was made for (weights: sha256:...), as those of surgeon search do, is refused for
    a model with others. Given one with --model, it is applied with a warning.

    Where the recipe has lowrank with a method other than plain, factors are made first, layer by layer, on the text
    that it names. Interrupted, the same command goes on where it was.
    """
    from surgeon.exports.staging import check_target
    from surgeon.language.recipe import read_recipe
    from surgeon.memory import share_heaps
    from surgeon.progress import progress

    share_heaps()
    steps = read_recipe(recipe)
    check_target(output, overwrite)
    checkpoint = _being_hashed(model or steps.model)
    from surgeon.exports.export import plan_export, write_export
    from surgeon.exports.plan import check_exportable
    from surgeon.models.recipe_program import recipe_program
    from surgeon.opened import Model
    from surgeon.results.measured import read_measured

    original = Model.of(checkpoint, model or steps.model)
    check_exportable(original)
    if steps.weights is not None:
        steps = _bound(steps, original, chosen=model is not None)
    made = calibrated.make(steps, original, output, dtype)
    if made is not None:
        steps = made.published(steps)
    source = None if made is None else made.found.source
    plan = plan_export(original, recipe_program(steps, original.config, original.own), form, dtype, source)
    measured = read_measured(results, plan.identity(output.absolute().name)) if results else None
    print(f"{plan.layout.form} form: {plan.layout.reason}.", file=sys.stderr)
    published = replace(steps, model=original.public_name).to_yaml()  # says nothing of the folders of this machine
    with progress(f"writing and proving {output}", plan.passes * plan.weight_bytes, "bytes") as advance:
        proof = write_export(plan, output, overwrite, published, advance, measured)
    if made is not None:
        calibrated.discard(output)
    print(_summary(plan, proof), file=sys.stderr)
    print(output)


def _being_hashed(path_or_name: str) -> Checkpoint:
    """A model's checkpoint, whose files are being hashed from now on: what comes next takes seconds to import."""
    from surgeon.beside import Background
    from surgeon.checkpoint.read import Checkpoint, locate

    checkpoint = Checkpoint(locate(path_or_name))
    Background(checkpoint.weights_hash)
    return checkpoint


def _bound(steps: Recipe, original: Model, chosen: bool) -> Recipe:
    """The recipe, bound to the original; a model that the user chose may be another than it was made for."""
    found = original.hash, original.checkpoint.weights_hash()
    if not chosen:
        steps.require_model(*found)
    warn(filter(None, [steps.mismatch(*found)]))
    return replace(steps, weights=found[0])


def _summary(plan: ExportPlan, proof: Proof) -> str:
    """What was measured, in a sentence or two."""
    from surgeon.processes.files import show_bytes

    depth = plan.program.effective_depth(plan.original.family.steps_per_layer)
    exact = f"by {proof.exact:.1g} of their scale in float32"
    if proof.dtype != "float32":
        exact += f", and by {proof.written:.1g} once computed weights are rounded to {proof.dtype}"
    return (
        f"effective depth {depth:g}, {plan.program.sync_points(2)} synchronisations per forward pass on two ranks, "
        f"{show_bytes(plan.weight_bytes)} of weights. Proof: on {proof.tokens} random tokens the logits differ from "
        f"the original's under this program {exact}."
    )
