"""How long measuring takes here, which is measured before it is decided how much of it there will be."""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from surgeon.analysis.engine.measure import MeasureOptions, measure
from surgeon.analysis.engine.memory import windows_at_once
from surgeon.analysis.engine.sharing import SharedPlan, share
from surgeon.analysis.subject import Subject
from surgeon.language.program import Program
from surgeon.models.edit import as_stored
from surgeon.models.families import family_of

_LEAST_SHARE = 0.05  # of the time of a run, which sublayers take however large the head is


@dataclass(frozen=True)
class RunPace:
    """Seconds for a token of text.

    Attributes:
        sublayer: that one sublayer takes.
        program: that it takes to compare what one program predicts with what the original does.
        own: that the model's own program takes in all.
    """

    sublayer: float
    program: float
    own: float

    def seconds(self, plan: SharedPlan, tokens: int) -> float:
        """How long it takes to measure a plan's programs on so many tokens."""
        return tokens * (self.sublayer * plan.total_sublayers + self.program * len(plan.programs))


def measure_pace(subject: Subject, enough: float, most: float) -> RunPace:
    """Measure how long a model takes on its text, in about the time that is enough for it.

    The first layer alone is run on one window first. Where the whole model would take too long, the pace is what
    follows from that layer, with the head in each: an upper bound.

    Args:
        enough: seconds after which no more windows are taken.
        most: seconds that one window may take.

    Raises:
        ValueError: as `as_stored`, `windows_at_once` and `measure`.
    """
    model, ids = subject.model, subject.windows.ids
    window = ids.shape[1]
    with as_stored(model) as own:
        steps = family_of(model.config).steps_per_layer
        begun = [Program(own.nodes[:end]) for end in range(steps, len(own.nodes), steps)]
        first, alone, beside = share([*begun, own][:1]), share([own]), share([own, *begun])
        seconds = [_seconds(subject, model, first, ids[:1]) for _ in range(2)][-1]  # what is set up once is set up now
        if seconds * len(own.nodes) / steps > most:
            each = seconds / first.total_sublayers / window
            return RunPace(each, each, each * alone.total_sublayers)
        windows = 1
        while True:
            whole, all_ = (_seconds(subject, model, plan, ids[:windows]) for plan in (alone, beside))
            if whole + all_ >= enough or windows == len(ids):
                break
            windows = min(2 * windows, len(ids))
    tokens, sublayers = windows * window, alone.total_sublayers
    head = max(0.0, all_ - whole) / max(1, len(begun))
    return RunPace(max(_LEAST_SHARE * whole, whole - head) / sublayers / tokens, head / tokens, whole / tokens)


def _seconds(subject: Subject, model: PreTrainedModel, plan: SharedPlan, ids: Tensor) -> float:
    """How long it takes to measure a plan's programs on some windows."""
    at_once = windows_at_once(model, plan, ids, subject.memory)
    start = time.perf_counter()
    for _ in measure(model, ids, plan, MeasureOptions(at_once, memory=subject.memory)):
        pass
    return time.perf_counter() - start
