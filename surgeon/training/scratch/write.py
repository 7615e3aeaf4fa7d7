"""A model from scratch as a checkpoint, and the record of how it came about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surgeon.checkpoint.describe import Weights
from surgeon.checkpoint.read import Checkpoint
from surgeon.checkpoint.training import Training, no_source
from surgeon.exports.prove import Proof
from surgeon.provenance import provenance
from surgeon.training.scratch.build import Blueprint
from surgeon.training.scratch.run import ScratchTrained
from surgeon.training.texts import TrainTexts


def story_of(blueprint: Blueprint, texts: TrainTexts, found: ScratchTrained) -> dict[str, Any]:
    """What is to be known of a run whatever becomes of its model, as JSON values."""
    settings, whole = blueprint.config.settings, found.whole
    racks = {} if found.racks is None else {"racks": found.racks}
    return racks | {
        "architecture": blueprint.architecture.model_type,
        "configuration": blueprint.config.published(),
        "program": str(blueprint.program),
        "method": f"{found.method}, from random ones (seed {settings.seed})",
        "tokenizer_hash": blueprint.tokenizer_digest,
        **texts.record(),
        "window": texts.training.ids.shape[1],
        "settings": settings.to_json(),
        "steps": whole.steps,
        "tokens": whole.tokens,
        "seconds": whole.seconds,
        "untrained": whole.before.to_json(),
        "trained": whole.after.to_json(),
    }


def record_of(output: Path, story: dict[str, Any]) -> dict[str, Any]:
    """What completes run.json once the checkpoint is written."""
    checkpoint, seed = Checkpoint(output), story["settings"]["seed"]
    parameters = Weights.of(checkpoint).parameters
    return provenance(str(output), checkpoint.model_hash(), seed=seed, parameters=parameters, **story)


def write_trained(
    found: ScratchTrained,
    blueprint: Blueprint,
    story: dict[str, Any],
    output: Path,
    form: str = "auto",
    dtype: str = "float32",
    overwrite: bool = False,
) -> Proof:
    """Write the model with its tokenizer as a checkpoint, its proof, and what it went through.

    Args:
        story: of the run (`story_of`).
        form, dtype: as `surgeon.export` takes them.

    Raises:
        NotProven: if what was written is not the model.
        OSError, ValueError: as `surgeon.export`.
    """
    layers = int(blueprint.architecture.num_hidden_layers)
    training = Training(None, blueprint.program, no_source(layers), story)
    tokenizer = blueprint.tokenizer
    return found.write(
        found.whole.merged(),
        output,
        form=form,
        dtype=dtype,
        tokenizer=tokenizer,
        overwrite=overwrite,
        training=training,
    )
