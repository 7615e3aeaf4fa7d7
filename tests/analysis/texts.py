"""Texts of random tokens, for the tiny models' vocabulary."""

from __future__ import annotations

import torch

from surgeon.quality.data import Windows
from tests.tiny_models import VOCABULARY


def random_windows(windows: int, tokens: int, seed: int = 5, digest: str = "digest") -> Windows:
    """The same for the same arguments."""
    ids = torch.randint(VOCABULARY, (windows, tokens), generator=torch.Generator().manual_seed(seed))
    return Windows(ids, "random", digest)
