"""What a checkpoint or a recipe is: its model, its form, and its program over the layers of the unedited model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from surgeon.checkpoint.codas import read_codas
from surgeon.checkpoint.forms import Form, form_of
from surgeon.checkpoint.load import read_config, stored_program
from surgeon.checkpoint.offline import fetching
from surgeon.checkpoint.read import Checkpoint, locate, read_json
from surgeon.checkpoint.training import is_no_source, lacking
from surgeon.errors import shown
from surgeon.language.program import Program
from surgeon.language.recipe import Recipe, read_recipe
from surgeon.models.families import Family, family_of
from surgeon.models.recipe_program import recipe_program
from surgeon.named import is_hub_name, is_recipe, name_of, on_disk
from surgeon.words import plural

REPORT_FILE = "surgeon.json"
MOST_LAYERS = 10_000  # a number beyond is damage, which would fill the memory


@dataclass(frozen=True)
class Weights:
    """How many parameters there are, and their size in bytes."""

    parameters: int
    size: int

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Weights:
        """What a checkpoint's headers say."""
        names = checkpoint.names()
        return cls(sum(math.prod(checkpoint.shape(name)) for name in names), sum(map(checkpoint.num_bytes, names)))


@dataclass(frozen=True)
class Description:
    """What is to be known without reading weights.

    Attributes:
        name: of the checkpoint's folder, or of the recipe.
        form: None for a recipe.
        model: the unedited model's name, where it is known, and there was one.
        config: of the checkpoint (for a recipe, of its model), as `transformers` reads it.
        program: over the layers of the unedited model.
        num_layers: of the unedited model.
        weights: what the files hold; None for a recipe.
        report: surgeon.json, if the checkpoint has one.
        recipe: if that is what is described.
        sources: for each layer of the checkpoint, the unedited model's layers that it comes from, where surgeon.json
            says so; else they follow from the program and the form.
        own: the program of the unedited model, where it is not its layers one after the other (native tracks).
        codas: the racks' ranges of layers and the depth of their codas, where such lie beside it (see codas.py).
    """

    name: str
    form: Form | None
    model: str | None
    config: Any
    family: Family
    program: Program
    num_layers: int
    weights: Weights | None = None
    report: dict[str, Any] | None = None
    recipe: Recipe | None = None
    sources: list[tuple[int, ...]] | None = None
    codas: tuple[list[str], int] | None = None
    own: Program | None = None

    @property
    def unedited(self) -> Program:
        """What the unedited model runs."""
        return self.own or Program.dense(self.num_layers, self.family.steps_per_layer)

    @property
    def training(self) -> dict[str, Any] | None:
        """What surgeon.json says of the model's (last) training; None where there was none."""
        return (self.report or {}).get("trained")

    @property
    def from_scratch(self) -> bool:
        """Whether it was trained from random weights, so that there is no unedited model."""
        return self.report is not None and is_no_source(self.report["source"])

    @property
    def trained(self) -> str | None:
        """That training in a few words; None where there was none."""
        said = self.training
        if said is None:
            return None
        again = "" if "earlier" not in said else "; not for the first time"
        steps, tokens = plural(said["steps"], "step"), plural(said["tokens"], "token")
        return f"{steps} on {tokens} of {said['data']}, {said['method']}{again}"


def describe(what: str | Path) -> Description:
    """Describe a recipe file, a checkpoint folder, or a model by its name.

    Raises:
        FileNotFoundError: if there is no such thing.
        ValueError: if it is damaged, or of an architecture that is not supported.
    """
    return _describe_recipe(Path(what)) if is_recipe(what) else _describe_checkpoint(what)


def _describe_recipe(path: Path) -> Description:
    recipe = read_recipe(path)
    config, own = _config_only(recipe.model)
    family, layers = family_of(config), int(config.num_hidden_layers)
    program = recipe_program(recipe, config, own)
    return Description(path.name, None, recipe.model, config, family, program, layers, recipe=recipe, own=own)


def _config_only(model: str) -> tuple[Any, Program | None]:
    """A model's configuration, and its own program if it has one; of a model on the hub no weights are fetched."""
    if on_disk(model) is not None or not is_hub_name(model):
        checkpoint = Checkpoint(locate(model))
        return read_config(checkpoint), stored_program(checkpoint)
    with fetching(model, "its configuration ", "check the name and the connection"):
        return AutoConfig.from_pretrained(model), None


def _describe_checkpoint(name: str | Path) -> Description:
    checkpoint = Checkpoint(locate(name))
    config = read_config(checkpoint)
    family = family_of(config)
    report, held = _report_of(checkpoint), stored_program(checkpoint)
    layers, form, sources = int(config.num_hidden_layers), form_of(checkpoint), None
    model, program, own = None, Program.dense(layers, family.steps_per_layer), None
    if report is not None:
        model, layers, program = report["source"]["model"], report["source"]["num_layers"], report["program"]
        program = Program.parse(program)
        own = None if (text := report["source"].get("program")) is None else Program.parse(text)
        stored = report.get("stored_layers")
        sources = None if stored is None else list(map(tuple, stored))
    elif held is not None:
        program = held
    return Description(
        name=name_of(name),
        form=form,
        model=model,
        config=config,
        family=family,
        program=program,
        num_layers=layers,
        weights=Weights.of(checkpoint),
        report=report,
        sources=sources,
        codas=_codas_of(checkpoint.folder),
        own=own,
    )


def _codas_of(folder: Path) -> tuple[list[str], int] | None:
    found = read_codas(folder, check_weights=False)
    return None if found is None else (list(found.racks), found.depth)


def _report_of(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """surgeon.json, checked as far as it is used."""
    path = checkpoint.folder / REPORT_FILE
    if not path.exists():
        return None
    report = read_json(path)
    source, proof = report.get("source"), report.get("proof")
    layers = source.get("num_layers") if isinstance(source, dict) else None
    if not (
        isinstance(report.get("program"), str)
        and isinstance(source, dict)
        and (isinstance(source.get("model"), str) or (is_no_source(source) and "trained" in report))
        and type(layers) is int
        and 1 <= layers <= MOST_LAYERS
        and isinstance(source.get("program"), str | None)
    ):
        raise ValueError(f"{path} is not what surgeon export writes: it lacks the program or its source")
    if isinstance(proof, dict) and not _is_proof(proof):
        raise ValueError(f"{path} is not what surgeon export writes: its proof is {shown(proof, 200)}; export again")
    if (trained := report.get("trained")) is not None and not _is_training(trained):
        raise ValueError(f"{path} is not what surgeon export writes: it has trained: {shown(trained, 200)}")
    if (stored := report.get("stored_layers")) is not None and not _are_layers(stored, layers):
        raise ValueError(f"{path} is not what surgeon export writes: it has stored_layers: {shown(stored, 200)}")
    return report


def _is_training(trained: Any) -> bool:
    return isinstance(trained, dict) and lacking(trained) is None


def _are_layers(stored: Any, num_layers: int) -> bool:
    """Whether it is a list of lists of the original's layers."""
    lists = isinstance(stored, list) and all(isinstance(one, list) for one in stored)
    return lists and all(type(layer) is int and 0 <= layer < num_layers for one in stored for layer in one)


def _is_proof(proof: dict[str, Any]) -> bool:
    numbers = all(isinstance(proof.get(name), int | float) for name in ("exact", "written"))
    return numbers and type(proof.get("tokens")) is int and isinstance(proof.get("dtype"), str)
