"""Rotary positions that depend on the length of a text, around the length from which they do.

Texts get what `transformers` gives them alone, with a cache, whatever else is computed beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from surgeon.models.edit import edit
from surgeon.runtime.batching.request import Request, Sampling
from surgeon.runtime.batching.scheduler import Limits
from surgeon.runtime.batching.windows import BLOCK_TOKENS
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.worker.options import RankOptions
from surgeon.runtime.worker.ranks import Ranks
from surgeon.runtime.worker.worker import ENGINE, complete, load, unload
from tests.checkpoint.helpers import load_shipped, run_export
from tests.selection import case
from tests.tiny_models import VOCABULARY, tiny_model

BORDER = 40
NEW = 12
ROPE = {"rope_theta": 100.0, "original_max_position_embeddings": BORDER}
LONGROPE = ROPE | {"rope_type": "longrope", "short_factor": [1.0, 1.2, 1.4, 1.6], "long_factor": [1.5, 3.0, 6.0, 9.0]}
LONGROPE |= {"factor": 8.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": ("llama", {"rope_parameters": LONGROPE}),
    "dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": BORDER}),
    "computed anew": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": BORDER, "sliding_window": None},
    ),
    "computed anew in windows": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": BORDER}),
}
GENERATOR = torch.Generator().manual_seed(3)
SHARED = torch.randint(2, VOCABULARY, (80,), generator=GENERATOR).tolist()
# Far below the border; such that they come across it, from just below and from the last token on; and far above. Two
# blocks are shared by all, but what short and long texts keep of them is not the same.
PROMPTS = [SHARED[:length] for length in (9, 33, 39, 40, 41, 60)] + [[*SHARED[:41], 7, 8, 9]]


class Text(NamedTuple):
    """A prompt continued alone.

    Attributes:
        tokens: the new ones.
        logprobs: of these.
    """

    tokens: list[int]
    logprobs: list[float]


def continued(model: Any, prompt: list[int]) -> Text:
    """By `transformers`."""
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = model.generate(torch.tensor([prompt]), return_dict_in_generate=True, output_logits=True, **options)
    tokens = found.sequences[0, len(prompt) :]
    chosen = torch.cat(found.logits).log_softmax(-1).gather(1, tokens[:, None])
    return Text(tokens.tolist(), chosen[:, 0].tolist())


@pytest.fixture(scope="module", params=[1, 2])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(RankOptions(request.param)) as started:
        yield started


DEFAULT = [(1, "longrope", "auto"), (1, "dynamic", "static"), (1, "computed anew", "auto"), (2, "dynamic", "auto")]
CASES = [case(*each, default=each in DEFAULT) for each in product((1, 2), MODELS, ("auto", "dynamic", "static"))]


@pytest.mark.parametrize(("ranks", "name", "decoding"), CASES, indirect=["ranks"])
def test_texts_of_all_lengths_in_every_company(name: str, decoding: Any, ranks: Ranks, tmp_path: Path) -> None:
    family, overrides = MODELS[name]
    tiny_model(family, **overrides).save_pretrained(tmp_path)
    # Each by a model of its own: transformers' dynamic frequencies remember longer texts.
    wanted = [continued(tiny_model(family, **overrides), prompt) for prompt in PROMPTS]
    plan = replace(make_plan(tmp_path, len(ranks.pids), 80), decoding=decoding)
    ranks.call(load, plan)
    blocks, everybody = 7 * -(-80 // BLOCK_TOKENS), list(range(len(PROMPTS)))

    def check(
        order: list[int], sampling: Sampling, max_batch: int = 8, pass_tokens: int = 512, room: int = blocks
    ) -> None:
        limits = Limits(max_batch, 80, pass_tokens=pass_tokens, expected_share=0, long_texts=plan.long_texts)
        requests = [Request(number, tuple(PROMPTS[number]), sampling) for number in order]
        outputs, _ = ranks.call(complete, requests, room, limits, ENGINE)[0]
        for number in order:
            own = [output for output in outputs if output.request == number]
            assert [output.token for output in own] == wanted[number].tokens, PROMPTS[number]
            if sampling.logprobs is not None:
                found = [output.logprob.logprob for output in own if output.logprob is not None]
                assert found == pytest.approx(wanted[number].logprobs, abs=1e-4)

    greedy, told = (Sampling(max_new_tokens=NEW, ignore_end=True, logprobs=logprobs) for logprobs in (None, 0))
    check(everybody, told, max_batch=1)  # one after the other, with prefixes from those before
    check(everybody[::-1], greedy)  # in one batch
    check(everybody, told, max_batch=3, pass_tokens=7)  # prompts in chunks beside continuations
    check(everybody, greedy, room=9)  # with preemption
    check(everybody[-2:], greedy, max_batch=1, pass_tokens=1)  # each token of a prompt like one that continues a text
    scored = Request(0, tuple(PROMPTS[5]), Sampling(max_new_tokens=0, prompt_logprobs=0))
    limits = Limits(1, 80, pass_tokens=7, long_texts=plan.long_texts)
    outputs, _ = ranks.call(complete, [scored], blocks, limits, ENGINE)[0]
    found = [told.logprob for output in outputs for told in output.prompt_logprobs]
    assert found == pytest.approx(scores(tiny_model(family, **overrides), PROMPTS[5]), abs=1e-4)
    ranks.call(unload)


def scores(model: Any, text: list[int]) -> list[float]:
    """How likely each token but the first is, all of them in one pass."""
    ids = torch.tensor([text])
    with torch.no_grad():
        likely = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    found: list[float] = likely.gather(2, ids[:, 1:, None])[0, :, 0].tolist()
    return found


def test_the_fused_form_computes_texts_anew_too(tmp_path: Path) -> None:
    family, overrides = MODELS["computed anew"]
    program = "A0 F0 [A1 A2] [F1 F2] A3 F3"
    tiny_model(family, **overrides).save_pretrained(tmp_path / "source")
    run_export(tmp_path / "source", tmp_path / "fused", program, form="fused")
    written = load_shipped(tmp_path / "fused")
    for prompt in PROMPTS[1:4]:
        wanted = continued(edit(tiny_model(family, **overrides), program), prompt)
        assert continued(written, prompt).tokens == wanted.tokens
    assert make_plan(tmp_path / "fused", 1, 80).long_texts == make_plan(tmp_path / "source", 1, 80).long_texts
