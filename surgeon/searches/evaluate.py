"""The divergence of programs from the original, measured on fixed windows of text, cheaply.

Programs measured together run common beginnings once. States of beginnings are kept, as memory allows, for later
programs. The original's predictions are kept on disk. And a program that is hopelessly worse than the best is stopped
after some of the windows. None of the first three changes a number; the fourth gives an estimate, with its interval,
of a program that is out of the running.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor
from transformers import PreTrainedModel

from surgeon.analysis.engine.machine import windows_at_once, working_bytes
from surgeon.analysis.engine.measure import MeasureOptions, measure, streams_after
from surgeon.analysis.engine.prefixes import StateCache
from surgeon.analysis.engine.sharing import SharedPlan, share
from surgeon.language.program import Program
from surgeon.machine import available_bytes, resident_bytes, stay_below
from surgeon.models.edit import program_of, require_unedited
from surgeon.models.weights import FactorSource, TruncatedSVD
from surgeon.opened import streamed_layers
from surgeon.progress import require_time
from surgeon.quality.data import Windows
from surgeon.quality.head import ByWindow, OutputHead, TextReferences, concatenate_windows, join_measures
from surgeon.quality.summary import Quality, Values, quality_of

BLOCK = 64  # tokens, at least, in what is compared
ROUNDING = 1e-6  # nats: what equal programs may differ by
MOST_BLOCKS = 256  # of a text: with more windows than that, windows are compared


def blocks_per_window(windows: int, tokens: int) -> int:
    """Into how many parts to cut each of these windows of predicted tokens; 1: they are not cut."""
    return max(1, min(tokens // BLOCK, MOST_BLOCKS // windows))


# Of the test at each look, of a race against the best.
ALPHA = 0.01
MARGIN = 0.01  # how much worse than the best a program may be, as a share of the best's divergence
CORRELATION = 0.25  # of the blocks of a window, in the difference of two programs


def is_lost(own: Values, best: Values, blocks: int = 1) -> bool:
    """Test whether a program is worse, by its divergence and the best's on the same parts of a text, (parts,) each.

    A program whose divergence is no number has lost; to a best of that kind nothing loses. One value tells nothing.

    Args:
        blocks: how many of the parts are of one window.
    """
    if not np.isfinite(best).all():
        return False
    if not np.isfinite(own).all():
        return True
    if len(own) < 2:
        return False
    above = own - best * (1 + MARGIN) - ROUNDING
    mean = float(above.mean())
    error = float(stats.sem(above)) * math.sqrt(1 + (blocks - 1) * CORRELATION)
    if mean <= 0:
        return False
    return error == 0 or float(stats.t.sf(mean / error, len(above) - 1)) < ALPHA


# Share of the free memory for states of earlier trials if no limit is given.
KEPT_SHARE = 0.125
_OVERHEAD = 0.8  # of the room under a limit, what they take by count: the allocator has gaps
FIRST_TOKENS = {"cpu": 512, "cuda": 8192}  # in the first windows of a race; fewer would run no faster


class Evaluator:
    """Measures programs on a model and a text, and keeps what later ones can use.

    Args:
        model: the layers that it is stored as; it is left as it is.
        memory: a limit in bytes on the memory of the whole process.
        folder: for hidden states that do not fit into the memory, where the model's weights are streamed.
        ran: called with the number of sublayers run, as they run.
        kept: bytes of states to keep; by default what `memory` leaves, or else a share of the memory that is free.
        own: the model's program over these layers, which is the original; by default they run one after the other.
        factors: of matrices that programs have ranks for; by default the plain ones.
        sampled: whether programs get their sampled acceptance, too.

    Attributes:
        sublayers: that have run so far, one on a part of the windows counted as that part.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        windows: Windows,
        memory: int | None = None,
        folder: Path | None = None,
        ran: Callable[[float], Any] = lambda _: None,
        *,
        kept: int | None = None,
        own: Program | None = None,
        factors: FactorSource | None = None,
        sampled: bool = False,
    ) -> None:
        require_unedited(model)
        self.model = model
        self.windows = windows
        self.memory = memory
        self.folder = folder
        self.ran = ran
        self.dense = own or program_of(model)
        self.sublayers = 0.0
        self.head = OutputHead(model)
        self.blocks = blocks_per_window(len(windows.ids), windows.ids.shape[1] - 1)
        self.references = TextReferences(windows.ids, sampled)
        self.at_once = len(windows.ids)
        self.limit = kept
        self.cache = None
        if streamed_layers(model) is None:
            if kept is None:
                kept = max(0, int(KEPT_SHARE * available_bytes(model.device, memory)))
            self.cache = StateCache(kept)
        # What matrices are decomposed into serves every rank, and every trial.
        room = 0 if self.cache is None else self.cache.limit // 4
        self.factors = factors or TruncatedSVD(remembers=True, room=room)

    def measure(
        self, programs: Iterable[Program], best: Quality | None = None, most: int | None = None
    ) -> dict[Program, Quality]:
        """Measure the quality of programs, equal ones once.

        Args:
            best: measured on all windows; programs that are hopelessly worse are stopped (`whole` is False, then).
            most: windows to run, from the first on; by default all. Of fewer, numbers are means over those, and `whole`
                is False.
        """
        if most is not None and most < 1:
            raise ValueError(f"a program is measured on one window at least, not on {most}")
        wanted = list(dict.fromkeys(programs))
        count = len(self.windows.ids)
        if best is not None:
            ran = len(best.by_window("divergence"))
            if not best.whole or ran != count or len(best.by_window("nll")) != count:
                raise ValueError(
                    f"programs are raced against one measured on all {count} windows, not on {ran}"
                )
        parts: dict[Program, list[ByWindow]] = defaultdict(list)
        lost: set[Program] = set()

        def is_done(program: Program, windows: range) -> bool:
            if most is not None and windows.start >= most:
                return True
            if best is None or program in lost or not parts[program]:
                return program in lost
            name = "blocks"
            if name in best.windows:
                own = _blocks(parts[program])
            else:  # windows are many, or the best was measured by something else
                name = "divergence"
                own = join_measures(parts[program])[1]
            blocks = self.blocks if name == "blocks" else 1
            if is_lost(own, best.by_window(name)[: len(own)], blocks):
                lost.add(program)
            return program in lost

        plan = share([self.dense, *wanted])
        for part in measure(self.model, self.windows.ids, plan, self._options(plan, is_done)):
            parts[part.program].append(part.quality)
        return {program: self._summary(parts[program], best) for program in wanted}

    def streams(
        self, programs: Iterable[Program], windows: range, tokens: int | None = None
    ) -> Iterator[tuple[Program, Tensor]]:
        """Yield programs with the stream after each on some windows, as they are reached, before the final norm."""
        plan = share(programs)
        ids = self.windows.ids[:, :tokens]
        options = self._options(plan)
        if ids.shape != self.windows.ids.shape:  # states are kept of whole windows
            part = ids.numel() / self.windows.ids.numel()
            options = replace(options, cache=None, ran=lambda amount: self._ran(amount * part))
        return streams_after(self.model, ids, windows, plan, options)

    def _options(
        self, plan: SharedPlan, is_done: Callable[[Program, range], bool] = lambda *_: False
    ) -> MeasureOptions:
        ids = self.windows.ids
        window = self.windows.ids.shape[1]
        # What is in the cache gives way: it counts as free here.
        limit = None  # on a GPU: what is limited is the main memory
        if self.memory is not None and self.model.device.type != "cuda":
            limit = self.memory + (0 if self.cache is None else self.cache.bytes)
        self.at_once = min(self.at_once, windows_at_once(self.model, plan, ids, limit))
        if self.cache is not None and limit is not None:
            left = limit - resident_bytes() - working_bytes(self.model, plan, self.at_once * window)
            left = int(_OVERHEAD * left)
            self.cache.shrink(left if self.limit is None else min(left, self.limit))

        first = None
        if self.cache is not None:  # whoever reads weights as it goes reads them once for every part
            first = max(1, FIRST_TOKENS.get(self.model.device.type, FIRST_TOKENS["cpu"]) // window)
        return MeasureOptions(
            self.at_once,
            is_done,
            self._ran,
            references=self.references,
            memory=self.memory,
            folder=self.folder,
            first=first,
            blocks=self.blocks,
            sampled=self.references.sampled,
            cache=self.cache,
            factors=self.factors,
        )

    def _ran(self, amount: float) -> None:
        self.sublayers += amount
        self.ran(amount)
        require_time()
        stay_below(self.memory)

    def _summary(self, parts: list[ByWindow], best: Quality | None) -> Quality:
        values = {
            name: tensor.numpy()
            for name, tensor in concatenate_windows(parts).items()
            if name != "blocks"
        }
        if self.blocks > 1:
            values["blocks"] = _blocks(parts)
        count = len(values["nll"])
        tokens = count * (self.windows.ids.shape[1] - 1)
        return quality_of(values, tokens, count == len(self.windows.ids), best)


def _blocks(parts: list[ByWindow]) -> Values:
    """The divergence of the blocks of windows that were measured in parts, in order."""
    values: Values = torch.cat([part["blocks"].flatten() for part in parts if "blocks" in part]).numpy()
    return values
