"""What a scheduler lets in."""

from __future__ import annotations

from dataclasses import dataclass

from surgeon.runtime.batching.sequence import LongTexts
from surgeon.runtime.batching.windows import PASS_TOKENS


@dataclass(frozen=True)
class Limits:
    """What a scheduler lets in.

    Attributes:
        max_batch: sequences in one pass.
        max_tokens: tokens of one sequence, prompt and output.
        max_waiting: how many requests may be open beyond `max_batch`.
        pass_tokens: of prompts, in one pass; of texts that are continued, with what is drafted for them, as many more.
        ends: token ids that end a text.
        draft_tokens: how many tokens are drafted at a time for a sequence that is being continued; no more than
            `max_batch` of them have in `pass_tokens`.
        long_texts: that turn otherwise than short ones, if any.
        expected_share: what share of the tokens that they may add texts are expected to add, before any has ended.
        as_pays: whether fewer tokens are drafted, or none, where that is faster.
        looked_up: whether a text's drafts are what it has in itself (lookup.py); otherwise passes draft them.
        stretches: how many ranks a pass goes through, one after the other (in_flight.py).
    """

    max_batch: int
    max_tokens: int
    max_waiting: int = 64
    pass_tokens: int = PASS_TOKENS["cpu"]
    ends: tuple[int, ...] = ()
    draft_tokens: int = 0
    expected_share: float = 1.0
    long_texts: LongTexts | None = None
    as_pays: bool = False
    looked_up: bool = False
    stretches: int = 1

    def __post_init__(self) -> None:
        at_least = {"max_batch": 1, "max_tokens": 2, "max_waiting": 0, "pass_tokens": self.max_batch, "draft_tokens": 0}
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
