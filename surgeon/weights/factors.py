"""Two factors in the place of a matrix."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Factors(NamedTuple):
    """A matrix of low rank, second @ first.

    Attributes:
        first: (rank, in).
        second: (out, rank).
    """

    first: Tensor
    second: Tensor
