"""Configurations of models from scratch: the YAML a user writes for `surgeon train`.

    surgeon: 1
    model: {model_type: llama, hidden_size: 128, intermediate_size: 344, num_hidden_layers: 8, num_attention_heads: 4}
    tokenizer: demo
    operations:
      - ladder: {layers: "0:8"}
    data: demo:train
    eval_data: demo
    window: 128
    training: {steps: 400, batch: 8, learning_rate: 2.0e-3, schedule: cosine, warmup: 20}

`model` is a configuration as `transformers` knows it. `operations` are a recipe's, on a model of that many layers. In
their place `program` may stand, as text, or `tracks: {count: 2, depth: 4}` for a native Parallel Track model: 2 narrow
tracks that meet every 4 layers, as large together as the layers of `model` (see tracks.py). Without any of these the
model is the plain one. With `racks: {ranges: ["0:4", "4:8"], coda: 1}` it is trained rack by rack, each of which has a
coda of so many layers and a loss of its own (see training/racks/); with `processes: true` in it all racks at once, and
then their codas may be averaged (`average: 100`), and each rack may be several processes (`replicas: 2`). Every error
names the file, the line, the value and what would be right.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from surgeon.language.operations.applied import AppliedOperation, in_braces
from surgeon.language.program import Program
from surgeon.language.recipe import FORMAT, DocumentReader, Recipe, read_document
from surgeon.language.yaml import line_of
from surgeon.named import is_recipe, on_disk, public
from surgeon.quality.data import DEFAULT_WINDOW
from surgeon.training.arguments import read_trainer_argument
from surgeon.training.settings import TrainSettings
from surgeon.training.texts import HELD_OUT_TOKENS

KIND = "configuration"
PROGRAMS = ("operations", "program", "tracks")  # of which there is at most one
# As YAML 1.1 does not read them, and people and JSON write them: 2e-3 is a text there, 2.0e-3 a number.
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d{1,3}")
_CHECKED = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class TrainingSection(BaseModel):
    """The key `training`: what is not given is as here."""

    model_config = _CHECKED

    steps: int | None = Field(default=None, ge=1)
    epochs: float | None = Field(default=None, gt=0)
    batch: int = Field(default=8, ge=1)
    micro_batch: int | None = Field(default=None, ge=1)
    learning_rate: float = Field(default=1e-3, gt=0)
    schedule: str = "cosine"
    warmup: int = Field(default=0, ge=0)
    seed: int = Field(default=0, ge=0)
    evaluate_every: int = Field(default=100, ge=1)
    save_every: int = Field(default=100, ge=1)
    patience: int | None = Field(default=None, ge=1)
    arguments: dict[str, Any] = {}


class TracksSection(BaseModel):
    """The key `tracks`: how many there are, and how many layers they run between two joins."""

    model_config = _CHECKED

    count: int = Field(ge=2)
    depth: int = Field(ge=1)


class RacksSection(BaseModel):
    """The key `racks`: ranges of the program's layers, how many layers a coda has, and how racks are trained.

    With `processes` all at once, a process each (otherwise one after the other, to the same result), which run at most
    `ahead` micro-batches ahead of each other and may `average` their codas: never, every N steps, always. Each rack may
    be several processes, `replicas` that share its batches.
    """

    model_config = _CHECKED

    ranges: list[str] = Field(min_length=2)
    coda: int = Field(default=1, ge=0)
    processes: bool = False
    average: int | str = "never"
    ahead: int = Field(default=4, ge=1)
    replicas: int = Field(default=1, ge=1)


class ScratchKeys(BaseModel):
    """What stands at the top of a configuration, beside `surgeon` and `operations`."""

    model_config = _CHECKED

    model: dict[str, Any]
    tokenizer: str = Field(min_length=1)
    program: str | None = None
    tracks: TracksSection | None = None
    racks: RacksSection | None = None
    data: str = Field(min_length=1)
    eval_data: str | None = Field(default=None, min_length=1)
    eval_tokens: int = Field(default=HELD_OUT_TOKENS, ge=2)
    tokens: int | None = Field(default=None, ge=1)
    window: int = Field(default=DEFAULT_WINDOW, ge=2)
    separator: str | None = None
    training: TrainingSection = TrainingSection()


@dataclass(frozen=True)
class ScratchConfig:
    """A model from scratch: its architecture, its program, its text, and how it is trained.

    Attributes:
        model: the entries of a `transformers` configuration, with its model_type.
        tokenizer: a folder, a name on the hub, or demo.
        operations: what is done to the plain model, as in a recipe.
        program: the model's program, where it is given as text.
        tracks: of a native Parallel Track model; `model` is the dense one then that it is derived from.
        racks: that are trained each by a loss of its own; None trains the model as one.
        data, eval_data, eval_tokens, tokens, window, separator: as `load_train_texts` takes them; without `tokens`
            there is as much training text as the steps go through.
        source: where it was read from, for error messages.
        lines: of its keys, by the keys that lead there.
    """

    model: Mapping[str, Any]
    tokenizer: str
    data: str
    settings: TrainSettings
    operations: tuple[AppliedOperation, ...] = ()
    program: Program | None = None
    tracks: TracksSection | None = None
    racks: RacksSection | None = None
    eval_data: str | None = None
    eval_tokens: int = HELD_OUT_TOKENS
    tokens: int | None = None
    window: int = DEFAULT_WINDOW
    separator: str | None = None
    source: str = KIND
    lines: Mapping[tuple[Any, ...], int] = field(default_factory=dict, repr=False, compare=False)

    def error(self, message: str, *path: Any) -> ValueError:
        """An error of what stands under a key; `path` has the keys that lead there, or to where it would stand."""
        return ValueError(f"{self.source}:{line_of(path, self.lines)}: {message}")

    @contextmanager
    def under(self, key: str) -> Iterator[None]:
        """What is refused inside is said of what stands under a key."""
        try:
            yield
        except ValueError as error:
            raise self.error(f"{key}: {error}", key) from error

    @property
    def recipe(self) -> Recipe:
        """The operations, as a recipe has them."""
        return Recipe(str(self.model.get("model_type")), self.operations, source=self.source)

    def with_settings(self, **given: Any) -> ScratchConfig:
        """The same with other settings; those that are None stay.

        Args:
            given: fields of `TrainSettings`; of `arguments` those that are not given stay, too.

        Raises:
            ValueError: as `TrainSettings`.
        """
        wanted = {name: value for name, value in given.items() if value is not None}
        wanted["arguments"] = {**self.settings.arguments, **wanted.get("arguments", {})}
        return replace(self, settings=replace(self.settings, **wanted))

    def to_yaml(self, name: Callable[[str], str] = str) -> str:
        """The configuration as text; `parse_config` reads it back.

        Args:
            name: what is written in place of the names of texts and of the tokenizer.
        """
        lines = [f"surgeon: {FORMAT}", f"model: {in_braces(self.model)}", _line("tokenizer", name(self.tokenizer))]
        if self.operations:
            lines += ["operations:", *(f"  - {operation.to_yaml()}" for operation in self.operations)]
        lines += [] if self.program is None else [_line("program", str(self.program))]
        lines += [] if self.tracks is None else [f"tracks: {in_braces(dict(self.tracks))}"]
        lines += [] if self.racks is None else [f"racks: {in_braces(dict(self.racks))}"]
        lines.append(_line("data", name(self.data)))
        lines += [] if self.eval_data is None else [_line("eval_data", name(self.eval_data))]
        plain = ("eval_tokens", "tokens", "window", "separator")
        given = {key: value for key in plain if (value := getattr(self, key)) is not None}
        lines += [_line(key, value) for key, value in given.items()]
        settings = {each: getattr(self.settings, each) for each in TrainingSection.model_fields}
        settings = {key: value for key, value in settings.items() if value not in (None, {})}
        lines.append(f"training: {in_braces(settings)}")
        return "\n".join(lines) + "\n"

    def published(self) -> str:
        """The same text without the places of files on this machine."""
        return self.to_yaml(public)


def read_config_file(path: Path) -> ScratchConfig:
    """Read a configuration from a file.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if it is not a valid configuration, naming the line.
    """
    if not is_recipe(path) and on_disk(path) is not None:
        raise ValueError(f"{path} is no {KIND}; give a YAML file, as recipes/train/ has them")
    return parse_config(read_document(path, KIND), str(path))


def parse_config(text: str, source: str = KIND) -> ScratchConfig:
    """Read a configuration from its text; `source` names it in error messages.

    Raises:
        ValueError: if it is not a valid configuration, naming the line.
    """
    return _ConfigReader(text, source).config()


class _ConfigReader(DocumentReader):
    """Reads one configuration."""

    kind = KIND
    keys = ("surgeon", *PROGRAMS, *(name for name in ScratchKeys.model_fields if name not in PROGRAMS))
    needed = ("surgeon", *(name for name, each in ScratchKeys.model_fields.items() if each.is_required()))

    def config(self) -> ScratchConfig:
        document = self.top()
        there = [name for name in PROGRAMS if name in document]
        if len(there) > 1:
            raise self.error(
                self.lines[there[1],],
                f"{there[0]} and {there[1]} both say what the model's program is; keep one of them",
            )
        given = {name: _numbers(document[name]) for name in ScratchKeys.model_fields if name in document}
        keys = self.validate(ScratchKeys, given, ())
        plain = {name: getattr(keys, name) for name in ScratchKeys.model_fields if name not in ("program", "training")}
        return ScratchConfig(
            **plain,
            operations=self.operations(document["operations"]) if "operations" in document else (),
            program=self._program(keys.program),
            settings=self._settings(keys.training),
            source=self.source,
            lines=self.lines,
        )

    def _program(self, text: str | None) -> Program | None:
        try:
            return None if text is None else Program.parse(text)
        except ValueError as error:
            raise self.error(self.lines["program",], f"program: {error}") from error

    def _settings(self, training: TrainingSection) -> TrainSettings:
        path = ("training", "arguments")
        arguments = {}
        for name, value in training.arguments.items():
            try:
                arguments[name] = read_trainer_argument(name, value if isinstance(value, str) else json.dumps(value))
            except ValueError as error:
                raise self.error(self.lines[*path, name], f"arguments: {error}") from error
        try:
            return TrainSettings(scope="all", **(dict(training) | {"arguments": arguments}))
        except ValueError as error:
            raise self.error(self.lines["training",], f"training: {error}") from error


def _numbers(value: Any) -> Any:
    """A value whose texts like 2e-3 are the numbers that they look like."""
    if isinstance(value, dict):
        return {key: _numbers(inside) for key, inside in value.items()}
    if isinstance(value, list):
        return [_numbers(inside) for inside in value]
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _line(key: str, value: Any) -> str:
    return f"{key}: {json.dumps(value, ensure_ascii=False)}"
