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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surgeon.checkpoint.companions import companions_of
from surgeon.checkpoint.describe import Description, describe
from surgeon.checkpoint.hunks import Hunk, hunks
from surgeon.checkpoint.ranks import Layer, RankDifference, rank_differences
from surgeon.checkpoint.read import Checkpoint, locate
from surgeon.checkpoint.write import as_bytes
from surgeon.models.weights import Names
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
        hunks: where the programs differ but for ranks.
        ranks: where these differ.
    """

    a: Description
    b: Description
    facts: dict[str, Pair] = field(default_factory=dict)
    hunks: tuple[Hunk, ...] = ()
    ranks: tuple[RankDifference, ...] = ()
    tensors: TensorComparison | None = None
    config: dict[str, Pair] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        found = self.tensors or TensorComparison()
        of_models = (self.facts, self.hunks, self.ranks, self.config, self.files)
        return not any((*of_models, found.only_a, found.only_b, found.different))


@dataclass(frozen=True)
class Compared:
    """Two checkpoints or recipes that were opened to be compared; no weights have been read.

    Attributes:
        checkpoints: both, if both are checkpoints.
    """

    a: Description
    b: Description
    checkpoints: tuple[Checkpoint, Checkpoint] | None

    @classmethod
    def open(cls, a: str | Path, b: str | Path) -> Compared:
        """Open them, given as `describe` takes them.

        Raises:
            FileNotFoundError, ValueError: as `describe`.
        """
        first, second = describe(a), describe(b)
        if first.recipe is not None or second.recipe is not None:
            return cls(first, second, None)
        return cls(first, second, (Checkpoint(locate(a)), Checkpoint(locate(b))))

    @property
    def size(self) -> int:
        """Bytes of A's tensors, all of which are read."""
        return 0 if self.a.weights is None or self.checkpoints is None else self.a.weights.size

    def compare(self, advance: Advance = lambda _: None) -> Comparison:
        """Compare them.

        Args:
            advance: told of every amount of A's bytes gone through, in all `size`.
        """
        a, b = self.a, self.b
        found = tuple(hunks(a.program.whole(), b.program.whole(), a.family.steps_per_layer))
        both = Comparison(a, b, _facts(a, b), found, tuple(rank_differences(a.program, b.program)))
        if self.checkpoints is None:
            return both
        first, second = self.checkpoints
        tensors = _compare_tensors(first, _keys(a, first), second, _keys(b, second), advance)
        files = _compare_files(_files_of(first), _files_of(second))
        keys = [*first.config, *(key for key in second.config if key not in first.config)]
        pairs = {key: (first.config.get(key), second.config.get(key)) for key in keys}
        config = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
        return replace(both, tensors=tensors, config=config, files=files)


def _facts(a: Description, b: Description) -> dict[str, Pair]:
    """What differs of the models as wholes; what only one of them can have is left out."""
    first, second = _facts_of(a), _facts_of(b)
    both = [name for name in first if name in second]
    return {name: (first[name], second[name]) for name in both if first[name] != second[name]}


def _facts_of(one: Description) -> dict[str, Any]:
    steps = one.family.steps_per_layer
    facts = {
        "family": one.family.name,
        "layers": one.num_layers,
        "form": one.form and one.form.name,
        "depth": one.program.effective_depth(steps),
        "syncs": one.program.sync_points(2),
        "parameters": None if one.weights is None else one.weights.parameters,
        "in layers": one.program.parameters(one.family.layer_shapes(one.config)),
        "model": None if one.recipe is None else one.recipe.model,
        "made for": _made_for(one),
        "trained": None if one.report is None else one.trained or "not after the edit",
    }
    return {name: value for name, value in facts.items() if value is not None}


def _made_for(one: Description) -> str | None:
    """The hash of the unedited weights, where it is known."""
    if one.recipe is not None:
        return one.recipe.weights
    known = (one.report or {}).get("source", {}).get("model_hash")
    return known if isinstance(known, str) else None


def _keys(one: Description, checkpoint: Checkpoint) -> dict[Key, str]:
    """The stored name of every tensor."""
    if one.sources is not None:
        sources = one.sources
    elif one.report is None:  # nothing says that its layers come from other ones
        sources = [(layer,) for layer in range(int(one.config.num_hidden_layers))]
    else:
        assert one.form is not None
        sources = one.form.sources(one.program, one.family, one.num_layers)
    seen: Counter[tuple[int, ...]] = Counter()
    labels = []
    for layers in sources:
        labels.append((layers, seen[layers]))
        seen[layers] += 1
    names = Names(checkpoint, one.family)
    embedding, head = (f"{path}.weight" for path in (one.family.embedding, one.family.head))
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
        largest = max(largest, distance, key=_nan_is_largest)
    if other_dtype is None and not count:
        return None
    scale = max(map(_largest, a.rows(a_name, at_once)), default=0.0)
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


def _largest(tensor: Tensor) -> float:
    return _wide(tensor).abs().max().item() if tensor.numel() else 0.0


def _wide(tensor: Tensor) -> Tensor:
    """In a dtype in which differences are exact enough."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16, torch.float32) else tensor.double()


def _nan_is_largest(value: float) -> tuple[bool, float]:
    return math.isnan(value), value


def _files_of(checkpoint: Checkpoint) -> dict[str, Path]:
    """Tokenizer, chat templates, settings, licence, code; not what tells of the checkpoint, which differs with it."""
    code = {path.name: path for path in checkpoint.folder.glob("*.py")}
    return code | companions_of(checkpoint.folder, checkpoint.file_names).files


def _compare_files(a: dict[str, Path], b: dict[str, Path]) -> dict[str, str]:
    found = {}
    for name in sorted(a.keys() | b.keys()):
        if name not in b:
            found[name] = "only in A"
        elif name not in a:
            found[name] = "only in B"
        elif not filecmp.cmp(a[name], b[name], shallow=False):
            found[name] = "different"
    return found
