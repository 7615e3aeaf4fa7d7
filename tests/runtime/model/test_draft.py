"""Drafting by another program over the same weights: the tokens, or the distribution, of decoding without."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from surgeon.runtime.batching.request import Request, Sampling
from surgeon.runtime.batching.scheduler import Limits
from surgeon.runtime.comm.collectives import Alone
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.drafts import with_draft
from surgeon.runtime.worker.worker import complete, load
from tests.runtime.model.conftest import Several
from tests.runtime.model.test_coda import (
    GREEDY,
    PROMPTS,
    WORDS,
    continued,
    deviation,
    outputs_of,
    run,
    texts_of,
)
from tests.tiny_models import tiny_model

thorough = pytest.mark.thorough
REQUESTS = [Request(number, tuple(prompt), GREEDY) for number, prompt in enumerate(PROMPTS)]
DRAFTS = {
    "pairs": "A0 F0 [A1 A2] [F1 F2] A3 F3",
    "ladder": "A0 F0 >A1 >F1 >A2 >F2 A3 F3",
    "ladder of pairs": "A0 F0 >[A1 A2] >[F1 F2] >A3 >F3",
    "order": "A0 F0 A2 F2 A1 F1 A3 F3",
    "left out": "A0 F0 A3 F3",
    "factors": "A0@q8,o8 F0 A1 F1 [A2@k6,v6 A3] F2@up12 F3",
    "no attention": "F0 F3",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"sliding_window": 8},  # with norms behind, and in two groups of the cache
    "gpt2": {},
    "olmo2": {},  # with norms of all heads together
    "mixtral": {},
}
USUAL = "pairs", "ladder", "left out"
TRACKS = "A0 F0 {A1/2:0 F1/2:0 A2/2:0 F2/2:0 | A1/2:1 F1/2:1 A2/2:1 F2/2:1} A3 F3"


def engine_of(folder: Path, draft: str, program: str | None = None) -> RankEngine:
    plan = with_draft(make_plan(folder, 1, 100, program), folder, draft)
    return RankEngine(plan, Alone(), torch.device("cpu"))


def saved(folder: Path, family: str = "llama", **config: Any) -> Any:
    model = tiny_model(family, **config)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    "family",
    [name if name in ("llama", "gemma2") else pytest.param(name, marks=thorough) for name in FAMILIES],
)
def test_greedy_tokens_are_those_of_the_model(family: str, tmp_path: Path) -> None:
    model = saved(tmp_path, family, **FAMILIES[family])
    expected = {number: continued(model, prompt) for number, prompt in enumerate(PROMPTS)}
    engine = engine_of(tmp_path, DRAFTS["pairs"])
    found, tally = run(engine, REQUESTS, 1, max_batch=1)
    assert found == expected
    assert tally.cached_tokens == 32  # of the last prompt, which is the beginning of the one before
    # Prompts in chunks beside drafts.
    assert run(engine, REQUESTS, 4, max_batch=3, pass_tokens=15)[0] == expected
    found, tally = run(engine, REQUESTS, 3)
    assert found == expected
    assert 0 < tally.accepted <= tally.drafted


@pytest.mark.parametrize(
    "draft",
    [
        "ladder",
        "left out",
        *(pytest.param(name, marks=thorough) for name in DRAFTS if name not in USUAL),
    ],
)
def test_whatever_the_draft_is(draft: str, tmp_path: Path) -> None:
    model = saved(tmp_path)
    found, tally = run(engine_of(tmp_path, DRAFTS[draft]), REQUESTS, 3)
    assert found == {number: continued(model, prompt) for number, prompt in enumerate(PROMPTS)}
    assert 0 < tally.accepted < tally.drafted


def test_a_draft_that_is_the_program_is_always_right(tmp_path: Path) -> None:
    """Which it is only if it reads what the program has cached of the prompt and of all that came since."""
    saved(tmp_path)
    engine = engine_of(tmp_path, "A0 F0 A1 F1 A2 F2 A3 F3")
    found, tally = run(engine, REQUESTS[1:2], 3)
    assert found == run(engine, REQUESTS[1:2], 0)[0]
    # One token comes out of the prompt, four of each round of three drafts, and the last one alone.
    assert (tally.drafted, tally.accepted) == (9, 9)
    assert engine.figures.drafting.passes == 3 * 3
    assert engine.figures.decode.tokens == 3 * 4 + 1 + 13  # with drafts, the last one, without drafts


def test_nothing_is_loaded_twice(tmp_path: Path) -> None:
    saved(tmp_path)
    engine = engine_of(tmp_path, DRAFTS["ladder of pairs"])
    assert engine.drafter is not None
    assert engine.drafter.model.program.sublayers.keys() == engine.model.program.sublayers.keys()
    assert all(
        made is engine.model.program.sublayers[key]
        for key, made in engine.drafter.model.program.sublayers.items()
    )
    assert engine.drafter.model.ends is engine.model.ends
    cache = engine.new_cache(2)
    lent = cache.lend([1, 0])
    assert lent.pairs[0].data_ptr() == cache.pairs[1].data_ptr()


def test_an_edited_program_verifies(tmp_path: Path) -> None:
    """With averages, of which the draft has the same, and layers in another order."""
    saved(tmp_path, num_layers=6)
    program = "A1 F1 A0 F0 A2~A3 F2~F3 [A4 A5] [F4 F5]"
    engine = engine_of(tmp_path, "A1 F1 A2~A3 F2~F3 A5 F5", program)
    found, tally = run(engine, REQUESTS, 3)
    assert (
        found
        == run(
            RankEngine(make_plan(tmp_path, 1, 100, program), Alone(), torch.device("cpu")), REQUESTS, 0
        )[0]
    )
    assert 0 < tally.accepted < tally.drafted


def test_passes_of_fixed_shapes(tmp_path: Path) -> None:
    """As GPUs compute them: each drafted token is a line of its own in the pass that verifies."""
    model = saved(tmp_path)
    plan = with_draft(make_plan(tmp_path, 1, 100, decoding="static"), tmp_path, DRAFTS["pairs"])
    found, tally = run(RankEngine(plan, Alone(), torch.device("cpu")), REQUESTS, 3)
    assert found == {number: continued(model, prompt) for number, prompt in enumerate(PROMPTS)}
    assert tally.accepted > 0


def test_preempted_texts_go_on(tmp_path: Path) -> None:
    saved(tmp_path)
    engine = engine_of(tmp_path, DRAFTS["pairs"])
    sampling = replace(GREEDY, max_new_tokens=40)
    requests = [Request(number, tuple(PROMPTS[1][number:]), sampling) for number in range(3)]
    found, tally = run(engine, requests, 5, blocks=5)
    assert tally.preempted > 0
    assert tally.accepted > 0
    assert found == run(engine, requests, 0, blocks=64)[0]


def test_what_a_seed_draws_is_that_without_drafts(tmp_path: Path) -> None:
    """Also beside others that take its blocks."""
    saved(tmp_path)
    engine = engine_of(tmp_path, DRAFTS["pairs"])
    sampling = replace(GREEDY, max_new_tokens=40, temperature=0.9, seed=3)
    requests = [
        Request(text, tuple(PROMPTS[1][text:]), replace(sampling, place=(text, 0))) for text in range(3)
    ]
    together, tally = run(engine, requests, 5, blocks=5)
    assert tally.preempted > 0
    assert tally.accepted > 0
    for drafts in (0, 2):
        assert together == {
            request.id: run(engine, [request], drafts)[0][request.id] for request in requests
        }


def test_what_is_reported_of_tokens_is_the_models(tmp_path: Path) -> None:
    """Penalties, log-probabilities of new tokens, and of the prompt's."""
    saved(tmp_path)
    engine = engine_of(tmp_path, DRAFTS["pairs"])
    for sampling in (
        Sampling(repetition_penalty=1.5, logprobs=2, max_new_tokens=14, ignore_end=True),
        replace(GREEDY, prompt_logprobs=1),
    ):
        plain, drafted = (
            outputs_of(engine, Request(0, tuple(PROMPTS[1]), sampling), drafts) for drafts in (0, 4)
        )
        assert [output.token for output in plain] == [output.token for output in drafted]
        for one, other in zip(plain, drafted, strict=True):
            assert len(one.prompt_logprobs) == len(other.prompt_logprobs)
            assert (one.logprob is None) == (other.logprob is None)
            if one.logprob is not None and other.logprob is not None:
                assert one.logprob.logprob == pytest.approx(other.logprob.logprob, abs=1e-4)


@pytest.mark.parametrize("looked_up", [False, pytest.param(True, marks=thorough)])
def test_drawn_texts_have_the_models_distribution(looked_up: bool, tmp_path: Path) -> None:
    """How often each text of three tokens comes, of which the last two are drafted, by a chi-square test."""
    model = saved(tmp_path, vocab_size=WORDS, tie_word_embeddings=False)
    engine, number = engine_of(tmp_path, DRAFTS["left out"]), 600
    sampling = Sampling(
        temperature=0.7, top_p=0.95, repetition_penalty=1.2, max_new_tokens=4, ignore_end=True
    )
    prompt = (3, 0, 1, 3, 1, 4, 3, 2, 5, 3, 4, 0, 3, 5, 2, 3) if looked_up else (2, 3)
    requests = [
        Request(text, prompt, replace(sampling, seed=0, place=(text, 0))) for text in range(number)
    ]
    tokens, tally = run(
        engine, requests, 2, blocks=number, max_batch=100, pass_tokens=400, looked_up=looked_up
    )
    assert 0.05 * tally.drafted < tally.accepted < 0.95 * tally.drafted
    found, expected = (
        Counter(tuple(text[:3]) for text in tokens.values()),
        texts_of(model, sampling, prompt),
    )
    assert set(found) <= set(expected)
    assert deviation(found, expected) < 3
    # Which the statistic would show.
    hotter = texts_of(model, replace(sampling, temperature=1.0), prompt)
    assert deviation(found, {text: hotter[text] for text in expected}) > 6


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are tried at once, also where passes are recorded, which may take longer than such short texts have."""
    monkeypatch.setattr("surgeon.runtime.batching.ahead.MAY_LOSE_PASSES", 1000)


@pytest.mark.usefixtures("trials")
@pytest.mark.parametrize("as_pays", [False, True])
def test_a_texts_own_tokens_as_drafts(as_pays: bool, tmp_path: Path) -> None:
    """Greedy, where blocks are few, and drawn."""
    model = saved(tmp_path)
    engine = RankEngine(make_plan(tmp_path, 1, 100), Alone(), torch.device("cpu"))
    prompts = [prompt * 2 for prompt in PROMPTS if len(prompt) < 20]
    sampling = replace(GREEDY, max_new_tokens=40)
    requests = [Request(number, tuple(prompt), sampling) for number, prompt in enumerate(prompts)]
    found, tally = run(engine, requests, 4, blocks=5, looked_up=True, as_pays=as_pays)
    assert found == run(engine, requests, 0)[0]
    assert {text: tokens[:14] for text, tokens in found.items()} == {
        number: continued(model, prompt) for number, prompt in enumerate(prompts)
    }
    assert 0 < tally.accepted <= tally.drafted
    drawn = [
        replace(request, sampling=replace(sampling, temperature=0.3, seed=1)) for request in requests
    ]
    found, tally = run(engine, drawn, 4, looked_up=True)
    assert tally.accepted > 0
    assert found == run(engine, drawn, 0)[0]


@pytest.mark.usefixtures("trials")
def test_as_many_as_pay(tmp_path: Path) -> None:
    """Greedy texts stay the same whatever pays, and so do those that are drawn with a seed."""
    saved(tmp_path)
    engine = engine_of(tmp_path, DRAFTS["left out"])
    found, tally = run(engine, REQUESTS, 8, as_pays=True)
    assert found == run(engine, REQUESTS, 0)[0]
    assert tally.drafted > 0
    drawn = [replace(request, sampling=replace(GREEDY, temperature=0.9, seed=4)) for request in REQUESTS]
    assert run(engine, drawn, 8, as_pays=True)[0] == run(engine, drawn, 0)[0]


@pytest.mark.parametrize(
    "draft", [DRAFTS["ladder of pairs"], TRACKS, pytest.param(DRAFTS["factors"], marks=thorough)]
)
@pytest.mark.parametrize("several", [2, pytest.param(4, marks=thorough)], indirect=True)
def test_several_ranks(draft: str, several: Several, tmp_path: Path) -> None:
    """Also sublayers that share an input lie in slices then, as those of the program that verifies."""
    model = saved(tmp_path)
    plan = with_draft(make_plan(tmp_path, several.count, 100), tmp_path, draft)
    limits = Limits(8, 100, draft_tokens=3)
    several.started.call(load, plan)
    outputs, figures = several.started.call(complete, REQUESTS, 64, limits)[0]
    found = {
        number: [out.token for out in outputs if out.request == number] for number in range(len(PROMPTS))
    }
    assert found == {number: continued(model, prompt) for number, prompt in enumerate(PROMPTS)}
    last = [output for output in outputs if output.finish_reason is not None]
    assert 0 < sum(output.accepted for output in last) < sum(output.drafted for output in last)
    if draft == DRAFTS["ladder of pairs"]:
        assert figures.drafting.layers.all_reduces == 6 * figures.drafting.passes


@pytest.mark.parametrize(
    "draft", ["fork", *(pytest.param(one, marks=thorough) for one in ("averages", "four tracks"))]
)
@pytest.mark.parametrize("several", [2, 3], indirect=True)
def test_several_ranks_with_keys_of_their_own(draft: str, several: Several, tmp_path: Path) -> None:
    """Each with whole layers of a fork, slices of averages, or two of four tracks; of three ranks some with none."""
    tracks = " | ".join(f"A1/4:{track} F1/4:{track}" for track in range(4))
    middle = {
        "fork": "{A1 F1 | A2 F2}",
        "averages": "A1~A2 F1~F2",
        "four tracks": f"{{{tracks}}} A2 F2",
    }[draft]
    kv_heads = 4
    if several.count == 3 and draft == "fork":
        kv_heads = 2  # the first rank alone has keys of its own
    model = saved(tmp_path, num_key_value_heads=kv_heads)
    plan = with_draft(make_plan(tmp_path, several.count, 100), tmp_path, f"A0 F0 {middle} A3 F3")
    assert plan.draft is not None
    assert plan.draft.keeps_own
    several.started.call(load, plan)
    outputs, _ = several.started.call(complete, REQUESTS, 64, Limits(8, 100, draft_tokens=3))[0]
    found = {
        number: [out.token for out in outputs if out.request == number] for number in range(len(PROMPTS))
    }
    assert found == {number: continued(model, prompt) for number, prompt in enumerate(PROMPTS)}
    assert sum(output.accepted for output in outputs if output.finish_reason is not None) > 0
