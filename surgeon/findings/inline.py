"""A figure as inline SVG of the page: small, without styles or links, in its colours, with values to point at."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from io import StringIO
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import matplotlib
from markupsafe import Markup, escape
from matplotlib.artist import Artist
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text

from surgeon.findings.drawing import COLOURS, GRID, INK, NO_CELL, ORDERED, PAPER, POINTS, SOFT, TIPS

# What style.css has in place of a colour, for light and for dark.
_OF_THE_PAGE = {"#000000": "currentColor", PAPER: "var(--paper)", INK: "var(--ink)", SOFT: "var(--soft)"}
_OF_THE_PAGE |= {GRID: "var(--grid)", NO_CELL: "var(--no-cell)"}
_OF_THE_PAGE |= {colour: f"var(--s{number})" for number, colour in enumerate(COLOURS)}
_OF_THE_PAGE |= {colour: f"var(--q{number})" for number, colour in enumerate(ORDERED)}
_LEFT_OUT = {"metadata", "style", "clipPath"}  # nothing is drawn beyond the axes, and styles become attributes
_UNUSED = {"id", "clip-path", "font-family", "stroke-dashoffset", "width", "height"}
_SHEET = "#fdfdfc"
_NO_TEXT = re.compile("[\\x00-\\x08\\x0b\\x0c\\x0e-\\x1f\\ud800-\\udfff\\ufffe\\uffff]")  # what XML cannot hold
_PRECISE = re.compile(r"-?\d+\.\d{3,}")


def inline_svg(figure: Figure, title: str = "", name: str = "", themed: bool = True) -> Markup:
    """The figure as an element of a page.

    Args:
        title: read out for those who do not see it; a drawing without one is read out by nobody.
        name: begins the ids of the drawing's parts, which must be unique in the page.
        themed: colours follow the page's light or dark; else they stay, on a light sheet.

    A legend of its own is left out: the page has its entries as text, which finds room on narrow screens.
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
    fixed: Any = {"svg.fonttype": "none", "svg.hashsalt": "surgeon", "path.simplify": False, "text.parse_math": False}
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
    inside = Markup("").join(_written(node, ids, name, themed) for node in root)
    head = {
        "viewBox": f"0 0 {width:g} {height:g}",
        "fill": "currentColor" if themed else "#000",
        "stroke-linejoin": "round",
    }
    head |= {"role": "img", "aria-label": title} if title else {"aria-hidden": "true", "class": "key"}
    if figure.axes and figure.axes[0].images:  # where the cells lie, for the page's script, and which is pointed at
        box = figure.axes[0].get_position()
        down, across = figure.axes[0].images[0].get_size()
        place = {"left": box.x0 * width, "top": (1 - box.y1) * height}
        place |= {"w": box.width * width / across, "h": box.height * height / down}
        head |= {f"data-{key}": f"{value:.4f}" for key, value in place.items()}
        head |= {"data-across": str(across), "data-down": str(down)}
        size = {"width": head["data-w"], "height": head["data-h"]}
        inside += _element("rect", {"class": "here", "visibility": "hidden", "fill": "none"} | size, Markup(""))
    return _element("svg", head, inside)


def _written(node: Element, ids: dict[str, str], name: str, themed: bool) -> Markup:
    tag = node.tag.rpartition("}")[2]
    if tag in _LEFT_OUT:
        return Markup("")
    kept = dict(_kept(node, themed))
    if tag == "path" and node.get("id"):  # a mark, which each `use` refers to, and gives its colours
        kept = {"d": kept["d"]}
        kept["id"] = ids.setdefault(str(node.get("id")), f"{name}-{len(ids)}")
    elif tag == "use":
        kept["href"] = "#" + ids[kept["href"].removeprefix("#")]
    inside = Markup("").join(_written(child, ids, name, themed) for child in node)
    if tag in ("g", "defs") and not (inside and (kept or tag == "defs")):
        return inside
    return _element(tag, kept, escape((node.text or "").strip()) + inside)


def _kept(node: Element, themed: bool) -> Iterator[tuple[str, str]]:
    """Attributes with short numbers, those of a style on their own."""
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
                yield name, _shortened(value, 4)
            case name if name not in _UNUSED:
                yield name, _shortened(value, 2)


def _shortened(text: str, digits: int) -> str:
    """With at most so many digits behind the point of each number."""
    return _PRECISE.sub(lambda found: f"{float(found[0]):.{digits}f}".rstrip("0").rstrip("."), text)


def _element(tag: str, attributes: Mapping[str, str], inside: Markup) -> Markup:
    given = Markup("").join(Markup(' {}="{}"').format(Markup(key), value) for key, value in attributes.items())
    return Markup("<{}{}>{}</{}>").format(Markup(tag), given, inside, Markup(tag))


def legend_keys(figure: Figure) -> list[tuple[Figure, str]]:
    """The entries of the legend that its axes have or could have: a sample of each, and its name."""
    axes = figure.axes[0]
    legend = axes.get_legend()
    if legend is None:
        found = zip(*axes.get_legend_handles_labels(), strict=True)
        return [(_legend_sample(handle), name) for handle, name in found]
    own = zip(legend.legend_handles, legend.get_texts(), strict=True)
    return [(_legend_sample(handle), text.get_text()) for handle, text in own if handle is not None]


def _legend_sample(handle: Artist | BarContainer) -> Figure:
    """A sample of how a line or an area is drawn, for a legend."""
    figure = Figure(figsize=(26 / POINTS, 14 / POINTS))
    if isinstance(handle, BarContainer):
        handle = handle.patches[0]
    if isinstance(handle, Line2D):
        sample = Line2D([0.0, 0.5, 1.0], [0.5] * 3, markevery=[1])
        for name in ("color", "linestyle", "linewidth", "marker", "markersize"):
            sample.set(**{name: getattr(handle, f"get_{name}")()})
        sample.set(markerfacecolor=handle.get_markerfacecolor(), markeredgecolor=handle.get_markeredgecolor())
        figure.add_artist(sample)
    else:
        figure.add_axes((0.1, 0.07, 0.8, 0.86), xticks=[], yticks=[], facecolor=handle.get_facecolor())  # type: ignore[attr-defined]
        figure.axes[0].spines[:].set_visible(False)
    return figure
