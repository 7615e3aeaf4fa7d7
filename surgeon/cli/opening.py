"""What the commands that measure have in common: they open a model and a text, and say what to know of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer

from surgeon.cli.options import TextArguments

if TYPE_CHECKING:
    from surgeon.analysis.subject import Subject


def open_measured(
    model: str, data: str, text: TextArguments, memory: str | None = None, elsewhere: bool = False
) -> Subject:
    """Open what is measured, and warn of what there is to know of its text; arguments as `open_subject` takes them.

    Args:
        memory: a limit as the user writes it; the subject has it in bytes.

    Raises:
        FileNotFoundError, ValueError: as `open_subject`; and if the limit is no amount of memory.
    """
    from surgeon.analysis.subject import open_subject
    from surgeon.memory import parse_size

    limit = None if memory is None else parse_size(memory)
    subject = open_subject(model, data, text.tokens, text.window, text.separator, limit, elsewhere)
    warn(subject.windows.notes)
    return subject


def warn(notes: Iterable[str]) -> None:
    """Put what the user should know on standard error, one line each."""
    for note in notes:
        typer.echo(f"warning: {note}", err=True)
