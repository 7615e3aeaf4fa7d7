"""Healed drafts on ranks: the model's matrices once, norms and adapters beside them; its text stays its own."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from surgeon.checkpoint.drafts import HealedDraft
from surgeon.runtime.batching.limits import Limits
from surgeon.runtime.batching.request import Request, Sampling
from surgeon.runtime.comm.collectives import Alone
from surgeon.runtime.model.adapted import Adapted
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.drafts import with_draft
from surgeon.runtime.plan.memory import footprint
from surgeon.runtime.plan.specification import Plan
from surgeon.runtime.worker.rank import Rank
from surgeon.runtime.worker.worker import complete, load
from tests.healed import healed_draft
from tests.runtime.model.conftest import Several
from tests.runtime.model.test_coda import PROMPTS, WORDS, continued, deviation, run, texts_of
from tests.runtime.model.test_draft import DRAFTS, REQUESTS, TRACKS, saved

thorough = pytest.mark.thorough
IDS = list(range(3, 40))
HEALED: dict[str, dict[str, Any]] = {
    "adapters": {"lora": 3},
    "norms": {"scope": "norms"},  # the final one, too
    "edited norms": {"scope": "edited-norms"},
}
USUAL = ("llama", "adapters"), ("qwen3", "norms")
FAMILIES = ["llama", "qwen3", "gemma2", "gpt2", "phi3", "glm", "gpt_neox", "olmo2", "granite", "opt", "mixtral"]


def planned(folder: Path, program: str, ranks: int = 1, **healed: Any) -> tuple[Plan, Any]:
    model = healed_draft(folder, program, folder / "draft", **healed)
    plan = with_draft(make_plan(folder, ranks, 100), folder, HealedDraft.read(folder / "draft"))
    return plan, model


def drafter_logits(rank: Rank, plan: Plan) -> Tensor:
    """Runs on a rank: the draft's own logits."""
    drafter = RankEngine(plan, rank.collectives, rank.device).drafter
    assert drafter is not None
    return drafter.text_logits(IDS)


def check_logits(found: Tensor, model: Any) -> None:
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([IDS]), use_cache=False).logits[0]
    assert ((found - expected).abs().max() / expected.abs().max()).item() < 1e-4


@pytest.mark.parametrize(
    ("family", "what"),
    [
        (family, what) if (family, what) in USUAL else pytest.param(family, what, marks=thorough)
        for family in FAMILIES
        for what in HEALED
        if (family, what) != ("mixtral", "adapters")  # which would lie on experts
    ],
)
def test_a_draft_computes_what_was_trained(family: str, what: str, tmp_path: Path) -> None:
    saved(tmp_path, family)
    plan, model = planned(tmp_path, DRAFTS["ladder of pairs" if family == "llama" else "pairs"], **HEALED[what])
    engine = RankEngine(plan, Alone(), torch.device("cpu"))
    assert engine.drafter is not None
    assert engine.drafter.by_kernels == engine.by_kernels
    check_logits(engine.drafter.text_logits(IDS), model)
    plain = RankEngine(make_plan(tmp_path, 1, 100), Alone(), torch.device("cpu"))
    assert torch.equal(engine.text_logits(IDS), plain.text_logits(IDS))


@pytest.mark.parametrize("what", ["adapters", pytest.param("norms", marks=thorough)])
def test_greedy_tokens_are_those_of_the_model(what: str, tmp_path: Path) -> None:
    model = saved(tmp_path)
    plan, _ = planned(tmp_path, DRAFTS["pairs"], **HEALED[what])
    found, tally = run(RankEngine(plan, Alone(), torch.device("cpu")), REQUESTS, 3)
    assert found == {number: continued(model, prompt) for number, prompt in enumerate(PROMPTS)}
    assert tally.drafted > 0


@thorough
def test_drawn_texts_have_the_models_distribution(tmp_path: Path) -> None:
    model = saved(tmp_path, vocab_size=WORDS, tie_word_embeddings=False)
    plan, _ = planned(tmp_path, DRAFTS["pairs"], lora=3)
    sampling = Sampling(temperature=0.7, top_p=0.95, repetition_penalty=1.2, max_new_tokens=4, ignore_end=True)
    requests = [Request(text, (2, 3), replace(sampling, seed=0, place=(text, 0))) for text in range(600)]
    engine = RankEngine(plan, Alone(), torch.device("cpu"))
    tokens, tally = run(engine, requests, 2, blocks=600, max_batch=100, pass_tokens=400)
    assert 0.05 * tally.drafted < tally.accepted < 0.95 * tally.drafted
    assert deviation(Counter(tuple(text[:3]) for text in tokens.values()), texts_of(model, sampling)) < 3


def test_matrices_are_there_once(tmp_path: Path) -> None:
    model = saved(tmp_path)
    plan, _ = planned(tmp_path, DRAFTS["pairs"], lora=3)
    engine = RankEngine(plan, Alone(), torch.device("cpu"))
    assert engine.drafter is not None
    changed = 0
    for key, made in engine.drafter.sublayers.items():
        own: Any = engine.sublayers[key]
        for name in ("qkv", "o", "up", "down"):
            mine, theirs = getattr(made, name, None), getattr(own, name, None)
            changed += isinstance(mine, Adapted)
            assert (mine.whole if isinstance(mine, Adapted) else mine) is theirs
    assert changed == 2 * 4
    assert engine.drafter.ends is engine.ends
    alone, both = footprint(make_plan(tmp_path, 1, 100)), footprint(plan)
    hidden, kv, neurons = 32, 16, int(model.config.intermediate_size)
    numbers = 2 * 3 * (2 * (hidden + hidden) + 2 * (hidden + kv) + 3 * (hidden + neurons))  # of two layers' adapters
    assert both.weights[0] - alone.weights[0] == 4 * numbers
    assert both.kept == alone.kept


@pytest.mark.parametrize("what", ["adapters", pytest.param("edited norms", marks=thorough)])
@pytest.mark.parametrize("draft", [TRACKS, pytest.param(DRAFTS["ladder of pairs"], marks=thorough)])
@pytest.mark.parametrize("several", [2, pytest.param(4, marks=thorough)], indirect=True)
def test_several_ranks(draft: str, what: str, several: Several, tmp_path: Path) -> None:
    model = saved(tmp_path)
    plan, trained = planned(tmp_path, draft, several.count, **HEALED[what])
    for found in several.started.call(drafter_logits, plan):
        check_logits(found, trained)
    several.started.call(load, plan)
    outputs, _ = several.started.call(complete, REQUESTS, 64, Limits(8, 100, draft_tokens=3))[0]
    tokens = {number: [out.token for out in outputs if out.request == number] for number in range(len(PROMPTS))}
    assert tokens == {number: continued(model, prompt) for number, prompt in enumerate(PROMPTS)}
