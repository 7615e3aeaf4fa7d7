"""The search itself: an Optuna study over which neighbouring layers run as LP pairs.

Everything lies in the study's storage file. A study killed at any point and started again asks the same questions in
the same order: the sampler is seeded anew for every trial, by how many are finished.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from surgeon.program import Program
from surgeon.search import proposals
from surgeon.search.space import Pairs, as_scores, best_pairs, pairs_program

SETTINGS, DAMAGE, PROFILE = "settings", "pair_damage", "profile"
STUDY_FILE = "study.db"


@dataclass(frozen=True)
class MeasuredProgram:
    """How well a program predicts; divergence and its 95% interval (NaN: not known) in nats per token."""

    perplexity: float
    divergence: float
    divergence_low: float
    divergence_high: float
    tokens: int


Measure = Callable[[list[Program]], dict[Program, MeasuredProgram]]


@dataclass(frozen=True)
class Trial:
    """One finished trial: where its choice of pairs came from, and how it did."""

    number: int
    source: str
    pairs: Pairs
    measured: MeasuredProgram


@dataclass
class PairStudy:
    """A search for the best `count` LP pairs of a model.

    Attributes:
        measure: measures programs, those given together with shared work.
        settings: what the study is about; a storage file of another study is refused.
    """

    folder: Path
    num_layers: int
    steps_per_layer: int
    count: int
    seed: int
    measure: Measure
    settings: dict[str, Any]

    def __post_init__(self) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.study = optuna.create_study(
            study_name="pairs", storage=f"sqlite:///{self.folder / STUDY_FILE}", load_if_exists=True
        )
        self._require_same_settings()
        for stale in self.study.get_trials(states=(TrialState.RUNNING, TrialState.WAITING)):  # left by a killed process
            self.study.tell(stale.number, state=TrialState.FAIL)

    def program(self, pairs: Pairs) -> Program:
        """The program that runs these pairs as LP steps."""
        return pairs_program(pairs, self.num_layers, self.steps_per_layer)

    def finished(self) -> list[Trial]:
        """The finished trials in the order they were asked for."""
        complete = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        return [_read_trial(trial) for trial in complete]

    def best(self) -> Trial:
        """The trial of least divergence; the first of equals."""
        return min(self.finished(), key=lambda trial: trial.measured.divergence)

    def profile(self) -> dict[float, MeasuredProgram]:
        """Quality by effective depth, from the dense model down to the budget, by the additive choice of pairs."""
        if PROFILE not in self.study.user_attrs:
            damage = self.pair_damage()
            programs = [self.program(best_pairs([-d for d in damage], n)) for n in range(self.count + 1)]
            measured = self.measure(programs)
            rows = [[p.effective_depth(self.steps_per_layer), vars(measured[p])] for p in programs]
            self.study.set_user_attr(PROFILE, rows)
        return {depth: MeasuredProgram(**values) for depth, values in self.study.user_attrs[PROFILE]}

    def pair_damage(self) -> list[float]:
        """The divergence of every single pair of neighbouring layers run in parallel, measured together."""
        if DAMAGE not in self.study.user_attrs:
            programs = [self.program((first,)) for first in range(self.num_layers - 1)]
            measured = self.measure(programs)
            self.study.set_user_attr(DAMAGE, [measured[program].divergence for program in programs])
        damage: list[float] = self.study.user_attrs[DAMAGE]
        return damage

    def run(self, trials: int) -> Iterator[Trial]:
        """Run until so many trials are finished, yielding each one that this call ran."""
        known = {trial.pairs: trial.measured for trial in self.finished()}
        first = proposals.first_proposals(self.pair_damage(), self.num_layers, self.count, limit=max(1, trials // 2))
        fresh = [pairs for _, pairs in first if pairs not in known]
        if fresh:  # together, so that what they begin with in common runs once
            measured = self.measure([self.program(pairs) for pairs in fresh])
            known |= {pairs: measured[self.program(pairs)] for pairs in fresh}
        while (done := len(self.finished())) < trials:
            trial, source, pairs = self._ask(done, first)
            if pairs not in known:
                known[pairs] = self.measure([self.program(pairs)])[self.program(pairs)]
            yield self._tell(trial, source, pairs, known[pairs])

    def _ask(self, done: int, first: list[tuple[str, Pairs]]) -> tuple[optuna.Trial, str, Pairs]:
        """The next choice: a first proposal, else in turn a neighbour of the best and one of the sampler's."""
        seed = self.seed * 100_003 + done
        if done < len(first):
            return self._ask_for(*first[done])
        tried = {trial.pairs for trial in self.finished()}
        near = proposals.neighbour(self.best().pairs, self.pair_damage(), tried, seed)
        if near is not None and done % 2:
            return self._ask_for(proposals.NEIGHBOUR, near)
        self.study.sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True)
        trial = self.study.ask()
        pairs = self._pairs_of(trial)
        if pairs in tried and near is not None:  # measuring it again would teach nothing
            self.study.tell(trial, state=TrialState.FAIL)
            return self._ask_for(proposals.NEIGHBOUR, near)
        return trial, proposals.SAMPLED, pairs

    def _ask_for(self, source: str, pairs: Pairs) -> tuple[optuna.Trial, str, Pairs]:
        """A trial of exactly these pairs."""
        scores = as_scores(pairs, self.num_layers)
        self.study.enqueue_trial({f"pair_{k}": score for k, score in enumerate(scores)})
        trial = self.study.ask()
        return trial, source, self._pairs_of(trial)

    def _pairs_of(self, trial: optuna.Trial) -> Pairs:
        scores = [trial.suggest_float(f"pair_{k}", 0.0, 1.0) for k in range(self.num_layers - 1)]
        return best_pairs(scores, self.count)

    def _tell(self, trial: optuna.Trial, source: str, pairs: Pairs, measured: MeasuredProgram) -> Trial:
        trial.set_user_attr("source", source)
        trial.set_user_attr("pairs", list(pairs))
        trial.set_user_attr("measured", vars(measured))
        # Optuna takes no infinity: a program that predicts nothing at all is as bad as a float can say.
        value = measured.divergence if math.isfinite(measured.divergence) else 1e30
        self.study.tell(trial, value)
        return Trial(trial.number, source, pairs, measured)

    def _require_same_settings(self) -> None:
        stored = self.study.user_attrs.get(SETTINGS)
        if stored is None:
            self.study.set_user_attr(SETTINGS, self.settings)
            return
        for name, value in self.settings.items():
            if name not in stored:
                raise ValueError(
                    f"{self.folder} holds a search of an earlier version, which does not say its {name}; "
                    "use another output folder"
                )
            if stored[name] != value:
                raise ValueError(
                    f"{self.folder} holds a search with another {name} ({stored.get(name)}, not {value}); "
                    "use another output folder, or the same settings to go on"
                )


def _read_trial(trial: FrozenTrial) -> Trial:
    attributes = trial.user_attrs
    return Trial(
        trial.number, attributes["source"], tuple(attributes["pairs"]), MeasuredProgram(**attributes["measured"])
    )
