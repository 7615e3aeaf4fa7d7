"""Drafts beside no drafts, on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from surgeon.benchmarks import measure as drafting
from surgeon.benchmarks.measure import DecodedTexts, decode_together, measure_drafts
from surgeon.language.program import Program
from surgeon.runtime.batching.request import Sampling
from surgeon.runtime.worker.rank import RankOptions

PROMPTS = [[[3, 4, 5], [6, 7]], [[8, 9, 10], [11]], [[5, 4], [3, 9, 7]]]
SAMPLING = Sampling(max_new_tokens=12, ignore_end=True)


def test_both_ways_write_the_same_texts_in_turns(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, bool, DecodedTexts]] = []

    def noted(
        started: object, name: str, prompts: object, sampling: Sampling, drafts: bool = False
    ) -> DecodedTexts:
        found = decode_together(started, name, prompts, sampling, drafts)  # type: ignore[arg-type]
        seen.append((name, drafts, found))
        return found

    monkeypatch.setattr(drafting, "decode_together", noted)
    ran: list[float] = []
    found = measure_drafts(
        tiny_checkpoint, Program.parse("A0 F0"), RankOptions(1), PROMPTS, SAMPLING, ran.append
    )
    assert [(name, drafts) for name, drafts, _ in seen] == 3 * [("plain", False), ("drafted", True)]
    assert len(ran) == 6
    for (_, _, plain), (_, _, own) in zip(seen[::2], seen[1::2], strict=True):
        assert own.tokens == plain.tokens
        assert [len(text) for text in own.tokens] == [12, 12]
        assert plain.drafted == 0
        assert own.new == plain.new == 22
    ratios = [
        own.rate / plain.rate for (_, _, plain), (_, _, own) in zip(seen[2::2], seen[3::2], strict=True)
    ]
    assert (found.low, found.high) == (min(ratios), max(ratios))
    assert found.low <= found.speedup <= found.high


def test_one_round_only_warms_up() -> None:
    with pytest.raises(ValueError, match="two rounds at least"):
        measure_drafts("demo", Program.parse("A0 F0"), RankOptions(1), PROMPTS[:1], SAMPLING)
