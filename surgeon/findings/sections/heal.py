"""Healing: how much of what an edit lost came back with training, and how the training went."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from surgeon.findings.blocks import Block, Code, Finding, Gallery, Paragraph, Table
from surgeon.findings.runs import Kind, Run
from surgeon.findings.settings import duration, settings_table
from surgeon.findings.training import Healing, HealRun, OnHeldOut, Regained, WithInterval, held_out_charts
from surgeon.words import NO_VALUE, interval, listed, number, plural

_HEAD = ["perplexity", "95% interval", "regained", "divergence", "95% interval", "regained"]
_UNTOLD = "?"  # behind a share of a loss that intervals do not tell from none
_EARLIER = 0.98  # of the last divergence: a lower one before the end is worth a word
_AS_GOOD = 0.995  # a share that is 100% when it is rounded
_NOTE = (
    "Regained, of what the edit lost: in log-perplexity (edited \N{MINUS SIGN} healed) / (edited \N{MINUS SIGN} "
    "original), in divergence from the original 1 \N{MINUS SIGN} healed / edited, with the range that the two "
    "intervals leave open."
)
_UNTOLD_NOTE = (
    f" With {_UNTOLD}: the intervals leave open that nothing was lost (each model's is of its own, and differences "
    "over the same text are known better than they say)."
)


def _show(run: Run[HealRun]) -> Iterator[Block]:
    record, healing = run.record, run.found.healing
    yield Paragraph(_what(record))
    back = _share(healing.of_perplexity), _share(healing.of_divergence)
    rows = [["original", *_cells(healing.original, divergence=False)]] if healing.original else []
    rows += [["edited", *_cells(healing.edited)], ["healed", *_cells(healing.healed, *back)]]
    marked = frozenset((len(rows) - 1, column) for column, share in zip((3, 6), back, strict=True) if share)
    yield Table("Before and after", ["", *_HEAD], rows, _note(back), marked=marked)
    yield Gallery(list(run.found.charts(run.name)))
    yield from settings_table(record.get("settings"))
    if record.get("program"):
        yield Code("The program that was healed", str(record["program"]))
    if record.get("recipe"):
        yield Code("Recipe", str(record["recipe"]))


def _what(record: dict[str, Any]) -> str:
    """How much was trained, and on which text."""
    steps, tokens = int(record["steps"]), int(record["tokens"])
    text = f"The edited model was trained for {plural(steps, 'step')} on {tokens:,} tokens"
    text += f" of {record['data']}" if record.get("data") else ""
    text += f" in {duration(float(record['seconds']))}."
    measured = f" Before and after, {int(record['healed']['tokens']):,} held-out tokens were predicted"
    return text + measured + (f" ({record['held_out']})." if record.get("held_out") else ".")


def _note(shares: Sequence[str]) -> str:
    if not any(shares):
        return "The original is not known, and so not what was lost."
    return _NOTE + (_UNTOLD_NOTE if any(_UNTOLD in share for share in shares) else "")


def _cells(state: OnHeldOut, regained: str = "", of_divergence: str = "", divergence: bool = True) -> list[str]:
    p, d = state.perplexity, state.divergence
    cells = [number(p.value), interval(p.low, p.high), regained]
    return cells + ([number(d.value), interval(d.low, d.high), of_divergence] if divergence else [])


def _share(regained: Regained | None) -> str:
    """A share in words: 62% (55% to 70%), with a mark where the loss itself may be none."""
    if regained is None:
        return ""
    if not regained.is_known:
        return "nothing lost" if math.isnan(regained.share) else NO_VALUE
    text = _percent(regained.share) + ("" if regained.certain else f" {_UNTOLD}")
    return text if math.isnan(regained.low) else f"{text} ({_percent(regained.low)} to {_percent(regained.high)})"


def _percent(share: float) -> str:
    text = f"{100 * abs(share):.0f}%"
    return text if share >= 0 or text == "0%" else f"\N{MINUS SIGN}{text}"


def _together(runs: Sequence[Run[HealRun]]) -> list[Block]:
    """All healings of a model side by side, and their curves in one picture."""
    if len(runs) < 2:
        return []
    same_text = len({run.record.get("held_out_hash") for run in runs}) == 1
    original = runs[0].found.healing.original if same_text else None
    rows = [["original", "", *_cells(original, divergence=False)]] if original else []
    marked: list[tuple[int, int]] = []
    edits = _by_edit(runs)
    for of_one_edit in edits:
        which = f", for {listed(run.name for run in of_one_edit)}" if len(edits) > 1 else ""
        rows.append([f"edited{which}", "", *_cells(of_one_edit[0].found.healing.edited)])
        for run in of_one_edit:
            healing = run.found.healing
            back = _share(healing.of_perplexity), _share(healing.of_divergence)
            marked += [(len(rows), 4), (len(rows), 7)]
            rows.append([run.name, f"{int(run.record['tokens']):,}", *_cells(healing.healed, *back)])
    note = _note([row[place] for row in rows for place in (4, 7) if len(row) > place])
    note += "" if same_text else " The runs were measured on different texts: only shares can be compared."
    table = Table("All healings side by side", ["", "tokens", *_HEAD], rows, note, marked=frozenset(marked))
    return [table, Gallery(list(held_out_charts({run.name: run.found for run in runs}, ", all healings")))]


def _by_edit(runs: Sequence[Run[HealRun]]) -> list[list[Run[HealRun]]]:
    """Runs of the same edited model on the same text together."""
    groups: dict[tuple[str, ...], list[Run[HealRun]]] = {}
    for run in runs:
        edited = [str(run.record.get(name)) for name in ("program", "recipe", "held_out_hash", "edited")]
        groups.setdefault(tuple(edited), []).append(run)
    return list(groups.values())


def _findings(run: Run[HealRun]) -> Iterator[Finding]:
    record, healing = run.record, run.found.healing
    steps, time = plural(int(record["steps"]), "step"), duration(float(record["seconds"]))
    text = (
        f"{steps} of training ({int(record['tokens']):,} tokens, {time}) brought the edited model's perplexity "
        f"{_from_to(healing.edited.perplexity, healing.healed.perplexity)}"
    )
    if healing.original:
        text += f", the original's being {number(healing.original.perplexity.value)}"
    if healing.of_divergence:
        text += f", and its divergence {_from_to(healing.edited.divergence, healing.healed.divergence)}"
    text += f": {_verdict(healing)}.{_went_too_far(run)}"
    back = healing.of_divergence
    figure = _percent(back.share) if back and back.is_known and back.certain else ""
    yield Finding("Trained", text, figure, "of the edit's divergence regained by healing" if figure else "")


def _from_to(before: WithInterval, after: WithInterval) -> str:
    return f"from {number(before.value)} to {number(after.value)}"


def _verdict(healing: Healing) -> str:
    """What that is of what was lost."""
    shares = {"log-perplexity": healing.of_perplexity, "divergence": healing.of_divergence}
    if all(one is None for one in shares.values()):
        return "what was lost is not known without the original"
    known = {name: one for name, one in shares.items() if one and one.is_known}
    if not known:
        return "nothing was lost of which a share could be told"
    parts = [_in_words(name, one) for name, one in known.items()]
    unsure = [name for name, one in known.items() if not one.certain]
    caution = f"; whether anything was lost in {listed(unsure)} the intervals leave open" if unsure else ""
    return listed(parts) + caution


def _in_words(name: str, regained: Regained) -> str:
    if regained.share < 0:
        return f"training has made its {name} worse"
    if regained.share >= _AS_GOOD:
        return f"all of what was lost in {name} is back"
    return f"{_percent(regained.share)} of what was lost in {name} is back"


def _went_too_far(run: Run[HealRun]) -> str:
    """What to say where it was better before the end."""
    table = run.found.held_out
    if table["divergence"].isna().any():
        return ""
    best, last = table.iloc[int(table["divergence"].argmin())], table.iloc[-1]
    if not (best["step"] < last["step"] and best["divergence"] < _EARLIER * last["divergence"]):
        return ""
    return (
        f" Held-out divergence was least at step {best['step']:g}, {number(best['divergence'])}, and "
        f"{number(last['divergence'])} at the end: fewer steps or a lower learning rate may heal better."
    )


HEALING = Kind(
    HealRun,
    "Healing",
    _show,
    _findings,
    together=_together,
    without="No healing: how much of what an edit loses comes back with training is not known (surgeon heal).",
)
