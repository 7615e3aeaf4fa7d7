"""`surgeon export`: write an edited model as a checkpoint that other software loads, proven before it gets its name."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from surgeon.beside import Background, one_at_a_time, torch_threads
from surgeon.checkpoint.tokenizer import keep_tokenizer_class
from surgeon.checkpoint.training import Training
from surgeon.checkpoint.write import Writing, shard_limit, split_into_shards
from surgeon.errors import is_full_disk
from surgeon.exports.plan import DTYPES, ExportPlan, plan_export
from surgeon.exports.prove import Proof, prove, reference_of, require_alike
from surgeon.exports.report import edit_record, write_report
from surgeon.exports.staging import check_target, staged
from surgeon.findings.card import write_card
from surgeon.findings.measured import CardScore
from surgeon.processes.files import check_space, show_bytes, write_json
from surgeon.processes.folders import scratch
from surgeon.progress import Advance, stretch

__all__ = ["DTYPES", "ExportPlan", "plan_export", "write_export"]


def write_export(
    plan: ExportPlan,
    target: Path,
    overwrite: bool = False,
    recipe: str | None = None,
    advance: Advance = lambda _: None,
    measured: Sequence[CardScore] = (),
    alive: Callable[[Tensor], Tensor] | None = None,
    training: Training | None = None,
    complete: Callable[[Path], None] = lambda _: None,
) -> Proof:
    """Write the checkpoint, prove it, and give it its name.

    Args:
        overwrite: replace an existing checkpoint under the target's name.
        recipe: the recipe's text, to be kept in surgeon.json.
        advance: told of every amount of bytes gone through, in all `plan.passes` times `plan.weight_bytes`.
        measured: for the model card.
        alive: logits (batch, tokens, vocabulary) of a model in memory that the original was written from, on tokens.
        training: of that model, whose original is another one then; its recipe counts.
        complete: adds what belongs to the checkpoint to its folder, before that gets its name.

    Raises:
        NotProven: if what was written does not compute what the program does, or it is not that of the recipe that
            the model was trained with.
        FileExistsError: if the target is in the way.
        OSError: if the disk is full or cannot be written. Whatever is raised, what was under the target's name before
            is there as it was, and nothing else.
    """
    original = plan.original
    size = plan.weight_bytes
    source = original.checkpoint
    check_apart(source.folder, target)
    check_target(target, overwrite)
    needed = plan.needed_bytes
    check_space(target.parent, needed)
    for note in plan.notes:
        warnings.warn(note, stacklevel=2)
    edits = edit_record(plan, recipe, training)
    advance = one_at_a_time(advance)
    hashing = Background(source.model_hash)  # reads all files once more, beside everything else
    try:
        with ExitStack() as stack:
            # One thread for each thing that goes on at once; factors are long work of one, and get all but one core.
            stack.enter_context(torch_threads(max(1, torch.get_num_threads() - 1) if plan.has_factors else 1))
            if plan.makes_factors:
                stack.enter_context(plan.factors.inside(stack.enter_context(scratch(target))))

            # Stage: a folder beside the target, with everything but the weights.
            folder = stack.enter_context(staged(target, overwrite))
            write_json(folder / "config.json", plan.config())
            for name, path in plan.companions.files.items():  # links as the files that they lead to
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(path, folder / name)
            if (shipped := plan.layout.form.shipped) is not None:
                shutil.copyfile(shipped.file, folder / shipped.file.name)
                keep_tokenizer_class(folder, original.config)

            # Write, and read back what was written, while the original runs with the program.
            shards = split_into_shards(plan.stored, shard_limit(source))
            with Writing(folder, shards, advance) as writing:
                with stretch(advance, size) as read:
                    reference = reference_of(original, plan.program, read, plan.factors)
                if alive is not None:
                    require_alike(reference, alive, {source.dtype(name) for name in source.names()})

                # Prove: run what is written, as far as it is, and compare.
                with stretch(advance, (plan.passes - 2) * size) as read:
                    proof = prove(reference, folder, plan.layout.form, plan.tensors, writing.wait, read)
                records = writing.finish()

            # Name: the last words, and then the folder becomes the target as the block ends.
            hashing.result()
            write_report(folder, plan, edits, proof, records)
            inherited = write_card(folder, target.absolute().name, measured)
            complete(folder)
    except OSError as error:
        if not is_full_disk(error):
            raise
    else:
        for note in inherited.notes:
            warnings.warn(f"the base model's card: {note}", stacklevel=2)
        return proof
    # Raised outside the handler, to stand for itself: it says more than the system's error that it comes from.
    raise OSError(
        f"the disk of {target.parent} filled up: {show_bytes(needed)} are needed; what was written is removed"
    )


def check_apart(source: Path, target: Path) -> None:
    """Refuse a target that is the original's folder, or lies around or inside it.

    Raises:
        ValueError: naming both.
    """
    first = source.resolve()
    second = target.resolve()
    if first == second or first in second.parents or second in first.parents:
        raise ValueError(f"the target {target} and the model's folder {source} must lie apart; choose another target")
