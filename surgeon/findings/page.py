"""`surgeon report`: one HTML page from the folders of other commands, whole in itself; its templates are in `html/`."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import matplotlib
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text

from surgeon.findings.drawing import COLOURS, GRID, INK, NO_CELL, ORDERED, PAPER, POINTS, SOFT, TIPS
from surgeon.findings.explore import Exploration
from surgeon.findings.exported import ExportRun
from surgeon.findings.result import SHORT_HASH, Finding, RunResult, name_file_in_errors, read_record
from surgeon.findings.scan import Scan
from surgeon.findings.search import SearchResult
from surgeon.findings.sensitivity import Sensitivity
from surgeon.findings.similarity import Similarity
from surgeon.findings.spectrum import Spectrum
from surgeon.findings.speeds import Predictions
from surgeon.findings.tasks import TaskRun
from surgeon.findings.training import HealRun, ScratchRun
from surgeon.named import public
from surgeon.processes.files import make_folder, write_text
from surgeon.version import __version__
from surgeon.words import join_words

# What style.css has in place of a colour, for light and for dark.
_OF_THE_PAGE = {"#000000": "currentColor", PAPER: "var(--paper)", INK: "var(--ink)", SOFT: "var(--soft)"}
_OF_THE_PAGE |= {GRID: "var(--grid)", NO_CELL: "var(--no-cell)"}
_OF_THE_PAGE |= {colour: f"var(--s{number})" for number, colour in enumerate(COLOURS)}
_OF_THE_PAGE |= {colour: f"var(--q{number})" for number, colour in enumerate(ORDERED)}
# Nothing is drawn beyond the axes, and styles become attributes.
_LEFT_OUT = {"metadata", "style", "clipPath"}
_UNUSED = {"id", "clip-path", "font-family", "stroke-dashoffset", "width", "height"}
_SHEET = "#fdfdfc"
# Characters that XML cannot hold.
_NO_TEXT = re.compile("[\\x00-\\x08\\x0b\\x0c\\x0e-\\x1f\\ud800-\\udfff\\ufffe\\uffff]")
# Of a line, that the sample of it in a legend has, too.
_LINE_LOOKS = (
    "color",
    "linestyle",
    "linewidth",
    "marker",
    "markersize",
    "markerfacecolor",
    "markeredgecolor",
)
_PRECISE = re.compile(r"-?\d+\.\d{3,}")


def inline_svg(figure: Figure, title: str = "", name: str = "", themed: bool = True) -> Markup:
    """The figure as an element of a page, without its legend, whose entries the page has as text.

    Args:
        title: for screen readers; a drawing without one is hidden from them.
        name: prefix of ids, which must be unique in the page.
        themed: colours follow the page's light or dark.
    """
    for legend in filter(None, (axes.get_legend() for axes in figure.axes)):
        legend.set_visible(False)
    if not themed:
        figure.patch.set_facecolor(_SHEET)
    spoken = [(artist, TIPS[artist]) for artist in figure.findobj(lambda one: one in TIPS)]
    for number, (artist, _) in enumerate(spoken):
        artist.set_gid(f"tips-{number}")
    for words in figure.findobj(Text):
        words.set_parse_math(False)  # a dollar in a name is a dollar
    text = StringIO()
    fixed: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "surgeon",
        "path.simplify": False,
        "text.parse_math": False,
    }
    with matplotlib.rc_context(fixed), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the reader's own fonts are used
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    root = ElementTree.fromstring(_NO_TEXT.sub("\N{REPLACEMENT CHARACTER}", text.getvalue()))
    places = {place.get("id"): place for place in root.iter()}
    for number, (_, tips) in enumerate(spoken):
        marks = [use for use in places[f"tips-{number}"].iter() if use.tag.endswith("}use")]
        for mark, tip in zip(marks, tips, strict=True):
            mark.set("class", "mark")
            ElementTree.SubElement(mark, "title").text = tip or None
    ids: dict[str, str] = {}
    _, _, width, height = map(float, str(root.get("viewBox")).split())
    inside = Markup("").join(_write(node, ids, name, themed) for node in root)
    head = {
        "viewBox": f"0 0 {width:g} {height:g}",
        "fill": "currentColor" if themed else "#000",
        "stroke-linejoin": "round",
    }
    head |= {"role": "img", "aria-label": title} if title else {"aria-hidden": "true", "class": "key"}
    # The page's script needs the places of the cells to find the one under the pointer.
    if figure.axes and figure.axes[0].images:
        box = figure.axes[0].get_position()
        down, across = figure.axes[0].images[0].get_size()
        place = {"left": box.x0 * width, "top": (1 - box.y1) * height}
        place |= {"w": box.width * width / across, "h": box.height * height / down}
        head |= {f"data-{key}": f"{value:.4f}" for key, value in place.items()}
        head |= {"data-across": str(across), "data-down": str(down)}
        size = {"width": head["data-w"], "height": head["data-h"]}
        inside += _element(
            "rect", {"class": "here", "visibility": "hidden", "fill": "none"} | size, Markup("")
        )
    return _element("svg", head, inside)


def _write(node: Element, ids: dict[str, str], name: str, themed: bool) -> Markup:
    tag = node.tag.rpartition("}")[2]
    if tag in _LEFT_OUT:
        return Markup("")
    kept = dict(_short_attributes(node, themed))
    if tag == "path" and node.get("id"):  # a mark, which each `use` refers to, and gives its colours
        kept = {"d": kept["d"]}
        kept["id"] = ids.setdefault(str(node.get("id")), f"{name}-{len(ids)}")
    elif tag == "use":
        kept["href"] = "#" + ids[kept["href"].removeprefix("#")]
    inside = Markup("").join(_write(child, ids, name, themed) for child in node)
    if tag in ("g", "defs") and not (inside and (kept or tag == "defs")):
        return inside
    return _element(tag, kept, escape((node.text or "").strip()) + inside)


def _short_attributes(node: Element, themed: bool) -> Iterator[tuple[str, str]]:
    is_image = node.tag.endswith("}image")
    for key, value in node.items():
        match key.rpartition("}")[2]:
            case "style":
                for rule, _, said in (part.partition(":") for part in value.split(";") if part.strip()):
                    if rule.strip() not in _UNUSED:
                        shown = said.strip().removesuffix("px")
                        yield rule.strip(), _OF_THE_PAGE.get(shown, shown) if themed else shown
            case "href":
                yield "href", "".join(value.split())
            case "transform" if value.startswith("rotate(-0 "):
                pass
            case name if is_image and name in ("transform", "width", "height"):
                yield name, _shorten(value, 4)
            case name if name not in _UNUSED:
                yield name, _shorten(value, 2)


def _shorten(text: str, digits: int) -> str:
    return _PRECISE.sub(lambda found: f"{float(found[0]):.{digits}f}".rstrip("0").rstrip("."), text)


def _element(tag: str, attributes: Mapping[str, str], inside: Markup) -> Markup:
    given = Markup("").join(
        Markup(' {}="{}"').format(Markup(key), value) for key, value in attributes.items()
    )
    return Markup("<{}{}>{}</{}>").format(Markup(tag), given, inside, Markup(tag))


def legend_keys(figure: Figure) -> list[tuple[Figure, str]]:
    """The entries of the legend that its axes have or could have: a sample of each, and its name."""
    axes = figure.axes[0]
    legend = axes.get_legend()
    handles: Sequence[Any]
    if legend is None:
        handles, names = axes.get_legend_handles_labels()
    else:
        handles = legend.legend_handles
        names = [text.get_text() for text in legend.get_texts()]
    found = []
    for handle, name in zip(handles, names, strict=True):
        if handle is None:
            continue
        artist = getattr(handle, "patches", [handle])[0]  # of bars the first
        sample = Figure(figsize=(26 / POINTS, 14 / POINTS))
        if isinstance(artist, Line2D):
            line = Line2D([0.0, 0.5, 1.0], [0.5] * 3, markevery=[1])
            for look in _LINE_LOOKS:
                line.set(**{look: getattr(artist, f"get_{look}")()})
            sample.add_artist(line)
        else:
            place = (0.1, 0.07, 0.8, 0.86)
            inside = sample.add_axes(place, xticks=[], yticks=[], facecolor=artist.get_facecolor())
            inside.spines[:].set_visible(False)
        found.append((sample, name))
    return found


# In the order of the page.
KINDS: tuple[type[RunResult], ...] = (
    Exploration,
    Scan,
    Similarity,
    Sensitivity,
    Spectrum,
    SearchResult,
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
class Chapter:
    """Everything about one model: runs of the same weights, and sentences about missing ones.

    Attributes:
        sections: of each run, as `page.html` shows it: anchor, name, title, blocks, and names and values of its record.
    """

    name: str
    model_hash: str
    anchor: str
    summary: Sequence[Finding]
    missing: Sequence[str]
    sections: Sequence[dict[str, Any]]


def write_page(paths: Iterable[Path], output: Path) -> list[Chapter]:
    """Write the page about these runs; a file of that name is replaced once the new one is whole.

    Args:
        paths: folders of commands, or single records.

    Raises:
        FileNotFoundError, ValueError: if a folder or a file of a run is missing or damaged, naming it.
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
    """Render the page as text."""
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
        title=f"surgeon report: {join_words(chapter.name for chapter in chapters)}",
        chapters=chapters,
        style=Markup((TEMPLATES / "style.css").read_text(encoding="utf-8")),
        script=Markup((TEMPLATES / "page.js").read_text(encoding="utf-8")),
        version=__version__,
    )


def chapters_of(paths: Iterable[Path]) -> list[Chapter]:
    """A chapter for each model of these runs, in their order."""
    unique: dict[Path, RunResult] = {}
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"no folder {path}; give folders that surgeon commands wrote")
        files = [path] if path.is_file() else sorted(path.iterdir())
        found = [
            kind.read(file)
            for kind in KINDS
            for file in files
            if file.match(kind.RECORD) and kind.is_ours(read_record(file))
        ]
        if not found:
            looked_for = ", ".join(dict.fromkeys(kind.RECORD for kind in KINDS))
            raise ValueError(f"{path} holds no run of a surgeon command; looked for {looked_for}")
        for run in found:
            unique.setdefault(run.files[0].resolve(), run)
    runs = list(unique.values())
    # Records without a hash go by the model's name, and never into a chapter of a model that is known.
    exported: dict[Path, str] = {}
    for run in runs:
        if isinstance(run, ExportRun):
            with name_file_in_errors(run.files[0], run.COMMAND):
                exported[run.files[0].parent.resolve()] = run.model_hash or f"name {run.model}"
    groups: dict[str, list[RunResult]] = {}
    for run in runs:
        # What was measured on an exported checkpoint belongs to the model it was made of.
        with name_file_in_errors(run.files[0], run.COMMAND):
            key = run.model_hash or f"name {run.model}"
            groups.setdefault(exported.get(Path(run.model).resolve(), key), []).append(run)
    return [
        _chapter(number, "" if key.startswith("name ") else key, group)
        for number, (key, group) in enumerate(groups.items(), start=1)
    ]


def _chapter(number: int, model_hash: str, runs: Sequence[RunResult]) -> Chapter:
    anchor = f"model-{number}"
    ordered = sorted(runs, key=lambda run: KINDS.index(type(run)))
    sections = []
    summary: list[Finding] = []
    missing: list[str] = []
    for place, run in enumerate(ordered, start=1):
        of_kind = [other for other in ordered if type(other) is type(run)]
        title = run.TITLE
        with name_file_in_errors(run.files[0], run.COMMAND):
            blocks = list(run.section())
            if run is of_kind[-1]:
                blocks += run.together(of_kind)
            for block in blocks:
                for panel in getattr(block, "items", [block]):
                    getattr(panel, "figure", None)  # drawn here, so that an error names the run
            if len(of_kind) == 1:
                summary += run.summary()
                missing += run.list_missing()
            else:
                title = f"{run.TITLE}: {run.name}"
                summary += [
                    replace(one, lead=f"{one.lead} ({run.name})", label=f"{one.label} ({run.name})")
                    for one in run.summary()
                ]
                missing += [f"{run.name}: {line}" for line in run.list_missing()]
        record = run.provenance(run.record)
        provenance = [("file", str(run.files[0]))]
        for name in dict.fromkeys([*(one for one in _FIRST if one in record), *record]):
            text = str(record[name])
            if not isinstance(record[name], str):
                text = json.dumps(record[name], ensure_ascii=False)
            if len(text) > _LONGEST_VALUE:
                text = f"{text[:_LONGEST_VALUE]} … ({len(text):,} characters)"
            provenance.append((name, text))
        section = {"anchor": f"{anchor}-{place}", "name": run.name, "title": title, "blocks": blocks}
        sections.append(section | {"provenance": provenance})
    present = {run.COMMAND for run in runs}
    if any(run.OF_SURGERY for run in runs):
        missing += [kind.WITHOUT for kind in KINDS if kind.WITHOUT and kind.COMMAND not in present]
    of_original = [run for run in ordered if run.model_hash == model_hash] or ordered
    names = join_words(dict.fromkeys(public(run.model) for run in of_original))
    return Chapter(
        names, model_hash[:SHORT_HASH], anchor, summary, list(dict.fromkeys(missing)), sections
    )
