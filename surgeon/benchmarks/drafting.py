"""Decoding with drafts of another program over the same weights, measured beside decoding without, on ranks, in turns.

Every run starts cold: the best number of drafted tokens is found while texts are written, as in `surgeon generate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from surgeon.language.program import Program
from surgeon.opened import Model
from surgeon.runtime.batching.ahead import MOST_AHEAD
from surgeon.runtime.batching.request import Request, Sampling
from surgeon.runtime.batching.scheduler import Limits
from surgeon.runtime.batching.windows import PASS_TOKENS, blocks_for
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.drafts import with_draft
from surgeon.runtime.worker.rank import RankOptions
from surgeon.runtime.worker.ranks import Ranks
from surgeon.runtime.worker.worker import complete, load

Prompts = Sequence[Sequence[int]]
PLAIN = "plain"
DRAFTED = "drafted"


@dataclass(frozen=True)
class DecodedTexts:
    """Some texts, decoded together in one way.

    Attributes:
        tokens: of each text, the new ones.
        new, seconds, passes: behind the prompts' passes; seconds are those of drafts, too.
        drafted, accepted: tokens.
    """

    tokens: list[list[int]]
    new: int
    seconds: float
    passes: int
    drafted: int
    accepted: int

    @property
    def rate(self) -> float:
        """New tokens per second, of all texts."""
        return self.new / self.seconds


def decode_together(
    started: Ranks,
    name: str,
    prompts: Prompts,
    sampling: Sampling,
    drafts: bool = False,
    looked_up: bool = False,
    ahead: int = 0,
) -> DecodedTexts:
    """Continue prompts by as many tokens as `sampling` says, all of them.

    Args:
        started: ranks that have loaded a plan of this name.
        drafts, looked_up: whether tokens are drafted, and of the text itself, in the place of a program.
        ahead: how many at a time; 0: as many as pay.
    """
    requests = [
        Request(number, tuple(prompt), replace(sampling, place=(number, 0)))
        for number, prompt in enumerate(prompts)
    ]
    batch = len(prompts)
    longest = max(map(len, prompts)) + sampling.max_new_tokens
    limits = Limits(batch, longest, pass_tokens=max(PASS_TOKENS["cpu"], batch * (1 + MOST_AHEAD)))
    if drafts:
        limits = replace(
            limits, draft_tokens=ahead or MOST_AHEAD, as_pays=not ahead, looked_up=looked_up
        )
    outputs, figures = started.call(complete, requests, batch * blocks_for(longest), limits, name)[0]
    tokens = [[each.token for each in outputs if each.request == number] for number in range(batch)]
    last = [each for each in outputs if each.finish_reason is not None]
    seconds = figures.decode.seconds + figures.drafting.seconds
    told = sum(each.drafted for each in last), sum(each.accepted for each in last)
    return DecodedTexts(tokens, figures.decode.new, seconds, figures.decode.passes, *told)


@dataclass(frozen=True)
class MeasuredDrafts:
    """A draft beside no draft.

    Attributes:
        speedup, low, high: of tokens per second: the median, the least and the most of the rounds.
        accepted: the share of drafted tokens; NaN where none was drafted.
        tokens_per_pass: of a text and a pass of the model.
    """

    speedup: float
    low: float
    high: float
    accepted: float
    tokens_per_pass: float

    @classmethod
    def of(cls, plain: Sequence[DecodedTexts], drafted: Sequence[DecodedTexts]) -> MeasuredDrafts:
        ratios = [own.rate / one.rate for own, one in zip(drafted, plain, strict=True)]
        tried, right, new = (
            sum(getattr(one, name) for one in drafted) for name in ("drafted", "accepted", "new")
        )
        accepted = float("nan")
        if tried:
            accepted = right / tried
        return cls(median(ratios), min(ratios), max(ratios), accepted, new / (new - right))

    def __str__(self) -> str:
        accepted = "nothing drafted"
        if self.accepted >= 0:
            accepted = f"{self.accepted:.0%} of drafted tokens accepted"
        return f"{self.speedup:.3g}x ({self.low:.3g}x to {self.high:.3g}x over the rounds), {accepted}"


def measure_drafts(
    model: str | Path | Model,
    draft: Program,
    options: RankOptions,
    prompts: Sequence[Prompts],
    sampling: Sampling,
    advance: Callable[[float], Any] = lambda _: None,
) -> MeasuredDrafts:
    """Measure decoding with a draft and without, in turns; the first round of prompts warms up."""
    if len(prompts) < 2:
        raise ValueError(
            f"drafts are measured in two rounds at least, one of them to warm up, not in {len(prompts)}"
        )
    longest = max(len(prompt) for texts in prompts for prompt in texts) + sampling.max_new_tokens
    plan = make_plan(model, options.ranks, longest)
    found: dict[str, list[DecodedTexts]] = {PLAIN: [], DRAFTED: []}
    with Ranks(options) as started:
        started.call(load, plan, PLAIN)
        started.call(load, with_draft(plan, model, draft), DRAFTED)
        for texts in prompts:
            for name, runs in found.items():
                runs.append(decode_together(started, name, texts, sampling, drafts=name == DRAFTED))
                advance(1)
    return MeasuredDrafts.of(found[PLAIN][1:], found[DRAFTED][1:])
