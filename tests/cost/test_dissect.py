"""Passes that are taken apart: that a sublayer's time stands for all of its kind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from surgeon.cost.dissect import EMPTY_CALLS, LEFT, DissectedEngine, Stopwatch
from surgeon.runtime.batching.sequence import Row, Wanted
from surgeon.runtime.comm.collectives import Alone
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.model.layers import FeedForward
from surgeon.runtime.plan.checks import make_plan
from tests.clock import HandClock
from tests.tiny_models import save_checkpoint


def test_all_tokens_of_a_prompt_go_through_all_sublayers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlike in other engines, where only the last one does behind the last attention."""
    plan, widths = make_plan(save_checkpoint(tmp_path / "tiny"), 1, 64), list[int]()
    compute = FeedForward.__call__

    def noting(self: FeedForward, x: Tensor) -> Tensor:
        widths.append(len(x))
        return compute(self, x)

    monkeypatch.setattr(FeedForward, "__call__", noting)
    found = []
    for kind in (RankEngine, DissectedEngine):
        engine = kind(plan, Alone(), torch.device("cpu"))
        logits = engine.step([Row(0, [5, 7, 9, 11], ([(0, 1)],), Wanted.LOGITS)], engine.new_cache(1)).logits
        assert logits is not None
        found.append(logits)
    layers = len(widths) // 2
    assert widths == [4] * (layers - 1) + [1] + [4] * layers
    torch.testing.assert_close(*found)


class Busy(HandClock):
    """Every look at it takes a second; now and then something else has the processor for long."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0

    def perf_counter(self) -> float:
        self.looks += 1
        self.seconds += 1 if self.looks % (5 * EMPTY_CALLS) else 10_000
        return self.seconds


def test_what_timing_takes_is_not_what_interrupts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Busy()
    monkeypatch.setattr("surgeon.cost.dissect.time", clock)
    watch = Stopwatch(torch.device("cpu"))
    assert watch.own == 1
    watch.wrap("long", lambda: clock.sleep(5))()
    watch.add("short", 0.5)
    watch.add("short", 0.75)
    assert watch.take() == {"long": (5, 1), "short": (pytest.approx(LEFT * 1.25), 2)}
    assert watch.take() == {}


def test_a_mixture_is_taken_apart(tmp_path: Path) -> None:
    """Its router reads the stream; its experts are what takes long, and write to it."""
    plan = make_plan(save_checkpoint(tmp_path / "tiny", "mixtral", 2), 1, 64)
    engine = DissectedEngine(plan, Alone(), torch.device("cpu"))
    cache, found = engine.new_cache(1), []
    for start in (0, 4, 5, 6):  # a prompt, then passes that are recorded where there are kernels
        tokens = [5, 7, 9, 11] if not start else [start]
        found.append(engine.step([Row(start, tokens, ([(0, 1)],), Wanted.LOGITS)], cache).logits)
    plain = RankEngine(plan, Alone(), torch.device("cpu"))
    whole = plain.text_logits([5, 7, 9, 11, 4, 5, 6])
    for logits, place in zip(found, (3, 4, 5, 6), strict=True):
        torch.testing.assert_close(logits[0], whole[place], rtol=1e-4, atol=1e-4)  # type: ignore[index]
    for seen in engine.passes_seen:
        assert {name: times for name, (_, times) in seen.parts.items() if name.endswith(" F")} == {
            "sublayer F": 2,
            "norm F": 2,
            "reading F": 2,
            "writing F": 2,
        }
