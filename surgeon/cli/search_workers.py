"""The options of `surgeon search` that say who works on it, and where they share what they know."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from surgeon.searches.study.storage import StudyStorage

STORAGE_VARIABLE = "SURGEON_STORAGE"
DEFAULT_STUDY = "search"


PROGRAM = ("-P", "-m", "surgeon.cli")  # not from the current folder, in which anything may lie


@dataclass(frozen=True)
class SearchWorkers:
    """Who works on a search, in the user's words; a group of options (see grouped.py)."""

    storage: Annotated[
        str | None,
        typer.Option(
            "--storage",
            envvar=STORAGE_VARIABLE,
            help="Where the study lies: postgresql://user@host/database for workers on many machines, sqlite:///file "
            "or journal:file for those of one. Default: a journal, study.log, in the output folder.",
            show_default=False,
        ),
    ] = None
    study: Annotated[
        str | None,
        typer.Option(
            "--study",
            help="The study's name in its storage. Default: search, or with --storage one that follows from the model "
            "and all settings, so that the same command is the same study.",
            show_default=False,
        ),
    ] = None
    workers: Annotated[
        int, typer.Option("--workers", min=1, help="Processes of this machine to work on it; they divide its cores.")
    ] = 1
    worker: Annotated[int, typer.Option("--worker", min=0, hidden=True)] = 0  # which of them this is (workers.py)

    @property
    def is_first(self) -> bool:
        """Whether this is the process that the user has started: it starts the others, and writes the results."""
        return self.worker == 0

    def open(self, output: Path) -> StudyStorage:
        """The storage; errors as `surgeon.searches.study.storage.open_storage` raises them."""
        from surgeon.searches.study.storage import open_storage

        return open_storage(self.storage, output)

    def name(self, model: str, settings: Mapping[str, Any]) -> str:
        """The study's name.

        Args:
            model: what to call the model.
            settings: all that the study depends on, as JSON values.
        """
        if self.study is not None or self.storage is None:
            return self.study or DEFAULT_STUDY
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        return f"{DEFAULT_STUDY} {model} {digest[:8]}"

    @contextmanager
    def at_work(self, output: Path) -> Iterator[None]:
        """While it lasts, all of this machine's workers work; SIGTERM and Ctrl-C give back what they run.

        Raises:
            ValueError: if others cannot be started from here.
        """
        from surgeon.searches.study.workers import WorkerProcesses, interruptible

        others = WorkerProcesses(self.workers if self.is_first else 1, PROGRAM, sys.argv[1:], output)
        with interruptible(self.worker), others:
            yield
