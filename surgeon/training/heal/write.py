"""A healed model as a checkpoint, and the record of how it came about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from surgeon.checkpoint.training import Training
from surgeon.exports.export import DTYPES, source_record
from surgeon.exports.in_memory import export
from surgeon.exports.prove import Proof
from surgeon.models.edit import decoder_layers
from surgeon.models.edited_layers import EditedLayers
from surgeon.models.weights import Names
from surgeon.provenance import provenance
from surgeon.quality.text import TextQuality
from surgeon.training.heal.subject import HealSubject
from surgeon.training.run import Trained
from surgeon.training.settings import TrainSettings
from surgeon.training.texts import TrainTexts


def record_of(subject: HealSubject, texts: TrainTexts, settings: TrainSettings, found: Trained) -> dict[str, Any]:
    """What is to be known of a run, as JSON values: run.json, and the checkpoint's own record."""
    judged = subject.edited if subject.original is None else subject.original
    return provenance(
        subject.edited.model.name,
        judged.model.hash,
        seed=settings.seed,
        program=str(subject.program),
        recipe=None if subject.recipe is None else subject.recipe.to_yaml(),
        method=settings.method,
        **texts.record(),
        window=texts.training.ids.shape[1],
        settings=settings.to_json(),
        steps=found.steps,
        tokens=found.tokens,
        seconds=found.seconds,
        original=_json(found.original),
        edited=_json(found.before),
        healed=_json(found.after),
    )


def check_adapter(student: PreTrainedModel, settings: TrainSettings) -> None:
    """Refuse, before it is trained, what could not be written as a base and an adapter.

    Raises:
        ValueError: if there are no adapters, or the edit has sublayers that no layer has.
    """
    if settings.lora is None:
        raise ValueError("--keep-adapter keeps an adapter, and there is none; add --lora RANK")
    layers = decoder_layers(student)
    assert isinstance(layers, EditedLayers)
    derived = next(filter(layers.is_derived, layers.program.sublayers()), None)
    if derived is not None:
        raise ValueError(
            f"{derived} is stored as a layer that the model has not while it is trained, so that an adapter does not "
            "fit it; leave --keep-adapter out, and the adapter is merged"
        )


def write_healed(
    found: Trained,
    subject: HealSubject,
    record: dict[str, Any],
    output: Path,
    form: str = "auto",
    dtype: str | None = None,
    overwrite: bool = False,
    write: Callable[..., Proof] = export,
) -> Proof:
    """Write the healed model as a checkpoint, with its adapters merged, its proof, and what it went through.

    Args:
        record: of the run (`record_of`).
        form, dtype: as `surgeon.export` takes them; by default what the original is stored in.
        write: `surgeon.export`, or what writes something beside.

    Raises:
        NotProven: if what was written is not the model, or its program not the recipe's.
        OSError, ValueError: as `surgeon.export`.
    """
    kept = {name: value for name, value in record.items() if name not in ("command", "model", "recipe", "program")}
    if subject.report is not None and "trained" in subject.report:
        kept["earlier"] = subject.report["trained"]
    training = Training(_published(subject), subject.program, _source_of(subject), kept)
    stored = dtype or _stored_dtype(subject)
    return write(found.merged(), output, form=form, dtype=stored, overwrite=overwrite, training=training)


def _published(subject: HealSubject) -> str | None:
    """The recipe's text, without the place where its model lies on this machine."""
    if subject.report is not None:
        recipe: str | None = subject.report.get("recipe")
        return recipe
    if subject.recipe is None:
        return None
    return replace(subject.recipe, model=subject.edited.model.public_name).to_yaml()


def _source_of(subject: HealSubject) -> dict[str, Any]:
    """What surgeon.json says of the original."""
    if subject.report is not None:
        source: dict[str, Any] = subject.report["source"]
        return source
    return source_record(subject.edited.model)


def _stored_dtype(subject: HealSubject) -> str:
    """What the edited model's weights are stored in, by its embedding."""
    model = subject.edited.model
    held = model.checkpoint.dtype(Names(model.checkpoint, model.family).of(f"{model.family.embedding}.weight"))
    return next((name for name, dtype in DTYPES.items() if dtype == held), "float32")


def _json(quality: TextQuality | None) -> dict[str, object] | None:
    return None if quality is None else quality.to_json()
