"""Healing before choosing: the last few candidates are trained briefly, and compared again.

What an edit loses and what training brings back are two things: the program that is best as it is need not be the best
one once it is healed. So the winner and the runners-up are healed, all by as many steps on the same text in the same
order, and measured on the held-out text again. The winner so far stays unless another is better for sure, window by
window, as before. That says how far the text can be trusted, not how far one run of training can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from surgeon.language.program import Program
from surgeon.processes.journal import Journal
from surgeon.searches.trial import MeasuredProgram, Trial
from surgeon.searches.winners import HeldOutComparison, compare, quality_json

JOURNAL_FILE = "healed.jsonl"


@dataclass(frozen=True)
class HealedProgram:
    """A program after its healing.

    Attributes:
        measured: on held-out text, all of its windows.
        tokens: of training text that it saw.
        seconds: that it took.
    """

    measured: MeasuredProgram
    tokens: int
    seconds: float


Heal = Callable[[Program], HealedProgram]


class HealedPrograms(Journal):
    """What was healed so far, in a file: a search that is killed heals what is missing.

    Args:
        path: None to keep nothing.
        key: what healed programs depend on beside the program; those of another key are in the file, too.
    """

    def __init__(self, path: Path | None, key: str) -> None:
        self.key = key
        self.found: dict[Program, HealedProgram] = {}
        super().__init__(path, "healing")

    def take(self, line: Any) -> None:
        program, healed = Program.parse(line["program"]), line["healed"]
        measured = MeasuredProgram.from_json(healed["measured"])
        if line["key"] == self.key:
            self.found[program] = HealedProgram(measured, int(healed["tokens"]), float(healed["seconds"]))

    def add(self, program: Program, healed: HealedProgram) -> None:
        self.keep({"key": self.key, "program": str(program), "healed": asdict(healed)})


@dataclass(frozen=True)
class HealedComparison:
    """Candidates before and after their healing.

    Attributes:
        before: on held-out text, as the search leaves them.
        after: the same once they are healed; the winner before comes first.
        healed: what each became, by its trial's number.
        how: how they were healed, a few words.
    """

    before: HeldOutComparison
    after: HeldOutComparison
    healed: Mapping[int, HealedProgram]
    how: str

    @property
    def chosen(self) -> Trial:
        """The winner after healing."""
        return self.after.chosen.trial

    @property
    def changed(self) -> bool:
        """Whether healing has made another one the winner."""
        return self.chosen != self.before.chosen.trial

    def table(self) -> list[str]:
        """Lines of one width: each candidate's numbers on held-out text before and after, and the time it took."""
        rows = [f"{'trial':>5}  {'divergence':>10} {'healed':>8}  {'perplexity':>10} {'healed':>8}  {'seconds':>7}"]
        for one in self.before.finalists:
            healed, before = self.healed[one.trial.number], one.unseen
            after = healed.measured
            rows.append(
                f"{one.trial.number:>5}  {before.divergence:>10.4g} {after.divergence:>8.4g}  "
                f"{before.perplexity:>10.4g} {after.perplexity:>8.4g}  {healed.seconds:>7.0f}"
            )
        return rows

    def lines(self) -> list[str]:
        """What was found, in sentences; the word better only where the interval excludes 0."""
        count = len(self.before.finalists)
        first = self.before.chosen.trial.number
        every = "the candidate was" if count == 1 else f"each of {count} candidates was"
        verdicts = self.after.verdicts(lambda one: (self.after.searched.unseen, one.unseen))
        found = [f"{every} {self.how}", *(f"healed, {verdict}" for verdict in verdicts)]
        if self.changed:
            found.append(
                f"HEALING CHANGES THE CHOICE: trial {self.chosen.number} is the winner, not trial {first}, which was "
                "the winner before healing only"
            )
        elif count > 1:
            found.append(f"healing does not change the choice: trial {first} is the winner")
        return found

    def to_json(self) -> dict[str, Any]:
        """As JSON values; what is not finite is None."""
        candidates = [
            {
                "trial": one.trial.number,
                "program": one.trial.proposal.key,
                "before": quality_json(one.unseen),
                "after": quality_json(self.healed[one.trial.number].measured),
                "tokens": self.healed[one.trial.number].tokens,
                "seconds": self.healed[one.trial.number].seconds,
            }
            for one in self.before.finalists
        ]
        return {
            "by": self.after.by,
            "candidates": candidates,
            "winner_before": self.before.chosen.trial.number,
            "winner": self.chosen.number,
            "changed": self.changed,
            "sentences": self.lines(),
        }


def heal_candidates(
    before: HeldOutComparison, heal: Heal, known: HealedPrograms, how: str, say: Callable[[str], None] = lambda _: None
) -> HealedComparison:
    """Heal the winner and the runners-up, those that are not known yet, and compare them again.

    Args:
        heal: trains a program and measures it on the text that `before` is of.
        how: what it does, for people.
        say: told which one is healed next.
    """
    finalists = before.finalists
    for number, one in enumerate(finalists, start=1):
        program = one.trial.program
        if program not in known.found:
            say(f"healing candidate {number} of {len(finalists)}, trial {one.trial.number}")
            known.add(program, heal(program))
    healed = {one.trial.number: known.found[one.trial.program] for one in finalists}
    winner = before.chosen
    others = [one for one in finalists if one.trial.number != winner.trial.number]
    after = [replace(one, unseen=healed[one.trial.number].measured) for one in (winner, *others)]
    return HealedComparison(before, compare(after[0], after[1:], before.original, before.by), healed, how)
