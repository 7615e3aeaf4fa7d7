"""Stacks in which layers lie several times, as mergekit's passthrough merges have them: which layers are the same."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from surgeon.checkpoint.read import Checkpoint
from surgeon.checkpoint.tensor_file import TensorFiles
from surgeon.language.program import Program
from surgeon.models.families import Family
from surgeon.models.weights import Names

Tensors = dict[str, str]  # of a layer: stored names by path


def stacked(checkpoint: Checkpoint, family: Family, config: Any) -> Program | None:
    """The program of a checkpoint whose layers are in part the same as earlier ones, bit for bit; None if none is.

    Norms are read, and more of a layer only as far as it is the same as an earlier one.
    """
    first = dict(_same(checkpoint, family, config))
    if not first:
        return None
    dense = Program.dense(int(config.num_hidden_layers), family.steps_per_layer)
    return dense.renamed(lambda one: replace(one, layers=tuple(first.get(layer, layer) for layer in one.layers)))


def _same(checkpoint: Checkpoint, family: Family, config: Any) -> Iterator[tuple[int, int]]:
    """Layers, and the first ones that are the same."""
    files = checkpoint.raw
    layers = list(_layers(files, Names(checkpoint, family).layers, int(config.num_hidden_layers)))
    lists = [(values, len(values)) for key in family.layer_lists if (values := getattr(config, key, None))]
    norms = [f"{spec.norm or spec.post_norm}.weight" for spec in (family.attention, family.mlp)]
    seen: dict[Any, list[int]] = {}
    for layer, tensors in enumerate(layers):
        said = tuple(str(values[layer]) for values, count in lists if layer < count)
        gains = tuple(b"".join(files.blocks(tensors[path])) for path in norms if path in tensors)
        alike = seen.setdefault((said, gains), [])
        same = next((other for other in alike if _are_same(files, layers[other], tensors)), None)
        if same is None:
            alike.append(layer)
        else:
            yield layer, same


def _layers(files: TensorFiles, prefix: str, count: int) -> Iterator[Tensors]:
    found: list[Tensors] = [{} for _ in range(count)]
    for name in files.names():
        match = re.fullmatch(rf"{re.escape(prefix)}(\d+)\.(.+)", name)
        if match is not None and int(match[1]) < count:
            found[int(match[1])][match[2]] = name
    return iter(found)


def _are_same(files: TensorFiles, one: Tensors, other: Tensors) -> bool:
    if one.keys() != other.keys():
        return False
    # Of different matrices the first block tells.
    pairs = [(name, other[path]) for path, name in one.items()]
    return all(
        (files.dtype(a), files.shape(a)) == (files.dtype(b), files.shape(b))
        and all(here == there for here, there in zip(files.blocks(a), files.blocks(b), strict=True))
        for a, b in pairs
    )
