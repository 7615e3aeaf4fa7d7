"""Recipes: the YAML a user writes, and a search writes too.

    surgeon: 1
    model: meta-llama/Llama-2-7b-chat-hf
    operations:
      - pair: {layers: "4:30"}
    expect: {effective_depth: 19}

Operations are applied in order. `layers` is a range as Python slices it ("4:30" is layers 4 to 29), or a list of such
ranges. With `weights: sha256:...` (of weights and config.json), as searches write it, a recipe is refused on other
models. Every error names the file, the line, the value and what would be right.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from surgeon.language.operations import OPERATIONS
from surgeon.language.operations.applied import AppliedOperation, in_braces
from surgeon.language.operations.base import parse_range
from surgeon.language.program import Program
from surgeon.language.sublayer import LayerShapes
from surgeon.language.yaml import LONGEST, Checked, YamlError, read_yaml, validate
from surgeon.named import on_disk
from surgeon.words import did_you_mean, show_value

FORMAT = 1
KEYS = ("surgeon", "model", "weights", "operations", "expect")
_WEIGHTS = re.compile(r"sha256:([0-9a-f]{64})")


class Expect(BaseModel):
    """Figures that the recipe's program must have; checked whenever the recipe is used.

    Attributes:
        effective_depth: in layers of the unedited model.
        sync_points: per forward pass, on two tensor-parallel ranks.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    effective_depth: float | None = None
    sync_points: int | None = None


@dataclass(frozen=True, repr=False)
class Recipe:
    """A model, operations on it, and figures that the result must have.

    Attributes:
        weights: the model it was made for, as `Checkpoint.model_hash()` names it; None: any.
        source: its file, for error messages.
        expect_line, weights_line: the lines these stand on.
    """

    model: str
    operations: tuple[AppliedOperation, ...]
    expect: Expect = field(default_factory=Expect)
    weights: str | None = None
    source: str = "recipe"
    expect_line: int = 0
    weights_line: int = 0

    def program(
        self,
        num_layers: int,
        steps_per_layer: int = 2,
        shapes: LayerShapes | None = None,
        own: Program | None = None,
    ) -> Program:
        """Return the program that the operations make of a model with this many layers.

        Args:
            shapes: of these layers, for operations that ask for them.
            own: the program of the model, if it is another than its layers one after the other.

        Raises:
            ValueError: if layers are out of range or overlap, or an expectation does not hold; with file and line.
        """
        start = own or Program.dense(num_layers, steps_per_layer)
        program = [start, *(edited for _, edited in self.steps(start, shapes, own))][-1]
        found = {
            "effective_depth": program.effective_depth(steps_per_layer),
            "sync_points": program.sync_points(2) if self.expect.sync_points is not None else None,
        }
        for name, expected in self.expect.model_dump(exclude_none=True).items():
            if found[name] != expected:
                raise ValueError(
                    f"{self.source}:{self.expect_line}: expect: {name} {expected:g} does not hold: "
                    f"the operations give {found[name]:g}"
                )
        return program

    def steps(
        self, program: Program, shapes: LayerShapes | None = None, own: Program | None = None
    ) -> Iterator[tuple[AppliedOperation, Program]]:
        """Yield each operation with the program after it; other arguments as of `program`.

        Args:
            program: to begin with.

        Raises:
            ValueError: if layers are out of range or overlap, or mixtures are averaged; with file and line.
        """
        for operation in self.operations:
            try:
                program = operation.apply(program, shapes, own)
                if shapes is not None:
                    shapes.check_experts(program.sublayers())
            except ValueError as error:
                raise ValueError(f"{self.source}:{operation.line}: {operation.name}: {error}") from error
            yield operation, program

    def mismatch(self, model_hash: str, weights_hash: str) -> str | None:
        """Say that this is another model than the recipe was made for; None if it is the same.

        Args:
            model_hash, weights_hash: of the model, and of its weights alone, by which earlier versions named it.
        """
        if self.weights in (None, model_hash):
            return None
        place = f"{self.source}:{self.weights_line}: weights:"
        if self.weights == weights_hash:
            return (
                f"{place} sha256:{self.weights} names the model's weights alone, as earlier versions wrote it; write "
                f"sha256:{model_hash}, which names its configuration, too"
            )
        return f"{place} the recipe was made for sha256:{self.weights}, and the model has sha256:{model_hash}"

    def require_model(self, model_hash: str, weights_hash: str) -> None:
        """Refuse another model than the recipe was made for; arguments as for `mismatch`.

        Raises:
            ValueError: with both hashes, file and line.
        """
        mismatch = self.mismatch(model_hash, weights_hash)
        if mismatch is not None and self.weights != weights_hash:
            mismatch += (
                "; what was found for one model need not hold for another. Use the model it was made for, or remove "
                "that line to use the recipe all the same"
            )
        if mismatch is not None:
            raise ValueError(mismatch)

    def __repr__(self) -> str:
        return self.to_yaml().rstrip()

    def to_yaml(self) -> str:
        """Write the recipe; `parse_recipe` reads it back."""
        lines = [f"surgeon: {FORMAT}", f"model: {json.dumps(self.model)}"]
        lines += [] if self.weights is None else [f"weights: sha256:{self.weights}"]
        lines.append("operations:")
        lines += [f"  - {operation.to_yaml()}" for operation in self.operations]
        if not self.operations:
            lines[-1] += " []"
        expect = self.expect.model_dump(exclude_none=True)
        if expect:
            whole = {
                name: int(value) if value == int(value) else value for name, value in expect.items()
            }
            lines.append(f"expect: {in_braces(whole)}")
        return "\n".join(lines) + "\n"


def read_recipe(path: Path) -> Recipe:
    """Read a recipe from a file.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if it is not a valid recipe, naming the line.
    """
    return parse_recipe(read_document(path, "recipe"), str(path))


def read_document(path: Path, kind: str) -> str:
    """Read the text of a file in YAML that a user wrote.

    Args:
        kind: of file, for error messages: "recipe", "configuration".

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if it is too large, or not UTF-8.
    """
    there = on_disk(path)
    if there is None or not there.is_file():
        raise FileNotFoundError(f"there is no {kind} {path}")
    if there.stat().st_size > 4 * LONGEST:  # bytes that a character takes at most
        raise ValueError(
            f"{path} has {there.stat().st_size:,} bytes, which is too much for a {kind}; check the name"
        )
    try:
        return there.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file in UTF-8: {error}") from error


def parse_recipe(text: str, source: str = "recipe") -> Recipe:
    """Read a recipe from its text; `source` names it in error messages.

    Raises:
        ValueError: if it is not a valid recipe, naming the line.
    """
    reader = DocumentReader(text, source)
    document = reader.top("recipe", KEYS, ("surgeon", "model", "operations"))
    model = document["model"]
    if not isinstance(model, str) or not model.strip() or not model.isprintable():
        raise reader.error(
            reader.lines["model",], f"model must be a folder or a hub name, not {show_value(model)}"
        )
    operations = reader.operations(document["operations"])
    expect = document.get("expect")
    if expect is None:
        expected = Expect()
    elif isinstance(expect, dict):
        expected = reader.validate(Expect, expect, ("expect",))
    else:
        raise reader.error(
            reader.lines["expect",], "expect must be a mapping, as in expect: {effective_depth: 19}"
        )
    weights = None
    if "weights" in document:
        given = document["weights"]
        match = _WEIGHTS.fullmatch(given) if isinstance(given, str) else None
        if match is None:
            raise reader.error(
                reader.lines["weights",],
                f"weights must be sha256: and 64 digits of 0-9 and a-f, not {show_value(given)}; copy them from a "
                "search's recipe or a checkpoint's surgeon.json, or remove the line",
            )
        weights = match[1]
    return Recipe(
        model=model,
        operations=operations,
        expect=expected,
        weights=weights,
        source=source,
        expect_line=reader.lines.get(("expect",), 0),
        weights_line=reader.lines.get(("weights",), 0),
    )


def operations_in(text: str) -> tuple[AppliedOperation, ...]:
    """Read the operations of a document, whatever else it says: a recipe, or the configuration of a model.

    Raises:
        ValueError: if it is none, or they are not as in a recipe.
    """
    reader = DocumentReader(text, "document")
    if isinstance(reader.document, dict):
        found = reader.document.get("operations", [])
    else:
        found = None
    return reader.operations(found)


class DocumentReader:
    """Reads a document with keys of surgeon's, of which `operations` is one, keeping the line of every key.

    Raises:
        ValueError: as every method: naming source, line, value, and what would be right.
    """

    def __init__(self, text: str, source: str) -> None:
        self.source = source
        try:
            self.document, self.lines = read_yaml(text)
        except YamlError as error:
            raise self.error(error.line, error.problem) from error

    def error(self, line: int, message: str) -> ValueError:
        return ValueError(f"{self.source}:{line}: {message}")

    def top(self, kind: str, keys: Sequence[str], needed: Sequence[str]) -> dict[str, Any]:
        """Return the document's entries, once keys and format are right.

        Args:
            kind: of document, for error messages.
            keys, needed: those that may be there, and those that must; `surgeon`, the format, is one of both.
        """
        document = self.document
        if not isinstance(document, dict):
            named = f"{', '.join(needed[:-1])} and {needed[-1]}"
            raise self.error(1, f"a {kind} is a mapping with the keys {named}")
        for key in document:
            if key not in keys:
                raise self.error(
                    self.lines[key,], f"unknown key {show_value(key)}; {did_you_mean(str(key), keys)}"
                )
        for key in needed:
            if key not in document:
                raise self.error(1, f"the key {key!r} is missing")
        form = document["surgeon"]
        if type(form) is not int or form != FORMAT:
            raise self.error(
                self.lines["surgeon",],
                f"{kind} format {show_value(form)} is not known; write surgeon: {FORMAT}",
            )
        return document

    def operations(self, entries: Any) -> tuple[AppliedOperation, ...]:
        """Read the key `operations`."""
        if not isinstance(entries, list):
            raise self.error(
                self.lines["operations",],
                'operations must be a list, each entry as in - pair: {layers: "4:30"}',
            )
        found = []
        for index, entry in enumerate(entries):
            path: tuple[Any, ...] = ("operations", index)
            line = self.lines[path]
            if not isinstance(entry, dict) or len(entry) != 1:
                raise self.error(
                    line,
                    f'an operation is one name with its parameters, as in pair: {{layers: "4:30"}}, not '
                    f"{show_value(entry)}",
                )
            ((name, given),) = entry.items()
            if name not in OPERATIONS:
                raise self.error(
                    line, f"unknown operation {show_value(name)}; {did_you_mean(str(name), OPERATIONS)}"
                )
            if not isinstance(given, dict) or "layers" not in given:
                raise self.error(line, f'{name} needs layers, as in {name}: {{layers: "4:30"}}')
            model = OPERATIONS[name].parameters
            for key in given:
                if key not in ("layers", *model.model_fields):
                    names = ["layers", *model.model_fields]
                    raise self.error(
                        self.lines[*path, name, key],
                        f"{name} has no parameter {show_value(key)}; {did_you_mean(str(key), names)}",
                    )
            layers = given["layers"]
            try:
                stretches = tuple(
                    parse_range(text) for text in (layers if isinstance(layers, list) else [layers])
                )
            except ValueError as error:
                raise self.error(self.lines[*path, name, "layers"], f"{name}: {error}") from error
            parameters = {key: value for key, value in given.items() if key != "layers"}
            self.validate(model, parameters, (*path, name))
            found.append(AppliedOperation(name, stretches, parameters, line))
        return tuple(found)

    def validate(self, model: type[Checked], given: dict[str, Any], path: tuple[Any, ...]) -> Checked:
        """Validate a mapping by a pydantic model; `path` leads to it."""
        try:
            return validate(model, given, self.lines, path)
        except YamlError as error:
            raise self.error(error.line, error.problem) from error
