"""What a search minimises: the divergence of a program from the original, measured on fixed windows of text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from surgeon.analysis.measure import MeasureOptions, References, measure, windows_at_once
from surgeon.analysis.sharing import share
from surgeon.memory import stay_below
from surgeon.model import program_of, require_unedited
from surgeon.program import Program
from surgeon.quality.data import Windows
from surgeon.quality.head import Quality, joined
from surgeon.quality.summary import estimate
from surgeon.search.study import Measure, MeasuredProgram


def divergence_on(
    model: PreTrainedModel,
    windows: Windows,
    memory: int | None = None,
    folder: Path | None = None,
    ran: Callable[[float], Any] = lambda _: None,
) -> Measure:
    """A measure for `PairStudy`; programs measured together share what they begin with in common.

    Args:
        model: unedited; it is left as it is.
        memory: a limit in bytes on the memory of the whole process.
        folder: for hidden states that do not fit into it, where the model's weights are streamed.
        ran: called with the number of sublayers run, as they run.

    Raises:
        ValueError: if the model is an edited one.
    """
    require_unedited(model)
    dense = program_of(model)
    references: References = {}
    at_once = len(windows.ids)

    def ran_some(amount: float) -> None:
        ran(amount)
        stay_below(memory)

    def measure_together(programs: list[Program]) -> dict[Program, MeasuredProgram]:
        nonlocal at_once
        # Never more than before: what is known of the original is known of windows that were run together.
        at_once = min(at_once, windows_at_once(model, share([dense, *programs]), windows.ids, memory))
        options = MeasureOptions(at_once, ran=ran_some, references=references, memory=memory, folder=folder)
        parts: dict[Program, list[Quality]] = defaultdict(list)
        for part in measure(model, windows.ids, dense, programs, options):
            parts[part.program].append(part.quality)
        return {program: _summary(parts[program], windows.predicted) for program in programs}

    return measure_together


def _summary(parts: list[Quality], tokens: int) -> MeasuredProgram:
    found = estimate(*joined(parts))
    return MeasuredProgram(found.perplexity, found.divergence, found.divergence_low, found.divergence_high, tokens)
