"""Ranks that the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from surgeon.runtime.worker.rank import RankOptions
from surgeon.runtime.worker.ranks import Ranks


class Several(NamedTuple):
    """Ranks, and how many."""

    count: int
    started: Ranks


@pytest.fixture(scope="module", params=[2, 4])
def several(request: pytest.FixtureRequest) -> Iterator[Several]:
    with Ranks(RankOptions(request.param)) as started:
        yield Several(request.param, started)
