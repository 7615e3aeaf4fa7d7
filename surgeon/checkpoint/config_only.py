"""A model's configuration alone: of a folder, a config.json, or a name on the hub, whether there are weights or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from transformers import CONFIG_MAPPING

from surgeon.checkpoint.forms.base import config_beside
from surgeon.checkpoint.load import program_in
from surgeon.checkpoint.offline import fetching
from surgeon.checkpoint.read import DEMO, read_json
from surgeon.checkpoint.report import REPORT_FILE
from surgeon.checkpoint.training import is_no_source
from surgeon.demo import demo_model
from surgeon.language.program import Program
from surgeon.models.edit import PROGRAM_KEY, PROGRAM_PREFIX
from surgeon.models.families import family_named, family_of
from surgeon.models.families.fused import FUSED
from surgeon.named import is_hub_name, on_disk

CONFIG = "config.json"


class ConfigOnly(NamedTuple):
    """What a config.json says.

    Attributes:
        config: as `transformers` reads it.
        program: that the checkpoint runs, if it has one of its own.
    """

    config: Any
    program: Program | None


def read_config_only(what: str | Path) -> ConfigOnly:
    """Read the configuration of a model: a folder or its config.json, demo, or a name on the hub.

    Of a name on the hub nothing else is fetched, or it is taken from the hub's cache.

    Raises:
        FileNotFoundError: if there is no such model.
        ValueError: if it is not what a supported architecture needs, or a checkpoint in the fused form whose model is
            not there.
    """
    path = _find(what)
    entries = read_json(path)
    model_type = str(entries.get("model_type"))
    if model_type == FUSED.model_type:
        return _of_source(path)
    family = family_named(model_type.removeprefix(PROGRAM_PREFIX) if PROGRAM_KEY in entries else model_type)
    try:
        config = config_beside(entries, CONFIG_MAPPING[family.model_type])
        family_of(config)
    except Exception as error:  # whatever it trips over is a fault of the file
        raise ValueError(f"{path} is not a valid configuration: {error}") from error
    return ConfigOnly(config, program_in(entries, path))


def _of_source(path: Path) -> ConfigOnly:
    """What a checkpoint in the fused form was made of, and the program that it runs: its layers are several in one."""
    record = path.with_name(REPORT_FILE)
    advice = "give the recipe that it was made by, or the model it was made of with --program"
    if not record.is_file():
        raise ValueError(
            f"{path} is of a checkpoint in the fused form, and there is no {REPORT_FILE} beside it; {advice}"
        )
    report = read_json(record)
    source, program = report.get("source"), report.get("program")
    if isinstance(source, dict) and is_no_source(source):
        raise ValueError(
            f"{path} is of a checkpoint in the fused form that was trained from scratch, so that there is no model "
            "that it was made of; give the config.json of a model with its layers, with --program"
        )
    model = source.get("model") if isinstance(source, dict) else None
    if not isinstance(model, str) or not isinstance(program, str):
        raise ValueError(f"{record} is not what surgeon export writes: it lacks the program or its source; {advice}")
    try:
        config, _ = read_config_only(model)
    except OSError as error:
        raise ValueError(f"{path} is of a checkpoint in the fused form, made of {model}: {error}; {advice}") from error
    return ConfigOnly(config, Program.parse(program))


def _find(what: str | Path) -> Path:
    name, there = str(what), on_disk(what)
    if there is not None:
        if not there.is_dir() and there.suffix.lower() != ".json":
            raise FileNotFoundError(
                f"{there} is no {CONFIG}; give one, a folder with one, a name on the hub, or a recipe"
            )
        return there / CONFIG if there.is_dir() else there
    if name == DEMO:
        return demo_model() / CONFIG
    if not is_hub_name(name):
        raise FileNotFoundError(f"there is no model folder {name}")
    advice = "check the name and the connection, or give the path of a config.json"
    with fetching(name, "its configuration ", advice):
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(name, CONFIG))
