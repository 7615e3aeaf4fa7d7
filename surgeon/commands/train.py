"""`surgeon train`, `surgeon.train`: a model of any program from scratch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from surgeon.commands.command import command, option, several
from surgeon.commands.options import Form, Overwrite, ProcessDevice, TrainerArguments

if TYPE_CHECKING:
    from surgeon.findings.training import ScratchRun
    from surgeon.training.scratch.config import ScratchConfig

_PROGRAM_SHOWN = 60  # characters


def _show(call: Callable[[], ScratchRun | None]) -> None:
    found = call()
    if found is not None:
        for path in found.files:
            print(path)


@command(_show)
def train(
    config: Annotated[
        str | Path | Mapping[str, Any] | ScratchConfig,
        option(
            "What to train: architecture, program, text, schedule (see recipes/train/).",
            metavar="CONFIG.yaml",
            kind=Path,
        ),
    ],
    output: Annotated[
        str | Path, option("Folder of the checkpoint; its run lies in FOLDER.run.", "--output", "-o")
    ],
    *,
    steps: Annotated[
        int | None, option("Of the optimiser, in place of the configuration's.", least=1)
    ] = None,
    seed: Annotated[
        int | None, option("Of the weights and the order of the text, in its place.", least=0)
    ] = None,
    scale: Annotated[
        float | str | None,
        option(
            "The same shape, small: all widths times this, as many layers, heads and steps, as many tokens for each "
            "parameter, in windows of 128 or more; the vocabulary is the tokenizer's. With --steps the warm-up keeps "
            "its share.",
            metavar="1/64",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, option("A folder, a hub name or demo, in place of the configuration's.")
    ] = None,
    data: Annotated[
        str | Sequence[str] | Mapping[str, float] | None,
        several("Text to train on in its place, as surgeon heal takes it, e.g. demo:train."),
    ] = None,
    eval_data: Annotated[str | None, option("Held-out text in its place, e.g. demo.")] = None,
    show_row: Annotated[
        bool, option("Print one row of the text, with what is trained on between brackets.")
    ] = False,
    arguments: TrainerArguments = None,
    form: Form = "auto",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], option("Of the written weights.")
    ] = "float32",
    overwrite: Overwrite = False,
    device: ProcessDevice = "auto",
) -> ScratchRun | None:
    """Train a model from scratch, from random weights that are the same for every program on an architecture.

    On transformers' Trainer; under accelerate launch or torchrun in several processes. Killed, the same command goes on
    where it was. The result is a checkpoint as surgeon export writes it, which says that it was trained from scratch.

    Returns:
        The run in `output.run`, with the checkpoint as its file; None in every process but the first (torchrun,
        accelerate launch).

    Raises:
        FileNotFoundError, ValueError: if the configuration (with file and line) or a text cannot be used, or
            `output.run` is of another run.
        NotProven: if the checkpoint does not compute what was trained.
        OSError: if the output is in the way or cannot be written.
    """
    from surgeon.checkpoint.describe import Training
    from surgeon.checkpoint.forms import lay_out
    from surgeon.exports.export import check_storage, check_target
    from surgeon.findings.training import ScratchRun
    from surgeon.opened import open_model, provenance
    from surgeon.training.model import announce, finish, say, say_proof, say_stages, train_model
    from surgeon.training.run import run_folder
    from surgeon.training.scratch.build import blueprint
    from surgeon.training.scratch.config import (
        ScratchConfig,
        parse_config,
        parse_scale,
        read_config_file,
        scale_config,
    )
    from surgeon.training.settings import join_processes, parse_trainer_arguments
    from surgeon.training.texts import parse_texts

    target = Path(output)
    check_storage(form, dtype)
    check_target(target, overwrite)
    if isinstance(config, Mapping):  # JSON is YAML
        read = parse_config(json.dumps(config))
    else:
        read = config if isinstance(config, ScratchConfig) else read_config_file(Path(config))
    text = None if data is None else parse_texts(data)
    instead: dict[str, Any] = {"tokenizer": tokenizer, "data": text, "eval_data": eval_data}
    read = replace(read, **{name: value for name, value in instead.items() if value is not None})
    if scale is not None:
        read = scale_config(read, scale if isinstance(scale, int | float) else parse_scale(scale), steps)
    plan = blueprint(
        read.with_settings(steps=steps, seed=seed, arguments=parse_trainer_arguments(arguments))
    )
    if form != "auto":
        # Refuses what could not be written, untrained.
        lay_out(plan.program, plan.family, plan.architecture, form)
    processes, where = join_processes(device)
    texts = plan.texts()
    program = str(plan.program)
    if len(program) > _PROGRAM_SHOWN:
        program = f"{program[: _PROGRAM_SHOWN - 3]}..."
    seeded = f"{plan.parameters:,} random weights (seed {plan.config.settings.seed})"
    what = f"{plan.family.name} of {seeded}, program {program}"
    announce(processes, where, what, texts, plan.config.settings, plan.tokenizer, show_row)
    folder = run_folder(target)
    found = train_model(
        plan.build(),
        texts,
        plan.config.settings,
        folder,
        program=plan.program,
        identity=plan.identity(),
        racks=plan.config.racks,
        seed=plan.config.settings.seed,
        device=where,
    )
    if found is None:
        return None
    say(*found.lines())
    say_stages({"untrained": found.whole.before, "trained": found.whole.after})
    from surgeon.named import public

    settings = plan.config.settings
    story = found.record(texts, settings) | {
        "architecture": plan.architecture.model_type,
        "configuration": plan.config.to_yaml(public),  # without the places of files on this machine
        "program": str(plan.program),
        "method": f"{found.method}, from random ones (seed {settings.seed})",
        "tokenizer_hash": plan.tokenizer_digest,
        "untrained": found.whole.before.to_json(),
        "trained": found.whole.after.to_json(),
    }
    no_source = {"model": None, "num_layers": int(plan.architecture.num_hidden_layers)}
    training = Training(None, plan.program, no_source, story)
    proof = found.write(
        target, form=form, dtype=dtype, tokenizer=plan.tokenizer, overwrite=overwrite, training=training
    )
    say_proof(proof, "the configuration's")
    written = open_model(target)
    finish(
        found,
        provenance(
            str(target),
            written.hash,
            seed=plan.config.settings.seed,
            parameters=written.parameters,
            **story,
        ),
    )
    return replace(ScratchRun.read(folder), files=(target,))
