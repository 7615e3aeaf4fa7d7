"""For all tests of training."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True, scope="package")
def _quick_collection() -> None:
    """A Trainer collects garbage first; with all that tests import, that takes longer than to train a tiny model."""
    gc.collect()
    gc.freeze()
