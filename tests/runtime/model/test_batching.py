"""What a request gets does not depend on what else is computed with it, nor on how: on 1, 2 and 4 ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from surgeon.exports.in_memory import edit
from surgeon.runtime.batching.request import Request, Sampling
from surgeon.runtime.batching.scheduler import Limits
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.memory import cache_groups
from surgeon.runtime.worker.rank import RankOptions
from surgeon.runtime.worker.ranks import Ranks
from surgeon.runtime.worker.worker import ENGINE, complete, load, unload
from tests.runtime.on_ranks import complete_twice
from tests.selection import case
from tests.tiny_models import VOCABULARY, tiny_model

PROGRAMS = {
    "dense": "A0 F0 A1 F1 A2 F2 A3 F3",
    "LP": "A0 F0 [A1 A2] [F1 F2] A3 F3",
    "ladder": "A0 F0 >A1 >F1 >A2 >F2 A3 F3",
    "fork": "A0 F0 {A1 F1 | A2 F2} A3 F3",
    "attention || MLP": "[A0 F0] [A1 F1] [A2 F2] [A3 F3]",
}
# Windows of two blocks and a bit, of half a block in every other layer, and of 5 tokens in every other layer.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 36},
    "gemma2": {"sliding_window": 8},
    "gpt_neo": {},
    "qwen3_moe": {},
    "gpt_oss": {"sliding_window": 8},
    "deepseek_v3": {},
    "llama4_text": {"attention_chunk_size": 20},  # which end within blocks
}
CASES = [
    *(("llama", name) for name in ("dense", "LP", "ladder", "fork")),
    ("mistral", "dense"),
    ("mistral", "LP"),
    ("gemma2", "dense"),
    ("gemma2", "LP"),
    ("gemma2", "attention || MLP"),
    ("gpt_neo", "ladder"),
]
MIXTURES = [
    (family, name)
    for family in ("qwen3_moe", "gpt_oss", "deepseek_v3")
    for name in ("dense", "LP", "ladder")
]
ON_ONE = [*CASES, ("deepseek_v3", "dense")]
CHUNKED = ("llama4_text", "dense")
ON_TWO = [("llama", "dense"), ("llama", "fork"), ("mistral", "LP"), ("gemma2", "attention || MLP")]
ON_TWO += [("qwen3_moe", "dense"), ("gpt_oss", "dense")]
ON_RANKS = [
    *(case(1, *each, default=each in ON_ONE) for each in (*CASES, *MIXTURES)),
    *(case(2, *each, default=each in ON_TWO) for each in (*CASES, *MIXTURES)),
    *(case(count, *CHUNKED, default=False) for count in (1, 2)),
    *(case(4, *each, default=each[0] == "llama") for each in (("llama", "fork"), ("gemma2", "LP"))),
]
GROUPS = {"gemma2": 2, "gpt_neo": 2, "gpt_oss": 2, "llama4_text": 4}  # with windows in some layers
NEW = 14
GENERATOR = torch.Generator().manual_seed(11)
SHARED = torch.randint(2, VOCABULARY, (33,), generator=GENERATOR).tolist()
PROMPTS = [
    *(
        torch.randint(2, VOCABULARY, (length,), generator=GENERATOR).tolist()
        for length in (1, 5, 16, 41)
    ),
    [*SHARED, 7, 8],
    [*SHARED, 9],
    SHARED,
]
GREEDY = Sampling(max_new_tokens=NEW, ignore_end=True)
ENOUGH = 64


@pytest.fixture(scope="module", params=[1, 2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(RankOptions(request.param)) as started:
        yield started


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("batching")
    for family, overrides in FAMILIES.items():
        tiny_model(family, **overrides).save_pretrained(folder / family)
    return {family: folder / family for family in FAMILIES}


@pytest.fixture(scope="module")
def checkpoint(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["llama"]


@lru_cache
def expected(family: str, name: str) -> dict[int, list[int]]:
    """Each prompt continued alone by `transformers`."""
    model = edit(tiny_model(family, **FAMILIES[family]), PROGRAMS[name])
    return {number: continued(model, prompt) for number, prompt in enumerate(PROMPTS)}


def continued(model: Any, prompt: list[int]) -> list[int]:
    tokens: list[int] = model.generate(
        torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None
    )[0].tolist()
    return tokens[len(prompt) :]


class Runner:
    """Runs requests on ranks that have loaded a program, and collects their tokens."""

    def __init__(
        self, ranks: Ranks, folder: Path, program: str, grouped: bool = False, **changes: Any
    ) -> None:
        self.ranks = ranks
        self.plan = replace(make_plan(folder, len(ranks.pids), 100, program), **changes)
        self.grouped = grouped
        ranks.call(load, self.plan)

    def __call__(
        self, requests: list[Request], max_batch: int = 8, pass_tokens: int = 512, blocks: int = ENOUGH
    ) -> dict[int, list[int]]:
        limits = Limits(max_batch, 100, pass_tokens=pass_tokens, expected_share=0)
        outputs, _ = self.ranks.call(complete, requests, blocks, limits, ENGINE, self.grouped)[0]
        return {
            request.id: [output.token for output in outputs if output.request == request.id]
            for request in requests
        }


def greedy(numbers: list[int]) -> list[Request]:
    return [Request(number, tuple(PROMPTS[number]), GREEDY) for number in numbers]


@pytest.mark.sampled
@pytest.mark.parametrize(("ranks", "family", "name"), ON_RANKS, indirect=["ranks"])
def test_greedy_tokens_in_every_company(
    family: str, name: str, ranks: Ranks, checkpoints: dict[str, Path]
) -> None:
    run = Runner(ranks, checkpoints[family], PROGRAMS[name], grouped=True)
    wanted = expected(family, name)
    everybody = list(range(len(PROMPTS)))
    # One after the other, with prefixes from those before.
    assert run(greedy(everybody), max_batch=1) == wanted
    assert run(greedy(everybody)) == wanted  # in one batch of mixed lengths
    # Prompts in chunks beside continuations.
    assert run(greedy(everybody), max_batch=3, pass_tokens=5) == wanted
    assert run(greedy(everybody[::-1]), max_batch=4, pass_tokens=20) == wanted
    groups = len(cache_groups(run.plan).windows)
    assert groups == GROUPS.get(family, 1)
    assert run(greedy(everybody), blocks=5 * groups) == wanted  # with preemption
    ranks.call(unload)


@pytest.mark.parametrize("decoding", ["dynamic", "static"])
@pytest.mark.parametrize(
    ("family", "blocks"),
    [("mistral", 4), ("gemma2", 6 + 2), ("gpt_neo", 6 + 2), case("gpt_oss", 6 + 2, default=False)],
)
@pytest.mark.parametrize("ranks", [1, 2], indirect=True)
def test_a_long_text_in_the_blocks_that_its_windows_reach(
    family: str, blocks: int, decoding: str, ranks: Ranks, checkpoints: dict[str, Path]
) -> None:
    """A text of six blocks, where a window of 36 tokens reaches four, and one of 8 or 5 tokens two."""
    prompt = torch.randint(
        2, VOCABULARY, (96 - NEW,), generator=torch.Generator().manual_seed(1)
    ).tolist()
    wanted = continued(tiny_model(family, **FAMILIES[family]), prompt)
    run = Runner(ranks, checkpoints[family], PROGRAMS["dense"], grouped=True, decoding=decoding)
    for pass_tokens in (8, 64):
        assert run([Request(0, tuple(prompt), GREEDY)], pass_tokens=pass_tokens, blocks=blocks) == {
            0: wanted
        }
    ranks.call(unload)


def test_prefixes_and_preemption_have_really_happened(ranks: Ranks, checkpoint: Path) -> None:
    """The conditions of the test above, looked at."""
    run = Runner(ranks, checkpoint, PROGRAMS["dense"])
    tallies = [
        ranks.call(complete_twice, greedy([4]), greedy([5, 6]), ENOUGH, Limits(8, 100))[0],
        ranks.call(complete_twice, [], greedy([1, 2]), 3, Limits(8, 100, expected_share=0))[0],
    ]
    shared, preempted = tallies
    assert shared.tally.cached_tokens == 64  # two blocks of 16 tokens, twice
    assert preempted.tally.preempted > 0
    for tally in tallies:
        assert tally.free == tally.blocks
        for request, tokens in tally.tokens.items():
            assert tokens == run(greedy([request]))[request]
    ranks.call(unload)


def test_sampled_tokens_in_every_company(ranks: Ranks, checkpoint: Path) -> None:
    """Different ways of sampling beside each other, and greedy ones."""
    run = Runner(ranks, checkpoint, PROGRAMS["dense"])
    kinds = [
        Sampling(temperature=0.9, seed=3),
        Sampling(temperature=1.2, top_p=0.8, seed=3),
        Sampling(temperature=1.0, top_k=10, min_p=0.02, seed=4),
        Sampling(repetition_penalty=1.5, seed=0),
        GREEDY,
        Sampling(temperature=0.9, seed=3, repetition_penalty=1.2, logprobs=2),
    ]
    requests = [
        Request(number, tuple(PROMPTS[number]), replace(kind, max_new_tokens=NEW, ignore_end=True))
        for number, kind in enumerate(kinds)
    ]
    alone: dict[int, list[int]] = {}
    for request in requests:
        alone |= run([request])
    assert run(requests) == alone
    assert run(requests[::-1], max_batch=4, pass_tokens=7) == alone
    assert run(requests, blocks=6) == alone
    assert (
        run([replace(requests[0], id=9, sampling=replace(requests[0].sampling, seed=5))])[9] != alone[0]
    )
    ranks.call(unload)


def test_logprobs_and_a_penalty_against_the_model(ranks: Ranks, checkpoint: Path) -> None:
    """Over the vocabulary of all ranks, whose parts differ in size here."""
    model = tiny_model("llama")
    Runner(ranks, checkpoint, PROGRAMS["dense"])
    sampling = Sampling(repetition_penalty=1.3, logprobs=3, max_new_tokens=6, ignore_end=True)
    outputs, _ = ranks.call(complete, [Request(0, tuple(PROMPTS[1]), sampling)], 8, Limits(1, 100))[0]
    tokens = list(PROMPTS[1])
    for output in outputs:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens])).logits[0, -1]
        wanted = logits.log_softmax(-1)
        assert output.logprob.token == output.token
        assert output.logprob.logprob == pytest.approx(float(wanted[output.token]), abs=1e-4)
        assert [token for token, _ in output.logprob.top] == wanted.topk(3).indices.tolist()
        assert [value for _, value in output.logprob.top] == pytest.approx(
            wanted.topk(3).values.tolist(), abs=1e-4
        )
        seen = logits[tokens]
        logits[tokens] = torch.where(seen > 0, seen / 1.3, seen * 1.3)
        assert int(logits.argmax()) == output.token
        tokens.append(output.token)
    ranks.call(unload)
