"""A model from scratch is trained; the record of how it came about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surgeon.checkpoint.training import Training, no_source
from surgeon.opened import open_model
from surgeon.provenance import provenance
from surgeon.training.model import TrainedModel, train_model
from surgeon.training.scratch.build import Blueprint
from surgeon.training.texts import TrainTexts


def train_blueprint(plan: Blueprint, texts: TrainTexts, folder: Path, device: str = "cpu") -> TrainedModel | None:
    """Build a model and train it; a run that was killed goes on where it was.

    Args:
        folder: of the run.
        device: "cpu" or "cuda".

    Returns:
        What came of it; None in every process but the first, where there are several.

    Raises:
        ValueError, OSError: as `train_model`.
    """
    settings, asked = plan.config.settings, plan.config.racks
    return train_model(
        plan.build(),
        texts,
        settings,
        folder,
        program=plan.program,
        identity=plan.identity(),
        racks=plan.racks,
        processes=None if asked is None else asked.process_options,
        seed=settings.seed,
        device=device,
    )


def story_of(blueprint: Blueprint, texts: TrainTexts, found: TrainedModel) -> dict[str, Any]:
    """What is to be known of a run whatever becomes of its model, as JSON values."""
    settings = blueprint.config.settings
    return found.record(texts, settings) | {
        "architecture": blueprint.architecture.model_type,
        "configuration": blueprint.config.published(),
        "program": str(blueprint.program),
        "method": f"{found.method}, from random ones (seed {settings.seed})",
        "tokenizer_hash": blueprint.tokenizer_digest,
        "untrained": found.whole.before.to_json(),
        "trained": found.whole.after.to_json(),
    }


def training_of(blueprint: Blueprint, story: dict[str, Any]) -> Training:
    """What the checkpoint says of its training."""
    return Training(None, blueprint.program, no_source(int(blueprint.architecture.num_hidden_layers)), story)


def record_of(output: Path, story: dict[str, Any]) -> dict[str, Any]:
    """What completes run.json once the checkpoint is written."""
    written, seed = open_model(output), story["settings"]["seed"]
    return provenance(str(output), written.hash, seed=seed, parameters=written.parameters, **story)
