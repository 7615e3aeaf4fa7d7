"""The terms that damage is predicted from: of every edit alone, and of every two of them, from single edits only.

To second order the divergence of a changed model is a quadratic form of the change of the logits,

    KL(p || q) = 1/2 Var_p(delta) + ...,        delta = the change of the logits, p the original's probabilities,

and the changes of two small edits add up. So together they do Cov_p(delta_i, delta_j) beyond the sum, which needs both
edits alone and never the two together: n programs give all n (n - 1) / 2 terms. Edits are not small, so covariances are
used as correlations, and scaled by the two edits' measured divergences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surgeon.analysis.engine.sharing import share
from surgeon.language.program import Program
from surgeon.quality.head import OutputHead
from surgeon.quality.summary import mean_divergence
from surgeon.searches.evaluate import Evaluator
from surgeon.searches.mixture import Mixture
from surgeon.searches.optimise import Counts, Damage, Flags, Numbers

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

    def of(self, numbers: Sequence[int]) -> Terms:
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
        for program, known, run in zip(self.programs, self.known, self.run, strict=True):
            if run:
                runs[measured if np.isnan(known) else few][program] = None
        return {windows: [*programs] for windows, programs in runs.items() if programs}

    def work(self, ids: Tensor) -> float:
        """Count the sublayers to run, in passes over all of the text."""
        # Share of each window that is run.
        part = min(self.tokens(ids), ids.shape[1]) / ids.numel()
        return sum(
            share(programs).total_sublayers * len(run) * part for run, programs in self.runs(ids).items()
        )

    def completed(self, divergence: Numbers) -> Numbers:
        """(n,), with estimates for NaN: a power of the foreseen numbers, fitted to the others of the group.

        Where fewer than three of a group are known they are as bad as the worst of these, or of all.
        """
        found = divergence.copy()
        for group in set(self.groups[np.isnan(divergence)].tolist()):
            own = self.groups == group
            known = own & np.isfinite(divergence) & (divergence > 0) & (self.foreseen > 0)
            missing = own & np.isnan(divergence)
            if known.sum() < _FITTED:
                found[missing] = (
                    divergence[known].max() if known.any() else np.nanmax(divergence, initial=0.0)
                )
                continue
            slope, level = np.polyfit(np.log(self.foreseen[known]), np.log(divergence[known]), 1)
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
        return Terms(plan.completed(divergence), found)
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
    return Terms(plan.completed(divergence), found, tokens, evaluator.sublayers - before)


def _sample_stream(head: OutputHead, stream: Tensor, programs: int) -> Tensor:
    """Normed streams at some of the tokens, evenly spread: as many as leave room for those of all programs."""
    hidden = head.predicting(stream)
    room = _SAMPLE_BYTES // (4 * hidden.shape[1] * max(1, programs))
    rows = min(len(hidden), _SAMPLE, max(_LEAST_SAMPLE, room))
    return hidden[torch.linspace(0, len(hidden) - 1, rows).long()].float()
