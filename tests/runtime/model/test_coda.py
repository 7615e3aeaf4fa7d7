"""Drafting with a coda: the tokens, or the distribution, of decoding without; on one rank without processes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from surgeon.exports.in_memory import edit, export
from surgeon.runtime.batching.request import Request, Sampling, Stats
from surgeon.runtime.batching.scheduler import Limits, Output
from surgeon.runtime.comm.collectives import Alone
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.drafts import with_coda
from surgeon.runtime.worker.rank import Sender
from surgeon.runtime.worker.worker import Leader
from tests.codas import save_codas
from tests.runtime.model.test_sampling import kept_by_lists
from tests.tiny_models import VOCABULARY, damage, tiny_model

NEW = 14
GREEDY = Sampling(max_new_tokens=NEW, ignore_end=True)
GENERATOR = torch.Generator().manual_seed(11)
SHARED = torch.randint(2, VOCABULARY, (33,), generator=GENERATOR).tolist()
PROMPTS = [
    *(torch.randint(2, VOCABULARY, (length,), generator=GENERATOR).tolist() for length in (1, 5, 41)),
    [*SHARED, 7, 8],
    SHARED,
]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"sliding_window": 8, "tie_word_embeddings": False},
    "gpt_neox": {},
    "opt": {"tie_word_embeddings": False},
}


def engine_of(folder: Path, program: str | None = None) -> RankEngine:
    return RankEngine(with_coda(make_plan(folder, 1, 100, program)), Alone(), torch.device("cpu"))


def saved(folder: Path, family: str, **coda: Any) -> Any:
    """A tiny model in a folder, with a coda."""
    model = tiny_model(family, **FAMILIES[family])
    model.save_pretrained(folder)
    save_codas(folder, model, **coda)
    return model


def engine_of_saved(folder: Path, **coda: Any) -> RankEngine:
    saved(folder, "llama", **coda)
    return engine_of(folder)


def run(
    engine: RankEngine,
    requests: list[Request],
    drafts: int,
    blocks: int = 64,
    max_batch: int = 8,
    pass_tokens: int = 512,
    **ways: bool,
) -> tuple[dict[int, list[int]], Stats]:
    """The tokens of requests that are worked on together, and what the scheduler has done."""
    limits = Limits(
        max_batch, 100, pass_tokens=pass_tokens, draft_tokens=drafts, expected_share=0, **ways
    )
    leader = Leader(engine, engine.new_cache(blocks, grouped=True), blocks, limits, Sender(()))
    for request in requests:
        leader.submit(request)
    tokens: dict[int, list[int]] = {request.id: [] for request in requests}
    while not leader.scheduler.idle:
        for output in leader.step():
            if output.token is not None:
                tokens[output.request].append(output.token)
    assert leader.scheduler.pool.free == blocks
    return tokens, leader.scheduler.tally


def continued(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    tokens: list[int] = model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None)[
        0
    ].tolist()
    return tokens[len(prompt) :]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_the_model(family: str, tmp_path: Path) -> None:
    model = saved(tmp_path, family, noise=0.5)
    engine = engine_of(tmp_path)
    expected = {number: continued(model, prompt) for number, prompt in enumerate(PROMPTS)}
    requests = [Request(number, tuple(prompt), GREEDY) for number, prompt in enumerate(PROMPTS)]
    assert run(engine, requests, 1, max_batch=1)[0] == expected
    # Prompts in chunks beside drafts.
    assert run(engine, requests, 4, max_batch=3, pass_tokens=9)[0] == expected
    found, tally = run(engine, requests, 3)
    assert found == expected
    assert 0 < tally.accepted < tally.drafted


def test_preempted_texts_go_on(tmp_path: Path) -> None:
    engine = engine_of_saved(tmp_path, depth=2, noise=0.3)
    sampling = replace(GREEDY, max_new_tokens=40)
    requests = [Request(number, tuple(PROMPTS[1][number:]), sampling) for number in range(3)]
    found, tally = run(engine, requests, 5, blocks=5)
    assert tally.preempted > 0
    assert tally.accepted > 0
    assert found == run(engine, requests, 0, blocks=64)[0]


def test_drawn_texts_are_the_same_beside_others_that_take_their_blocks(tmp_path: Path) -> None:
    """Also the text that is preempted: a seed's text does not depend on what else is computed."""
    engine = engine_of_saved(tmp_path, depth=2, noise=0.3)
    sampling = replace(GREEDY, max_new_tokens=40, temperature=0.9, seed=3)
    requests = [
        Request(text, tuple(PROMPTS[1][text:]), replace(sampling, place=(text, 0))) for text in range(3)
    ]
    alone = {request.id: run(engine, [request], 5)[0][request.id] for request in requests}
    for blocks in (5, 7):
        together, tally = run(engine, requests, 5, blocks=blocks)
        assert tally.preempted > 0
        assert tally.accepted > 0
        assert together == alone


def test_a_coda_that_is_the_rest_of_the_model_is_always_right(tmp_path: Path) -> None:
    engine = engine_of_saved(tmp_path, depth=2)
    found, tally = run(engine, [Request(0, tuple(PROMPTS[1]), GREEDY)], 3)
    assert found == run(engine, [Request(0, tuple(PROMPTS[1]), GREEDY)], 0)[0]
    # One token comes out of the prompt, four of each round of three drafts, and the last one alone.
    assert (tally.drafted, tally.accepted) == (9, 9)
    assert engine.figures.drafting.passes == 3 * 3
    assert engine.figures.decode.tokens == 3 * 4 + 1 + 13  # with drafts, the last one, without drafts


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    "program", ["A0 F0 [A1 A2] >[F1 F2] A3 F3 A4 >F4", "A0 F0 {A1 F1 | A2 F2} A3 F3 A4@o7,q9 F4"]
)
def test_programs_that_are_cut(program: str, depth: int, tmp_path: Path) -> None:
    model = edit(tiny_model("llama", 5), program)
    export(model, tmp_path / "edited", form="program")
    save_codas(tmp_path / "edited", model, cut=3, depth=depth)
    requests = [Request(number, tuple(prompt), GREEDY) for number, prompt in enumerate(PROMPTS[:2])]
    engine = engine_of(tmp_path / "edited")
    found, tally = run(engine, requests, 3)
    assert found == run(engine, requests, 0)[0]
    assert found[0] == continued(model, PROMPTS[0])
    assert tally.drafted > 0


def test_a_head_that_is_left_out_is_the_embedding(tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    save_codas(tmp_path, model, depth=2, tied=True)
    requests = [Request(0, tuple(PROMPTS[1]), GREEDY)]
    found, tally = run(engine_of(tmp_path), requests, 3)
    assert found[0] == continued(model, PROMPTS[1])
    assert tally.drafted == tally.accepted > 0


def test_an_end_token_among_drafts_ends_the_text(tmp_path: Path) -> None:
    engine = engine_of_saved(tmp_path, depth=2)
    whole = run(engine, [Request(0, tuple(PROMPTS[1]), GREEDY)], 0)[0][0]
    request = Request(0, tuple(PROMPTS[1]), replace(GREEDY, ignore_end=False))
    limits = Limits(1, 100, ends=(whole[5],), draft_tokens=6)
    leader = Leader(engine, engine.new_cache(8), 8, limits, Sender(()))
    leader.submit(request)
    outputs = [output for _ in range(2) for output in leader.step()]
    assert [output.token for output in outputs] == whole[: whole.index(whole[5]) + 1]
    assert outputs[-1].finish_reason == "stop"
    assert leader.scheduler.idle
    assert leader.scheduler.pool.free == 8


def test_a_penalty_and_logprobs_are_those_without_drafts(tmp_path: Path) -> None:
    engine = engine_of_saved(tmp_path, depth=1, noise=0.3)
    for sampling in (
        Sampling(repetition_penalty=1.5, logprobs=2, max_new_tokens=NEW, ignore_end=True),
        Sampling(
            suppress_tokens=(3, 4, 5), begin_suppress_tokens=(6,), max_new_tokens=NEW, ignore_end=True
        ),
        replace(GREEDY, prompt_logprobs=1),
    ):
        outputs = [
            outputs_of(engine, Request(0, tuple(PROMPTS[1]), sampling), drafts) for drafts in (0, 4)
        ]
        assert [output.token for output in outputs[0]] == [output.token for output in outputs[1]]
        for one, other in zip(*outputs, strict=True):
            assert (one.logprob is None) == (other.logprob is None)
            assert len(one.prompt_logprobs) == len(other.prompt_logprobs)
            if one.logprob is not None and other.logprob is not None:
                assert one.logprob.logprob == pytest.approx(other.logprob.logprob, abs=1e-4)


def outputs_of(engine: RankEngine, request: Request, drafts: int) -> list[Output]:
    leader = Leader(engine, engine.new_cache(8), 8, Limits(1, 100, draft_tokens=drafts), Sender(()))
    leader.submit(request)
    found: list[Output] = []
    while not leader.scheduler.idle:
        found += leader.step()
    return found


@pytest.mark.parametrize(
    "sampling", [GREEDY, replace(GREEDY, temperature=0.0, repetition_penalty=1.0001)]
)
def test_drafts_that_no_number_follows_harm_nothing(sampling: Sampling, tmp_path: Path) -> None:
    """A coda whose only token is one of which the model makes no number: the text is that without drafts."""
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    expected = continued(model, PROMPTS[1])
    bad = next(token for token in range(VOCABULARY) if token not in expected + PROMPTS[1])
    damage(tmp_path, bad)
    save_codas(tmp_path, model)
    file = tmp_path / "codas" / "rack-0.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"][:] = 0
    tensors["lm_head.weight"][bad] = tensors["model.norm.weight"].sign()
    tensors["lm_head.weight"][bad - 1] = -tensors["lm_head.weight"][bad]
    save_file(tensors, file, metadata={"format": "pt"})
    found, tally = run(engine_of(tmp_path), [Request(0, tuple(PROMPTS[1]), sampling)], 2)
    assert found[0] == expected
    assert tally.drafted > 0
    tensors["lm_head.weight"][:] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    found, tally = run(engine_of(tmp_path), [Request(0, tuple(PROMPTS[1]), sampling)], 2)
    assert found[0] == expected


WORDS = 6  # of a vocabulary of which every text of three tokens is counted


def test_sampled_texts_have_the_models_distribution(tmp_path: Path) -> None:
    """How often each text of three tokens comes, of which the last two are drafted, by a chi-square test."""
    model = tiny_model("llama", vocab_size=WORDS, tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    save_codas(tmp_path, model, noise=0.5)
    engine, number = engine_of(tmp_path), 600
    sampling = Sampling(
        temperature=0.7, top_p=0.95, repetition_penalty=1.2, max_new_tokens=4, ignore_end=True
    )
    requests = [
        Request(text, (2, 3), replace(sampling, seed=0, place=(text, 0))) for text in range(number)
    ]
    tokens, tally = run(engine, requests, 2, blocks=number, max_batch=100, pass_tokens=400)
    assert 0.2 * tally.drafted < tally.accepted < 0.95 * tally.drafted
    found = Counter(tuple(text[:3]) for text in tokens.values())
    expected = texts_of(model, sampling)
    assert set(found) <= set(expected)
    assert deviation(found, expected) < 3
    hotter = texts_of(model, replace(sampling, temperature=1.0))  # which the statistic would show
    assert deviation(found, {text: hotter[text] for text in expected}) > 6


def texts_of(
    model: Any, sampling: Sampling, prompt: tuple[int, ...] = (2, 3)
) -> dict[tuple[int, ...], float]:
    """The probability of every text of three tokens behind a prompt, by the definitions."""
    texts = {(): 1.0}
    for _ in range(3):
        longer: dict[tuple[int, ...], float] = {}
        for text, chance in texts.items():
            with torch.no_grad():
                scores = model(input_ids=torch.tensor([[*prompt, *text]])).logits[0, -1].double()
            seen = sorted({*prompt, *text})
            scores[seen] = torch.where(
                scores[seen] > 0,
                scores[seen] / sampling.repetition_penalty,
                scores[seen] * sampling.repetition_penalty,
            )
            kept = kept_by_lists(scores.tolist(), sampling)
            longer |= {(*text, token): chance * share for token, share in kept.items()}
        texts = longer
    return texts


def deviation(found: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """By how many standard deviations the chi-square statistic is above its mean, rare texts taken together."""
    number = found.total()
    rare = {text for text, chance in expected.items() if chance * number < 5}
    cells = [(found[text], chance * number) for text, chance in expected.items() if text not in rare]
    if rare:
        cells.append((sum(found[text] for text in rare), sum(expected[text] for text in rare) * number))
    freedom = len(cells) - 1
    return (sum((count - mean) ** 2 / mean for count, mean in cells) - freedom) / (2 * freedom) ** 0.5
