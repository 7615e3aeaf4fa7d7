"""What would work with a model, what not and why, and how much memory each would take."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import pandas as pd

from surgeon.findings.result import RunResult, TableFile
from surgeon.memory import show_size
from surgeon.words import hanging

# Columns.
AREA = 10
WORKS = 4
YES = "yes"
NO = "no"
PARTLY = "part"
AREAS = ("load", "scan", "search", "export", "ranks", "vllm", "train")
_WORDS = ("area", "what", "works", "why")


class Verdict(NamedTuple):
    """What becomes of one thing that can be asked of a model.

    Attributes:
        area: one of `AREAS`.
        what: a map of scans, a space of searches, a number of ranks, ...
        works: "yes", "no", or "part" where some of the layers or programs can.
        why: in the words of the code that does it, or that refuses it.
        bytes: of memory that it takes; NaN where that is not what counts.
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
        answers: one row for each thing that was asked, as in `check.csv`; columns as `Verdict` has them.
    """

    COMMAND = "check"
    RECORD = "check.json"
    TABLES: ClassVar = {
        "answers": TableFile(
            "check.csv", ("bytes",), _WORDS, one_of={"works": (YES, NO, PARTLY)}, may_be_empty=True, missing=""
        )
    }

    answers: pd.DataFrame

    @classmethod
    def of(cls, answers: Iterable[Verdict], **record: object) -> Check:
        return cls(pd.DataFrame([*answers], columns=Verdict._fields), record=record)

    @property
    def refused(self) -> str | None:
        """Why nothing can be done with the model; None if something can."""
        reason = self.record.get("refused")
        if reason is None:
            return None
        return str(reason)

    @property
    def described(self) -> dict[str, str]:
        """What the model is, by label."""
        return dict(self.record.get("facts", {}))

    def to_json(self) -> dict[str, object]:
        """All of it, as JSON values; bytes are null where memory is not what counts."""
        answers = [{**one._asdict(), "bytes": None if math.isnan(one.bytes) else int(one.bytes)} for one in self]
        return {"model": self.record.get("model"), "refused": self.refused, **self.described, "answers": answers}

    def __iter__(self) -> Iterator[Verdict]:
        return (Verdict(*row) for row in self.answers.itertuples(index=False))

    def of_area(self, area: str) -> dict[str, Verdict]:
        """The answers of an area, by what was asked."""
        return {one.what: one for one in self if one.area == area}

    def __str__(self) -> str:
        """At most 80 columns; what has the same answer stands together."""
        refused = []
        if self.refused is not None:
            refused = [("refused", self.refused)]
        lines = [hanging(f"{label:<{AREA}}", text) for label, text in [*refused, *self.described.items()]]
        before = ""
        for one, what in self._grouped():
            if one.area != before:
                lines.append("")
            start = f"{one.area if one.area != before else '':<{AREA}}{one.works:<{WORKS + 1}}"
            said = ", ".join(filter(None, ["" if math.isnan(one.bytes) else show_size(one.bytes), one.why]))
            lines.append(hanging(start, ", ".join(what) + (f": {said}" if said else "")))
            before = one.area
        return "\n".join(lines)

    def _grouped(self) -> Iterator[tuple[Verdict, list[str]]]:
        """Answers of an area that say the same, as the first of them, and what all of them are of."""
        found: dict[str, tuple[Verdict, list[str]]] = {}
        for one in self:
            alike = found.setdefault(str(one._replace(what="")), (one, []))  # as text: NaN equals nothing
            alike[1].append(one.what)
        yield from found.values()

    def _repr_html_(self) -> str:
        shown = self.answers.assign(
            bytes=[("" if math.isnan(size) else show_size(size)) for size in self.answers["bytes"]]
        )
        heading = "".join(f"<tr><th>{label}</th><td>{text}</td></tr>" for label, text in self.described.items())
        return f"<table>{heading}</table>{shown.to_html(index=False, max_rows=None)}"
