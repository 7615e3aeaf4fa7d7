"""Compare two checkpoints: their tensors, config.json and the files beside them.

Tensors are matched by the layer of the unedited model that they come from, so that what an edit left alone is equal
wherever it is stored. They are read in parts: memory holds a few megabytes of two tensors, never a model.
"""

from __future__ import annotations

import filecmp
import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surgeon.checkpoint.companions import companions_of
from surgeon.checkpoint.describe import Surgery
from surgeon.checkpoint.read import Checkpoint
from surgeon.checkpoint.write import as_bytes
from surgeon.progress import Advance

PART = 1 << 24  # bytes of a tensor that are compared at a time


@dataclass(frozen=True)
class Comparison:
    """The differences between two checkpoints, A and B.

    Attributes:
        equal: how many tensors are equal, bit for bit.
        only_a, only_b: tensors that only one of them has.
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
    """Compare two checkpoints.

    Args:
        advance: called with the bytes of A's tensors as they are compared, in all `a.stored.size`.
    """
    ours = a.stored.checkpoint
    theirs = b.stored.checkpoint
    names_a = _tensor_names(a)
    names_b = _tensor_names(b)
    different = {}
    for key, name in names_a.items():
        if key in names_b and (difference := _difference(ours, name, theirs, names_b[key])) is not None:
            different[key] = difference
        advance(ours.num_bytes(name))
    keys = dict.fromkeys([*ours.config, *theirs.config])
    values = {key: (ours.config.get(key), theirs.config.get(key)) for key in keys}
    return Comparison(
        len(names_a.keys() & names_b.keys()) - len(different),
        [key for key in names_a if key not in names_b],
        [key for key in names_b if key not in names_a],
        different,
        {key: pair for key, pair in values.items() if pair[0] != pair[1]},
        _compare_files(ours, theirs),
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
    alike = {names.of(head): head, names.of(embedding): names.own(embedding)}  # whatever name they are stored under
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
    """How two tensors differ, in words; None if they are equal, bit for bit."""
    shape = a.shape(a_name)
    dtypes = [str(a.dtype(a_name)).removeprefix("torch."), str(b.dtype(b_name)).removeprefix("torch.")]
    if shape != b.shape(b_name):
        return f"shape {list(shape)} | {list(b.shape(b_name))}"
    count = 0
    most = 0.0
    widest = max(a.dtype(a_name).itemsize, b.dtype(b_name).itemsize)
    rows = max(1, PART // max(1, math.prod(shape[1:]) * widest))
    for part_a, part_b in zip(a.rows(a_name, rows), b.rows(b_name, rows), strict=True):
        if part_a.dtype != part_b.dtype:
            differs = (_wide(part_a) != _wide(part_b)).reshape(-1)
        else:  # bit for bit, so that -0 is not 0
            width = part_a.dtype.itemsize
            differs = (as_bytes(part_a).view(-1, width) != as_bytes(part_b).view(-1, width)).any(dim=1)
        if differs.any():
            count += int(differs.sum())
            apart = (_wide(part_a).reshape(-1)[differs] - _wide(part_b).reshape(-1)[differs]).abs()
            most = max(most, apart.max().item(), key=lambda value: (math.isnan(value), value))  # nan is the largest
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


def _compare_files(*checkpoints: Checkpoint) -> dict[str, str]:
    """Compare tokenizer, chat templates, settings, licence and code; not the report and card, which always differ."""
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
