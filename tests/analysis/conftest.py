"""Fixtures of the tests of analyses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from surgeon.quality.data import Windows


@pytest.fixture
def windows() -> Windows:
    """A text of random tokens: 5 windows of 12."""
    from tests.analysis.texts import random_windows

    return random_windows(5, 12)
