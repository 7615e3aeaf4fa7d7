"""Candidates healed before the choice among them: what changes it, what is said of it, what is kept of it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from surgeon.language.program import Program
from surgeon.searches.healing import HealedComparison, HealedProgram, HealedPrograms, heal_candidates
from surgeon.searches.trial import MeasuredProgram, Proposal, Trial
from surgeon.searches.winners import Finalist, HeldOutComparison, compare

DENSE = Program.dense(4)
TEXTS = ["A0 F0 [A1 A2] [F1 F2] A3 F3", "[A0 A1] [F0 F1] A2 F2 A3 F3", "A0 F0 A1 F1 [A2 A3] [F2 F3]"]
BEFORE = ([0.30, 0.31, 0.32, 0.30], [0.40, 0.42, 0.41, 0.40], [0.50, 0.51, 0.52, 0.53])


def measured(divergences: Sequence[float]) -> MeasuredProgram:
    mean = float(np.mean(divergences))
    nll = tuple(2 + one for one in divergences)
    return MeasuredProgram(math.exp(2 + mean), mean, math.nan, math.nan, 100, nll, tuple(divergences))


def compared(*divergences: Sequence[float]) -> HeldOutComparison:
    """Trials on held-out text, the winner of the search first."""
    proposals = [Proposal(text, "window", ()) for text in TEXTS]
    first, *others = (
        Finalist(Trial(number, proposals[number], measured([0.1 + number / 100] * 4)), measured(own))
        for number, own in enumerate(divergences)
    )
    return compare(first, others, measured([0.0] * 4))


class Healer:
    """Knows what programs become; remembers which were asked for."""

    def __init__(self, *after: Sequence[float]) -> None:
        self.after = dict(zip(TEXTS, after, strict=False))
        self.asked: list[int] = []

    def __call__(self, program: Program) -> HealedProgram:
        self.asked.append(TEXTS.index(str(program)))
        return HealedProgram(measured(self.after[str(program)]), 400, 2.5)


def healed(before: HeldOutComparison, *after: Sequence[float]) -> HealedComparison:
    with HealedPrograms(None, "key") as kept:
        return heal_candidates(before, Healer(*after), kept, "healed for 5 steps")


def test_the_choice_changes_where_another_is_better_for_sure() -> None:
    found = healed(compared(*BEFORE), [0.2, 0.21, 0.22, 0.2], [0.1, 0.11, 0.12, 0.101], [0.2, 0.1, 0.3, 0.2])
    assert found.changed
    assert found.chosen.number == 1
    assert found.lines()[-1].startswith("HEALING CHANGES THE CHOICE: trial 1 is the winner, not trial 0,")
    assert found.lines()[1].startswith("healed, trial 0 is worse than trial 1 (divergence 0.2075 and 0.1078): ")
    known = stats.ttest_rel([0.2, 0.21, 0.22, 0.2], [0.1, 0.11, 0.12, 0.101]).confidence_interval(1 - 0.05 / 2)
    one = found.after.runners_up[0]
    assert (one.low, one.high) == pytest.approx((known.low, known.high))


def test_the_choice_stays_where_no_other_is_told_apart() -> None:
    found = healed(compared(*BEFORE), [0.2, 0.21, 0.22, 0.2], [0.19, 0.22, 0.20, 0.21], [0.1, 0.3, 0.2, 0.2])
    assert not found.changed
    assert found.chosen.number == 0
    assert found.lines()[-1] == "healing does not change the choice: trial 0 is the winner"
    assert "is better" not in " ".join(found.lines())


def test_who_won_on_held_out_text_is_compared_with_the_others() -> None:
    """Held-out text overturns the search; healing sets the search's winner right again."""
    before = compared([0.4, 0.41, 0.42, 0.4], [0.3, 0.31, 0.32, 0.301])
    assert before.chosen.trial.number == 1
    found = healed(before, [0.1, 0.11, 0.12, 0.1], [0.2, 0.21, 0.22, 0.201])
    assert found.after.searched.trial.number == 1
    assert (found.changed, found.chosen.number) == (True, 0)
    same = healed(before, [0.2, 0.21, 0.22, 0.2], [0.1, 0.11, 0.12, 0.101])
    assert (same.changed, same.chosen.number) == (False, 1)


def test_a_table_has_a_row_for_each_candidate() -> None:
    found = healed(compared(*BEFORE), [0.2] * 4, [0.1] * 4, [0.3] * 4)
    head, *rows = found.table()
    assert [row.split()[0] for row in rows] == ["0", "1", "2"]
    assert rows[1].split() == ["1", "0.4075", "0.1", f"{math.exp(2.4075):.4g}", f"{math.exp(2.1):.4g}", "2"]
    assert {len(row) for row in (head, *rows)} == {len(head)}
    assert len(head) <= 68


def test_a_single_candidate_has_nobody_to_lose_to() -> None:
    found = healed(compared(BEFORE[0]), [0.2] * 4)
    assert not found.changed
    assert found.lines() == ["the candidate was healed for 5 steps"]


def test_a_record_is_plain_json() -> None:
    found = healed(compared(*BEFORE[:2]), [0.2, 0.21, 0.22, math.inf], [0.1] * 4)
    read = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert read["candidates"][0]["before"]["divergence"] == pytest.approx(0.3075)
    assert read["candidates"][0]["after"]["divergence"] is None
    assert (read["winner_before"], read["winner"], read["changed"]) == (0, 0, False)


def test_what_is_kept_is_not_healed_again(tmp_path: Path) -> None:
    path, before = tmp_path / "found" / "healed.jsonl", compared(*BEFORE)
    after = ([0.2] * 4, [0.1] * 4, [0.3] * 4)
    with HealedPrograms(path, "key") as kept:
        kept.add(Program.parse(TEXTS[1]), Healer(*after)(Program.parse(TEXTS[1])))
    path.write_text(path.read_text() + '{"key":"key","program":"A0')  # a kill while the next one was written
    said: list[str] = []
    healer = Healer(*after)
    with HealedPrograms(path, "key") as kept:
        found = heal_candidates(before, healer, kept, "healed", said.append)
    assert healer.asked == [0, 2]
    assert said == ["healing candidate 1 of 3, trial 0", "healing candidate 3 of 3, trial 2"]
    assert found.to_json() == healed(before, *after).to_json() | {"sentences": found.lines()}
    other = Healer(*after)
    with HealedPrograms(path, "other settings") as kept:
        heal_candidates(before, other, kept, "healed")
    assert other.asked == [0, 1, 2]


def test_a_damaged_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "healed.jsonl"
    path.write_text('{"key":"key","program":"A0 F0"}\n')
    with pytest.raises(ValueError, match="damaged in line 1; delete the file"):
        HealedPrograms(path, "key")
