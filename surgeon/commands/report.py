"""`surgeon report`, `surgeon.report`: one HTML page about the runs of other commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from surgeon.commands.command import command, option

if TYPE_CHECKING:
    import pandas as pd

    from surgeon.findings.page import Chapter
    from surgeon.findings.result import RunResult


@dataclass(frozen=True)
class ReportPage:
    """A page that was written, with a chapter for each model."""

    file: Path
    chapters: Sequence[Chapter] = field(repr=False)

    def table(self) -> pd.DataFrame:
        """The page's summaries: a row for each finding, with its model."""
        import pandas as pd

        rows = [
            (chapter.name, finding.lead, finding.text, finding.figure)
            for chapter in self.chapters
            for finding in chapter.summary
        ]
        return pd.DataFrame(rows, columns=["model", "about", "finding", "figure"])

    def __str__(self) -> str:
        from surgeon.machine import show_size

        return f"{self.file}: {show_size(self.file.stat().st_size)}"


@command()
def report(
    runs: Annotated[
        str | Path | RunResult | Sequence[str | Path | RunResult],
        option(
            "Folders that explore, scan, similarity, sensitivity, spectrum, search, heal, train, export, eval or "
            "predict wrote.",
            metavar="RUN",
            kind=list[Path],
        ),
    ],
    output: Annotated[
        str | Path, option("The page, an .html file; replaced if it is there.", "--output", "-o")
    ] = "report.html",
) -> ReportPage:
    """Put what was measured into one HTML page that needs no network and no other file.

    It begins with a summary: which layers can be touched, at which cost, and which cannot. Runs of the same weights
    go together; other models get chapters of their own. Layers count from 0; stretches are named by both their ends.

    Raises:
        FileNotFoundError, ValueError: if a folder or a file of a run is missing or damaged.
        OSError: if the page cannot be written.
    """
    from surgeon.commands.command import as_several
    from surgeon.commands.opening import as_folder
    from surgeon.findings.explore import Exploration
    from surgeon.findings.page import write_page
    from surgeon.findings.result import read_record

    paths: dict[Path, None] = {}
    for folder in map(as_folder, as_several(runs)):
        paths[folder] = None
        record = folder / Exploration.RECORD
        if record.is_file():
            paths.update(dict.fromkeys(folder / name for name in read_record(record).get("passes", ())))
    if not paths:
        raise ValueError("there are no runs to report on; give the folders that passes wrote")
    page = Path(output)
    if page.suffix.lower() not in (".html", ".htm"):  # it would replace what somebody else wrote
        raise ValueError(
            f"a report is an .html file, and {page} is none; write {page.with_suffix('.html')}"
        )
    return ReportPage(page, write_page([*paths], page))
