"""What a base model's card says of it, as far as it holds for an edited model too: licence, languages, terms.

The front matter of a README.md is written by hand and can be anything. What is damaged or odd is left out, with a note
for the user: a card is no reason for an export to fail.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgeon.errors import first_line, shown
from surgeon.language.yaml import read_yaml

CARD_FILE = "README.md"
LARGEST_CARD = 1 << 20  # bytes; what is larger is no card
TEXTS = ("license", "license_name", "license_link", "pipeline_tag")
LISTS = ("license", "language", "datasets", "tags")  # a text, or several
MOST_VALUES = 1000  # that terms can consist of
TERMS = "extra_gated_"  # what the hub's keys for terms to be accepted begin with
_FRONT_MATTER = re.compile(r"\s*^---$(.*?)^---[ \t]*$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Inherited:
    """What is carried on.

    Attributes:
        metadata: entries of a card's front matter.
        notes: what was left out and why, a sentence each.
    """

    metadata: dict[str, Any]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"metadata": self.metadata, "notes": list(self.notes)}

    @classmethod
    def from_json(cls, kept: Any) -> Inherited:
        """The inverse of `to_json`; what is not there is empty."""
        kept = kept if isinstance(kept, dict) else {}
        metadata = kept.get("metadata")
        notes = kept.get("notes")
        return cls(metadata if isinstance(metadata, dict) else {}, tuple(notes) if isinstance(notes, list) else ())


def inherit(folder: Path) -> Inherited:
    """Read the card of the model in a folder; nothing is inherited where there is none."""
    path = folder / CARD_FILE
    if not path.is_file():
        return Inherited({})
    try:
        if path.stat().st_size > LARGEST_CARD:
            raise ValueError(f"the file has more than {LARGEST_CARD:,} bytes")
        match = _FRONT_MATTER.match(path.read_text(encoding="utf-8-sig"))
        front = read_yaml(match[1]).value if match else None
        if not isinstance(front, dict | None):
            raise ValueError("it is no mapping")
    except (OSError, ValueError) as error:
        return Inherited({}, (f"The front matter of its {CARD_FILE} cannot be read ({first_line(error)}).",))
    metadata: dict[str, Any] = {}
    notes = []
    for key, value in (front or {}).items():
        is_carried = isinstance(key, str) and (key in (*TEXTS, *LISTS) or key.startswith(TERMS))
        if not is_carried or value is None:
            continue
        if _is_valid(key, value):
            metadata[key] = value
        else:
            notes.append(f"Its {CARD_FILE} has {key}: {shown(value)}, which is not what belongs there.")
    return Inherited(metadata, tuple(notes))


def _is_valid(key: str, value: Any) -> bool:
    if key.startswith(TERMS):  # a few texts and numbers, nested in any way
        left = [value]
        seen = 0
        while left:
            one = left.pop()
            seen += 1
            if seen > MOST_VALUES or not (isinstance(one, dict | list | int) or _is_text(one)):
                return False
            if isinstance(one, dict | list):
                left += list(one)[:MOST_VALUES]
            if isinstance(one, dict):
                left += list(one.values())[:MOST_VALUES]
        return True
    if isinstance(value, list) and key in LISTS:
        return bool(value) and all(map(_is_text, value))
    return _is_text(value)


def _is_text(value: Any) -> bool:
    """Whether it is a text, of characters that a file can hold."""
    return isinstance(value, str) and bool(value.strip()) and value.encode(errors="ignore").decode() == value
