"""What sending activations as integers does to a model's predictions, measured on the ranks themselves."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from surgeon.checkpoint.texts import open_tokenizer
from surgeon.quality.data import load_windows
from surgeon.quality.summary import interval, mean_divergence, perplexity
from surgeon.runtime.batching.request import UndefinedLogits
from surgeon.runtime.comm.collectives import Collectives
from surgeon.runtime.comm.quantised import Compressed, Compression
from surgeon.runtime.model.engine import Figures, RankEngine, ways_through
from surgeon.runtime.plan.specification import Plan
from surgeon.runtime.worker.rank import Rank
from surgeon.runtime.worker.ranks import Ranks
from surgeon.runtime.worker.worker import ENGINE

FEWEST_WINDOWS = 8  # below, an interval says little
ROWS = 64  # tokens whose predictions are compared at a time, in float64


@dataclass(frozen=True)
class CompressionCost:
    """Predictions of the same weights and program with exact and with compressed reductions.

    Attributes:
        kind: of compression.
        predicted: how many tokens were predicted in all.
        divergences: KL(exact || compressed) over the full vocabulary, the mean over a window's predictions, nats, by
            window.
        exact_nll, compressed_nll: negative log-likelihood of the text, likewise.
        exact_bytes, compressed_bytes: that the rank which sends most sends in the reductions of the program's steps,
            over all windows (operands, as the runtime counts them).
    """

    kind: Compression
    predicted: int
    divergences: NDArray[np.float64]
    exact_nll: NDArray[np.float64]
    compressed_nll: NDArray[np.float64]
    exact_bytes: int
    compressed_bytes: int

    @property
    def divergence(self) -> float:
        """The mean over windows, nats per token."""
        return mean_divergence(self.divergences)

    @property
    def divergence_interval(self) -> tuple[float, float]:
        """The 95% interval of that mean."""
        return interval(self.divergences)

    @property
    def perplexities(self) -> tuple[float, float]:
        """Exact and compressed."""
        return perplexity(self.exact_nll), perplexity(self.compressed_nll)


def random_windows(vocabulary: int, length: int, tokens: int, seed: int) -> list[list[int]]:
    """Windows of random token ids, of about so many tokens in all."""
    generator = torch.Generator().manual_seed(seed)
    number = max(FEWEST_WINDOWS, -(-tokens // length))
    windows: list[list[int]] = torch.randint(vocabulary, (number, length), generator=generator).tolist()
    return windows


def windows_of(
    plans: Mapping[str, Plan], data: str | None, length: int, tokens: int, seed: int
) -> dict[str, list[list[int]]]:
    """What to predict with each plan, by name: windows of its own tokenizer's tokens of a text, or of random tokens.

    Raises:
        FileNotFoundError, ValueError: as `load_windows` and `open_tokenizer`.
    """
    windows: dict[str, list[list[int]]] = {}
    for name, plan in plans.items():
        if data is None:
            windows[name] = random_windows(plan.vocabulary, length, tokens, seed)
        else:
            found = load_windows(open_tokenizer(plan.folder), data, length, tokens)
            for note in found.notes:
                warnings.warn(note, stacklevel=2)
            windows[name] = found.ids.tolist()
    return windows


def measure_compression(
    ranks: Ranks, plan: Plan, windows: list[list[int]], kind: Compression, name: str = ENGINE
) -> CompressionCost:
    """Run windows of a text on ranks twice, with exact and with compressed reductions, and compare.

    Args:
        plan: the model and the program; for windows of up to its `max_tokens`.
        windows: token ids; every token of a window but the first is predicted.
        name: under which the ranks keep an engine of that plan.

    Raises:
        ValueError: if there is one rank only, the windows do not fit the plan, or the logits are not finite.
        RankFailed: if a rank fails.
    """
    if plan.ranks == 1 or ranks.options.collectives == "none":
        raise ValueError("nothing is sent here that could be compressed; use 2 ranks or more, which are connected")
    if not windows or any(not 2 <= len(window) <= plan.max_tokens for window in windows):
        raise ValueError(f"there must be windows, each of 2 to {plan.max_tokens} tokens")
    if any(not 0 <= token < plan.vocabulary for window in windows for token in window):
        raise ValueError(f"token ids must lie in 0..{plan.vocabulary - 1}, the model's vocabulary")
    found: list[CompressionCost] = ranks.call(compare_on_rank, name, windows, kind)
    exact, compressed = (max(getattr(one, f"{which}_bytes") for one in found) for which in ("exact", "compressed"))
    return replace(found[0], exact_bytes=exact, compressed_bytes=compressed)


@torch.inference_mode()
def compare_on_rank(rank: Rank, name: str, windows: list[list[int]], kind: Compression) -> CompressionCost:
    """Runs on a rank: run every window both ways with the weights of an engine that it keeps; bytes are this rank's."""
    engine: RankEngine = rank.engines[name]
    exact = _sending(engine, lambda collectives: collectives.exact)
    compressed = _sending(engine, lambda collectives: Compressed(collectives.exact, kind))
    found = []
    for window in windows:
        # The last token's prediction has no token to be compared with.
        first, second = (each.text_logits(window)[:-1] for each in (exact, compressed))
        found.append(_compare(first, second, torch.tensor(window[1:], device=rank.device)))
        if np.isnan(found[-1][1:]).any():
            raise UndefinedLogits(f"the logits of {name} are not finite (NaN or infinity); are the weights damaged?")
    sent = (each.figures.prefill.layers.bytes for each in (exact, compressed))
    return CompressionCost(kind, sum(len(window) - 1 for window in windows), *np.array(found).T, *sent)


def _sending(engine: RankEngine, how: Callable[[Collectives], Collectives]) -> RankEngine:
    """The same weights, with other reductions of the program's steps, counted apart."""
    other = copy.copy(engine)
    other.groups = {group: how(collectives) for group, collectives in engine.groups.items()}
    other.figures, other.ways = Figures(), ways_through(other)
    return other


def _compare(exact: Tensor, changed: Tensor, targets: Tensor) -> tuple[float, float, float]:
    """The mean divergence of predictions, (tokens, vocabulary), and each one's negative log-likelihood."""
    totals = [0.0, 0.0, 0.0]
    for rows in torch.arange(len(targets)).split(ROWS):
        both = [logits[rows].double().log_softmax(-1) for logits in (exact, changed)]
        totals[0] += float((both[0].exp() * (both[0] - both[1])).sum())
        for place, log_p in enumerate(both, start=1):
            totals[place] -= float(log_p.gather(-1, targets[rows, None]).sum())
    divergence, exact_nll, changed_nll = (total / len(targets) for total in totals)
    return divergence, exact_nll, changed_nll
