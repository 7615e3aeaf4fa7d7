"""Generation from a checkpoint on several ranks, from one function call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from surgeon.program import Program
from surgeon.runtime.collectives import Counts
from surgeon.runtime.engine import Figures, Phase, RankEngine
from surgeon.runtime.launch import Ranks
from surgeon.runtime.plan import Plan
from surgeon.runtime.rank import Rank

ENGINE = "engine"  # the name under which a rank keeps the engine of a single model


def load(rank: Rank, plan: Plan, name: str = ENGINE) -> None:
    """Runs on a rank: load its slices of a model, and keep the engine under a name."""
    rank.kept[name] = RankEngine(plan, rank.collectives, rank.device)


def unload(rank: Rank, name: str = ENGINE) -> None:
    """Runs on a rank: forget an engine."""
    del rank.kept[name]


def generate_on_rank(
    rank: Rank, tokens: list[list[int]], new_tokens: int, stop: bool = True, name: str = ENGINE
) -> tuple[list[list[int]], Figures]:
    """Runs on a rank: decode greedily; rank 0 sends every new token as it comes."""
    engine: RankEngine = rank.kept[name]
    notify = rank.notify if rank.rank == 0 else None
    prompt = torch.tensor(tokens, dtype=torch.long, device=rank.device)
    found, figures = engine.generate(prompt, new_tokens, stop, notify)
    return found.tolist(), figures


@dataclass(frozen=True)
class Generation:
    """New tokens of each text, and what they cost.

    Attributes:
        tokens: by text; a text's own end token, if it came, is the last.
        figures: by rank.
        program: that was run.
        ranks: how many ran it.
    """

    tokens: list[list[int]]
    figures: list[Figures]
    program: Program
    ranks: int

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second, over the whole batch."""
        first = self.figures[0]
        return first.prompt_tokens * len(self.tokens) / first.prefill.seconds

    @property
    def decode_rate(self) -> float | None:
        """New tokens per second after the first, over the whole batch; None if there was only the prefill's."""
        decode = self.figures[0].decode
        return decode.passes * len(self.tokens) / decode.seconds if decode.passes else None

    def layers_per_pass(self) -> Counts:
        """Collectives and bytes of one pass through the program, on the rank that has the most of them."""
        return self._per_pass(lambda phase: phase.layers)

    def vocabulary_per_pass(self) -> Counts:
        """Collectives and bytes of the embedding and the head in one pass."""
        return self._per_pass(lambda phase: phase.vocabulary)

    def _per_pass(self, counts: Callable[[Phase], Counts]) -> Counts:
        """Of a decoding pass, if there was one (a prefill sends more bytes, for all the prompt's tokens)."""
        phases = [figures.decode if figures.decode.passes else figures.prefill for figures in self.figures]
        each = [counts(phase) // phase.passes for phase in phases]
        return max(each, key=lambda count: (count.all_reduces + count.all_gathers, count.bytes))


def generate(
    ranks: Ranks,
    plan: Plan,
    tokens: list[list[int]],
    new_tokens: int,
    stop: bool = True,
    name: str = ENGINE,
    notify: Callable[[list[int]], Any] | None = None,
) -> Generation:
    """Decode greedily on ranks that have loaded the plan's model.

    Args:
        tokens: token ids of texts of equal length.
        new_tokens: how many to add at most to each.
        stop: whether end tokens end a text.
        name: of the engine.
        notify: called with the newest token of every text.

    Raises:
        ValueError: if there are no tokens, or texts differ in length, or are longer than planned, or the ranks are not
            connected.
        RankFailed: if a rank fails.
    """
    if ranks.collectives == "none":
        raise ValueError("ranks that are not connected (collectives none) compute wrong tokens; use auto")
    lengths = {len(text) for text in tokens}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(f"prompts must have one and the same number of tokens, at least 1, not {sorted(lengths)}")
    if new_tokens < 1:
        raise ValueError(f"the number of new tokens must be at least 1, not {new_tokens}")
    if max(lengths) + new_tokens > plan.max_tokens:
        raise ValueError(f"{max(lengths)} and {new_tokens} tokens are more than the planned {plan.max_tokens}")
    if any(not 0 <= token < plan.vocabulary for text in tokens for token in text):
        raise ValueError(f"token ids must lie in 0..{plan.vocabulary - 1}, the model's vocabulary")
    answers = ranks.call(generate_on_rank, tokens, new_tokens, stop, name, notify=notify)
    found = [text if not stop else _until_end(text, plan.ends) for text in answers[0][0]]
    return Generation(found, [figures for _, figures in answers], Program.parse(plan.program), plan.ranks)


def _until_end(tokens: list[int], ends: tuple[int, ...]) -> list[int]:
    first = next((i for i, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tokens[: first + 1]
