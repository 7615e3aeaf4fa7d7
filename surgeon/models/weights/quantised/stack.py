"""Quantised matrices made of others without computing their numbers: side by side, or some of what is stacked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from surgeon.models.weights.quantised.matrix import Quantised


@dataclass(frozen=True)
class StackedPart:
    """One of the tensors that hold a stacked matrix.

    Attributes:
        read: its values.
        sources: names of the stored tensors that they are made of.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    sources: tuple[str, ...]


def stacked(matrices: Sequence[Quantised], dim: int, blocks: int) -> dict[str, StackedPart] | None:
    """The tensors, by ending, that hold matrices side by side; None where they do not hold them exactly.

    They hold them where every block of every matrix begins and ends with an element of each tensor, and no tensor says
    the same of all that lies along the dimension, a scale for each row, say.

    Args:
        dim: along which the matrices lie side by side.
        blocks: how many of each matrix take turns.
    """
    first = matrices[0]
    if any(one.scheme != first.scheme or one.parts.keys() != first.parts.keys() for one in matrices):
        return None
    found = {}
    shape = list(first.shape)
    shape[dim] = sum(one.shape[dim] for one in matrices)
    for ending, name in first.parts.items():
        names = tuple(one.parts[ending] for one in matrices)
        dtype = first.store.dtype(name)
        stated = first.scheme.stated(ending, tuple(shape))
        if stated is not None:
            found[ending] = StackedPart(tuple(stated.shape), dtype, partial(stated.to, dtype), names)
            continue
        alongs = [one.arrangement.place(ending, dim) for one in matrices]
        own = alongs[0]
        if own is not None:
            sizes = [one.shape[dim] * own.per_element / blocks for one in matrices]
        else:
            sizes = []
        if own is None or any(along != own for along in alongs) or any(size.denominator > 1 for size in sizes):
            return None
        whole = list(first.store.shape(name))
        whole[own.dim] = int(sum(sizes)) * blocks
        read = partial(_in_turn, matrices, ending, own.dim, blocks)
        found[ending] = StackedPart(tuple(whole), dtype, read, names)
    return found


def chosen(matrix: Quantised, dim: int, elements: Sequence[int]) -> dict[str, StackedPart] | None:
    """The tensors, by ending, that hold some elements along a dimension; None where one has several as one."""
    places = {ending: matrix.arrangement.place(ending, dim) for ending in matrix.parts}
    found = {}
    for ending, place in places.items():
        if place is None or place.per_element != 1:
            return None
        name = matrix.parts[ending]
        shape = list(matrix.store.shape(name))
        shape[place.dim] = len(elements)
        read = partial(_some, matrix, ending, place.dim, elements)
        found[ending] = StackedPart(tuple(shape), matrix.store.dtype(name), read, (name,))
    return found


def _some(matrix: Quantised, ending: str, dim: int, elements: Sequence[int]) -> Tensor:
    return matrix.tensor(ending).index_select(dim, torch.tensor(elements))


def _in_turn(matrices: Sequence[Quantised], ending: str, dim: int, blocks: int) -> Tensor:
    """A tensor of all matrices, a block of each in turn."""
    tensors = [one.tensor(ending) for one in matrices]
    turns = zip(*(tensor.chunk(blocks, dim) for tensor in tensors), strict=True)
    return torch.cat([block for turn in turns for block in turn], dim)
