"""`surgeon report`: one HTML page from the folders that other commands wrote, whole in itself.

The page needs no network and no other file. A section is that of a result, how it looks comes from the templates in
`html/`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from surgeon.findings.blocks import Block, Finding
from surgeon.findings.explore import Exploration
from surgeon.findings.exported import ExportRun
from surgeon.findings.heal import HealRun
from surgeon.findings.inline import inline_svg, legend_keys
from surgeon.findings.prediction import Predictions
from surgeon.findings.result import SHORT_HASH, RunResult, named, read_record
from surgeon.findings.scan import Scan
from surgeon.findings.scratch import ScratchRun
from surgeon.findings.search import SearchRun
from surgeon.findings.sensitivity import Sensitivity
from surgeon.findings.similarity import Similarity
from surgeon.findings.spectrum import Spectrum
from surgeon.findings.tasks import TaskRun
from surgeon.named import public
from surgeon.processes.files import make_folder, write_text
from surgeon.version import __version__
from surgeon.words import listed

# In the order of the page.
KINDS: tuple[type[RunResult], ...] = (
    Exploration,
    Scan,
    Similarity,
    Sensitivity,
    Spectrum,
    SearchRun,
    HealRun,
    ScratchRun,
    ExportRun,
    TaskRun,
    Predictions,
)

TEMPLATES = Path(__file__).parent / "html"
_LONGEST_VALUE = 600  # characters of a value in the provenance, before it is cut short
_FIRST = ("command", "model", "model_hash", "data", "data_hash", "seed")


@dataclass(frozen=True)
class Section:
    """The page's part of one run.

    Attributes:
        anchor: to link to.
        name: of the run.
        provenance: names and values of its record.
    """

    anchor: str
    name: str
    title: str
    blocks: Sequence[Block]
    provenance: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Chapter:
    """Everything about one model: runs of the same weights.

    Attributes:
        missing: what cannot be said.
    """

    name: str
    model_hash: str
    anchor: str
    summary: Sequence[Finding]
    missing: Sequence[str]
    sections: Sequence[Section]

    @property
    def figures(self) -> list[Finding]:
        """The findings whose numbers stand at the top."""
        return [finding for finding in self.summary if finding.figure]


def write_page(paths: Iterable[Path], output: Path) -> list[Chapter]:
    """Write the page about these runs; a file of that name is replaced once the new one is whole.

    Args:
        paths: folders that commands wrote, or single records.

    Returns:
        What is in it.

    Raises:
        FileNotFoundError: if a folder or a file of a run is missing.
        ValueError: if a folder holds no known record, or a file is damaged, naming it.
        OSError: if the page cannot be written.
    """
    if output.is_dir():
        raise ValueError(f"{output} is a folder; give a file to write, such as {output / 'report.html'}")
    chapters = chapters_of(paths)
    html = render(chapters)
    make_folder(output.parent)
    write_text(output, html)
    return chapters


def render(chapters: Sequence[Chapter]) -> str:
    """The page as text."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"inline": inline_svg, "legend_keys": legend_keys}
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "ensure_ascii": False}
    return environment.get_template("page.html").render(
        title=f"surgeon report: {listed(chapter.name for chapter in chapters)}",
        chapters=chapters,
        style=Markup((TEMPLATES / "style.css").read_text(encoding="utf-8")),
        script=Markup((TEMPLATES / "page.js").read_text(encoding="utf-8")),
        version=__version__,
    )


def chapters_of(paths: Iterable[Path]) -> list[Chapter]:
    """One for each model of these runs, in the order in which they were named; errors as in `write_page`."""
    unique: dict[Path, RunResult] = {}
    for path in paths:
        for run in read_runs(path):
            unique.setdefault(run.files[0].resolve(), run)
    runs = list(unique.values())
    # Records without a hash go by the model's name, and never into a chapter of a model that is known.
    exported: dict[Path, str] = {}
    for run in runs:
        if isinstance(run, ExportRun):
            with _named(run):
                exported[run.files[0].parent.resolve()] = _key(run)
    groups: dict[str, list[RunResult]] = {}
    for run in runs:
        # What was measured on an exported checkpoint belongs to the model it was made of.
        with _named(run):
            groups.setdefault(exported.get(Path(run.model).resolve(), _key(run)), []).append(run)
    return [
        _chapter(number, "" if key.startswith("name ") else key, group)
        for number, (key, group) in enumerate(groups.items(), start=1)
    ]


def read_runs(path: Path) -> list[RunResult]:
    """Read everything that a folder holds, or the one run whose record the path is.

    Raises:
        FileNotFoundError: if there is no such folder, or a file of a run is missing.
        ValueError: if the folder holds no known record, or a file is damaged.
    """
    if not path.exists():
        raise FileNotFoundError(f"no folder {path}; give folders that surgeon commands wrote")
    files = [path] if path.is_file() else sorted(path.iterdir())
    runs = [
        kind.read(file)
        for kind in KINDS
        for file in files
        if file.match(kind.RECORD) and kind.is_ours(read_record(file))
    ]
    if not runs:
        looked_for = ", ".join(dict.fromkeys(kind.RECORD for kind in KINDS))
        raise ValueError(f"{path} holds no run of a surgeon command; looked for {looked_for}")
    return runs


def _named(run: RunResult) -> AbstractContextManager[None]:
    return named(run.files[0], run.COMMAND)


def _key(run: RunResult) -> str:
    return run.model_hash or f"name {run.model}"


def _chapter(number: int, model_hash: str, runs: Sequence[RunResult]) -> Chapter:
    anchor = f"model-{number}"
    ordered = sorted(runs, key=lambda run: KINDS.index(type(run)))
    sections = [_section(f"{anchor}-{place}", run, ordered) for place, run in enumerate(ordered, start=1)]
    summary: list[Finding] = []
    missing: list[str] = []
    for run in ordered:
        name = _name_if_several(run, runs)
        with _named(run):
            if name:
                summary += [
                    replace(one, lead=f"{one.lead} ({name})", label=f"{one.label} ({name})") for one in run.summary()
                ]
                missing += [f"{name}: {line}" for line in run.missing()]
            else:
                summary += run.summary()
                missing += run.missing()
    present = {run.COMMAND for run in runs}
    if any(run.OF_SURGERY for run in runs):
        missing += [kind.WITHOUT for kind in KINDS if kind.WITHOUT and kind.COMMAND not in present]
    of_original = [run for run in ordered if run.model_hash == model_hash] or ordered
    names = listed(dict.fromkeys(public(run.model) for run in of_original))
    return Chapter(names, model_hash[:SHORT_HASH], anchor, summary, list(dict.fromkeys(missing)), sections)


def _name_if_several(run: RunResult, runs: Sequence[RunResult]) -> str:
    if sum(type(other) is type(run) for other in runs) > 1:
        return run.name
    return ""


def _section(anchor: str, run: RunResult, runs: Sequence[RunResult]) -> Section:
    name = _name_if_several(run, runs)
    of_kind = [other for other in runs if type(other) is type(run)]
    record = run.provenance(run.record)
    names = [name for name in _FIRST if name in record] + [name for name in record if name not in _FIRST]
    with _named(run):
        blocks = list(run.section())
        if run is of_kind[-1]:
            blocks += run.together(of_kind)
        for block in blocks:
            for panel in getattr(block, "items", [block]):
                getattr(panel, "figure", None)  # drawn here, so that an error names the run
    provenance = [("file", str(run.files[0])), *((each, _value(record[each])) for each in names)]
    return Section(anchor, run.name, f"{run.TITLE}: {name}" if name else run.TITLE, blocks, provenance)


def _value(value: Any) -> str:
    text = str(value)
    if not isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
    if len(text) <= _LONGEST_VALUE:
        return text
    return f"{text[:_LONGEST_VALUE]} … ({len(text):,} characters)"
