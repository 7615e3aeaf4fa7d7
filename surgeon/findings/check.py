"""Check: whether scans, searches, exports, ranks and training work with a model, why not, and their memory."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from surgeon.findings.result import RunResult, Table, table_file
from surgeon.machine import show_size
from surgeon.words import align_columns, hang_indent

# Columns.
AREA = 10
WORKS = 4
YES = "yes"
NO = "no"
PARTLY = "part"
AREAS = ("load", "scan", "search", "export", "ranks", "vllm", "train")
_WORDS = ("area", "what", "works", "why")


class Verdict(NamedTuple):
    """An answer about one thing that can be asked of a model.

    Attributes:
        area: one of `AREAS`.
        what: a map of scans, a space of searches, a number of ranks, ...
        works: "yes", "no", or "part" where some of the layers or programs can.
        why: in the words of the code that does it, or that refuses it.
        bytes: of memory; NaN where that does not count.
    """

    area: str
    what: str
    works: str
    why: str = ""
    bytes: float = math.nan


@dataclass(frozen=True, repr=False)
class Check(RunResult):
    """The result of `surgeon.check`.

    Attributes:
        answers: one row for each question, as in `check.csv`; columns as in `Verdict`.
    """

    COMMAND = "check"
    RECORD = "check.json"

    answers: pd.DataFrame = table_file(
        "check.csv",
        ("bytes",),
        _WORDS,
        one_of={"works": (YES, NO, PARTLY)},
        may_be_empty=True,
        missing="",
    )

    @classmethod
    def of(cls, answers: Iterable[Verdict], **record: object) -> Check:
        return cls(pd.DataFrame([*answers], columns=Verdict._fields), record=record)

    @property
    def refusal(self) -> str | None:
        """The reason why nothing can be done with the model; None if something can."""
        reason: str | None = self.record.get("refused")
        return reason

    @property
    def described(self) -> dict[str, str]:
        return dict(self.record.get("facts", {}))

    def to_json(self) -> dict[str, object]:
        answers = [
            {**one._asdict(), "bytes": None if math.isnan(one.bytes) else int(one.bytes)} for one in self
        ]
        return {
            "model": self.record.get("model"),
            "refused": self.refusal,
            **self.described,
            "answers": answers,
        }

    def __iter__(self) -> Iterator[Verdict]:
        return (Verdict(*row) for row in self.answers.itertuples(index=False))

    def of_area(self, area: str) -> dict[str, Verdict]:
        return {one.what: one for one in self if one.area == area}

    def __str__(self) -> str:
        """At most 80 columns; equal answers stand together."""
        refused = []
        if self.refusal is not None:
            refused = [("refused", self.refusal)]
        lines = [
            hang_indent(f"{label:<{AREA}}", text) for label, text in [*refused, *self.described.items()]
        ]
        before = ""
        grouped: dict[str, tuple[Verdict, list[str]]] = {}
        for one in self:  # those of an area that say the same together; as text: NaN equals nothing
            grouped.setdefault(str(one._replace(what="")), (one, []))[1].append(one.what)
        for one, what in grouped.values():
            if one.area != before:
                lines.append("")
            start = f"{one.area if one.area != before else '':<{AREA}}{one.works:<{WORKS + 1}}"
            said = ", ".join(
                filter(None, ["" if math.isnan(one.bytes) else show_size(one.bytes), one.why])
            )
            lines.append(hang_indent(start, ", ".join(what) + (f": {said}" if said else "")))
            before = one.area
        return "\n".join(lines)


FAMILY_AREAS = AREAS[1:-1]
PAGE = Path(__file__).parent / "html" / "families.md"
HEAD = ("family", "model_type", "scan", "search", "ranks", "pairs", "on vLLM", "low rank")


class FamilyRow(NamedTuple):
    """A family, with a verdict on every question."""

    name: str
    model_type: str
    summary: str
    verdicts: tuple[Verdict, ...]

    def cells(self, briefly: bool = False) -> list[str]:
        cells = [self.name, self.model_type]
        for area in ("scan", "search", "ranks"):
            verdicts = [one for one in self.verdicts if one.area == area]
            lacking = [one.what for one in verdicts if one.works == NO]
            if not lacking:
                cells.append("all")
            elif briefly:
                cells.append(f"{len(verdicts) - len(lacking)}/{len(verdicts)}")
            elif len(lacking) < len(verdicts):
                cells.append(f"not {', '.join(lacking)}")
            else:
                cells.append("none")
        said = {(one.area, one.what): one.why for one in self.verdicts if one.works != NO}
        forms = re.findall(r"(\w+) form", said.get(("export", "lp"), ""))
        if briefly and len(forms) > 1:
            cells.append("either")
        else:
            cells.append(" or ".join(forms) or "no")
        for what in ("lp", "lowrank"):
            how = said.get(("vllm", what), "")
            if how.startswith("Unmodified"):
                cells.append("itself")
            elif how:
                cells.append("plugin")
            else:
                cells.append("no")
        return cells

    @property
    def reasons(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for one in self.verdicts:
            if one.works != YES and one.what not in found.setdefault(one.why, []):
                found[one.why].append(one.what)
        return found


@dataclass(frozen=True, repr=False)
class FamilyTable:
    """The result of `surgeon.families`.

    Attributes:
        wrappers: around decoders: a description by name.
    """

    rows: Sequence[FamilyRow]
    wrappers: Mapping[str, str]

    def __str__(self) -> str:
        return align_columns(
            [HEAD, *(row.cells(briefly=True) for row in self.rows)], left=range(len(HEAD))
        )

    def markdown(self) -> str:
        from jinja2 import Template

        table = Table("", HEAD, [row.cells() for row in self.rows], left=range(len(HEAD))).markdown
        page = Template(PAGE.read_text(encoding="utf-8"), trim_blocks=True, keep_trailing_newline=True)
        return str(page.render(table=table, rows=self.rows, wrappers=self.wrappers))
