"""A reader of the page that knows nothing of how it is made."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import numpy as np
from matplotlib.image import imread
from numpy.typing import NDArray

from surgeon.findings import page

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """What a browser would find in a page.

    Attributes:
        tags: every element's name and attributes, in order.
        data: the JSON blocks, by id.
        errors: elements that are closed in another order than they were opened.
    """

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.data: dict[str, Any] = {}
        self.errors: list[str] = []
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self._texts: list[tuple[tuple[str, ...], str]] = []
        self._json = ""
        self.html = html
        self.feed(html)
        self.close()
        if self._open:
            self.errors.append(f"not closed: {self._open}")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append((tag, dict(attrs)))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open[-1][0] != tag:
            self.errors.append(f"</{tag}> at {self.getpos()}, open: {self._open[-3:]}")
            return
        _, attributes = self._open.pop()
        if tag == "script" and attributes.get("type") == "application/json":
            self.data[str(attributes["id"])] = json.loads(self._json)
            self._json = ""

    def handle_data(self, data: str) -> None:
        names = tuple(name for name, _ in self._open)
        if names and names[-1] == "script":
            self._json += data if self._open[-1][1].get("type") == "application/json" else ""
        elif names and names[-1] != "style":
            inside = tuple(str(attributes["id"]) for _, attributes in self._open if attributes.get("id"))
            self._texts.append((inside + names, data))

    def text(self, inside: str = "") -> str:
        """Everything that is read, of the whole page or of an element by its id or name; spaces are single."""
        parts = (data for names, data in self._texts if not inside or inside in names)
        return " ".join("".join(parts).split()).replace("\N{WORD JOINER}", "")

    def ids(self) -> list[str]:
        return [str(attributes["id"]) for _, attributes in self.tags if attributes.get("id")]

    def maps(self) -> Iterator[tuple[dict[str, Any], str]]:
        """The data of every map, with the id of its block."""
        return ((cells, name) for name, cells in self.data.items())

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def render(folders: Iterable[Path]) -> str:
    return page.render(page.chapters_of(folders))


def page_of(*folders: Path) -> Page:
    found = Page(render(folders))
    assert found.errors == []
    return found


def map_named(page: Page, title: str) -> dict[str, Any]:
    """The data of the map under a title, by the order in which maps and their captions stand in the page."""
    captions = re.findall(r'<figure class="map[^"]*">\s*<figcaption><b>(.*?)</b>', page.html)
    return list(page.data.values())[captions.index(title)]


def drawing_of(html: str, title: str) -> Element:
    """The first drawing whose description begins with a title."""
    svg = re.search(rf'<svg[^>]*aria-label="{re.escape(title)}[:"].*?</svg>', html, re.DOTALL)
    assert svg is not None, title
    return ElementTree.fromstring(svg[0])


def colours_in(html: str, title: str) -> NDArray[np.float64]:
    """(rows, columns, 4): the colours of a map's cells, in an image of a pixel for each; transparent where is none."""
    (image,) = drawing_of(html, title).iter("image")
    kind, _, data = str(image.get("href")).partition(",")
    assert kind == "data:image/png;base64"
    return np.asarray(imread(BytesIO(base64.b64decode(data))), dtype=np.float64)


def marks_in(drawing: Element) -> list[tuple[float, float, bool, str]]:
    """Of every point of a chart: where it is, whether it is hollow, and what is said of it."""
    found = []
    for mark in drawing.iter("use"):
        if mark.get("class") == "mark":
            place = float(str(mark.get("x"))), float(str(mark.get("y")))
            found.append((*place, mark.get("fill") == "var(--paper)", mark.findtext("title", "")))
    return found
