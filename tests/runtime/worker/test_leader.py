"""How many passes rank 0 has ranks compute at once, and that texts do not depend on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from surgeon.runtime.batching.request import Request, Sampling
from surgeon.runtime.batching.scheduler import Limits
from surgeon.runtime.comm.collectives import Alone
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.worker import worker as leader_module
from surgeon.runtime.worker.worker import Leader
from tests.tiny_models import tiny_model

LENGTHS = (9, 14, 20)


class Sent(list[Any]):
    """Messages to other ranks."""

    def send(self, message: Any) -> None:
        self.append(message)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> RankEngine:
    folder = tmp_path_factory.mktemp("leader")
    tiny_model("llama").save_pretrained(folder)
    return RankEngine(make_plan(folder, 1, 64), Alone(), torch.device("cpu"))


def texts_of(engine: RankEngine, at_once: int, **sampling: Any) -> tuple[dict[int, list[int]], Sent]:
    """The tokens of some texts, and what other ranks are sent."""
    sent: Any = Sent()
    cache = engine.new_cache(16, grouped=True)
    leader = Leader(engine, cache, 16, Limits(4, 64, at_once=at_once), sent)
    for number, length in enumerate(LENGTHS):
        wanted = Sampling(max_new_tokens=length, ignore_end=True, **sampling)
        leader.submit(Request(number, tuple(range(2, 5 + number)), wanted))
    tokens: dict[int, list[int]] = {number: [] for number in range(len(LENGTHS))}
    while not leader.scheduler.idle:
        for output in leader.step():
            assert output.token is not None
            tokens[output.request].append(output.token)
    return tokens, sent


def test_texts_are_the_same(engine: RankEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_module, "AT_ONCE_SECONDS", 1000.0)
    one_by_one, every_pass = texts_of(engine, 1)
    at_once, few = texts_of(engine, 8)
    assert at_once == one_by_one
    assert [len(tokens) for tokens in at_once.values()] == list(LENGTHS)
    assert {compute for compute, *_ in every_pass} == {"step"}
    # A text's end is never within them; the prompts have a pass of their own.
    assert [message[2] for message in few if message[0] == "several"] == [8, 5, 6]
    assert len(few) == 4
    _, drawn = texts_of(engine, 8, temperature=1.0, seed=1)
    assert {compute for compute, *_ in drawn} == {"step"}


def test_slow_passes_come_one_by_one(engine: RankEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_module, "AT_ONCE_SECONDS", 1e-9)
    _, sent = texts_of(engine, 8)
    assert {compute for compute, *_ in sent} == {"step"}
