"""Version of surgeon."""

__version__ = "0.2.0"
