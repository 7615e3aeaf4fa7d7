"""Sweeps: a configuration of which several models are trained, each by programs, seeds and learning rates.

    surgeon: 1
    model: {model_type: llama, hidden_size: 128, intermediate_size: 344, num_hidden_layers: 8, num_attention_heads: 4}
    tokenizer: demo
    data: demo:train
    eval_data: demo
    training: {steps: 400, batch: 8}
    sweep:
      programs:
        dense: {}
        ladder: {operations: [ladder: {layers: "0:8"}]}
        tracks: {tracks: {count: 2, depth: 4}}
      seeds: [0, 1, 2]
      learning_rates: [1.0e-3, 2.0e-3]

What stands under a program's name is what would stand in a configuration of it alone: `operations`, `program` or
`tracks`, and `racks`. The first program is what others are compared with. Without `seeds` or `learning_rates` there is
the one of `training`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from copy import copy, deepcopy
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, Strict

from surgeon.errors import did_you_mean, shown
from surgeon.language.recipe import read_document
from surgeon.training.scratch.config import KIND, PROGRAMS, SWEEP, ConfigReader, ScratchConfig

_OF_A_PROGRAM = (*PROGRAMS, "racks")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,80}")  # one that a folder may have


@dataclass(frozen=True)
class SweepKeys:
    """The key `sweep`.

    Attributes:
        programs: by name, the keys of a configuration that say what each is.
        seeds, learning_rates: of each program; those of `training` where there are none.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    programs: Annotated[dict[Annotated[str, Strict()], Annotated[dict[str, Any], Strict()]], Field(min_length=1)]
    seeds: Annotated[list[Annotated[int, Strict(), Field(ge=0)]], Field(min_length=1)] | None = None
    learning_rates: Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1)] | None = None


@dataclass(frozen=True)
class SweptModel:
    """One model of a sweep: which program it has, and what it is trained by."""

    program: str
    config: ScratchConfig

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.program}-lr{self.config.settings.rate:g}-seed{self.config.settings.seed}"


def read_sweep(path: Path) -> tuple[SweptModel, ...]:
    """Read a sweep from a file: program by program, rate by rate, and seed by seed.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: as `parse_sweep`.
    """
    return parse_sweep(read_document(path, KIND), str(path))


def parse_sweep(text: str, source: str = KIND) -> tuple[SweptModel, ...]:
    """Read a sweep from its text; `source` names it in error messages.

    Raises:
        ValueError: if it is no valid configuration with a sweep, naming the line.
    """
    reader = ConfigReader(text, source)
    document = reader.top()
    if SWEEP not in document:
        raise reader.error(1, "the key 'sweep' is missing, which says what to train: sweep: {programs: {...}}")
    keys = reader.validate(SweepKeys, document[SWEEP], (SWEEP,))
    for name in (name for name in _OF_A_PROGRAM if name in document):
        raise reader.error(reader.lines[name,], f"{name} stands under each program of the sweep; move it there")
    models = tuple(_models(reader, keys))
    names = [model.name for model in models]
    for name in (name for name in names if names.count(name) > 1):
        raise reader.error(reader.lines[SWEEP,], f"sweep: {name} would be trained twice; every seed and rate once")
    return models


def _models(reader: ConfigReader, keys: SweepKeys) -> Iterator[SweptModel]:
    for name, given in keys.programs.items():
        place = (SWEEP, "programs", name)
        if _NAME.fullmatch(name) is None:
            raise reader.error(
                reader.lines[place], f"the program's name {shown(name)} is no folder's; use letters, digits and - _ ."
            )
        for key in (key for key in given if key not in _OF_A_PROGRAM):
            raise reader.error(
                reader.lines[*place, key], f"unknown key {shown(key)} of a program; {did_you_mean(key, _OF_A_PROGRAM)}"
            )
        config = _alone(reader, place, given)
        settings = config.settings
        for rate, seed in product(keys.learning_rates or [settings.rate], keys.seeds or [settings.seed]):
            yield SweptModel(name, config.with_settings(learning_rate=rate, seed=seed))


def _alone(reader: ConfigReader, place: tuple[str, ...], given: Mapping[str, Any]) -> ScratchConfig:
    """The configuration of one program, whose keys have the lines where they stand in the sweep."""
    one = copy(reader)
    others = {key: value for key, value in reader.document.items() if key != SWEEP}
    one.document = deepcopy({**others, **given})
    moved = {path[len(place) :]: line for path, line in reader.lines.items() if path[: len(place)] == place}
    one.lines = {**reader.lines, **moved}
    return one.config()
