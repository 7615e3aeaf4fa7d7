"""Healing: a healed model beside the original and the edited one, and its training curves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from surgeon.findings.drawing import Picture
from surgeon.findings.result import Block, Finding, Record, Table, record_codes
from surgeon.findings.training import TrainingRun, held_out_charts, trained_on
from surgeon.progress import clock
from surgeon.quality.summary import Quality
from surgeon.words import NO_VALUE, interval, join_words, number, plural

_HEAD = ["perplexity", "95% interval", "regained", "divergence", "95% interval", "regained"]
_AS_GOOD = 0.995  # a share that is 100% when it is rounded
_UNKNOWN = "The original is not known, and so not what was lost."
_NOTE = (
    "Regained, of what the edit lost: in log-perplexity (edited \N{MINUS SIGN} healed) / (edited \N{MINUS SIGN} "
    "original), in divergence from the original 1 \N{MINUS SIGN} healed / edited."
)


@dataclass(frozen=True)
class Healing:
    """Three models on the same held-out text; the original is None where it is not known."""

    original: Quality | None
    edited: Quality
    healed: Quality

    @classmethod
    def of(cls, record: Record) -> Healing:
        """Read a `run.json`; a ValueError says which perplexity is not above 0."""
        found = {
            name: record[name] and Quality.from_json(record[name])
            for name in ("original", "edited", "healed")
        }
        for quality in filter(None, found.values()):
            if not quality.perplexity > 0:
                raise ValueError(f"a perplexity of {quality.perplexity:g} is not above 0")
        return cls(**found)

    @property
    def of_perplexity(self) -> float | None:
        """The regained share of the lost log-perplexity; NaN where none was lost, None without the original."""
        if self.original is None:
            return None
        edited, healed, original = (
            math.log(one.perplexity) for one in (self.edited, self.healed, self.original)
        )
        lost = edited - original
        if not (math.isfinite(lost) and lost > 0):
            return math.nan
        return (edited - healed) / lost

    @property
    def of_divergence(self) -> float | None:
        """The regained share of divergence; None where it is not known."""
        lost = self.edited.divergence
        if math.isnan(lost):
            return None
        if not (math.isfinite(lost) and lost > 0):
            return math.nan
        return 1 - self.healed.divergence / lost


@dataclass(frozen=True, repr=False)
class HealRun(TrainingRun):
    """The result of `heal`.

    Attributes:
        healing: the three models on the same held-out text.
    """

    COMMAND = "heal"
    TITLE = "Healing"
    WITHOUT = "No healing: how much of what an edit loses comes back with training is not known (surgeon heal)."
    LAST = "healed"
    BEFORE = "the edited model before training"
    LOG_FROM = 20.0

    @classmethod
    def is_ours(cls, record: Record) -> bool:
        return bool(record.get("identity", {}).get("task", "heal") == "heal")

    healing: Healing = field(kw_only=True)

    @classmethod
    def facts(cls, record: Record, file: Path) -> Record:
        return super().facts(record, file) | {"healing": Healing.of(record)}

    @property
    def original(self) -> float | None:
        original = self.healing.original
        if original is None:
            return None
        return original.perplexity

    def section(self) -> Iterator[Block]:
        record = self.record
        healing = self.healing
        text = f"The edited model was trained for {trained_on(record)}."
        text += f" Before and after, {int(record['healed']['tokens']):,} held-out tokens were predicted"
        if record.get("held_out"):
            text += f" ({record['held_out']})"
        yield f"{text}."
        back = _share(healing.of_perplexity), _share(healing.of_divergence)
        rows = []
        if healing.original:
            rows = [["original", *_cells(healing.original, divergence=False)]]
        rows += [["edited", *_cells(healing.edited)], ["healed", *_cells(healing.healed, *back)]]
        marked = [(len(rows) - 1, column) for column, share in zip((3, 6), back, strict=True) if share]
        yield Table(
            "Before and after", ["", *_HEAD], rows, _NOTE if any(back) else _UNKNOWN, marked=marked
        )
        yield Picture(list(self.charts()))
        yield from record_codes(record, program="The program that was healed", recipe="Recipe")

    @classmethod
    def together(cls, runs: Sequence[Self]) -> list[Block]:
        """All healings of a model side by side, and their curves in one picture."""
        if len(runs) < 2:
            return []
        same_text = len({run.record.get("held_out_hash") for run in runs}) == 1
        original = None
        if same_text:
            original = runs[0].healing.original
        rows = []
        if original:
            rows = [["original", "", *_cells(original, divergence=False)]]
        marked: list[tuple[int, int]] = []
        edits: dict[str, list[Self]] = {}
        for run in runs:  # those of one edited model on one text together
            edited = [run.record.get(name) for name in ("program", "recipe", "held_out_hash", "edited")]
            edits.setdefault(str(edited), []).append(run)
        for of_one_edit in edits.values():
            which = ""
            if len(edits) > 1:
                which = f", for {join_words(run.name for run in of_one_edit)}"
            rows.append([f"edited{which}", "", *_cells(of_one_edit[0].healing.edited)])
            for run in of_one_edit:
                healing = run.healing
                back = _share(healing.of_perplexity), _share(healing.of_divergence)
                marked += [(len(rows), 4), (len(rows), 7)]
                rows.append([run.name, f"{int(run.record['tokens']):,}", *_cells(healing.healed, *back)])
        note = _UNKNOWN
        if any(row[place] for row in rows for place in (4, 7) if len(row) > place):
            note = _NOTE
        if not same_text:
            note += " The runs were measured on different texts: only shares can be compared."
        table = Table("All healings side by side", ["", "tokens", *_HEAD], rows, note, marked=marked)
        return [table, Picture(list(held_out_charts({run.name: run for run in runs}, ", all healings")))]

    def summary(self) -> Iterator[Finding]:
        record = self.record
        healing = self.healing
        edited = healing.edited
        healed = healing.healed
        steps = plural(int(record["steps"]), "step")
        time = clock(float(record["seconds"]))
        text = (
            f"{steps} of training ({int(record['tokens']):,} tokens, {time}) brought the edited model's perplexity "
            f"from {number(edited.perplexity)} to {number(healed.perplexity)}"
        )
        if healing.original:
            text += f", the original's being {number(healing.original.perplexity)}"
        if healing.of_divergence:
            text += (
                f", and its divergence from {number(edited.divergence)} to {number(healed.divergence)}"
            )
        shares = {"log-perplexity": healing.of_perplexity, "divergence": healing.of_divergence}
        parts = []
        for name, one in shares.items():
            if one is None or not math.isfinite(one):
                continue
            if one < 0:
                parts.append(f"training has made its {name} worse")
            elif one >= _AS_GOOD:
                parts.append(f"all of what was lost in {name} is back")
            else:
                parts.append(f"{_percent(one)} of what was lost in {name} is back")
        verdict = join_words(parts) or "nothing was lost of which a share could be told"
        if all(one is None for one in shares.values()):
            verdict = "what was lost is not known without the original"
        text += f": {verdict}."
        back = healing.of_divergence
        figure = ""
        if back and math.isfinite(back):
            figure = _percent(back)
        yield Finding(
            "Trained", text, figure, "of the edit's divergence regained by healing" if figure else ""
        )


def _cells(
    state: Quality, regained: str = "", of_divergence: str = "", divergence: bool = True
) -> list[str]:
    cells = [number(state.perplexity), interval(*state.ends("perplexity")), regained]
    if divergence:
        cells += [number(state.divergence), interval(*state.ends("divergence")), of_divergence]
    return cells


def _share(regained: float | None) -> str:
    if regained is None:
        return ""
    if math.isnan(regained):
        return "nothing lost"
    if math.isinf(regained):
        return NO_VALUE
    return _percent(regained)


def _percent(share: float) -> str:
    text = f"{100 * abs(share):.0f}%"
    if share >= 0 or text == "0%":
        return text
    return f"\N{MINUS SIGN}{text}"
