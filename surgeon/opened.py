"""What is evaluated: a checkpoint, or what a recipe makes of one, or one under a program of the user's own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from surgeon.checkpoint.load import device_map_for, load, read_config, stored_program
from surgeon.checkpoint.read import Checkpoint, locate, read_json
from surgeon.checkpoint.texts import open_tokenizer
from surgeon.errors import did_you_mean
from surgeon.language.program import Program
from surgeon.language.recipe import parse_recipe, read_document
from surgeon.models.edit import check_layers, edit
from surgeon.models.families import family_of
from surgeon.models.recipe_program import recipe_program
from surgeon.models.weights import FactorSource
from surgeon.named import is_recipe
from surgeon.provenance import provenance

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class UnloadedModel:
    """A model that has not been loaded yet.

    Attributes:
        name: as the user named it: a folder, a hub name, a recipe.
        model: the folder or hub name of its weights.
        program: what to run, or None for what the checkpoint runs by itself.
        recipe: the recipe's text, if it is one.
        factors: of matrices that the program has a rank for; by default their truncated singular values.
        factors_identity: what the values of such factors follow from, as JSON values.
    """

    name: str
    model: str
    checkpoint: Checkpoint
    config: Any
    tokenizer: Any
    program: Program | None = None
    recipe: str | None = None
    factors: FactorSource | None = None
    factors_identity: dict[str, Any] | None = None

    @property
    def positions(self) -> int:
        """How many tokens the model can read at once."""
        return int(self.config.max_position_embeddings)

    @property
    def runs(self) -> str:
        """The program that is evaluated, as text."""
        if self.program is not None:
            return str(self.program)
        layers, family = self.config.num_hidden_layers, family_of(self.config)
        return str(stored_program(self.checkpoint) or Program.dense(layers, family.steps_per_layer))

    def load(self, device: str = "auto") -> PreTrainedModel:
        """The model, under its program, on the device; for cuda one GPU that has room for it, else all of them."""
        where = choose_device(device)
        places = device_map_for(self.checkpoint, self.program) if where == "cuda" else None
        model = load(self.checkpoint.folder, device_map=places)
        return model if self.program is None else edit(model, self.program, factors=self.factors)

    def identity(self, model_hash: str, device: str) -> dict[str, Any]:
        """What a model's answers on some device depend on, as JSON values."""
        generation = self.checkpoint.folder / "generation_config.json"
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        words = json.dumps(self.tokenizer.get_vocab(), sort_keys=True) if backend is None else backend.to_str()
        return {
            "model_hash": model_hash,
            "generation": read_json(generation) if generation.is_file() else None,  # penalties, end tokens
            "program": self.runs,
            "tokenizer": words,
            "special": self.tokenizer.special_tokens_map,
            "device": choose_device(device),  # numbers differ a little, and 16-bit weights are computed as such
            "lm_eval": version("lm_eval"),
            **({} if self.factors_identity is None else {"factors": self.factors_identity}),
        }

    def provenance(self, model_hash: str, **more: Any) -> dict[str, Any]:
        """The record that goes into the results."""
        if self.recipe is not None:
            more = {"recipe": self.recipe} | more
        return provenance(self.model, model_hash, program=self.runs, **more)


def open_candidate(name: str, program: str | None = None) -> UnloadedModel:
    """Check a model's files, its program and its tokenizer; weights are read only to tell if a recipe is for them.

    Args:
        name: a checkpoint folder (plain, fused, or with a program), a hub name, "demo", or a recipe (.yaml).
        program: to run in place of the checkpoint's own.

    Raises:
        FileNotFoundError: if there is no such model or recipe, or a file of it is missing.
        ValueError: if a file is damaged, the program does not fit, there is no tokenizer, or a recipe was made for
            another model.
    """
    recipe = text = None
    if is_recipe(name):
        if program is not None:
            raise ValueError(f"{name} is a recipe, which has a program of its own; give its model with --program")
        text = read_document(Path(name), "recipe")
        recipe = parse_recipe(text, name)
    model = name if recipe is None else recipe.model
    checkpoint = Checkpoint(locate(model))
    config = read_config(checkpoint)
    chosen = Program.parse(program) if program is not None else None
    if recipe is not None:
        chosen = recipe_program(recipe, config, stored_program(checkpoint))
        if recipe.weights is not None:
            recipe.require_model(checkpoint.model_hash(), checkpoint.weights_hash())
    if chosen is not None:
        check_layers(chosen, config.num_hidden_layers)
    return UnloadedModel(name, model, checkpoint, config, open_tokenizer(checkpoint.folder), chosen, text)


def choose_device(device: str) -> str:
    """The device to compute on: "cpu" or "cuda"; "auto" is cuda where there is one.

    Raises:
        ValueError: if it is unknown, or there is none.
    """
    if device not in DEVICES:
        raise ValueError(f"unknown device {device!r}; {did_you_mean(device, DEVICES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no GPU that this PyTorch can use; use --device cpu")
    return "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
