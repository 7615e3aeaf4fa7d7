"""`surgeon.report`: one HTML page about what other passes have found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from surgeon.findings.explore import Exploration
from surgeon.findings.page import Chapter, write_page
from surgeon.findings.result import RunResult, read_record
from surgeon.library.opening import as_folder
from surgeon.words import plural


@dataclass(frozen=True, repr=False)
class ReportPage:
    """A page that was written.

    Attributes:
        file: the page, whole in itself.
        chapters: one for each model, with what its runs say.
    """

    file: Path
    chapters: Sequence[Chapter]

    def table(self) -> pd.DataFrame:
        """The page's summaries: a row for each finding, with the model that it is about."""
        rows = [
            (chapter.name, finding.lead, finding.text, finding.figure)
            for chapter in self.chapters
            for finding in chapter.summary
        ]
        return pd.DataFrame(rows, columns=["model", "about", "finding", "figure"])

    def __repr__(self) -> str:
        return f"<ReportPage {self.file}: {plural(len(self.chapters), 'model')}>"

    def _repr_html_(self) -> str:
        return self.table().to_html(index=False)

    def __str__(self) -> str:
        return f"{self.file}: {self.file.stat().st_size / 2**20:.2f} MB"


def report(
    runs: str | Path | RunResult | Sequence[str | Path | RunResult], output: str | Path = "report.html"
) -> ReportPage:
    """Put what was measured into one HTML page that needs no network and no other file.

    Args:
        runs: folders that passes wrote, single records (.json) in them, or what the passes have returned; runs of the
            same weights go together. The folder of an exploration stands for those of its passes, too.
        output: the page; a file of that name is replaced once the new one is whole.

    Raises:
        FileNotFoundError: if a folder or a file of a run is missing.
        ValueError: if a folder holds no known record, or a file is damaged, naming it.
        OSError: if the page cannot be written.
    """
    given = [as_folder(run) for run in ([runs] if isinstance(runs, str | Path | RunResult) else runs)]
    paths = [*dict.fromkeys(path for one in given for path in _with_its_passes(one))]
    if not paths:
        raise ValueError("there are no runs to report on; give the folders that passes wrote")
    return ReportPage(Path(output), write_page(paths, Path(output)))


def _with_its_passes(path: Path) -> list[Path]:
    record = path / Exploration.RECORD
    return [path, *(path / name for name in read_record(record).get("passes", ()))] if record.is_file() else [path]
