"""`surgeon report`: one HTML page from the folders that other commands wrote, whole in itself.

The page needs no network and no other file. What a section shows comes from `surgeon.findings.sections`, how it looks
from the templates in `html/`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from surgeon.findings.blocks import Block, Finding
from surgeon.findings.exported import ExportRun
from surgeon.findings.inline import inline_svg, legend_keys
from surgeon.findings.result import SHORT_HASH, named
from surgeon.findings.runs import Run, read_runs
from surgeon.findings.sections import KINDS
from surgeon.named import public
from surgeon.processes.files import make_folder, write_text
from surgeon.version import __version__
from surgeon.words import listed

TEMPLATES = Path(__file__).parent / "html"
_LONGEST_VALUE = 600  # characters of a value in the provenance, before it is cut short
_FIRST = ("command", "model", "model_hash", "data", "data_hash", "seed")


@dataclass(frozen=True)
class Section:
    """What the page shows of one run.

    Attributes:
        anchor: to link to.
        provenance: names and values of its record.
    """

    run: Run[Any]
    anchor: str
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
    unique: dict[Path, Run[Any]] = {}
    for path in paths:
        for run in read_runs(path, KINDS):
            unique.setdefault(run.file.resolve(), run)
    runs = list(unique.values())
    # Records without a hash go by the model's name, and never into a chapter of a model that is known.
    exported: dict[Path, str] = {}
    groups: dict[str, list[Run[Any]]] = {}
    for run in runs:
        if run.kind.result is ExportRun:
            with named(run.file, run.kind.result.COMMAND):
                exported[run.folder.resolve()] = _key(run)
    for run in runs:
        # What was measured on an exported checkpoint belongs to the model it was made of.
        with named(run.file, run.kind.result.COMMAND):
            groups.setdefault(exported.get(Path(run.model).resolve(), _key(run)), []).append(run)
    return [
        _chapter(number, "" if key.startswith("name ") else key, group)
        for number, (key, group) in enumerate(groups.items(), start=1)
    ]


def _key(run: Run[Any]) -> str:
    return run.model_hash or f"name {run.model}"


def _chapter(number: int, model_hash: str, runs: Sequence[Run[Any]]) -> Chapter:
    anchor = f"model-{number}"
    ordered = sorted(runs, key=lambda run: KINDS.index(run.kind))
    sections = [_section(f"{anchor}-{place}", run, ordered) for place, run in enumerate(ordered, start=1)]
    summary: list[Finding] = []
    missing: list[str] = []
    for run in ordered:
        name = _name_if_several(run, runs)
        with named(run.file, run.kind.result.COMMAND):
            summary += [_named(finding, name) for finding in run.kind.findings(run)]
            missing += [f"{name}: {line}" if name else line for line in run.kind.missing(run)]
    present = {run.kind.result.COMMAND for run in runs}
    if any(run.kind.of_surgery for run in runs):
        missing += [kind.without for kind in KINDS if kind.without and kind.result.COMMAND not in present]
    of_original = [run for run in ordered if run.model_hash == model_hash] or ordered
    names = listed(dict.fromkeys(public(run.model) for run in of_original))
    return Chapter(names, model_hash[:SHORT_HASH], anchor, summary, list(dict.fromkeys(missing)), sections)


def _name_if_several(run: Run[Any], runs: Sequence[Run[Any]]) -> str:
    return run.name if sum(other.kind is run.kind for other in runs) > 1 else ""


def _named(finding: Finding, run: str) -> Finding:
    """The finding with its run's name, where there are several."""
    return replace(finding, lead=f"{finding.lead} ({run})", label=f"{finding.label} ({run})") if run else finding


def _section(anchor: str, run: Run[Any], runs: Sequence[Run[Any]]) -> Section:
    name = _name_if_several(run, runs)
    title = f"{run.kind.title}: {name}" if name else run.kind.title
    of_kind = [other for other in runs if other.kind is run.kind]
    with named(run.file, run.kind.result.COMMAND):
        blocks = list(run.kind.show(run))
        if run is of_kind[-1]:
            blocks += run.kind.together(of_kind)
        return Section(run, anchor, title, blocks, _provenance(run))


def _provenance(run: Run[Any]) -> list[tuple[str, str]]:
    """Names and values of the record, what everyone looks for first."""
    record = run.found.provenance(run.record)
    names = [name for name in _FIRST if name in record] + [name for name in record if name not in _FIRST]
    return [("file", str(run.file)), *((name, _value(record[name])) for name in names)]


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]} … ({len(text):,} characters)"
