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

from surgeon.quality.head import OutputHead
from surgeon.search.optimise import Damage, Numbers

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
