"""A checkpoint's or recipe's model, form, and program over the layers of the unedited model; its record; differences.

Training changes every weight, so that measurements of the original no longer hold; a model from scratch never had one.
The program can still be proven: the stored one is the recipe's, or the configuration's of a model from scratch, with
the layers under other numbers.

Tensors of two checkpoints are matched by the layer of the unedited model that they come from, so that layers that an
edit left alone are equal wherever they are stored. They are read in parts: memory holds a few megabytes of each.
"""

from __future__ import annotations

import filecmp
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surgeon.checkpoint.belongings import companions_of
from surgeon.checkpoint.codas import StoredCodas, read_codas
from surgeon.checkpoint.config import is_no_source, open_stored, read_config_only
from surgeon.checkpoint.forms import Form, form_of
from surgeon.checkpoint.stored import REPORT_FILE, Checkpoint, StoredModel
from surgeon.checkpoint.tensor_file import as_bytes, read_json
from surgeon.errors import NotProven
from surgeon.language.program import Fork, Node, Program, Step
from surgeon.language.recipe import Recipe, read_recipe
from surgeon.language.sublayer import Sublayer
from surgeon.models.edit import recipe_program
from surgeon.named import is_recipe, name_of, public
from surgeon.processes.files import finite
from surgeon.progress import Advance
from surgeon.words import MOST_LAYERS, plural, show_value


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
    def training_line(self) -> str | None:
        """The training in a few words; None where there was none."""
        said = self.training
        if said is None:
            return None
        again = ""
        if "earlier" in said:
            again = "; not for the first time"
        steps = plural(said["steps"], "step")
        tokens = plural(said["tokens"], "token")
        return f"{steps} on {tokens} of {said['data']}, {said['method']}{again}"

    @property
    def codas(self) -> StoredCodas | None:
        """The codas of its racks, where such lie beside it."""
        if self.recipe is not None:
            return None
        return read_codas(self.stored.folder, check_weights=False)


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
    if (report := read_report(stored)) is None:
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
    alike = {names.stored_name(head): head, names.stored_name(embedding): names.own(embedding)}
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


_ENTRIES: dict[str, type] = {"method": str, "data": str, "data_hash": str, "steps": int, "tokens": int}
_SOURCE: dict[str, type] = {"model": str, "num_layers": int, "parameters": int, "model_hash": str}
_NO_SOURCE: dict[str, type] = {"num_layers": int}
# Of which `training` may have the quality on held-out text; of a model from scratch the last two.
STAGES = ("original", "edited", "healed", "untrained", "trained")


@dataclass(frozen=True)
class Training:
    """A model's training after its edit or from scratch, for `surgeon.export`.

    Attributes:
        recipe: the recipe's text, to be kept; None where there was none.
        recipe_program: the program over the layers of the original; of a model from scratch, over those that it was
            begun with.
        source: of the original, as surgeon.json has it (`source_record` of surgeon.exports.export): its model,
            num_layers, parameters, model_hash and card. Where there was no original, its model is None, and num_layers
            those that it was begun with.
        training: JSON values. `method`, `data` and `data_hash` are texts, `steps` and `tokens` numbers; the STAGES
            that are there are qualities (`Quality.to_json`) on the text `held_out` (with `held_out_hash`);
            `earlier` is such a record of the training before this one. Anything else (settings, versions) is kept. Of
            files on this machine only the names are.

    Raises:
        ValueError: if an entry that cards show is missing, or is something else.
    """

    recipe: str | None
    recipe_program: Program
    source: dict[str, Any]
    training: dict[str, Any]

    def __post_init__(self) -> None:
        of_source = missing_entries(self.source, _NO_SOURCE if is_no_source(self.source) else _SOURCE)
        for what, reason in (("training", missing_entries(self.training)), ("source", of_source)):
            if reason is not None:
                raise ValueError(f"the record of the {what} needs {reason}")
        # Nothing that is published says where a file lay on this machine.
        texts = {
            name: public(self.training[name]) for name in ("data", "held_out") if name in self.training
        }
        object.__setattr__(self, "training", finite(self.training | texts))


def missing_entries(entries: dict[str, Any], kinds: dict[str, type] = _ENTRIES) -> str | None:
    """Say what a record lacks that cards show, by default of a training; None if it is whole."""
    for name, kind in kinds.items():
        if type(entries.get(name)) is not kind:
            return f"{name}, {'a text' if kind is str else 'a whole number'}, and has {show_value(entries.get(name))}"
    if "earlier" in entries and (
        not isinstance(entries["earlier"], dict) or missing_entries(entries["earlier"]) is not None
    ):
        return "earlier to be the record of another training"
    for name in STAGES:
        if entries.get(name) is not None and not _is_quality(entries[name]):
            return f"{name} with its perplexity"
    return None


def _is_quality(value: Any) -> bool:
    """Tell whether it is a result of `Quality.to_json`."""
    if not isinstance(value, dict) or type(value.get("tokens")) is not int:
        return False
    numbers = [value.get("perplexity"), value.get("divergence")]
    for name in ("perplexity_interval", "divergence_interval"):
        ends = value.get(name)
        numbers += ends if isinstance(ends, list | tuple) and len(ends) == 2 else [ends]
    return all(number is None or type(number) in (int, float) for number in numbers)


def read_report(stored: StoredModel) -> dict[str, Any] | None:
    """Read surgeon.json, the record of a checkpoint's export; None where it has none."""
    path = stored.folder / REPORT_FILE
    if not path.exists():
        return None
    report = read_json(path)
    source, proof, trained, layers_of = (
        report.get(name) for name in ("source", "proof", "trained", "stored_layers")
    )
    layers = source.get("num_layers") if isinstance(source, dict) else None
    if not (
        isinstance(report.get("program"), str)
        and isinstance(source, dict)
        and (isinstance(source.get("model"), str) or (is_no_source(source) and "trained" in report))
        and type(layers) is int
        and 1 <= layers <= MOST_LAYERS
        and isinstance(source.get("program"), str | None)
    ):
        fault = "it lacks the program or its source"
    elif isinstance(proof, dict) and not (
        all(isinstance(proof.get(name), int | float) for name in ("exact", "written"))
        and type(proof.get("tokens")) is int
        and isinstance(proof.get("dtype"), str)
    ):
        fault = f"its proof is {show_value(proof, 200)}; export again"
    elif trained is not None and (not isinstance(trained, dict) or missing_entries(trained) is not None):
        fault = f"it has trained: {show_value(trained, 200)}"
    elif layers_of is not None and not (
        isinstance(layers_of, list)
        and all(isinstance(one, list) for one in layers_of)
        and all(type(layer) is int and 0 <= layer < layers for one in layers_of for layer in one)
    ):
        fault = f"it has stored_layers: {show_value(layers_of, 200)}"
    else:
        return report
    raise ValueError(f"{path} is not what surgeon export writes: {fault}")


# The original's layers, by kind and number of a stored layer.
Whose = dict[tuple[str, int], tuple[int, ...]]


def layers_by_recipe(recipe: Program, stored: Program) -> Whose:
    """Map each stored sublayer to the original's layers, if a stored program is the recipe's.

    One has to be the other with its layers under other numbers: the same steps and forks, of the same widths, slices
    and ranks, and no stored sublayer for two of the recipe's. A sublayer that the recipe has twice may be stored twice,
    as forms of whole layers do, and the order within a step does not count.

    Args:
        recipe: over the original's layers.
        stored: over the layers that are stored, one for each sublayer.

    Raises:
        NotProven: naming the first step that differs.
    """
    whose: Whose = {}
    places: dict[tuple[Any, ...], int] = {}
    for asked, found in _side_by_side(recipe.nodes, stored.nodes):
        (place,), pieces = found.layers, found.piece and found.piece[1]
        if pieces is None:
            first_place = place
        else:
            first_place = places.setdefault((replace(asked, piece=None), pieces), place)
        if first_place != place or whose.setdefault((found.kind, place), asked.layers) != asked.layers:
            raise NotProven(
                f"the model does not run the recipe's program: where that has {asked}, it has {found}, which stands "
                "for another sublayer elsewhere"
            )
    return whose


def _side_by_side(recipe: Sequence[Node], stored: Sequence[Node]) -> Iterator[tuple[Sublayer, Sublayer]]:
    """Yield the sublayers of two programs that stand in the same place."""
    if len(recipe) != len(stored):
        raise NotProven(
            f"the model does not run the recipe's program: it has {len(stored)} steps or forks where that has "
            f"{len(recipe)}"
        )
    for asked, found in zip(recipe, stored, strict=True):
        if isinstance(asked, Fork) and isinstance(found, Fork):
            if len(asked.branches) == len(found.branches):
                for branches in zip(asked.branches, found.branches, strict=True):
                    yield from _side_by_side(*branches)
                continue
        elif isinstance(asked, Step) and isinstance(found, Step):
            first, second = (sorted(step.sublayers, key=_shape) for step in (asked, found))
            if asked.late == found.late and list(map(_shape, first)) == list(map(_shape, second)):
                yield from zip(first, second, strict=True)
                continue
        raise NotProven(
            f"the model does not run the recipe's program: where that has {asked}, it has {found}"
        )


def _shape(sublayer: Sublayer) -> tuple[Any, ...]:
    """Return a sublayer's kind and sizes, whatever its layer."""
    return sublayer.kind, sublayer.width or 0, sublayer.piece or (0, 1), sublayer.ranks
