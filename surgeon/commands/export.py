"""`surgeon export`, `surgeon.export`: a changed model as a checkpoint for other software; `surgeon card`: its card."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from surgeon.commands.command import command, keyword, option
from surgeon.commands.options import Results

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from surgeon.checkpoint.describe import Training
    from surgeon.checkpoint.forms import Layout
    from surgeon.exports.prove import Proof
    from surgeon.findings.exported import ExportRun
    from surgeon.findings.measured import CardScore
    from surgeon.language.program import Program
    from surgeon.language.recipe import Recipe
    from surgeon.opened import EditedModel, Model


def _show(call: Callable[..., ExportRun]) -> None:
    from surgeon.machine import share_heaps

    share_heaps()
    found = call(planned=lambda layout: print(f"{layout.form} form: {layout.reason}.", file=sys.stderr))
    print(found, file=sys.stderr)
    print(found.folder)


@command(_show)
def export(
    model: Annotated[
        str | Path | Recipe | Model | EditedModel | PreTrainedModel,
        option("Recipe (YAML): a model and the operations on it.", metavar="RECIPE", kind=Path),
    ],
    folder: Annotated[str | Path, option("Folder to write.", "--output", "-o")],
    *,
    program: Annotated[
        Program | str | None,
        keyword(
            "That the model is to run: of a folder, a hub name, or a model that is open, in place of a recipe."
        ),
    ] = None,
    form: Annotated[
        Literal["auto", "plain", "fused", "program"],
        option(
            "plain: an ordinary checkpoint of whole layers. fused: layers side by side stored as one wide layer "
            "(transformers and vLLM, with a small modeling file inside). program: anything else (transformers, "
            "likewise; vLLM, too, where it is low-rank only). auto: the first of these that is exact."
        ),
    ] = "auto",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        option("Store weights in this dtype, not in the original's."),
    ] = None,
    original: Annotated[
        str | Path | None,
        option("Folder or hub name, instead of the recipe's model.", "--model", kind=str),
    ] = None,
    overwrite: Annotated[
        bool,
        option(
            "Replace an existing checkpoint: a folder with the surgeon.json of an export, or with a model's "
            "config.json and safetensors weights. One that holds anything else too (folders, files of yours) is kept."
        ),
    ] = False,
    results: Results = (),
    factors: Annotated[
        str | Path | None,
        option(
            "Folder for factors that the recipe has calibrated on a text: made there, and kept. Default: one beside "
            "the output, which is removed once the checkpoint is written."
        ),
    ] = None,
    memory: Annotated[
        int | str | None,
        option(
            "The most memory that making such factors may take, model included, such as 512MB or 2GB.",
        ),
    ] = None,
    tokenizer: Annotated[
        Any,
        keyword(
            "Of a model in memory, edited or not, trained or not, which is left as it is: written in place of the "
            "tokenizer's files where it was loaded from."
        ),
    ] = None,
    adapter: Annotated[
        bool,
        keyword(
            "Of a model in memory with a LoRA adapter of peft, write the adapter apart: the folder has `base` and "
            "`adapter` then. Without, adapters have to be merged."
        ),
    ] = False,
    training: Annotated[
        Training | None,
        keyword(
            "What a model in memory went through since its edit, where that is to be known of the checkpoint: its "
            "original is named as the source then, and its program is proven to be the recipe's."
        ),
    ] = None,
    planned: Annotated[
        Callable[[Layout], None],
        keyword(
            "Called with the form and the reason for it, before anything of a model's files is written."
        ),
    ] = lambda _: None,
) -> ExportRun:
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

    Raises:
        NotProven: if the checkpoint does not compute what the model does, or its program is not the recipe's.
        FileNotFoundError, ValueError: if model, recipe or form cannot be used.
        FileExistsError: if the target is in the way.
        OSError: if it cannot be written; whatever is raised, the target is as it was.
    """
    from torch import nn

    from surgeon.analysis.factors.make_factors import with_factors
    from surgeon.commands.command import as_list
    from surgeon.exports import in_memory
    from surgeon.exports.export import DTYPES, check_exportable, check_target, plan_export, write_export
    from surgeon.exports.in_memory import BASE, export_with_adapter
    from surgeon.findings.measured import read_measured
    from surgeon.machine import parse_size
    from surgeon.opened import open_edited
    from surgeon.progress import progress

    target = Path(folder)
    others: dict[str, Any] = {"tokenizer": tokenizer, "adapter": adapter, "training": training}
    which = "that is known by its files"
    if isinstance(model, nn.Module):
        others = {
            "program": program,
            "original": original,
            "results": results,
            "factors": factors,
            "memory": memory,
        }
        which = "in memory, which is written as it is"
    if useless := [name for name, value in others.items() if value]:
        raise ValueError(f"{useless[0]} is of no use for a model {which}")
    if isinstance(model, nn.Module) and adapter:
        if form != "auto" or dtype is not None or overwrite or training is not None:
            raise ValueError(
                "with its adapter apart a model keeps its form and dtype, and gets a new folder"
            )
        adapted: Any = model
        proof = export_with_adapter(adapted, target, tokenizer=tokenizer)
        return _read_run(target / BASE, proof)
    if isinstance(model, nn.Module):
        proof = in_memory.export(
            model,
            target,
            form=form,
            dtype=dtype,
            overwrite=overwrite,
            tokenizer=tokenizer,
            training=training,
        )
        return _read_run(target, proof)
    check_target(target, overwrite)
    edited = open_edited(model, program, original=original, tokenizer=False)
    source = edited.model
    check_exportable(source)
    kept = Path(factors) if factors else target.with_name(f"{target.name}.factors")
    limit = parse_size(memory) if isinstance(memory, str) else memory
    ready = with_factors(edited, kept, limit, DTYPES.get(dtype or ""))
    plan = plan_export(source, ready.program, form, dtype, ready.factors)
    files = [Path(one) for one in as_list(results)]
    measured: Sequence[CardScore] = ()
    if files:
        measured = read_measured(files, plan.identity(target.absolute().name))
    planned(plan.layout)
    # What is published says nothing of the folders of this machine.
    if ready.recipe is None:
        published = None
    else:
        published = replace(ready.recipe, model=source.public_name).to_yaml()
    with progress(f"writing and proving {target}", plan.passes * plan.weight_bytes, "bytes") as advance:
        proof = write_export(plan, target, overwrite, published, advance, measured)
    # Choices by weights alone keep nothing there.
    if ready is not edited and not factors and kept.is_dir():
        shutil.rmtree(kept)
    return _read_run(target, proof)


def _read_run(folder: Path, proof: Proof) -> ExportRun:
    """Read the report of a checkpoint just written."""
    from surgeon.checkpoint.config import open_stored
    from surgeon.findings.exported import ExportRun

    return replace(ExportRun.read(folder), proof=proof, size=open_stored(folder).size)


@command()
def card(
    checkpoint: Annotated[str | Path, option("A folder that surgeon export wrote.", metavar="DIR")],
    results: Results = (),
    overwrite: Annotated[
        bool, option("Replace a README.md that you have changed or written yourself, too.")
    ] = False,
) -> Path:
    """Write the model card (README.md) of an exported checkpoint, with measurements of it.

    It has the measurements that are given now, and no earlier ones. They must be of this checkpoint's weights, or of
    its source's weights under the same program or unedited: others are refused. A README.md that surgeon did not
    write, or that was changed since, is kept unless you say --overwrite. Prints the file's name.
    """
    from surgeon.checkpoint.belongings import CARD_FILE
    from surgeon.commands.command import as_list
    from surgeon.findings.card import identity_of, open_edited, require_own_card, write_card
    from surgeon.findings.measured import read_measured

    folder = Path(checkpoint)
    found = open_edited(folder)
    if not overwrite:
        require_own_card(folder)
    measured: Sequence[CardScore] = ()
    if results:
        measured = read_measured([*map(Path, as_list(results))], identity_of(found))
    write_card(folder, found.name, measured)
    return folder / CARD_FILE
