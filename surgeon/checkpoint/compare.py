"""What differs between two checkpoints or recipes: facts, program, tensors, config.json and files.

Tensors are told apart by the layer of the unedited model that they come from, so that what an edit left alone is equal
wherever it is stored. They are read in parts: memory holds a few megabytes of two tensors, never a model.
"""

from __future__ import annotations

import filecmp
import math
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from surgeon.checkpoint.companions import companions_of
from surgeon.checkpoint.describe import Surgery
from surgeon.checkpoint.hunks import Hunk, hunks
from surgeon.checkpoint.read import Checkpoint
from surgeon.checkpoint.sizes import Layer, SizeDifference, size_differences
from surgeon.checkpoint.write import as_bytes
from surgeon.progress import Advance

PART = 1 << 24  # bytes of a tensor that are compared at a time

Pair = tuple[Any, Any]


@dataclass(frozen=True, order=True)
class Key:
    """What a tensor is.

    Attributes:
        layers: of the unedited model, that its layer comes from; empty for a tensor that is of no layer.
        copy: counts from 0 where a program has the same layer several times, each stored for itself.
        name: within the layer, or its whole name.
    """

    layers: tuple[int, ...]
    copy: int
    name: str

    @property
    def layer(self) -> Layer:
        """Which stored layer it is of."""
        return self.layers, self.copy

    def __str__(self) -> str:
        if not self.layers:
            return self.name
        return f"layer {'+'.join(map(str, self.layers))}{' again' * self.copy} {self.name}"


@dataclass(frozen=True)
class Difference:
    """A tensor that both have, with other contents.

    Attributes:
        shape, dtype: of A's and B's, where they are not the same.
        count: of elements that differ, of `total`; None where shapes do.
        largest: absolute difference, and `relative` to A's largest value; None where there is no number for it.
    """

    key: Key
    shape: Pair | None = None
    dtype: Pair | None = None
    count: int | None = None
    total: int = 0
    largest: float | None = None
    relative: float | None = None


@dataclass(frozen=True)
class TensorComparison:
    """How the tensors of two checkpoints compare.

    Attributes:
        counts: how many tensors a layer has in all.
    """

    equal: int = 0
    only_a: tuple[Key, ...] = ()
    only_b: tuple[Key, ...] = ()
    different: tuple[Difference, ...] = ()
    counts: dict[Layer, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """All that differs; where recipes are compared there are no tensors, config and files.

    Attributes:
        a, b: what was compared.
        facts: by name, A's and B's.
        config: by key of config.json, A's and B's; None for a key that is not there.
        files: by name, "only in A", "only in B" or "different".
        hunks: where the programs differ but for sizes: widths and ranks.
        sizes: where these differ.
    """

    a: Surgery
    b: Surgery
    facts: dict[str, Pair] = field(default_factory=dict)
    hunks: tuple[Hunk, ...] = ()
    sizes: tuple[SizeDifference, ...] = ()
    tensors: TensorComparison | None = None
    config: dict[str, Pair] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        found = self.tensors or TensorComparison()
        of_models = (self.facts, self.hunks, self.sizes, self.config, self.files)
        return not any((*of_models, found.only_a, found.only_b, found.different))


def compare(a: Surgery, b: Surgery, advance: Advance = lambda _: None) -> Comparison:
    """Compare two checkpoints or recipes.

    Args:
        advance: told of every amount of A's bytes gone through, where both are checkpoints; in all `a.stored.size`.
    """
    found = tuple(hunks(a.program.whole(), b.program.whole(), a.steps_per_layer))
    first, second = _facts_of(a), _facts_of(b)
    both = [name for name in first if name in second]  # what only one of them can have is left out
    facts = {name: (first[name], second[name]) for name in both if first[name] != second[name]}
    comparison = Comparison(a, b, facts, found, tuple(size_differences(a.program, b.program)))
    if a.recipe is not None or b.recipe is not None:
        return comparison
    ours, theirs = a.stored.checkpoint, b.stored.checkpoint
    keys = [*ours.config, *(key for key in theirs.config if key not in ours.config)]
    pairs = {key: (ours.config.get(key), theirs.config.get(key)) for key in keys}
    return replace(
        comparison,
        tensors=_compare_tensors(ours, _keys(a), theirs, _keys(b), advance),
        config={key: pair for key, pair in pairs.items() if pair[0] != pair[1]},
        files=_compare_files(ours, theirs),
    )


def _facts_of(one: Surgery) -> dict[str, Any]:
    made_for = one.report.get("source", {}).get("model_hash") if one.recipe is None else one.recipe.weights
    facts = {
        "family": one.stored.family.name,
        "layers": one.num_layers,
        "form": one.form and one.form.name,
        "depth": one.depth,
        "syncs": one.program.sync_points(2),
        "parameters": one.stored.parameters if one.recipe is None else None,
        "in layers": one.program.parameters(one.stored.family.layer_shapes(one.stored.config)),
        "model": one.recipe and one.recipe.model,
        "made for": made_for if isinstance(made_for, str) else None,
        "trained": one.trained or "not after the edit" if one.report else None,
    }
    return {name: value for name, value in facts.items() if value is not None}


def _keys(one: Surgery) -> dict[Key, str]:
    """The stored name of every tensor."""
    checkpoint, family = one.stored.checkpoint, one.stored.family
    seen: Counter[tuple[int, ...]] = Counter()
    labels = []
    for layers in one.sources:
        labels.append((layers, seen[layers]))
        seen[layers] += 1
    names = one.stored.weights.names
    embedding, head = (f"{path}.weight" for path in (family.embedding, family.head))
    alike = {names.of(head): head, names.of(embedding): names.own(embedding)}  # whatever name they are stored under
    pattern = re.compile(rf"{re.escape(names.layers)}(\d+)\.(.+)")
    keys = {}
    for name in checkpoint.names():
        match = pattern.fullmatch(name)
        inside = match is not None and int(match[1]) < len(labels)
        keys[Key(*labels[int(match[1])], match[2]) if match and inside else Key((), 0, alike.get(name, name))] = name
    return keys


def _compare_tensors(
    a: Checkpoint, a_names: dict[Key, str], b: Checkpoint, b_names: dict[Key, str], advance: Advance
) -> TensorComparison:
    equal, different = 0, []
    for key in sorted(a_names.keys() & b_names.keys()):
        difference = _compare_tensor(key, a, a_names[key], b, b_names[key])
        if difference is None:
            equal += 1
        else:
            different.append(difference)
        advance(a.num_bytes(a_names[key]))
    only_a, only_b = sorted(a_names.keys() - b_names.keys()), sorted(b_names.keys() - a_names.keys())
    advance(sum(a.num_bytes(a_names[key]) for key in only_a))
    counts = Counter(key.layer for key in a_names.keys() | b_names.keys())
    return TensorComparison(equal, tuple(only_a), tuple(only_b), tuple(different), counts)


def _compare_tensor(key: Key, a: Checkpoint, a_name: str, b: Checkpoint, b_name: str) -> Difference | None:
    """How two tensors differ; None if they are equal, bit for bit."""
    shapes, dtypes = (a.shape(a_name), b.shape(b_name)), (a.dtype(a_name), b.dtype(b_name))
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    other_dtype = None if dtypes[0] == dtypes[1] else (names[0], names[1])
    if shapes[0] != shapes[1]:
        return Difference(key, (list(shapes[0]), list(shapes[1])), other_dtype)
    count, largest = 0, 0.0
    at_once = max(1, PART // max(1, math.prod(shapes[0][1:]) * max(dtype.itemsize for dtype in dtypes)))  # rows
    for parts in zip(a.rows(a_name, at_once), b.rows(b_name, at_once), strict=True):
        if other_dtype is None and torch.equal(as_bytes(parts[0]), as_bytes(parts[1])):
            continue
        differing, distance = _distance(*parts)
        count += differing
        largest = max(largest, distance, key=lambda value: (math.isnan(value), value))  # nan is the largest
    if other_dtype is None and not count:
        return None
    scale = max((_wide(rows).abs().max().item() for rows in a.rows(a_name, at_once) if rows.numel()), default=0.0)
    known = math.isfinite(largest)
    relative = largest / scale if known and 0 < scale < math.inf else None
    return Difference(key, None, other_dtype, count, math.prod(shapes[0]), largest if known else None, relative)


def _distance(a: Tensor, b: Tensor) -> tuple[int, float]:
    """How many elements differ, and the largest absolute difference (nan if one of these is no number)."""
    if a.dtype == b.dtype:
        width = a.dtype.itemsize
        differs = (as_bytes(a).view(-1, width) != as_bytes(b).view(-1, width)).any(dim=1)
    else:
        differs = (_wide(a) != _wide(b)).reshape(-1)
    apart = (_wide(a).reshape(-1)[differs] - _wide(b).reshape(-1)[differs]).abs()
    return int(differs.sum()), apart.max().item() if len(apart) else 0.0


def _wide(tensor: Tensor) -> Tensor:
    """In a dtype in which differences are exact enough."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16, torch.float32) else tensor.double()


def _compare_files(*checkpoints: Checkpoint) -> dict[str, str]:
    """Tokenizer, chat templates, settings, licence, code; not what tells of the checkpoint, which differs with it."""
    ours, theirs = (
        {path.name: path for path in one.folder.glob("*.py")} | companions_of(one.folder, one.file_names).files
        for one in checkpoints
    )
    found = {}
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in theirs:
            found[name] = "only in A"
        elif name not in ours:
            found[name] = "only in B"
        elif not filecmp.cmp(ours[name], theirs[name], shallow=False):
            found[name] = "different"
    return found
