"""Divergence of predictions with compressed reductions, measured on the ranks themselves."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import numpy as np
import torch

from surgeon.checkpoint.texts import open_tokenizer
from surgeon.quality.data import load_windows
from surgeon.quality.summary import Values
from surgeon.runtime.batching.request import UndefinedLogits
from surgeon.runtime.comm.collectives import Collectives, Compressed
from surgeon.runtime.model.engine import Figures, RankEngine, ways_through
from surgeon.runtime.plan.specification import Plan
from surgeon.runtime.worker.rank import Rank
from surgeon.runtime.worker.ranks import Ranks
from surgeon.runtime.worker.worker import ENGINE

FEWEST_WINDOWS = 8  # below, an interval says little
ROWS = 64  # tokens whose predictions are compared at a time, in float64


def windows_to_compare(plan: Plan, data: str | None, length: int, tokens: int, seed: int) -> list[list[int]]:
    """Windows of the tokenizer's tokens of a text, or of random tokens."""
    if data is None:
        generator = torch.Generator().manual_seed(seed)
        shape = (max(FEWEST_WINDOWS, -(-tokens // length)), length)
        windows: list[list[int]] = torch.randint(plan.vocabulary, shape, generator=generator).tolist()
        return windows
    found = load_windows(open_tokenizer(plan.folder), data, length, tokens)
    for note in found.notes:
        warnings.warn(note, stacklevel=2)
    return list(found.ids.tolist())


def divergence_of_compressed(ranks: Ranks, windows: list[list[int]], kind: str, name: str = ENGINE) -> Values:
    """Run windows of a text on ranks' engine twice, with exact and with compressed reductions.

    Returns:
        KL(exact || compressed) over the full vocabulary in nats, the mean over each window's predictions, (windows,).
    """
    found: list[list[float]] = ranks.call(_compare_on_rank, name, windows, kind)
    return np.array(found[0])


@torch.inference_mode()
def _compare_on_rank(rank: Rank, name: str, windows: list[list[int]], kind: str) -> list[float]:
    """Run every window both ways on a rank, with the weights of its engine."""
    engine: RankEngine = rank.engines[name]
    exact = _with_wire(engine, lambda collectives: collectives.exact)
    compressed = _with_wire(engine, lambda collectives: Compressed(collectives.exact, kind))
    found = []
    for window in windows:
        first = exact.text_logits(window)
        second = compressed.text_logits(window)
        total = 0.0
        for rows in torch.arange(len(window) - 1).split(ROWS):  # nothing comes behind the last token's prediction
            log_p = first[rows].double().log_softmax(-1)
            total += float((log_p.exp() * (log_p - second[rows].double().log_softmax(-1))).sum())
        if np.isnan(total):
            raise UndefinedLogits(f"the logits of {name} are not finite (NaN or infinity); are the weights damaged?")
        found.append(total / (len(window) - 1))
    return found


def _with_wire(engine: RankEngine, how: Callable[[Collectives], Collectives]) -> RankEngine:
    other = copy.copy(engine)
    other.model = copy.copy(engine.model)
    other.model.program = copy.copy(engine.model.program)
    peers = copy.copy(engine.model.peers)
    peers.groups = {group: how(collectives) for group, collectives in peers.groups.items()}
    other.model.peers = peers
    other.model.program.peers = peers
    other.figures = Figures()
    other.ways = ways_through(other.model)
    return other
