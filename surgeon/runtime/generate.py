"""Generation from a checkpoint on several ranks, from one function call: for benchmarks and tests.

What serves requests as they come is service.py; both run the same passes on the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from surgeon.program import Program
from surgeon.runtime.blocks import blocks_for
from surgeon.runtime.collectives import Counts
from surgeon.runtime.engine import Figures, Phase
from surgeon.runtime.launch import Ranks
from surgeon.runtime.plan import Plan
from surgeon.runtime.request import Request, Sampling
from surgeon.runtime.scheduler import Limits, check_length
from surgeon.runtime.worker import ENGINE, Progress, complete, load, unload

__all__ = ["ENGINE", "Generation", "generate", "load", "unload"]


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
        first = self.figures[0].prefill
        return first.tokens / first.seconds

    @property
    def decode_rate(self) -> float | None:
        """New tokens per second after the first, over the whole batch; None if there was only the prefill's."""
        decode = self.figures[0].decode
        return decode.tokens / decode.seconds if decode.passes else None

    def layers_per_pass(self) -> Counts:
        """Collectives and bytes of one pass through the program, on the rank that has the most of them."""
        return per_pass(self.figures, lambda phase: phase.layers)

    def vocabulary_per_pass(self) -> Counts:
        """Collectives and bytes of the embedding and the head in one pass."""
        return per_pass(self.figures, lambda phase: phase.vocabulary)


def per_pass(figures: list[Figures], counts: Callable[[Phase], Counts]) -> Counts:
    """Collectives and bytes of one pass, on the rank that has the most of them.

    Of a decoding pass, if there was one (a prefill sends more bytes, for all the prompt's tokens).
    """
    phases = [each.decode if each.decode.passes else each.prefill for each in figures]
    found = [counts(phase) // phase.passes for phase in phases]
    return max(found, key=lambda count: (count.all_reduces + count.all_gathers, count.bytes))


def generate(
    ranks: Ranks,
    plan: Plan,
    tokens: list[list[int]],
    new_tokens: int,
    stop: bool = True,
    name: str = ENGINE,
    notify: Callable[[Progress], Any] | None = None,
) -> Generation:
    """Decode greedily on ranks that have loaded the plan's model, all texts at the same time.

    Args:
        tokens: token ids of texts of any lengths.
        new_tokens: how many to add at most to each.
        stop: whether end tokens end a text.
        name: of the engine.
        notify: called with what each pass brings.

    Raises:
        ValueError: if there are no tokens, or texts are longer than planned, or the ranks are not connected.
        RankFailed: if a rank fails.
    """
    if ranks.collectives == "none":
        raise ValueError("ranks that are not connected (collectives none) compute wrong tokens; use auto")
    sampling = Sampling(max_new_tokens=new_tokens, ignore_end=not stop)
    requests = [Request(number, tuple(text), sampling) for number, text in enumerate(tokens)]
    if any(not 0 <= token < plan.vocabulary for text in tokens for token in text):
        raise ValueError(f"token ids must lie in 0..{plan.vocabulary - 1}, the model's vocabulary")
    batch = len(tokens)
    limits = Limits(max_batch=batch, max_tokens=plan.max_tokens, pass_tokens=max(512, batch), ends=plan.ends)
    blocks = sum(blocks_for(len(text) + new_tokens) for text in tokens)
    for request in requests:
        check_length(request, plan.max_tokens)
    answers = ranks.call(complete, requests, blocks, limits, name, notify=notify)
    found: list[list[int]] = [[] for _ in tokens]
    for output in answers[0][0]:
        if output.token is not None:
            found[output.request].append(output.token)
    return Generation(found, [figures for _, figures in answers], Program.parse(plan.program), plan.ranks)
