"""Versions of surgeon and of its results."""

__version__ = "0.2.0"
# Of everything measured; rises when what was measured before is not to be gone on with, or shown.
# 3: before, models with dropout in their configuration were measured with it on.
FORMAT = 3
