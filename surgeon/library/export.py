"""`surgeon.export`: a model, as it is changed, as a checkpoint that other software loads."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from torch import nn

from surgeon.analysis.factors.recipe_factors import with_factors
from surgeon.checkpoint.forms import Layout
from surgeon.checkpoint.load import open_stored
from surgeon.checkpoint.training import Training
from surgeon.exports.export import DTYPES, plan_export, write_export
from surgeon.exports.in_memory import export as export_loaded
from surgeon.exports.plan import check_exportable
from surgeon.exports.prove import Proof
from surgeon.exports.staging import check_target
from surgeon.findings.measured import read_measured
from surgeon.language.program import Program
from surgeon.language.recipe import Recipe
from surgeon.library.opening import as_list
from surgeon.memory import parse_size
from surgeon.opened import EditedModel, Model, open_edited
from surgeon.processes.files import show_bytes
from surgeon.progress import progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Exported:
    """A checkpoint that was written and proven.

    Attributes:
        folder: where it lies.
        form: that it is stored in, by its name.
        reason: why, in a sentence.
        program: that it runs, over the layers of the original.
        depth: how many layers run one after the other.
        size: of its weights, in bytes.
        proof: that it computes what the program does.
    """

    folder: Path
    form: str
    reason: str
    program: Program
    depth: float
    size: int
    proof: Proof

    @classmethod
    def of(cls, folder: Path, proof: Proof) -> Exported:
        """What an exported checkpoint says of itself."""
        stored = open_stored(folder)
        report = stored.report
        assert report is not None
        program, depth = Program.parse(report["program"]), report["effective_depth"]
        return cls(folder, report["form"], report["reason"], program, depth, stored.size, proof)

    def table(self) -> pd.DataFrame:
        """One row: the folder, and what `surgeon show` says of it first."""
        syncs, program = self.program.sync_points(2), str(self.program)
        row = {"folder": str(self.folder), "form": self.form, "depth": self.depth, "syncs": syncs, "bytes": self.size}
        return pd.DataFrame([row | {"program": program}])

    def __str__(self) -> str:
        return (
            f"effective depth {self.depth:g}, {self.program.sync_points(2)} synchronisations per forward pass on two "
            f"ranks, {show_bytes(self.size)} of weights.\nProof: on {self.proof.tokens} random tokens the logits "
            f"differ from the original's under this program\n{self.proof.differ}"
        )


def export(
    model: str | Path | Recipe | Model | EditedModel | PreTrainedModel,
    folder: str | Path,
    *,
    program: Program | str | None = None,
    original: str | Path | None = None,
    form: str = "auto",
    dtype: str | None = None,
    tokenizer: Any = None,
    adapter: bool = False,
    overwrite: bool = False,
    results: str | Path | Sequence[str | Path] = (),
    factors: str | Path | None = None,
    memory: int | str | None = None,
    training: Training | None = None,
    planned: Callable[[Layout], None] = lambda _: None,
) -> Exported:
    """Write a changed model as a checkpoint, in the most portable form that is exact, with its proof.

    The checkpoint is proven before it gets its name: on random tokens it gives the logits that the original has under
    the program, and those of the model in memory, if it is of one.

    Args:
        model: a recipe or its path (.yaml); a folder, a hub name, "demo" or a model that is open, with `program`; an
            open model that was edited; or a model in memory, edited or not, trained or not, which is left as it is.
        folder: the target.
        program: that the model is to run.
        original: a model in place of the one that the recipe names, which may be another than it was made for.
        form: "plain", "fused", "program", or "auto".
        dtype: of the written weights, "float32", "float16" or "bfloat16"; by default each tensor keeps its own.
        tokenizer: of a model in memory, written in place of the tokenizer's files where it was loaded from. What else
            belongs to the model there goes along: generation settings, processors, licence.
        adapter: of a model in memory with a LoRA adapter of peft, write the adapter apart: the folder has `base` and
            `adapter` then. Without, adapters have to be merged.
        overwrite: replace an existing checkpoint.
        results: what `surgeon.evaluate`, `bench` and `search` wrote, for the model card: files or folders.
        factors: folder for factors that the recipe has calibrated on a text: made there, and kept. By default one
            beside the target, which is removed at the end.
        memory: the most that making these factors may take, in bytes or as text ("2GB").
        training: what a model in memory went through since its edit, where that is to be known of the checkpoint: its
            original is named as the source then, and its program is proven to be the recipe's.
        planned: given the form and the reason for it, before anything of a model's files is written.

    Raises:
        NotProven: if what was written does not compute what the model does, or its program is not the recipe's.
        FileNotFoundError, ValueError: if the model, the recipe or the form cannot be used, saying why.
        FileExistsError: if the target is in the way.
        OSError: if the disk is full or cannot be written; whatever is raised, the target is as it was.
    """
    target, loaded = Path(folder), isinstance(model, nn.Module)
    of_files = {"program": program, "original": original, "results": results, "factors": factors, "memory": memory}
    of_memory = {"tokenizer": tokenizer, "adapter": adapter, "training": training}
    if useless := [name for name, value in (of_files if loaded else of_memory).items() if value]:
        which = "in memory, which is written as it is" if loaded else "that is known by its files"
        raise ValueError(f"{useless[0]} is of no use for a model {which}")
    if isinstance(model, nn.Module):
        more = {"tokenizer": tokenizer, "training": training}
        return _export_loaded(model, target, form, dtype, overwrite, adapter, more)
    check_target(target, overwrite)
    edited = open_edited(model, program, original=original, tokenizer=False)
    source = edited.model
    check_exportable(source)
    kept = Path(factors) if factors else target.with_name(f"{target.name}.factors")
    limit = parse_size(memory) if isinstance(memory, str) else memory
    ready = with_factors(edited, kept, limit, DTYPES.get(dtype or ""))
    plan = plan_export(source, ready.program, form, dtype, ready.factors)
    files = [Path(one) for one in as_list(results)]
    measured = read_measured(files, plan.identity(target.absolute().name)) if files else None
    planned(plan.layout)
    # What is published says nothing of the folders of this machine.
    published = None if ready.recipe is None else replace(ready.recipe, model=source.public_name).to_yaml()
    with progress(f"writing and proving {target}", plan.passes * plan.weight_bytes, "bytes") as advance:
        proof = write_export(plan, target, overwrite, published, advance, measured)
    if ready is not edited and not factors and kept.is_dir():  # choices by weights alone keep nothing there
        shutil.rmtree(kept)
    return Exported.of(target, proof)


def _export_loaded(
    model: Any, target: Path, form: str, dtype: str | None, overwrite: bool, adapter: bool, more: dict[str, Any]
) -> Exported:
    """Write a model in memory, its adapter apart if that is asked for."""
    if not adapter:
        return Exported.of(target, export_loaded(model, target, form=form, dtype=dtype, overwrite=overwrite, **more))
    if form != "auto" or dtype is not None or overwrite or more["training"] is not None:
        raise ValueError("with its adapter apart a model keeps its form and dtype, and gets a new folder")
    from surgeon.exports.adapters import BASE, export_with_adapter

    return Exported.of(target / BASE, export_with_adapter(model, target, tokenizer=more["tokenizer"]))
