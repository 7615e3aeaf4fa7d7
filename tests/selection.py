"""Which combinations of families, programs and ranks are tried by default, and which with `--thorough` only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from surgeon.models.families import FAMILIES

# Families that norm what a sublayer adds to the stream: theirs are neither sliced nor fused.
NORMED_BEHIND = tuple(name for name, family in FAMILIES.items() if family.attention.norms_output)

# Families all of whose attentions run on ranks; programs of the others' MLPs do.
RANKED = tuple(name for name, family in FAMILIES.items() if family.attention.apart is None)


def case(*values: Any, default: bool, slow: bool = False, id: str | None = None) -> Any:
    """A set of parameters, tried by default, with `--thorough` only, or of these before a release only."""
    marks = []
    if slow or not default:
        marks.append(pytest.mark.thorough)
    if slow:
        marks.append(pytest.mark.slow)
    return pytest.param(*values, id=id, marks=marks)


def one_in(count: int, values: Iterable[Any], first: int = 0) -> list[Any]:
    """Values of one parameter, of which every so many are tried by default.

    Args:
        first: the place of the first one; tests that differ in it try different ones.
    """
    return [case(value, default=place % count == first) for place, value in enumerate(values)]
