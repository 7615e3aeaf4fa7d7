"""Drafts with attentions that the model has no keys for: they keep their own, and make up for what they have missed."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from surgeon.language.program import Program
from surgeon.language.sublayer import Sublayer
from surgeon.models.edit import EditedLayers, edit
from surgeon.models.verified import _Joined
from surgeon.runtime.batching.ahead import FEW_MISSED, Ahead
from surgeon.runtime.batching.request import Request
from surgeon.runtime.batching.scheduler import Limits
from surgeon.runtime.comm.collectives import Alone
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.drafts import with_draft
from surgeon.runtime.worker.rank import Sender
from surgeon.runtime.worker.worker import Leader
from tests.runtime.model.test_coda import GREEDY, PROMPTS, continued, run
from tests.runtime.model.test_draft import REQUESTS, TRACKS, engine_of, saved
from tests.tiny_models import tiny_model

thorough = pytest.mark.thorough
AVERAGES = "A0 F0 A1~A2 F1~F2 A3 F3"
DRAFTS = {"averages": AVERAGES, "tracks": TRACKS, "twice": "A0 F0 A1 F1 A1 F1 A3 F3"}
CASES = [
    ("llama", "averages", {}),
    pytest.param("llama", "tracks", {}, marks=thorough),
    pytest.param("gemma2", "averages", {"sliding_window": 8}, marks=thorough),
    pytest.param("gpt2", "tracks", {}, marks=thorough),
    pytest.param("mixtral", "twice", {}, marks=thorough),
]
# Tokens drafted in each pass.
IN_TURNS = [3, 3, 0, 0, 0, 0, 0, 2, 4, *[0] * (FEW_MISSED + 2), 3, 1, 1, 3]


AT_ONCE = 11  # tokens that a draft makes up for at most, in a pass


class InTurns(Ahead):
    """Has as many tokens drafted as it is told."""

    def __init__(self, numbers: list[int]) -> None:
        super().__init__()
        self.numbers = iter(numbers)
        self._texts = 1

    def choose(self, _: Any, most: Any, *__: Any) -> list[int]:
        now = next(self.numbers, 3)
        return [min(now, each) for each in most]


@pytest.mark.parametrize(("family", "draft", "config"), CASES)
def test_greedy_tokens_are_those_of_the_model(
    family: str, draft: str, config: dict[str, Any], tmp_path: Path
) -> None:
    """Alone, beside others, and in chunks of prompts and of what drafts have missed."""
    model = saved(tmp_path, family, **config)
    expected = {number: continued(model, prompt) for number, prompt in enumerate(PROMPTS)}
    engine = engine_of(tmp_path, DRAFTS[draft])
    assert engine.plan.draft is not None
    assert engine.plan.draft.keeps_own
    for ways in ({"max_batch": 3, "pass_tokens": 15}, {}):
        found, tally = run(engine, REQUESTS, 3, **ways)
        assert found == expected
        assert 0 < tally.accepted <= tally.drafted


class Beside:
    """What attentions of a draft read: the model's keys, where they are its, of tokens before those in flight."""

    def __init__(self, model: Any, ids: Tensor, begins: list[int], own: frozenset[Sublayer]) -> None:
        cache = DynamicCache()
        model(input_ids=ids, past_key_values=cache, use_cache=True)
        self.kept = [(layer.keys, layer.values) for layer in cache.layers]
        self.own = own
        at, begin = torch.arange(ids.shape[1]), torch.tensor(begins)[:, None]
        causal = at[None] <= at[:, None]
        self.mask = torch.cat([causal & (at[None] < begin), causal & (at[None] >= begin)], 1)[None, None]

    def replace_arguments(self, attention: Sublayer, arguments: dict[str, Any]) -> dict[str, Any]:
        if attention in self.own:
            return arguments
        joined = _Joined(*self.kept[attention.layers[0]])
        return arguments | {"past_key_values": joined, "attention_mask": self.mask}


@torch.no_grad()
def accepted_by_hand(
    model: Any, edited: Any, own: frozenset[Sublayer], text: list[int], first: int
) -> list[int]:
    """How many drafted tokens are right each time, by passes over a whole text that know which were in flight.

    Args:
        first: tokens of the prompt.
    """
    layers = next(module for module in edited.modules() if isinstance(module, EditedLayers))
    numbers, right, length, reached = iter(IN_TURNS), list[int](), first + 1, 0
    begins = [place + 1 for place in range(len(text))]  # of those that were drafted behind each token
    while length < len(text):
        newest, most = length - 1, min(next(numbers, 3), len(text) - 1 - length)
        if most and newest - reached > AT_ONCE:
            reached, most = reached + AT_ONCE, 0
        tokens = text[:length]
        for place in range(newest, newest + most):
            begin = begins[:newest] + [newest] * (place + 1 - newest)
            layers.verified = Beside(model, torch.tensor([tokens]), begin, own)
            tokens.append(
                int(edited(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())
            )
        accepted = sum(takewhile(bool, map(eq, tokens[length:], text[length:])))
        if most:
            reached = newest + min(most, accepted + 1)
            begins[newest:reached] = [newest] * (reached - newest)
            right.append(accepted)
        length += accepted + 1
    return right


@pytest.mark.parametrize(
    ("draft", "own"),
    [
        ("A1 F1 A0 F0 A2~A3 F2~F3", "A2~A3"),
        pytest.param(
            "A2 F2 {A1/2:0 F1/2:0 | A1/2:1 F1/2:1} A0 F0 A3 F3", "A1/2:0 A1/2:1", marks=thorough
        ),
    ],
)
@pytest.mark.parametrize(
    "decoding", ["auto", *(pytest.param(way, marks=thorough) for way in ("dynamic", "static"))]
)
def test_acceptance_is_that_of_plain_passes(draft: str, own: str, decoding: str, tmp_path: Path) -> None:
    """With a draft whose own keys depend on those it shares, and that is off and on, for some tokens and for many."""
    model = saved(tmp_path)
    plan = with_draft(make_plan(tmp_path, 1, 100, decoding=decoding), tmp_path, draft)
    engine = RankEngine(plan, Alone(), torch.device("cpu"))
    edited, sublayers = edit(tiny_model("llama"), draft), frozenset(Program.parse(own).sublayers())
    for number, prompt in enumerate(PROMPTS[1:3]):
        limits = Limits(1, 100, pass_tokens=AT_ONCE, draft_tokens=4, as_pays=True)
        leader = Leader(engine, engine.new_cache(16, grouped=True), 16, limits, Sender(()))
        leader.scheduler.ahead = InTurns(IN_TURNS)
        leader.submit(Request(number, tuple(prompt), replace(GREEDY, max_new_tokens=40)))
        tokens, accepted, tally = list[int | None](), list[int](), leader.scheduler.tally
        while not leader.scheduler.idle:
            drafted, before = tally.drafted, tally.accepted
            tokens += [output.token for output in leader.step()]
            accepted += [tally.accepted - before] if tally.drafted > drafted else []
        text = model.generate(
            torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None
        )[0].tolist()
        assert tokens == text[len(prompt) :]
        assert accepted == accepted_by_hand(model, edited, sublayers, text, len(prompt))
        assert sum(accepted) > 0


@pytest.mark.usefixtures("trials")
@pytest.mark.parametrize(
    "ways", [pytest.param({"as_pays": True}, marks=thorough), {"blocks": 5, "pass_tokens": 40}]
)
def test_texts_are_those_without_drafts(ways: dict[str, Any], tmp_path: Path) -> None:
    """Greedy and drawn with seeds, where blocks are few, and as many drafts as pay."""
    saved(tmp_path)
    engine = engine_of(tmp_path, AVERAGES)
    greedy = replace(GREEDY, max_new_tokens=40)
    for sampling in (greedy, replace(greedy, temperature=0.9, seed=3)):
        requests = [
            Request(text, (*PROMPTS[1][text:], *PROMPTS[2][:11]), replace(sampling, place=(text, 0)))
            for text in range(3)
        ]
        found, tally = run(engine, requests, 5, **ways)
        assert found == run(engine, requests, 0)[0]
        assert tally.accepted > 0
        assert (tally.preempted > 0) == ("blocks" in ways)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are tried at once, also where passes are recorded, which may take longer than such short texts have."""
    for passes in ("MAY_LOSE_PASSES", "ENOUGH"):
        monkeypatch.setattr(f"surgeon.runtime.batching.ahead.{passes}", 1000)


@pytest.mark.parametrize("decoding", ["dynamic", pytest.param("static", marks=thorough)])
def test_keys_in_rank_space(decoding: str, tmp_path: Path) -> None:
    """Those of the model are lent as they are; a draft's own may be such, too, or not."""
    saved(tmp_path)
    program = "A0@k3,v5 F0 A1@q5,k2,v2,o7 F1 A2 F2 A3@k4,v4 F3"
    draft = "A0@k3,v5 F0 A1@q5,k2,v2,o7 F1 A3 F3 A2@k4,v6"
    plan = make_plan(tmp_path, 1, 100, program, decoding=decoding, kv="lowrank")
    engine = RankEngine(with_draft(plan, tmp_path, draft), Alone(), torch.device("cpu"))
    assert engine.plan.draft is not None
    assert (engine.plan.draft.slots, engine.plan.draft.own) == (((0, 1, 4, 5),), ((2, 3),))
    cache = engine.new_cache(2)
    assert list(cache.rebuilds) == [0, 1, 3, 5]
    found, tally = run(engine, REQUESTS, 3)
    assert found == run(RankEngine(plan, Alone(), torch.device("cpu")), REQUESTS, 0)[0]
    assert 0 < tally.accepted < tally.drafted
