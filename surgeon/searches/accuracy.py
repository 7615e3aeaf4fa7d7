"""A task's accuracy as an objective: lm-eval on the few best programs, as it takes minutes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from surgeon.findings.tasks import Score, scores
from surgeon.language.program import Program
from surgeon.models.edit import edit, require_unedited, restore
from surgeon.models.weights import FactorSource
from surgeon.quality.tasks import Answers, TaskModel, Tasks, TaskSettings, load_tasks, run_tasks
from surgeon.searches.mixture import Trial
from surgeon.searches.quantities import ACCURACY, Aspect

FEW = 5
METRICS = ("acc", "exact_match")  # of a task that has several, the first of these that it has


@dataclass
class TaskAccuracy:
    """Measures the tasks of some objectives.

    Attributes:
        model: unedited; it is left as it is.
        identity: on which the model's answers depend beside the program, as JSON values.
        folder: where answers are kept, so that a killed search asks only what is missing; None to keep none.
        factors: of matrices that programs have ranks for; by default the plain ones.
    """

    model: PreTrainedModel
    tokenizer: Any
    objectives: Sequence[Aspect]
    identity: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    settings: TaskSettings = field(default_factory=TaskSettings)
    factors: FactorSource | None = None

    def __post_init__(self) -> None:
        """Load the tasks, before anything is measured."""
        require_unedited(self.model)
        positions = int(self.model.config.max_position_embeddings)
        self._tasks: dict[str, Tasks] = {}
        for objective in self.objectives:
            if objective.name == ACCURACY and objective.on is not None:
                self._tasks[str(objective)] = load_tasks(
                    [objective.on], positions, seed=self.settings.seed
                )

    def measure(self, programs: Iterable[Program]) -> dict[Program, dict[str, float]]:
        """Measure the accuracy of each program by each of the objectives' names, as `Quality.more` has it.

        Raises:
            ValueError: if a text cannot be scored with this model, or a task has no accuracy.
        """
        found: dict[Program, dict[str, float]] = {}
        for program in programs:
            edit(self.model, program, factors=self.factors)
            try:
                found[program] = {}
                for name, tasks in self._tasks.items():
                    answers = Answers(
                        self.folder, {**self.identity, "program": str(program), "objective": name}
                    )
                    lm = TaskModel(self.model, self.tokenizer, answers, self.settings.batch_size)
                    found[program][name] = accuracy_of(
                        scores(run_tasks(lm, tasks, name, self.settings)), name
                    )
            finally:
                restore(self.model)
        return found

    def of_the_best(self, trials: Sequence[Trial], count: int = FEW) -> list[Trial]:
        """Add the accuracy of those trials of least divergence, so many of every level.

        The others keep none, so that by these objectives they are infinitely dear.
        """
        by_level: dict[float | None, list[Trial]] = defaultdict(list)
        for trial in trials:
            if trial.measured.whole and math.isfinite(trial.measured.divergence):
                by_level[trial.level].append(trial)
        best = [
            trial
            for group in by_level.values()
            for trial in sorted(group, key=lambda trial: (trial.measured.divergence, trial.number))[
                :count
            ]
        ]
        found = self.measure(dict.fromkeys(trial.program for trial in best))
        more = {trial.number: found[trial.program] for trial in best}
        return [
            replace(
                trial,
                measured=replace(trial.measured, more={**trial.measured.more, **more[trial.number]}),
            )
            if trial.number in more
            else trial
            for trial in trials
        ]


def accuracy_of(found: Sequence[Score], name: str) -> float:
    """Find the accuracy among a task's numbers."""
    for metric in METRICS:
        for score in found:
            if score.metric == metric:
                return score.value
    had = ", ".join(dict.fromkeys(score.metric for score in found))
    raise ValueError(
        f"objective {name}: the task has no {' or '.join(METRICS)}, only {had}; use another task"
    )
