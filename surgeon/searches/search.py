"""A search: its next proposal, and its trials.

All spaces together have a proposer, and each space by itself has one as well: one space alone is easier to predict
than a mixture, a search of several never does worse than one of them, and each one's share is known.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import (
    BaseSampler,
    GPSampler,
    NSGAIISampler,
    RandomSampler,
    TPESampler,
)
from optuna.trial import FrozenTrial, TrialState

from surgeon.analysis.importance import expert_use
from surgeon.analysis.subject import Subject, calibration_entry, most_important, open_subject
from surgeon.cost.hardware import Hardware
from surgeon.findings.trials import SOURCES
from surgeon.language.operations.applied import Choice
from surgeon.machine import free_bytes
from surgeon.models.edit import restore
from surgeon.opened import Model, open_model
from surgeon.quality.summary import Quality
from surgeon.searches.evaluate import KEPT_SHARE, Evaluator, Terms, TermsPlan, measure_terms
from surgeon.searches.known import Known, open_factors, read_known
from surgeon.searches.mixture import NONE, Mixture, Proposal, Trial
from surgeon.searches.pricing import Pricing
from surgeon.searches.proposer import Proposer
from surgeon.searches.quantities import DIVERGENCE, select_priced
from surgeon.searches.question import SURGEON, PricedQuestion, Question, price_question
from surgeon.words import did_you_mean

BATCH = 8  # proposals that are made of the same knowledge, and measured together
FIRST = 3  # of the first round, for each goal: one of every kind
FIRST_OF_ALL = 30  # of the first round, for all goals, where they are many
SURE = 3.0  # standard deviations above the best, for which a predicted choice is ruled out
MIXTURE = "mixture"
DIGITS = 9  # of what was measured: further ones may depend on what it was measured together with
# Attributes of trials.
PROGRAM = "program"
EDITS = "edits"
SOURCE = "source"
LEVEL = "level"
# The same, when they are told.
MEASURED = "measured"
SUBLAYERS = "sublayers"
_WORST = 100.0  # of a constraint
_WORST_COST = 1e30  # as Optuna's tools can show it


@dataclass(frozen=True)
class SearchSetup:
    """A search that can begin.

    Attributes:
        mixture: of edits as passes have measured them, on the text.
        pricing: None where that of times on this machine is still to come.
        evaluator: of programs on the text.
    """

    subject: Subject
    settings: Question
    mixture: Mixture
    pricing: Pricing | None
    known: Known
    evaluator: Evaluator

    @classmethod
    def load(
        cls,
        model: str | Path | Model,
        question: Question,
        pricing: Pricing | None,
        folder: Path,
        make: bool = True,
    ) -> SearchSetup:
        """Load the model and the text, read the findings of passes, and make factors, or read those of worker 0."""
        opened = open_model(model)
        mixture = question.mixture(opened)  # factors of others' are known by what tensors are called
        subject = open_subject(
            opened,
            question.data,
            question.tokens,
            question.window,
            question.separator,
            memory=question.memory,
        )
        findings = read_known(map(Path, question.using), opened, subject.windows)
        mixture = findings.mixture(mixture).on_text(calibration_entry(subject.windows))
        if mixture.most_salient:
            use = expert_use(subject.model, subject.windows, memory=subject.memory)
            mixture = mixture.by_saliency({layer: one.order() for layer, one in use.items()})
        for note in findings.notes(mixture):
            warnings.warn(note, stacklevel=2)
        programs = mixture.single_edits
        made = open_factors(subject, programs, findings.ranks, folder / "factors", make)
        factors = most_important(
            subject.model, programs, subject.windows, factors=made, memory=subject.memory
        )
        if opened.own is not None:
            restore(subject.model)  # its program is the one that others are compared with
        # Workers share the memory.
        room = None
        if question.workers > 1:
            room = int(KEPT_SHARE * free_bytes() / question.workers)
        evaluator = Evaluator(
            subject.model,
            subject.windows,
            subject.memory,
            folder,
            kept=room,
            own=opened.own,
            factors=factors,
            sampled=question.sampled_acceptance,
        )
        return cls(subject, question, mixture, pricing, findings, evaluator)

    def question(self, original: Quality, here: Hardware | None = None) -> PricedQuestion:
        """The question with its prices, of which some are times on this machine."""
        pricing = self.pricing or price_question(self.settings, self.mixture, here)
        return PricedQuestion(self.settings, self.mixture, pricing, original)


@dataclass
class Search:
    """A search of a model.

    Attributes:
        known_terms: of the mixture's edits; None: they are measured when they are asked for.
        known: findings of passes, which are not measured again.
    """

    question: PricedQuestion
    evaluator: Evaluator
    known_terms: Terms | None = None
    known: Known = field(default_factory=Known)
    # One thread of a study asks or measures at a time.
    lock: Lock = field(default_factory=Lock, init=False, repr=False)
    # Known so far: trials by what is stored of them; the last round, with the trials that it was made of.
    _trials: dict[tuple[Any, ...], Trial] = field(default_factory=dict, init=False, repr=False)
    _round: tuple[Any, list[Proposal]] = field(default=((), []), init=False, repr=False)

    @cached_property
    def terms(self) -> Terms:
        return self.known_terms or measure_terms(self.evaluator, self.terms_plan)

    @cached_property
    def terms_plan(self) -> TermsPlan:
        return self.known.plan(self.question)

    @cached_property
    def strands(self) -> dict[str, Proposer]:
        """By name, proposers of all spaces together, first, and of each that can reach a goal."""
        mixture = self.question.mixture
        if len(mixture.spaces) == 1:
            return {mixture.spaces[0].name: self._proposer(self.question)}
        alone = {
            space.name: self._proposer(self.question.with_spaces((space,))) for space in mixture.spaces
        }
        able = {name: proposer for name, proposer in alone.items() if proposer.can_meet}
        return {MIXTURE: self._proposer(self.question), **able}

    def next_proposal(
        self, finished: Sequence[Trial], running: Collection[str] = (), skipped: int = 0
    ) -> Proposal | None:
        """Propose what to try next; None if nothing is left.

        The first round's proposals come first. Then those of rounds that are made of all that is finished, in turn, of
        each round as many as are asked for before more is known. Keys of running trials count as tried; `skipped`
        proposals are left to others who ask at the same moment.
        """
        tried = {trial.key for trial in finished} | set(running)
        first = [proposal for proposal in self._first_round if proposal.key not in tried]
        if first:
            return first[skipped % len(first)]
        made_of = [(trial.number, trial.key) for trial in finished]
        if self._round[0] != made_of:
            self._round = made_of, self._next_round(finished)
        found = self._round[1]
        turn = (len(tried) - len(self._first_round) + skipped) % max(1, len(found))
        for proposal in [*found[turn:], *found[:turn]]:
            if proposal.key not in tried:
                return proposal
        # All of the round is given out, and nothing of it finished yet.
        more = self._next_round(finished, running)
        found += more
        return next(iter(more), None)

    @cached_property
    def _first_round(self) -> list[Proposal]:
        """A few of each goal, which run on all of the text, so that later ones can be raced against them."""
        goals = sum(len(proposer.goals) for proposer in self.strands.values())
        count = max(1, min(FIRST, FIRST_OF_ALL // max(1, goals)))
        found: dict[str, Proposal] = {}
        for proposer in self.strands.values():
            for proposal in proposer.first_round(count):
                found.setdefault(proposal.key, proposal)
        if self.question.drafting is None:
            return [*found.values()]
        first = next(iter(self.strands.values()))
        promise = self.question.drafting.promise
        return sorted(found.values(), key=lambda one: first.rate(one.choice, promise))

    def _next_round(self, finished: Sequence[Trial], running: Collection[str] = ()) -> list[Proposal]:
        """At most `BATCH` proposals, half of them the mixture's."""
        found: dict[str, Proposal] = {}
        others = len(self.strands) - 1
        for name, proposer in self.strands.items():
            share = BATCH - BATCH // 2 * bool(others)
            if name != MIXTURE and others:
                share = max(1, BATCH // 2 // others)
            trials = [trial for trial in finished if proposer.knows(trial.choice)]
            counts = self.question.shared_out(proposer.goals, trials, share)
            made = proposer.next_round(trials, counts, running)
            if not made:  # these goals are tried out; others may not be
                made = proposer.next_round(trials, [share] * len(proposer.goals), running)[:share]
            for proposal in made:
                found.setdefault(proposal.key, proposal)
        return [*found.values()]

    def proposal(
        self, values: Mapping[str, Any], attributes: Mapping[str, Any] | None = None
    ) -> Proposal:
        """Read a trial's proposal from the values of its parameters, and its attributes."""
        choice = self.question.mixture.choice(values)
        entries = attributes or {}
        program = self.question.mixture.program(choice)
        level = entries[LEVEL] if LEVEL in entries else self.question.level(program)
        return Proposal(str(program), entries.get(SOURCE, ""), choice, level)

    def finished_trials(self, stored: Sequence[FrozenTrial]) -> list[Trial]:
        """A study's finished trials of this search's edits, in order, numbered among those that were not given up.

        Of a trial that another objective measured only its first value is known.
        """
        found = []
        kept = (one for one in stored if one.state != TrialState.FAIL)
        for number, one in enumerate(kept):
            if (
                not one.state.is_finished()
                or self.question.mixture.parameters.keys() - one.params.keys()
            ):
                continue
            told = one.user_attrs.get(MEASURED) or repr(one.values)
            key = number, told, *one.params.values()
            if key not in self._trials:
                proposal = self.proposal(one.params, one.user_attrs)
                if MEASURED in one.user_attrs:
                    read = json.loads(told, parse_float=_round)
                    windows = {name: tuple(own) for name, own in read.pop("windows").items()}
                    measured = self.question.add_value(
                        proposal.program, Quality(**read, windows=windows)
                    )
                else:
                    value = one.values[0] if one.values else math.inf
                    measured = Quality(value, divergence=value)
                self._trials[key] = Trial(**vars(proposal), number=number, measured=measured)
            found.append(self._trials[key])
        return found

    def objective(self, trial: optuna.Trial) -> float | tuple[float, ...]:
        for name, edits in self.question.mixture.parameters.items():
            trial.suggest_categorical(name, [NONE, *map(str, edits)])
        # What the sampler has said of the trial is in the storage only.
        proposal = self.proposal(trial.params, trial.storage.get_trial(trial._trial_id).user_attrs)
        with self.lock:
            stored = trial.study.get_trials(deepcopy=False)
            earlier = self.finished_trials([one for one in stored if one.number != trial.number])
            before = self.evaluator.sublayers
            measured = self.measure(proposal, earlier, races=proposal.source in SOURCES)
            ran = self.evaluator.sublayers - before
        tried = Trial(**vars(proposal), number=trial.number, measured=measured)
        settings = self.question.settings
        short = self.question.pricing.shortfalls(settings.limits, tried.program)
        lacking = (*short, *self.question.lacks_of_quality(measured))
        limits = (*select_priced(settings.limits), *settings.of_quality)
        attributes = {
            PROGRAM: proposal.key,
            EDITS: proposal.edits,
            SOURCE: proposal.source or type(trial.study.sampler).__name__.removesuffix("Sampler"),
            MEASURED: json.dumps(asdict(measured)),  # readers of JSON do not agree on infinities and NaN
            SUBLAYERS: round(ran, 1),
        }
        for name, value in attributes.items():
            trial.set_user_attr(name, value)
        for limit, lack in zip(limits, lacking, strict=True):
            trial.set_constraint(str(limit), min(lack, _WORST))
        recorded = self.question.pricing.costs(settings.recorded_aspects, tried)
        # Infinite ones are as bad as can be.
        costs = [cost if math.isfinite(cost) else _WORST_COST for cost in recorded]
        if len(costs) > 1:
            return tuple(costs)
        if not measured.whole:
            trial.report(costs[0], len(measured.by_window("divergence")))
            raise optuna.TrialPruned
        return costs[0]

    def measure(self, proposal: Proposal, earlier: Sequence[Trial], races: bool = True) -> Quality:
        """Measure a proposal, unless it is known.

        It is raced against the best trial so far of the same level and, where a cost has levels, of the same space.
        """
        program = proposal.program
        same = next(
            (one.measured for one in earlier if one.key == proposal.key and one.measured.whole), None
        )
        passed = self.known.find_quality(program)
        drafting = self.question.drafting
        if passed is not None and (drafting is None or passed.knows(drafting.by)):
            same = passed
        if same is None:
            rivals = []
            # By nothing but divergence something is known before a program has run through.
            if races and self._is_by_divergence:
                kind = MIXTURE if not self.question.along else self._space_of(proposal.choice)
                rivals = [
                    trial.measured
                    for trial in earlier
                    if trial.measured.whole
                    and trial.level == proposal.level
                    and kind in (MIXTURE, self._space_of(trial.choice))
                ]
            rival = min(rivals, key=lambda measured: measured.divergence, default=None)
            same = self.evaluator.measure([program], rival)[program]
        return self.question.add_value(program, same)

    @property
    def _is_by_divergence(self) -> bool:
        return [one for one in self.question.settings.objectives if not one.is_priced] == [DIVERGENCE]

    def _space_of(self, choice: Choice) -> str:
        spaces = {edit.space for edit in choice}
        return spaces.pop() if len(spaces) == 1 else MIXTURE

    def _proposer(self, question: PricedQuestion) -> Proposer:
        number = {edit: place for place, edit in enumerate(self.question.mixture.edits)}
        terms = self.terms.select([number[edit] for edit in question.mixture.edits])
        divergences = self.known.choices(self.question.mixture)
        # Only divergence is predicted, and only where choices were measured before is there enough to be sure by.
        sure = SURE if divergences and self._is_by_divergence else None
        quality = [
            objective for objective in self.question.settings.objectives if not objective.is_priced
        ] or [DIVERGENCE]

        found = Proposer(
            question.mixture,
            terms,
            question.prices,
            question.goals,
            lambda trial: self.question.pricing.costs(quality, trial)[0],
            divergences,
            sure,
        )
        found = replace(found, goals=found.goals_worth_trying)
        if self.question.drafting is None:
            return found
        promising = found.keep_promising(self.question.drafting.promise)
        if question.whole is None and not promising.goals:
            return found
        return promising


def _round(number: str) -> float:
    return float(f"{float(number):.{DIGITS}g}")


POPULATION = 16  # of nsga2: searches have tens of trials, and Optuna's 50 would all be drawn at random


class SurgerySampler(BaseSampler):
    """Samples a search's proposals.

    They go by the terms of single edits, which are measured when it is first asked, and by all finished trials of the
    study; running ones count as tried. Nothing is random. When nothing is left to try it repeats the best trial's
    values, and stops the study.

    Args:
        search: as `surgeon.SearchProblem` is one.

    Attributes:
        is_exhausted: whether nothing was left the last time.
    """

    def __init__(self, search: Search) -> None:
        self.search = search
        self.is_exhausted = False
        self._others = RandomSampler(seed=0)

    def infer_relative_search_space(
        self,
        study: optuna.Study,  # noqa: ARG002
        trial: FrozenTrial,  # noqa: ARG002
    ) -> dict[str, BaseDistribution]:
        return self.search.question.mixture.categories

    def sample_relative(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        search_space: dict[str, BaseDistribution],  # noqa: ARG002
    ) -> dict[str, Any]:
        with self.search.lock:
            stored = [one for one in study.get_trials(deepcopy=False) if one.number != trial.number]
            finished = self.search.finished_trials(stored)
            # Of one that was asked for by somebody else just now the parameters are not there yet.
            open_ = [one for one in stored if not one.state.is_finished()]
            running = {one.user_attrs[PROGRAM] for one in open_ if PROGRAM in one.user_attrs}
            # Those who ask at this moment, and asked first, get what would be said first.
            asking = sum(PROGRAM not in one.user_attrs and one.number < trial.number for one in open_)
            proposal = self.search.next_proposal(finished, running, asking)
            self.is_exhausted = proposal is None
            if proposal is None:
                best = min(finished, key=lambda one: (one.measured.divergence, one.number), default=None)
                proposal = best or Proposal("", "", ())
            for name, value in (
                (PROGRAM, proposal.key),
                (SOURCE, proposal.source),
                (LEVEL, proposal.level),
            ):
                # Optuna's samplers keep their attributes in the storage, too.
                study._storage.set_trial_user_attr(trial._trial_id, name, value)
        return self.search.question.mixture.values(proposal.choice)

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """A parameter that is none of the search's, at random."""
        return self._others.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(
        self,
        study: optuna.Study,
        trial: FrozenTrial,  # noqa: ARG002
        state: TrialState,  # noqa: ARG002
        values: Sequence[float] | None,  # noqa: ARG002
    ) -> None:
        if self.is_exhausted and study._thread_local.in_optimize_loop:
            study.stop()


OTHERS: Mapping[str, Callable[..., BaseSampler]] = {
    "tpe": TPESampler,
    "gp": GPSampler,
    "nsga2": partial(NSGAIISampler, population_size=POPULATION),
    "random": RandomSampler,
}
SAMPLERS = (SURGEON, *OTHERS)


def make_sampler(search: Search, name: str, seed: int = 0) -> BaseSampler:
    """Make a sampler for the studies of a search."""
    require_sampler(name)
    if name == SURGEON:
        return SurgerySampler(search)
    return OTHERS[name](seed=seed)


def require_sampler(name: str) -> None:
    """Refuse a sampler that cannot be had, as `make_sampler` does."""
    if name not in SAMPLERS:
        raise ValueError(f"unknown sampler {name!r}; {did_you_mean(name, SAMPLERS)}")
