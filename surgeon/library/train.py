"""`surgeon.train`: a model of any program from scratch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from surgeon.checkpoint.forms import lay_out
from surgeon.checkpoint.training import Training, no_source
from surgeon.exports.plan import check_storage
from surgeon.exports.staging import check_target
from surgeon.findings.scratch import ScratchRun
from surgeon.library.training import announce, say, say_proof, say_stages
from surgeon.named import public
from surgeon.opened import open_model
from surgeon.provenance import provenance
from surgeon.training.arguments import join_processes
from surgeon.training.model import TrainedModel, train_model
from surgeon.training.resume import run_folder
from surgeon.training.scratch.build import Blueprint, blueprint
from surgeon.training.scratch.config import ScratchConfig, parse_config, read_config_file
from surgeon.training.scratch.scale import scaled
from surgeon.training.texts import TrainTexts

_PROGRAM_SHOWN = 60  # characters


def train(
    config: str | Path | Mapping[str, Any] | ScratchConfig,
    output: str | Path,
    *,
    steps: int | None = None,
    seed: int | None = None,
    scale: float | None = None,
    tokenizer: str | None = None,
    data: str | Mapping[str, float] | None = None,
    eval_data: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    form: str = "auto",
    dtype: str = "float32",
    overwrite: bool = False,
    show_row: bool = False,
    device: str = "auto",
) -> ScratchRun | None:
    """Train a model from random weights, which are the same for every program on an architecture.

    A run that was killed goes on where it was.

    Args:
        config: a YAML file, as recipes/train/ has them, what was read of one, or its keys as a mapping.
        output: folder of the checkpoint; its run lies beside it, in `output.run`.
        steps, seed, tokenizer, data, eval_data: in place of the configuration's.
        scale: of all widths: the same shape, small, on as many tokens for each parameter
            (`surgeon.training.scratch.scale`).
        arguments: of transformers' TrainingArguments, beside the configuration's or in their place.
        form, dtype, overwrite: as `surgeon.export` takes them.
        show_row: as `surgeon.heal` has it.
        device: "cpu", "cuda" (one GPU for each process), or "auto".

    Returns:
        What `output.run` holds, with the checkpoint as its file; None in every process but the first, where there are
        several (torchrun, accelerate launch).

    Raises:
        FileNotFoundError, ValueError: if the configuration or a text cannot be used, with file and line, or
            `output.run` is of another run.
        NotProven: if what was written does not compute what was trained.
        OSError: if the output is in the way or cannot be written, or the disk is too full.
    """
    target = Path(output)
    check_storage(form, dtype)
    check_target(target, overwrite)
    if isinstance(config, Mapping):  # JSON is YAML
        read = parse_config(json.dumps(config))
    else:
        read = config if isinstance(config, ScratchConfig) else read_config_file(Path(config))
    texts_given = {"tokenizer": tokenizer, "data": data, "eval_data": eval_data}
    plan = blueprint(as_asked(read, texts_given, scale, steps=steps, seed=seed, arguments=arguments or {}))
    if form != "auto":
        lay_out(plan.program, plan.family, plan.architecture, form)  # refuses what could not be written, untrained
    processes, where = join_processes(device)
    texts = plan.texts()
    announce(processes, where, _in_words(plan), texts, plan.config.settings, plan.tokenizer, show_row)
    folder = run_folder(target)
    found = train_blueprint(plan, texts, folder, where)
    if found is None:
        return None
    say(*found.lines())
    say_stages({"untrained": found.whole.before, "trained": found.whole.after})
    story = story_of(plan, texts, found)
    training = Training(None, plan.program, no_source(int(plan.architecture.num_hidden_layers)), story)
    proof = found.write(
        target, form=form, dtype=dtype, tokenizer=plan.tokenizer, overwrite=overwrite, training=training
    )
    say_proof(proof, "the configuration's")
    written, settings = open_model(target), plan.config.settings
    found.finish(provenance(str(target), written.hash, seed=settings.seed, parameters=written.parameters, **story))
    return replace(ScratchRun.read(folder), files=(target,))


def as_asked(config: ScratchConfig, texts: Mapping[str, Any], scale: float | None, **settings: Any) -> ScratchConfig:
    """A configuration with what is given in its place, and at a scale; what is None stays.

    Args:
        texts: keys of the configuration.
        settings: fields of `TrainSettings`.

    Raises:
        ValueError: as `scaled` and `TrainSettings`.
    """
    read = replace(config, **{name: value for name, value in texts.items() if value is not None})
    read = read if scale is None else scaled(read, scale, settings.get("steps"))
    return read.with_settings(**settings)


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
        "configuration": blueprint.config.to_yaml(public),  # without the places of files on this machine
        "program": str(blueprint.program),
        "method": f"{found.method}, from random ones (seed {settings.seed})",
        "tokenizer_hash": blueprint.tokenizer_digest,
        "untrained": found.whole.before.to_json(),
        "trained": found.whole.after.to_json(),
    }


def _in_words(plan: Blueprint) -> str:
    program, seed = str(plan.program), plan.config.settings.seed
    program = program if len(program) <= _PROGRAM_SHOWN else f"{program[: _PROGRAM_SHOWN - 3]}..."
    return f"{plan.family.name} of {plan.parameters:,} random weights (seed {seed}), program {program}"
