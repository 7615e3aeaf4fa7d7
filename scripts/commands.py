"""The command lines of scripts: a parser whose help is the script's docstring, and changed environment variables."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def make_parser(doc: str | None, **options: Any) -> argparse.ArgumentParser:
    """Make a parser that shows a docstring as it stands."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, **options
    )


class Said(list[str]):
    """Lines that are printed as they come, and kept."""

    def __call__(self, line: str) -> None:
        self.append(line)
        print(line, flush=True)

    def write(self, path: Path | None) -> None:
        """Write them into a file, if one is wanted."""
        if path is not None:
            path.write_text("\n".join(self) + "\n", encoding="utf-8")


def add_defaults(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add options by their defaults, of whose types they are; those whose default is a list take several.

    Args:
        defaults: by name, False for a switch; a help text may stand behind one, in a tuple.
    """
    for name, default in defaults.items():
        value, told = default if isinstance(default, tuple) else (default, None)
        how: dict[str, Any] = {"type": type(value)}
        if value is False:
            how = {"action": "store_true"}
        elif isinstance(value, list):
            how = {"type": type(value[0]), "nargs": "+"}
        parser.add_argument(f"--{name.replace('_', '-')}", default=value, help=told, **how)


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
