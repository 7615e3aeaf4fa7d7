"""Every space keeps the contract, with every argument that it takes."""

from __future__ import annotations

import pytest

from surgeon.searches.spaces import SPACES, Space, parse_spaces
from surgeon.testing import SpaceContract

WITH_ARGUMENTS = [
    "pair:3",
    "par:4",
    "ladder:sublayers",
    "ladder:ranges",
    "drop:layers",
    "drop:attention",
    "drop:mlp",
    "order:4",
    "repeat:3",
    "tracks:3",
    "rank:0.9/0.3",
    "experts:3/1",
]


@pytest.mark.sampled("test_its_edits_go_together_with_those_of_others")
class TestSpaces(SpaceContract):
    @pytest.fixture(params=[*SPACES, *WITH_ARGUMENTS])
    def space(self, request: pytest.FixtureRequest) -> Space:
        (space,) = parse_spaces(request.param)
        return space
