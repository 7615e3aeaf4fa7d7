"""The divergence of programs from the original, measured on fixed windows of text, cheaply.

Programs measured together run common beginnings once. States of beginnings are kept, as memory allows, for later
programs. The original's predictions are kept on disk. And a program that is hopelessly worse than the best is stopped
after some of the windows. None of the first three changes a number; the fourth gives an estimate, with its interval,
of a program that is out of the running.

Damage is predicted from terms of every edit alone, and of every two, measured on single edits only. To second order the
divergence of a changed model is a quadratic form of the change of the logits,

    KL(p || q) = 1/2 Var_p(delta) + ...,        delta = the change of the logits, p the original's probabilities,

and the changes of two small edits add up. So together they do Cov_p(delta_i, delta_j) beyond the sum, which needs both
edits alone and never the two together: n programs give all n (n - 1) / 2 terms. Edits are not small, so covariances are
used as correlations, and scaled by the two edits' measured divergences.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
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
from surgeon.quality.summary import Quality, Values, mean_divergence, quality_of
from surgeon.searches.mixture import Mixture
from surgeon.searches.optimise import Counts, Damage, Flags, Numbers

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

    def on(self, windows: Windows) -> Evaluator:
        """Make an evaluator of the same model on other text."""
        return Evaluator(
            self.model,
            windows,
            self.memory,
            self.folder,
            own=self.dense,
            factors=self.factors,
            sampled=self.references.sampled,
        )

    def measure(
        self, programs: Iterable[Program], best: Quality | None = None
    ) -> dict[Program, Quality]:
        """Measure the quality of programs, equal ones once.

        Args:
            best: measured on all windows; programs that are hopelessly worse are stopped (`whole` is False, then).
        """
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

        def is_done(program: Program, _: range) -> bool:
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
        found = {}
        for program in wanted:
            joined = concatenate_windows(parts[program])
            values = {name: tensor.numpy() for name, tensor in joined.items() if name != "blocks"}
            if self.blocks > 1:
                values["blocks"] = _blocks(parts[program])
            ran = len(values["nll"])
            tokens = ran * (self.windows.ids.shape[1] - 1)
            found[program] = quality_of(values, tokens, ran == count, best)
        return found

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


def _blocks(parts: list[ByWindow]) -> Values:
    """The divergence of the blocks of windows that were measured in parts, in order."""
    values: Values = torch.cat([part["blocks"].flatten() for part in parts if "blocks" in part]).numpy()
    return values


# Limit of all single edits' sublayers, in runs of the original on all of the text.
_RUNS = 15
# Tokens that each single edit runs on if there is room; trials correct its error.
_TOKENS = 2048
# Of these, the tokens that covariances are taken over.
_SAMPLE = 512
_LEAST_SAMPLE = 32
_LEAST_TOKENS = _SAMPLE  # that each runs on: on 128 what edits do is off by a fifth, on 512 by a tenth
_SAMPLE_BYTES = 256 << 20  # of their streams, of all edits together
_BLOCK_BYTES = 64 << 20  # of the logits of all edits
_FITTED = 3  # edits of a group that estimates of its others take
_WORST = 1e3  # nats: a model that is broken, whatever else it is


@dataclass(frozen=True)
class Terms:
    """The terms of edits, in the order of `Mixture.edits`.

    Attributes:
        divergence: (n,), of each edit alone, nats per token; infinite where it breaks the model.
        correlation: (n, n), of the edits' changes of the logits, from -1 to 1; 0 where it is not known.
        tokens: of the text that was measured on.
        sublayers: that ran for them, in passes over all of the text.
    """

    divergence: Numbers
    correlation: Numbers
    tokens: int = 0
    sublayers: float = 0.0

    @property
    def damage(self) -> Damage:
        """The predicted damage: the cross term of two edits is 2 rho sqrt(d_i d_j)."""
        alone = np.minimum(np.maximum(self.divergence, 0.0), _WORST)
        amplitude = np.sqrt(alone)
        cross = 2 * self.correlation * np.outer(amplitude, amplitude)
        np.fill_diagonal(cross, 0.0)
        return Damage(alone, cross)

    def select(self, numbers: Sequence[int]) -> Terms:
        index = list(numbers)
        return Terms(self.divergence[index], self.correlation[np.ix_(index, index)])

    def to_json(self) -> dict[str, Any]:
        """Round them to significant digits, as JSON values."""
        upper = self.correlation[np.triu_indices(len(self.divergence), 1)]
        return {
            "divergence": [float(f"{value:.9g}") for value in self.divergence],
            "correlation": [round(float(value), 4) for value in upper],
            "tokens": self.tokens,
            "sublayers": round(self.sublayers, 1),
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Terms:
        divergence = np.array(values["divergence"], dtype=np.float64)
        upper = np.zeros((len(divergence), len(divergence)))
        upper[np.triu_indices(len(divergence), 1)] = values["correlation"]
        ran = {name: values[name] for name in ("tokens", "sublayers") if name in values}
        return cls(divergence, upper + upper.T + np.eye(len(divergence)), **ran)


@torch.inference_mode()
def covariances(head: OutputHead, original: Tensor, changed: Sequence[Tensor]) -> Tensor:
    """Cov_p of changes of the logits, the mean over tokens: (n, n), float64.

    Args:
        original: (tokens, hidden), the unedited model's stream after its final norm.
        changed: n of them, (tokens, hidden) each, of the edited ones.
    """
    total = torch.zeros(len(changed), len(changed), dtype=torch.float64)
    rows = max(1, _BLOCK_BYTES // (4 * len(head.weight) * max(1, len(changed))))
    for start in range(0, len(original), rows):
        block = slice(start, start + rows)
        logits = head.logits(original[block])
        p = logits.softmax(-1)
        # All in one product: the head of a large vocabulary takes longest to read, and a block may be a single token.
        # (tokens, n, words).
        delta = head.logits(torch.stack([one[block] for one in changed], dim=1)) - logits[:, None]
        delta = (delta - (delta * p[:, None]).sum(-1, keepdim=True)) * p.sqrt()[:, None]
        total += (delta @ delta.transpose(1, 2)).double().nan_to_num().sum(0).cpu()
    return total / len(original)


def correlations(covariance: Tensor) -> Numbers:
    """Correlations; 0 for what has no finite variance."""
    deviation = covariance.diagonal().clamp_min(0).sqrt()
    scale = deviation[:, None] * deviation[None, :]
    found = torch.where(scale > 0, covariance / scale, torch.zeros_like(scale)).nan_to_num()
    return found.clamp(-1, 1).numpy()


@dataclass(frozen=True)
class TermsPlan:
    """The measurements of edits, on the beginning of the text.

    Attributes:
        programs: of each edit alone.
        known: (n,), the divergence of each where that is known, else NaN.
        run: (n,), which of them run: for their divergence if that is not known, and for correlations.
        foreseen: (n,), a number that rises with the divergence of edits of one group, by which those that are neither
            known nor run are estimated.
        groups: (n,), the number of each one's group.
        original: the unedited program.
    """

    programs: Sequence[Program]
    known: Numbers
    run: Flags
    foreseen: Numbers
    groups: Counts
    original: Program

    @classmethod
    def whole(cls, mixture: Mixture) -> TermsPlan:
        programs = mixture.single_edits
        original = mixture.model.program
        nothing = np.full(len(programs), np.nan)
        every = np.ones(len(programs), dtype=bool)
        return cls(programs, nothing, every, nothing, np.zeros(len(programs), dtype=np.int64), original)

    def tokens(self, ids: Tensor) -> int:
        """Choose the tokens that each measured edit runs on: whole windows, or a part of the first one.

        So many that no more runs than in `_RUNS` of the original, but `_LEAST_TOKENS` at least, where there are these.
        """
        window = ids.shape[1]
        wanted = min(_TOKENS, ids.numel())
        running = [program for program, run in zip(self.programs, self.run, strict=True) if run]
        if running:
            runs = share(running).total_sublayers / share([self.original]).total_sublayers
            wanted = min(wanted, max(_LEAST_TOKENS, int(_RUNS / runs * ids.numel())))
        if wanted < window:
            return wanted
        return wanted - wanted % window

    def runs(self, ids: Tensor) -> dict[range, list[Program]]:
        """By windows, from the first on, the programs that run on them, each once: on more where they are measured."""
        window = ids.shape[1]
        measured = range(max(1, self.tokens(ids) // window))
        # Where some are known, what the others do is compared where those run, too.
        if np.isnan(self.known).all():
            few = measured
        else:
            few = measured[: max(1, _SAMPLE // window)]
        runs: dict[range, dict[Program, None]] = {measured: {}, few: {}}
        for program, measured_divergence, run in zip(self.programs, self.known, self.run, strict=True):
            if run:
                runs[measured if np.isnan(measured_divergence) else few][program] = None
        return {windows: [*programs] for windows, programs in runs.items() if programs}

    def work(self, ids: Tensor) -> float:
        """Count the sublayers to run, in passes over all of the text."""
        # Share of each window that is run.
        part = min(self.tokens(ids), ids.shape[1]) / ids.numel()
        return sum(
            share(programs).total_sublayers * len(run) * part for run, programs in self.runs(ids).items()
        )

    def complete(self, divergence: Numbers) -> Numbers:
        """(n,), with estimates for NaN: a power of the foreseen numbers, fitted to the others of the group.

        Where fewer than three of a group are known they are as bad as the worst of these, or of all.
        """
        found = divergence.copy()
        for group in set(self.groups[np.isnan(divergence)].tolist()):
            own = self.groups == group
            usable = own & np.isfinite(divergence) & (divergence > 0) & (self.foreseen > 0)
            missing = own & np.isnan(divergence)
            if usable.sum() < _FITTED:
                found[missing] = (
                    divergence[usable].max() if usable.any() else np.nanmax(divergence, initial=0.0)
                )
                continue
            slope, level = np.polyfit(np.log(self.foreseen[usable]), np.log(divergence[usable]), 1)
            found[missing] = np.exp(level + max(slope, 0.0) * np.log(self.foreseen[missing]))
        return found


@torch.inference_mode()
def measure_terms(evaluator: Evaluator, plan: TermsPlan) -> Terms:
    """Measure the terms of edits."""
    ids = evaluator.windows.ids
    head = evaluator.head
    count = len(plan.programs)
    divergence = plan.known.copy()
    found = np.eye(count)
    runs = plan.runs(ids)
    tokens = plan.tokens(ids)
    before = evaluator.sublayers
    if not runs:
        return Terms(plan.complete(divergence), found)
    places: dict[Program, list[int]] = {}
    for place, program in enumerate(plan.programs):
        places.setdefault(program, []).append(place)
    few = min(runs, key=len)
    most = max(runs, key=len)
    ((_, stream),) = evaluator.streams([evaluator.dense], most, tokens)
    reference = head.reference(stream, ids[: len(most), :tokens].to(evaluator.model.device))
    original = _sample_stream(head, stream[: len(few)], count)
    changed: dict[int, Tensor] = {}
    for windows, programs in runs.items():
        for program, after in evaluator.streams(programs, windows, tokens):
            sample = _sample_stream(head, after[: len(few)], count)
            changed |= dict.fromkeys(places[program], sample)
            if np.isnan(divergence[places[program]]).any():
                divergence[places[program]] = mean_divergence(
                    head.compare(after, reference)["divergence"].cpu().numpy()
                )
    there = [*changed]
    found[np.ix_(there, there)] = correlations(
        covariances(head, original, [changed[place] for place in there])
    )
    return Terms(plan.complete(divergence), found, tokens, evaluator.sublayers - before)


def _sample_stream(head: OutputHead, stream: Tensor, programs: int) -> Tensor:
    """Normed streams at some of the tokens, evenly spread: as many as leave room for those of all programs."""
    hidden = head.norm_predicting(stream)
    room = _SAMPLE_BYTES // (4 * hidden.shape[1] * max(1, programs))
    rows = min(len(hidden), _SAMPLE, max(_LEAST_SAMPLE, room))
    return hidden[torch.linspace(0, len(hidden) - 1, rows).long()].float()
