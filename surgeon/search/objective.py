"""What a search minimises: the divergence of a program from the original, measured on fixed windows of text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from surgeon.analysis.measure import References, measure, windows_at_once
from surgeon.analysis.sharing import share
from surgeon.families import family_of
from surgeon.program import Program
from surgeon.quality.data import Windows
from surgeon.quality.head import Quality
from surgeon.quality.summary import interval, mean_divergence, perplexity
from surgeon.search.study import Measure, Measured


def divergence_on(
    model: PreTrainedModel,
    windows: Windows,
    memory: int | None = None,
    ran: Callable[[float], Any] = lambda _: None,
) -> Measure:
    """A measure for `PairStudy`; programs measured together share what they begin with in common.

    Args:
        model: unedited; it is left as it is.
        memory: a limit in bytes on the memory of the whole process.
        ran: called with the number of sublayers run, as they run.
    """
    dense = Program.dense(model.config.num_hidden_layers, family_of(model.config).steps_per_layer)
    references: References = {}

    def measure_together(programs: list[Program]) -> dict[Program, Measured]:
        at_once = windows_at_once(model, share([dense, *programs]), windows.ids, memory)
        parts: dict[Program, list[Quality]] = defaultdict(list)
        for part in measure(model, windows.ids, dense, programs, at_once, ran=ran, references=references):
            parts[part.program].append(part.quality)
        return {program: _summary(parts[program], windows.predicted) for program in programs}

    return measure_together


def _summary(parts: list[Quality], tokens: int) -> Measured:
    nll = torch.cat([part.nll for part in parts]).numpy()
    divergence = torch.cat([part.divergence for part in parts]).numpy()
    low, high = interval(divergence)
    return Measured(perplexity(nll), mean_divergence(divergence), low, high, tokens)
