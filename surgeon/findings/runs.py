"""The folders that commands write, read for the page: recognised by their JSON record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from surgeon.findings.blocks import Block, Finding
from surgeon.findings.result import RunResult, read_record

Found = TypeVar("Found", bound=RunResult)


@dataclass(frozen=True)
class Run(Generic[Found]):
    """One run of one command.

    Attributes:
        file: its JSON record.
        found: what it has found.
    """

    kind: Kind[Found]
    file: Path
    found: Found

    @property
    def folder(self) -> Path:
        """Where it lies."""
        return self.file.parent

    @property
    def name(self) -> str:
        """What the page calls it."""
        return self.folder.resolve().name

    @property
    def record(self) -> dict[str, Any]:
        """Its JSON record."""
        return self.found.record

    @property
    def model(self) -> str:
        """As the user named it."""
        return self.found.model_of(self.record)[0]

    @property
    def model_hash(self) -> str:
        """Of the model that was operated on; empty where the record has none."""
        return self.found.model_of(self.record)[1]


@dataclass(frozen=True)
class Kind(Generic[Found]):
    """A kind of run, and what the page shows of it.

    Attributes:
        result: what such a run has found: how it is recognised, and which files it has.
        title: of its section.
        show: the section's contents.
        findings: what it has to say in the summary.
        together: what the page shows once of several runs of a model, at the end of the last one's section.
        without: what a page cannot say that has no such run; empty if nothing is missed.
        missing: what a run leaves out.
        of_surgery: whether it has to do with a model that is operated on, of which a page misses what it does not have.
    """

    result: type[Found]
    title: str
    show: Callable[[Run[Found]], Iterable[Block]]
    findings: Callable[[Run[Found]], Iterable[Finding]] = lambda _: ()
    missing: Callable[[Run[Found]], Iterable[str]] = lambda _: ()
    together: Callable[[Sequence[Run[Found]]], Iterable[Block]] = lambda _: ()
    without: str = ""
    of_surgery: bool = True


def read_runs(path: Path, kinds: Sequence[Kind[Any]]) -> list[Run[Any]]:
    """Everything that a folder holds, or the one run whose record the path is.

    Raises:
        FileNotFoundError: if there is no such folder, or a file of a run is missing.
        ValueError: if the folder holds no known record, or a file is damaged.
    """
    if not path.exists():
        raise FileNotFoundError(f"no folder {path}; give folders that surgeon commands wrote")
    files = [path] if path.is_file() else sorted(path.iterdir())
    runs = [
        Run(kind, file, kind.result.read(file))
        for kind in kinds
        for file in files
        if file.match(kind.result.RECORD) and kind.result.is_ours(read_record(file))
    ]
    if not runs:
        looked_for = ", ".join(dict.fromkeys(kind.result.RECORD for kind in kinds))
        raise ValueError(f"{path} holds no run of a surgeon command; looked for {looked_for}")
    return runs
