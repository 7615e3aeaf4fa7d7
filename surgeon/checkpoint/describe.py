"""A checkpoint's or recipe's model, form, and program over the layers of the unedited model; sizes; differences.

Tensors of two checkpoints are matched by the layer of the unedited model that they come from, so that layers that an
edit left alone are equal wherever they are stored. They are read in parts: memory holds a few megabytes of each.
"""

from __future__ import annotations

import filecmp
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surgeon.checkpoint.belongings import companions_of
from surgeon.checkpoint.codas import read_codas
from surgeon.checkpoint.config import open_stored, read_config_only
from surgeon.checkpoint.forms import Form, form_of
from surgeon.checkpoint.stored import Checkpoint, StoredModel
from surgeon.checkpoint.training import is_no_source
from surgeon.checkpoint.write import as_bytes
from surgeon.language.program import Program
from surgeon.language.recipe import Recipe, read_recipe
from surgeon.models.edit import recipe_program
from surgeon.named import is_recipe, name_of
from surgeon.progress import Advance
from surgeon.words import plural


@dataclass(frozen=True)
class Surgery:
    """The edits of a model, as a checkpoint or a recipe records them.

    Attributes:
        name: of the checkpoint's folder, or of the recipe.
        stored: the checkpoint; of a recipe its model, known by its configuration alone.
        original: the unedited model's name, where it is known, and there was one.
        num_layers: of the unedited model.
        unedited: its program.
        program: run now, over its layers.
        recipe: if it is one.
        report: the checkpoint's surgeon.json; empty if there is none.
    """

    name: str
    stored: StoredModel
    original: str | None
    num_layers: int
    unedited: Program
    program: Program
    recipe: Recipe | None = None
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def steps_per_layer(self) -> int:
        return self.stored.family.steps_per_layer

    @property
    def depth(self) -> float:
        """Effective depth in layers."""
        return self.program.effective_depth(self.steps_per_layer)

    @property
    def form(self) -> Form | None:
        """The checkpoint's; None for a recipe."""
        if self.recipe is not None:
            return None
        return form_of(self.stored.checkpoint)

    @property
    def sources(self) -> list[tuple[int, ...]]:
        """For each layer of the checkpoint, the unedited model's layers that it comes from."""
        if "stored_layers" in self.report:
            return list(map(tuple, self.report["stored_layers"]))
        if self.form is None or not self.report:  # nothing says that its layers come from other ones
            return [(layer,) for layer in range(self.stored.num_layers)]
        return self.form.sources(self.program, self.stored.family, self.num_layers)

    @property
    def training(self) -> dict[str, Any] | None:
        """The record of the model's (last) training in surgeon.json; None where there was none."""
        return self.report.get("trained")

    @property
    def from_scratch(self) -> bool:
        """True if it was trained from random weights, so that there is no unedited model."""
        return is_no_source(self.report.get("source", {}))

    @property
    def trained(self) -> str | None:
        """The training in a few words; None where there was none."""
        said = self.training
        if said is None:
            return None
        if "earlier" not in said:
            again = ""
        else:
            again = "; not for the first time"
        steps = plural(said["steps"], "step")
        tokens = plural(said["tokens"], "token")
        return f"{steps} on {tokens} of {said['data']}, {said['method']}{again}"

    @property
    def codas(self) -> tuple[list[str], int] | None:
        """The racks' ranges of layers and the depth of their codas, where such lie beside it (see codas.py)."""
        if (
            self.recipe is None
            and (found := read_codas(self.stored.folder, check_weights=False)) is not None
        ):
            return (list(found.racks), found.depth)
        return None


def describe(what: str | Path) -> Surgery:
    """Describe a recipe file, a checkpoint folder, or a model by its name."""
    if is_recipe(what):
        recipe = read_recipe(Path(what))
        model = StoredModel(recipe.model, None, *read_config_only(recipe.model))
        program = recipe_program(recipe, model.config, model.own)
        return Surgery(
            Path(what).name, model, recipe.model, model.num_layers, model.program, program, recipe
        )
    stored = open_stored(what)
    steps = stored.family.steps_per_layer
    if (report := stored.report) is None:
        dense = Program.dense(stored.num_layers, steps)
        return Surgery(name_of(what), stored, None, stored.num_layers, dense, stored.program)
    source = report["source"]
    layers = source["num_layers"]
    if source.get("program") is None:
        unedited = Program.dense(layers, steps)
    else:
        unedited = Program.parse(source["program"])
    program = Program.parse(report["program"])
    return Surgery(name_of(what), stored, source["model"], layers, unedited, program, report=report)


PART = 1 << 24  # bytes of a tensor that are compared at a time


@dataclass(frozen=True)
class Comparison:
    """The differences between two checkpoints, A and B.

    Attributes:
        equal: number of tensors that are equal, bit for bit.
        only_a, only_b: tensors of only one of them.
        different: by tensor, in words, how its shape, dtype or values differ.
        config: by key of config.json, A's value and B's; None for a missing key.
        files: by name, "only in A", "only in B" or "different".
    """

    equal: int
    only_a: list[str]
    only_b: list[str]
    different: dict[str, str]
    config: dict[str, tuple[Any, Any]]
    files: dict[str, str]

    @property
    def is_equal(self) -> bool:
        return not any((self.only_a, self.only_b, self.different, self.config, self.files))


def compare(a: Surgery, b: Surgery, advance: Advance = lambda _: None) -> Comparison:
    """Compare two checkpoints."""
    ours = a.stored.checkpoint
    theirs = b.stored.checkpoint
    names_a = _tensor_names(a)
    names_b = _tensor_names(b)
    different = {}
    for key, name in names_a.items():
        if key in names_b and (difference := _difference(ours, name, theirs, names_b[key])) is not None:
            different[key] = difference
        advance(ours[name].num_bytes)
    keys = dict.fromkeys([*ours.config, *theirs.config])
    values = {key: (ours.config.get(key), theirs.config.get(key)) for key in keys}
    # Tokenizer, chat templates, settings, licence and code; the report and card always differ.
    beside_a, beside_b = (
        {path.name: path for path in one.folder.glob("*.py")}
        | companions_of(one.folder, one.file_names).files
        for one in (ours, theirs)
    )
    files = dict.fromkeys(beside_a.keys() - beside_b.keys(), "only in A")
    files |= dict.fromkeys(beside_b.keys() - beside_a.keys(), "only in B")
    for name in beside_a.keys() & beside_b.keys():
        if not filecmp.cmp(beside_a[name], beside_b[name], shallow=False):
            files[name] = "different"
    return Comparison(
        len(names_a.keys() & names_b.keys()) - len(different),
        [key for key in names_a if key not in names_b],
        [key for key in names_b if key not in names_a],
        different,
        {key: pair for key, pair in values.items() if pair[0] != pair[1]},
        dict(sorted(files.items())),
    )


def _tensor_names(one: Surgery) -> dict[str, str]:
    """Map "layer 3 mlp.up_proj.weight", by layers of the unedited model, to the name under which it is stored."""
    seen: Counter[tuple[int, ...]] = Counter()
    labels = []
    for layers in one.sources:
        labels.append(f"layer {'+'.join(map(str, layers))}{' again' * seen[layers]}")
        seen[layers] += 1
    family = one.stored.family
    names = one.stored.weights.names
    embedding = f"{family.embedding}.weight"
    head = f"{family.head}.weight"
    # Files may store either under the other's name.
    alike = {names.of(head): head, names.of(embedding): names.own(embedding)}
    pattern = re.compile(rf"{re.escape(names.layers)}(\d+)\.(.+)")
    found = {}
    for name in one.stored.checkpoint.names():
        match = pattern.fullmatch(name)
        if match and int(match[1]) < len(labels):
            found[f"{labels[int(match[1])]} {match[2]}"] = name
        else:
            found[alike.get(name, name)] = name
    return found


def _difference(a: Checkpoint, a_name: str, b: Checkpoint, b_name: str) -> str | None:
    """Say how two tensors differ, bit for bit; None if they do not."""
    shape = a.shape(a_name)
    dtypes = [str(a.dtype(a_name)).removeprefix("torch."), str(b.dtype(b_name)).removeprefix("torch.")]
    if shape != b.shape(b_name):
        return f"shape {list(shape)} | {list(b.shape(b_name))}"
    count = 0
    most = 0.0
    widest = max(a.dtype(a_name).itemsize, b.dtype(b_name).itemsize)
    rows = max(1, PART // max(1, math.prod(shape[1:]) * widest))
    for part_a, part_b in zip(a[a_name].rows(rows), b[b_name].rows(rows), strict=True):
        if part_a.dtype != part_b.dtype:
            differs = (_wide(part_a) != _wide(part_b)).reshape(-1)
        else:  # bit for bit, so that -0 is not 0
            width = part_a.dtype.itemsize
            differs = (as_bytes(part_a).view(-1, width) != as_bytes(part_b).view(-1, width)).any(dim=1)
        if differs.any():
            count += int(differs.sum())
            apart = (_wide(part_a).reshape(-1)[differs] - _wide(part_b).reshape(-1)[differs]).abs()
            # Nan is the largest.
            most = max(most, apart.max().item(), key=lambda value: (math.isnan(value), value))
    if dtypes[0] == dtypes[1] and not count:
        return None
    words = [] if dtypes[0] == dtypes[1] else [f"dtype {dtypes[0]} | {dtypes[1]}"]
    if count:
        words.append(f"{count:,} of {math.prod(shape):,} values, by {most:.3g} at most")
    return ", ".join(words)


def _wide(tensor: Tensor) -> Tensor:
    if tensor.dtype in (torch.float16, torch.bfloat16, torch.float32):
        return tensor.float()
    return tensor.double()
