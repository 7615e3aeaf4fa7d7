"""Configurations of models from scratch: the YAML that a user writes for `surgeon train` (docs/training.md).

Errors name file, line, value and what would be right.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from math import sqrt
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, PlainValidator, Strict
from transformers import CONFIG_MAPPING

from surgeon.language.operations.applied import AppliedOperation, in_braces
from surgeon.language.program import Program
from surgeon.language.recipe import FORMAT, DocumentReader, Recipe, read_document
from surgeon.language.yaml import line_of
from surgeon.models.families import FAMILIES
from surgeon.named import is_recipe, on_disk
from surgeon.quality import DEFAULT_WINDOW
from surgeon.training.racks.run import RackOptions
from surgeon.training.scratch.tracks import WIDTH_STEP, layer_of_each_width
from surgeon.training.settings import TrainSettings, read_trainer_argument
from surgeon.training.texts import check_texts
from surgeon.training.token_store import documents_of
from surgeon.words import did_you_mean, show_value

KIND = "configuration"
PROGRAMS = ("operations", "program", "tracks")  # of which there is at most one
# As YAML 1.1 does not read them, and people and JSON write them: 2e-3 is a text there, 2.0e-3 a number.
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d{1,3}")
_Count = Annotated[int, Strict(), Field(ge=1)]
_Text = Annotated[str, Strict(), Field(min_length=1)]
_ONLY_THESE = ConfigDict(extra="forbid", arbitrary_types_allowed=True)  # an operation has ranges
# Where the key `training` says nothing else.
_TRAINING: dict[str, Any] = {"scope": "all", "learning_rate": 1e-3, "schedule": "cosine"}
_OF_HEALING = ("scope", "router", "lora", "distillation")  # by that key, of a model from scratch


@dataclass(frozen=True)
class TracksSection:
    """The key `tracks`: number of tracks, and of layers between two joins."""

    __pydantic_config__ = _ONLY_THESE

    count: Annotated[int, Strict(), Field(ge=2)]
    depth: _Count


@dataclass(frozen=True)
class ScratchConfig:
    """A model from scratch: its architecture, program, text and training.

    Attributes:
        model: entries of a `transformers` configuration, with its model_type.
        tokenizer: a folder, a name on the hub, or demo.
        data, eval_data, eval_tokens, tokens, window, separator, documents: as `load_texts` takes them; without `tokens`
            there is as much training text as the steps go through.
        program: as text.
        tracks: of a native Parallel Track model, derived from the dense `model`.
        racks: that are trained each by a loss of its own; None trains the model as one.
        settings: of the key `training`.
        operations: on the plain model, as in a recipe.
        source: for error messages.
        lines: of its keys, by the keys that lead there.
    """

    __pydantic_config__ = _ONLY_THESE

    model: Annotated[dict[str, Any], Strict()]
    tokenizer: _Text
    data: Annotated[str | dict[str, float], PlainValidator(check_texts)]
    program: Annotated[str, Strict()] | None = None
    tracks: TracksSection | None = None
    racks: RackOptions | None = None
    eval_data: _Text | None = None
    eval_tokens: Annotated[int, Strict(), Field(ge=2)] | None = None
    tokens: _Count | None = None
    window: Annotated[int, Strict(), Field(ge=2)] = DEFAULT_WINDOW
    separator: Annotated[str, Strict()] | None = None
    documents: Annotated[str, Strict()] = "joined"
    settings: TrainSettings = field(default_factory=lambda: TrainSettings(**_TRAINING))
    operations: tuple[AppliedOperation, ...] = ()
    source: str = KIND
    lines: Mapping[tuple[Any, ...], int] = field(default_factory=dict, repr=False, compare=False)

    def error(self, message: str, *path: Any) -> ValueError:
        """Make an error with the line of a key; `path` has the keys that lead there, or to where it would stand."""
        return ValueError(f"{self.source}:{line_of(path, self.lines)}: {message}")

    @contextmanager
    def under(self, key: str) -> Iterator[None]:
        """Add the line of a key to errors inside."""
        try:
            yield
        except ValueError as error:
            raise self.error(f"{key}: {error}", key) from error

    @property
    def recipe(self) -> Recipe:
        return Recipe(str(self.model.get("model_type")), self.operations, source=self.source)

    def with_settings(self, **given: Any) -> ScratchConfig:
        """Change some settings; those that are None stay.

        Args:
            given: fields of `TrainSettings`; of `arguments` those that are not given stay, too.

        Raises:
            ValueError: as `TrainSettings`.
        """
        wanted = {name: value for name, value in given.items() if value is not None}
        wanted["arguments"] = {**self.settings.arguments, **wanted.get("arguments", {})}
        return replace(self, settings=replace(self.settings, **wanted))

    def to_yaml(self, name: Callable[[str], str] = str) -> str:
        """Write the configuration as text for `parse_config`.

        Args:
            name: maps the names of texts and of the tokenizer.
        """
        data = self.data
        if isinstance(data, dict):
            data = {name(text): weight for text, weight in data.items()}
        else:
            data = name(data)
        written = {
            "tokenizer": name(self.tokenizer),
            "data": data,
            "program": self.program and str(Program.parse(self.program)),
            "eval_data": self.eval_data and name(self.eval_data),
        }
        lines = [f"surgeon: {FORMAT}"]
        for key in _PLAIN:
            if key == "data" and self.operations:  # which stand behind model and tokenizer
                lines += ["operations:", *(f"  - {one.to_yaml()}" for one in self.operations)]
            value = written.get(key, getattr(self, key))
            if isinstance(value, TracksSection | RackOptions):
                value = {name: each for name, each in vars(value).items() if each not in (None, ())}
            if value is not None:
                lines.append(
                    f"{key}: {in_braces(value) if isinstance(value, dict) else json.dumps(value, ensure_ascii=False)}"
                )
        settings = {
            key: value
            for key, value in vars(self.settings).items()
            if key not in _OF_HEALING and value not in (None, {})
        }
        return "\n".join([*lines, f"training: {in_braces(settings)}", ""])


_NO_KEYS = ("settings", "operations", "source", "lines")  # fields that are read apart
_PLAIN = [each.name for each in fields(ScratchConfig) if each.name not in _NO_KEYS]


def read_config_file(path: Path) -> ScratchConfig:
    """Read a configuration from a file."""
    if not is_recipe(path) and on_disk(path) is not None:
        raise ValueError(f"{path} is no {KIND}; give a YAML file, as recipes/train/ has them")
    return parse_config(read_document(path, KIND), str(path))


def parse_config(text: str, source: str = KIND) -> ScratchConfig:
    """Parse a configuration; `source` names it in error messages."""
    reader = DocumentReader(text, source)
    keys = ("surgeon", "operations", *_PLAIN, "training")
    top = reader.top(KIND, keys, ("surgeon", "model", "tokenizer", "data"))
    document = {name: _read_numbers(value) for name, value in top.items()}
    there = [name for name in PROGRAMS if name in document]
    if len(there) > 1:
        raise reader.error(
            reader.lines[there[1],],
            f"{there[0]} and {there[1]} both say what the model's program is; keep one of them",
        )
    config = reader.validate(
        ScratchConfig,
        {name: value for name, value in document.items() if name in _PLAIN},
        (),
    )
    given = document.get("training", {})
    if not isinstance(given, dict):
        raise reader.error(
            reader.lines["training",], f"training must be a mapping, not {show_value(given)}"
        )
    setting_names = [each.name for each in fields(TrainSettings) if each.name not in _OF_HEALING]
    for name in (name for name in given if name not in setting_names):
        raise reader.error(
            reader.lines["training", name],
            f"unknown key {show_value(name)}; {did_you_mean(str(name), setting_names)}",
        )
    arguments = given.get("arguments", {})
    for name, value in arguments.items() if isinstance(arguments, dict) else ():
        try:
            arguments[name] = read_trainer_argument(
                name, value if isinstance(value, str) else json.dumps(value)
            )
        except ValueError as error:
            raise reader.error(
                reader.lines["training", "arguments", name], f"arguments: {error}"
            ) from error
    config = replace(
        config,
        settings=reader.validate(
            TrainSettings, _TRAINING | given | {"arguments": arguments}, ("training",)
        ),
        operations=reader.operations(document["operations"]) if "operations" in document else (),
        source=source,
        lines=reader.lines,
    )
    with config.under("documents"):
        documents_of(config.documents)
    with config.under("program"):
        _ = config.program and Program.parse(config.program)
    return config


def _read_numbers(value: Any) -> Any:
    """Read texts like 2e-3, which YAML 1.1 takes for no numbers, as numbers."""
    if isinstance(value, dict):
        return {key: _read_numbers(inside) for key, inside in value.items()}
    if isinstance(value, list):
        return [_read_numbers(inside) for inside in value]
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        return float(value)
    return value


SHORTEST_WINDOW = 128


def parse_scale(text: str) -> float:
    """Parse a scale such as 1/64 or 0.125."""
    try:
        scale = float(Fraction(text))
    except (ValueError, ZeroDivisionError):
        scale = 0.0
    if not 0 < scale <= 1:
        raise ValueError(
            f"a scale is above 0 and at most 1, such as 1/64 or 0.125, not {show_value(text)}"
        )
    return scale


def scale_config(config: ScratchConfig, scale: float, steps: int | None = None) -> ScratchConfig:
    """Scale a configuration's widths down, on fewer and shorter windows.

    Counts stay: layers, heads, KV heads, tracks, experts, racks, codas, steps. Widths (of the stream, of a head, of
    neurons) are multiplied by the scale s, so that the layers' parameters come to about s^2 of what they were, and so
    are the tokens of a step: tokens for each parameter stay. Windows are multiplied by s, too, down to 128 tokens; the
    rest falls on the batch. The learning rate, which wider models take lower, is divided by the root of s. The
    vocabulary becomes the tokenizer's.

    Args:
        scale: above 0, at most 1.
        steps: in place of the configuration's; the warm-up keeps its share of them.

    Raises:
        ValueError: if the architecture is not known or its entries fit no model, with file and line.
    """
    settings = config.settings
    tokens = settings.batch * config.window * scale**2
    window = max(min(config.window, SHORTEST_WINDOW), round(config.window * scale))
    shorter: dict[str, Any] = {"batch": max(1, round(tokens / window)), "micro_batch": None}
    if steps is not None:
        before = settings.steps or steps
        shorter |= {"steps": steps, "warmup": round(settings.warmup * steps / before)}
    smaller = replace(settings, learning_rate=settings.rate / sqrt(scale), **shorter)
    entries = {
        name: value for name, value in config.model.items() if name not in ("model_type", "vocab_size")
    }
    model_type = config.model.get("model_type")
    with config.under("model"):
        if model_type not in FAMILIES:
            raise ValueError(
                f"model_type {show_value(model_type)} is not known, and so not what its widths are called"
            )
        family = FAMILIES[model_type]
        try:
            full: Any = CONFIG_MAPPING[model_type](**entries)
        except Exception as error:  # whatever it trips over is a fault of the entries
            raise ValueError(f"it cannot be scaled: {error}") from error
    heads = family.units(full)["heads"]
    width = family.head_dim(full)
    # Rotary positions need even heads.
    head = 2 * max(1, round(width * scale / 2))
    filled = heads * width == full.hidden_size
    stream = heads * head if filled else _round_width(full.hidden_size * scale)
    narrow: dict[str, Any] = (
        {"hidden_size": stream}
        | ({} if filled else {"head_dim": head})
        | family.entries.follow_width(full, stream)
    )
    for name in layer_of_each_width(full, family):
        # GPT-2 fills in the same default.
        narrow[name] = _round_width(scale * (getattr(full, name) or 4 * full.hidden_size))
    same: dict[str, str] = full.attribute_map  # names that entries have beside their own
    given = {same.get(name, name): name for name in entries}
    kept = {name: value for name, value in config.model.items() if name != "vocab_size"}
    return replace(
        config,
        model=kept | {given.get(same.get(name, name), name): value for name, value in narrow.items()},
        window=window,
        settings=smaller,
    )


def _round_width(width: float) -> int:
    return WIDTH_STEP * max(1, round(width / WIDTH_STEP))
