"""The terms that damage is predicted from: of every edit alone, and of every two of them, from single edits only.

To second order the divergence of a changed model is a quadratic form of what the change does to the logits,

    KL(p || q) = 1/2 Var_p(delta) + ...,        delta = the change of the logits, p the original's probabilities,

and what two small edits do to the logits adds up. So what they do together beyond the sum is Cov_p(delta_i, delta_j),
which needs both edits alone and never the two together: n programs give all n (n - 1) / 2 terms. Edits are not small,
so covariances are used as correlations, and scaled by what the two edits were measured to do.
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
from surgeon.searches.optimise import Damage, Numbers

_TOKENS = 2048  # of the text, that edits are measured on alone: trials correct what a short text gets wrong
_SAMPLE, _LEAST_SAMPLE = 512, 32  # of these, the tokens that covariances are taken over
_SAMPLE_BYTES = 256 << 20  # of their streams, of all edits together
_BLOCK_BYTES = 64 << 20  # of the logits of all edits
_WORST = 1e3  # nats: a model that is broken, whatever else it is


@dataclass(frozen=True)
class Terms:
    """What is known of edits, in the order of `Mixture.edits`.

    Attributes:
        divergence: (n,), of each edit alone, nats per token; infinite where it breaks the model.
        correlation: (n, n), of what edits do to the logits, from -1 to 1; 0 where it is not known.
    """

    divergence: Numbers
    correlation: Numbers

    @property
    def damage(self) -> Damage:
        """The prediction that they make: the cross term of two edits is 2 rho sqrt(d_i d_j)."""
        alone = np.minimum(np.maximum(self.divergence, 0.0), _WORST)
        amplitude = np.sqrt(alone)
        cross = 2 * self.correlation * np.outer(amplitude, amplitude)
        np.fill_diagonal(cross, 0.0)
        return Damage(alone, cross)

    def of(self, numbers: Sequence[int]) -> Terms:
        """Those of some of the edits."""
        index = list(numbers)
        return Terms(self.divergence[index], self.correlation[np.ix_(index, index)])

    def to_json(self) -> dict[str, Any]:
        """As JSON values, rounded to what matters."""
        upper = self.correlation[np.triu_indices(len(self.divergence), 1)]
        return {
            "divergence": [float(f"{value:.9g}") for value in self.divergence],
            "correlation": [round(float(value), 4) for value in upper],
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Terms:
        """The inverse of `to_json`."""
        divergence = np.array(values["divergence"], dtype=np.float64)
        upper = np.zeros((len(divergence), len(divergence)))
        upper[np.triu_indices(len(divergence), 1)] = values["correlation"]
        return cls(divergence, upper + upper.T + np.eye(len(divergence)))


@torch.inference_mode()
def covariances(head: OutputHead, original: Tensor, changed: Sequence[Tensor]) -> Tensor:
    """Cov_p of what changes do to the logits, the mean over tokens: (n, n), float64.

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
        delta = torch.stack([head.logits(one[block]) - logits for one in changed], dim=1)  # (tokens, n, vocabulary)
        delta = (delta - (delta * p[:, None]).sum(-1, keepdim=True)) * p.sqrt()[:, None]
        total += (delta @ delta.transpose(1, 2)).double().nan_to_num().sum(0).cpu()
    return total / len(original)


def correlations(covariance: Tensor) -> Numbers:
    """Correlations; 0 for what has no finite variance."""
    deviation = covariance.diagonal().clamp_min(0).sqrt()
    scale = deviation[:, None] * deviation[None, :]
    found = torch.where(scale > 0, covariance / scale, torch.zeros_like(scale)).nan_to_num()
    return found.clamp(-1, 1).numpy()


@torch.inference_mode()
def measure_terms(evaluator: Evaluator, programs: Sequence[Program]) -> Terms:
    """The terms of edits, measured on the beginning of the text.

    Args:
        programs: of each edit alone.
    """
    ids, dense, head = evaluator.windows.ids, evaluator.dense, evaluator.head
    windows = _windows(evaluator)
    part = ids[windows.start : windows.stop].to(evaluator.model.device)
    ((_, stream),) = evaluator.streams([dense], windows)
    reference = head.reference(stream, part)
    original = _sampled(head.predicting(stream), len(programs))
    places: dict[Program, list[int]] = {}
    for place, program in enumerate(programs):
        places.setdefault(program, []).append(place)
    divergence = np.full(len(programs), np.inf)
    changed = [original] * len(programs)
    for program, stream in evaluator.streams(places, windows):
        mean = mean_divergence(head.compare(stream, reference).divergence.cpu().numpy())
        for place in places.get(program, ()):  # the dense program's may be among them
            divergence[place], changed[place] = mean, _sampled(head.predicting(stream), len(programs))
    return Terms(divergence, correlations(covariances(head, original, changed)))


def work_of_terms(evaluator: Evaluator, programs: Sequence[Program]) -> float:
    """How many sublayers that runs, in passes over all of the text."""
    return share(programs).total_sublayers * len(_windows(evaluator)) / len(evaluator.windows.ids)


def _windows(evaluator: Evaluator) -> range:
    count, window = evaluator.windows.ids.shape
    return range(max(1, min(count, _TOKENS // window)))


def _sampled(hidden: Tensor, programs: int) -> Tensor:
    """Some of the tokens, evenly spread: as many as leave room for those of all programs."""
    room = _SAMPLE_BYTES // (4 * hidden.shape[1] * max(1, programs))
    rows = min(len(hidden), _SAMPLE, max(_LEAST_SAMPLE, room))
    return hidden[torch.linspace(0, len(hidden) - 1, rows).long()].float()
