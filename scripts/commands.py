"""The command lines of scripts: a parser whose help is the script's docstring, and changed environment variables."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def make_parser(doc: str | None, **options: Any) -> argparse.ArgumentParser:
    """Make a parser that shows a docstring as it stands."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, **options
    )


@contextmanager
def changed_environment(**variables: str) -> Iterator[None]:
    """Set environment variables for processes that start inside."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
