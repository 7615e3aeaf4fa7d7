"""A search: rounds of proposals, measured, until there were enough trials.

All spaces together have a proposer, and each space by itself has one as well: what one space can do alone is easier to
foretell than a mixture, a search of several never does worse than one of them, and it can be said what each gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from surgeon.language.program import Program
from surgeon.results.edit import Choice
from surgeon.searches.evaluate import Evaluator
from surgeon.searches.mixture import Mixture
from surgeon.searches.proposer import Proposer
from surgeon.searches.question import Question
from surgeon.searches.terms import Terms
from surgeon.searches.trial import MeasuredProgram, Proposal, Trial

BATCH = 8  # proposals of a round: measured together, and made of the same knowledge
FIRST = 3  # of the first round, for each goal: one of every kind
MIXTURE = "mixture"


@dataclass(frozen=True)
class Search:
    """A search of a model; `propose` and `measure` are what `RoundStudy.run` takes.

    Attributes:
        terms: of the mixture's edits.
        trials: how many there are to be.
    """

    question: Question
    terms: Terms
    evaluator: Evaluator
    trials: int

    @cached_property
    def strands(self) -> dict[str, Proposer]:
        """Proposers of all spaces together, first, and of each that can reach a goal, by name."""
        mixture = self.question.mixture
        if len(mixture.spaces) == 1:
            return {mixture.spaces[0].name: self._proposer(mixture)}
        alone = {space.name: self._proposer(replace(mixture, spaces=(space,))) for space in mixture.spaces}
        able = {name: proposer for name, proposer in alone.items() if proposer.can_meet}
        return {MIXTURE: self._proposer(mixture), **able}

    def propose(self, earlier: Sequence[Trial]) -> list[Proposal]:
        """The next round, given all trials of the earlier ones."""
        left = self.trials - len(earlier)
        if left <= 0:
            return []
        found: dict[str, Proposal] = {}
        if not earlier:  # a few of each goal: they run on all of the text, and later ones can be raced against them
            goals = sum(len(proposer.goals) for proposer in self.strands.values())
            count = max(1, min(FIRST, self.trials // 2 // max(1, goals)))
            for proposer in self.strands.values():
                for proposal in proposer.first_round(count):
                    found.setdefault(proposal.key, proposal)
            return [*found.values()][:left]
        batch, others = min(BATCH, left), len(self.strands) - 1
        for name, proposer in self.strands.items():
            # Half of the trials are the mixture's.
            share = max(1, batch // 2 // others) if name != MIXTURE and others else batch - batch // 2 * bool(others)
            trials = [trial for trial in earlier if proposer.knows(trial.proposal.choice)]
            made = proposer.next_round(trials, self.question.shared_out(proposer.goals, trials, share))
            if not made:  # these goals are tried out; others may not be
                made = proposer.next_round(trials, [share] * len(proposer.goals))[:share]
            for proposal in made:
                found.setdefault(proposal.key, proposal)
        return [*found.values()][:left]

    def measure(self, proposals: Sequence[Proposal], earlier: Sequence[Trial]) -> list[MeasuredProgram]:
        """Measure a round's proposals, or some of them, each against the best of its kind so far."""
        rivals = [self._rival(proposal, earlier) for proposal in proposals]
        numbers = [None if rival is None else rival.number for rival in rivals]
        programs = [Program.parse(proposal.key) for proposal in proposals]
        found: dict[Program, MeasuredProgram] = {}
        for number, rival in dict(zip(numbers, rivals, strict=True)).items():
            against = [program for program, other in zip(programs, numbers, strict=True) if other == number]
            found |= self.evaluator.measure(against, None if rival is None else rival.measured)
        return [found[program] for program in programs]

    def _rival(self, proposal: Proposal, earlier: Sequence[Trial]) -> Trial | None:
        """The best trial so far of the same level and, where spaces are looked at by themselves, of the same space.

        None where programs are not compared by their divergence: only that is known before a program has run through.
        """
        if [str(objective) for objective in self.question.objectives if not objective.is_priced] != ["divergence"]:
            return None
        kind = MIXTURE if not self.question.along else self._space_of(proposal.choice)
        same = [
            trial
            for trial in earlier
            if trial.measured.whole
            and trial.proposal.level == proposal.level
            and kind in (MIXTURE, self._space_of(trial.proposal.choice))
        ]
        return min(same, key=lambda trial: (trial.measured.divergence, trial.number), default=None)

    def _space_of(self, choice: Choice) -> str:
        """The space that all edits of a choice are of, or the mixture."""
        spaces = {edit.space for edit in choice}
        return spaces.pop() if len(spaces) == 1 else MIXTURE

    def _proposer(self, mixture: Mixture) -> Proposer:
        number = {edit: place for place, edit in enumerate(self.question.mixture.edits)}
        question = replace(self.question, mixture=mixture)
        terms = self.terms.of([number[edit] for edit in mixture.edits])
        return Proposer(mixture, terms, question.prices, question.goals, self._value)

    def _value(self, trial: Trial) -> float:
        quality = [objective for objective in self.question.objectives if not objective.is_priced]
        return self.question.budget.pricing.costs(quality, trial)[0] if quality else trial.measured.divergence
