"""Ranks with stretches of a model, each on a thread here: the texts of the whole model, however many are in flight."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from surgeon.runtime.batching.request import Request, Sampling, Stats
from surgeon.runtime.batching.scheduler import Limits
from surgeon.runtime.comm.collectives import Alone, Link
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.drafts import with_stretches
from surgeon.runtime.plan.specification import Plan
from surgeon.runtime.worker.rank import Ring
from surgeon.runtime.worker.worker import Account, PipelineLeader, Report, StretchEngine, relay
from tests.codas import save_codas
from tests.runtime.model.test_coda import run as run_alone
from tests.tiny_models import VOCABULARY, damage, tiny_model

NEW, LONG = 12, 40
GREEDY = Sampling(max_new_tokens=NEW, ignore_end=True)
GENERATOR = torch.Generator().manual_seed(3)
PROMPTS = [
    torch.randint(2, VOCABULARY, (length,), generator=GENERATOR).tolist() for length in (5, 1, 23, 9, 40)
]


@contextmanager
def pipeline(
    plan: Plan, limits: Limits, blocks: int, delay: float, notify: Any = None
) -> Iterator[PipelineLeader]:
    """Rank 0, and threads that are the others."""
    pairs = [Pipe() for _ in plan.stretches]  # from each rank to the next one
    rings = [Ring(pairs[rank][0], pairs[rank - 1][1], Link(delay)) for rank in range(plan.ranks)]
    engines = [StretchEngine(plan, rank, torch.device("cpu")) for rank in range(plan.ranks)]
    caches = [engine.new_cache(blocks, grouped=True) for engine in engines]
    ranks: list[Any] = [
        SimpleNamespace(rank=rank, ring=ring, notify=notify) for rank, ring in enumerate(rings)
    ]

    def work(rank: int) -> None:
        try:
            relay(ranks[rank], engines[rank], caches[rank])
        except BaseException:
            pairs[rank][0].close()  # so that the next rank fails, too, and at last rank 0
            raise

    others = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(1, plan.ranks)]
    for other in others:
        other.start()
    leader = PipelineLeader(engines[0], caches[0], blocks, limits, rings[0])
    yield leader
    leader.end()
    for other in others:
        other.join(5)
        assert not other.is_alive()


def run(
    plan: Plan, requests: list[Request], blocks: int = 64, delay: float = 0.0, max_batch: int = 8
) -> tuple[dict[int, list[int]], Stats]:
    """The tokens of requests, and what the scheduler has done."""
    limits = Limits(max_batch, 100, pass_tokens=16, expected_share=0, stretches=plan.ranks)
    tokens: dict[int, list[int]] = {request.id: [] for request in requests}
    with pipeline(plan, limits, blocks, delay) as leader:
        for request in requests:
            leader.submit(request)
        while not leader.scheduler.idle:
            for output in leader.step():
                if output.token is not None:
                    tokens[output.request].append(output.token)
        assert leader.scheduler.pool.free == blocks
        return tokens, leader.scheduler.tally


def continued(model: Any, prompt: list[int], new: int = NEW) -> list[int]:
    whole = model.generate(
        torch.tensor([prompt]), max_new_tokens=new, do_sample=False, eos_token_id=None
    )
    tokens: list[int] = whole[0, len(prompt) :].tolist()
    return tokens


def saved(folder: Path, family: str = "llama", noise: float = 0.4, **settings: Any) -> Any:
    """A tiny model of five layers in a folder, with a coda of two behind the second."""
    model = tiny_model(family, num_layers=5, **settings)
    model.save_pretrained(folder)
    save_codas(folder, model, cut=2, depth=2, noise=noise)
    return model


def planned(folder: Path, ranks: int, drafts: bool = True) -> Plan:
    return with_stretches(make_plan(folder, 1, 100), ranks, drafts)


@pytest.mark.parametrize(
    ("ranks", "drafts", "family", "settings"),
    [
        pytest.param(2, True, "llama", {"tie_word_embeddings": True}, marks=pytest.mark.thorough),
        (3, True, "gemma2", {"sliding_window": 8, "tie_word_embeddings": False}),
        (4, True, "llama", {}),
        pytest.param(4, False, "gpt_neox", {}, marks=pytest.mark.thorough),
    ],
)
def test_tokens_in_flight_become_the_models(
    ranks: int, drafts: bool, family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    model = saved(tmp_path, family, **settings)
    plan = planned(tmp_path, ranks, drafts)
    for prompts in ([PROMPTS[0]], PROMPTS[:2], PROMPTS):
        requests = [Request(number, tuple(prompt), GREEDY) for number, prompt in enumerate(prompts)]
        found, tally = run(plan, requests, delay=0.001)
        assert found == {number: continued(model, prompt) for number, prompt in enumerate(prompts)}
        if drafts and ranks > len(prompts):
            assert 0 < tally.accepted <= tally.drafted
            # Then texts repeat a token.
            assert tally.accepted < tally.drafted or model.config.tie_word_embeddings
        elif not drafts:
            assert tally.drafted == 0


@pytest.mark.thorough
def test_texts_that_have_to_give_way_are_the_models(tmp_path: Path) -> None:
    model = saved(tmp_path)
    sampling = replace(GREEDY, max_new_tokens=LONG)
    requests = [Request(number, tuple(prompt), sampling) for number, prompt in enumerate(PROMPTS[:3])]
    found, tally = run(planned(tmp_path, 3), requests, blocks=4)
    assert found == {number: continued(model, prompt, LONG) for number, prompt in enumerate(PROMPTS[:3])}
    assert tally.preempted


@pytest.mark.parametrize("blocks", [pytest.param(64, marks=pytest.mark.thorough), 4])
def test_drawn_texts_are_those_without_drafts(blocks: int, tmp_path: Path) -> None:
    saved(tmp_path)
    ways = [
        Sampling(1.0, seed=3),
        Sampling(0.8, top_k=20, seed=3, repetition_penalty=1.3),
        Sampling(0.0, logprobs=2),
    ]
    requests = [
        Request(
            number,
            tuple(prompt),
            replace(sampling, max_new_tokens=LONG, ignore_end=True, place=(number, 0)),
        )
        for number, (prompt, sampling) in enumerate(zip(PROMPTS, ways, strict=False))
    ]
    engine = RankEngine(make_plan(tmp_path, 1, 100), Alone(), torch.device("cpu"))
    expected, _ = run_alone(engine, requests, drafts=0)
    found, tally = run(planned(tmp_path, 3), requests, blocks=blocks)
    assert found == expected
    assert tally.drafted == 0  # only greedy texts are drafted for
    assert bool(tally.preempted) == (blocks < 64)


def test_texts_without_a_seed_are_drawn(tmp_path: Path) -> None:
    saved(tmp_path)
    requests = [Request(0, tuple(PROMPTS[0]), Sampling(1.0, max_new_tokens=NEW, ignore_end=True))]
    plan = planned(tmp_path, 2)
    assert run(plan, requests)[0] != run(plan, requests)[0]


def test_texts_end_where_they_should(tmp_path: Path) -> None:
    model = saved(tmp_path)
    whole = continued(model, PROMPTS[0])
    end = whole[4]
    plan = replace(planned(tmp_path, 3), ends=(end,))
    limits = Limits(8, 100, ends=plan.ends, stretches=3)
    with pipeline(plan, limits, 64, 0.001) as leader:
        leader.submit(Request(0, tuple(PROMPTS[0]), Sampling(max_new_tokens=NEW)))
        leader.submit(Request(1, tuple(PROMPTS[1]), GREEDY))
        leader.submit(Request(2, tuple(PROMPTS[2]), replace(GREEDY, max_new_tokens=0)))
        found = leader.step()
        assert leader.cancel(1) is not None
        while not leader.scheduler.idle:
            found += leader.step()
    assert [output.token for output in found if output.request == 0] == whole[: whole.index(end) + 1]
    assert {(output.request, output.finish_reason) for output in found if output.finish_reason} == {
        (0, "stop"),
        (2, "length"),
    }


def test_all_ranks_say_what_passes_have_cost(tmp_path: Path) -> None:
    saved(tmp_path)
    plan = planned(tmp_path, 2)
    accounts = list[Account]()
    with pipeline(plan, Limits(8, 100, stretches=2), 64, 0.0, accounts.append) as leader:
        leader.submit(Request(0, tuple(PROMPTS[0]), GREEDY))
        while not leader.scheduler.idle:
            leader.step()
        leader.sender.send(Report(7))
    assert [(account.ticket, account.rank) for account in accounts] == [(7, 1)]
    assert accounts[0].figures.decode.passes > 0


def test_an_undefined_logit_ends_its_text(tmp_path: Path) -> None:
    tiny_model("llama", num_layers=5).save_pretrained(tmp_path)
    damage(tmp_path, slice(None))
    with pipeline(planned(tmp_path, 2, drafts=False), Limits(8, 100, stretches=2), 64, 0.0) as leader:
        leader.submit(Request(0, tuple(PROMPTS[0]), GREEDY))
        found = []
        while not leader.scheduler.idle:
            found += leader.step()
    assert [(output.token, output.finish_reason) for output in found] == [(None, "undefined")]
