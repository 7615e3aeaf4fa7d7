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
from surgeon.runtime.batching.blocks import BLOCK_TOKENS
from surgeon.runtime.batching.request import Request, Sampling
from surgeon.runtime.batching.scheduler import Limits
from surgeon.runtime.model.attending import rotate_angles
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.worker.rank import RankOptions
from surgeon.runtime.worker.ranks import Ranks
from surgeon.runtime.worker.worker import ENGINE, complete, load, unload
from tests.checkpoint.helpers import load_shipped, run_export
from tests.selection import case
from tests.tiny_models import VOCABULARY, tiny_model

BORDER = 40
NEW = 12
ROPE = {"rope_theta": 100.0, "original_max_position_embeddings": BORDER}
LONGROPE = ROPE | {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.2, 1.4, 1.6],
    "long_factor": [1.5, 3.0, 6.0, 9.0],
}
LONGROPE |= {"factor": 8.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": ("llama", {"rope_parameters": LONGROPE}),
    "dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": BORDER}),
    "computed anew": (
        "phi3",
        {
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": BORDER,
            "sliding_window": None,
        },
    ),
    "computed anew in windows": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": BORDER},
    ),
}
GENERATOR = torch.Generator().manual_seed(3)
SHARED = torch.randint(2, VOCABULARY, (80,), generator=GENERATOR).tolist()
# Far below the border; such that they come across it, from just below and from the last token on; and far above. Two
# blocks are shared by all, but what short and long texts keep of them is not the same.
PROMPTS = [SHARED[:length] for length in (9, 33, 39, 40, 41, 60)] + [[*SHARED[:41], 7, 8, 9]]


LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
MINISTRAL3 = YARN | {
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
MINISTRAL3 |= {"beta_fast": 32.0, "beta_slow": 1.0, "llama_4_scaling_beta": 0.1}
PHI4 = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
PHI4 |= {"short_factor": [1.0] * 48, "long_factor": [1 + k**2 / 50 for k in range(48)]}
# What models say of themselves: the family, the width of a head, its rotary positions, and how long texts may be.
PUBLISHED: dict[str, tuple[str, int, dict[str, Any], int, int]] = {
    "Llama 3.1": ("llama", 128, LLAMA3 | {"factor": 8.0}, 8192, 131072),
    "Llama 3.2": ("llama", 64, LLAMA3 | {"factor": 32.0}, 8192, 131072),
    "Qwen2.5": ("qwen2", 128, YARN, 32768, 131072),
    "Qwen3": ("qwen3", 128, YARN, 32768, 131072),
    "Mistral Nemo": ("mistral", 128, {"rope_type": "default", "rope_theta": 1e6}, 8192, 131072),
    "Ministral 3": ("ministral3", 128, MINISTRAL3, 16384, 262144),
    "Phi-4-mini": ("phi3", 128, PHI4 | {"original_max_position_embeddings": 4096}, 4096, 131072),
    "Phi-4": (
        "phi3",
        128,
        {"rope_type": "default", "rope_theta": 250000.0, "partial_rotary_factor": 1.0},
        4096,
        16384,
    ),
    "GLM-4": (
        "glm4",
        128,
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        8192,
        32768,
    ),
    "DeepSeek Coder": (
        "llama",
        128,
        {"rope_type": "linear", "rope_theta": 1e5, "factor": 4.0},
        4096,
        16384,
    ),
    "InternLM2": (
        "llama",
        128,
        {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0},
        32768,
        65536,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_angles_up_to_the_full_length(name: str, tmp_path: Path) -> None:
    """In texts of half the length that a model began with, of that length, of one token more, and of the full one."""
    family, head_dim, rope, first, longest = PUBLISHED[name]
    own = {"original_max_position_embeddings": first} if family == "phi3" else {}
    positions = first if rope["rope_type"] == "dynamic" else longest
    sizes = {
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "hidden_size": head_dim,
        "head_dim": head_dim,
    }
    model = tiny_model(
        family, 1, max_position_embeddings=positions, rope_parameters=dict(rope), **sizes | own
    )
    model.save_pretrained(tmp_path)
    plan = make_plan(tmp_path, 1, None)
    assert plan.max_tokens == longest
    for length in (first // 2, first, first + 1, longest):
        places = torch.tensor([0, 1, first // 3, length // 2, length - 1])
        cosine, sine = model.model.rotary_emb(torch.ones(1), position_ids=places[None])
        found = rotate_angles(
            plan.arithmetic.rotaries[0], places, torch.full_like(places, length), torch.ones(1)
        )
        # transformers computes dynamic frequencies in another order, and a turn is many thousand positions.
        tolerance = 0.02 if plan.long_texts is not None and plan.long_texts.by_length else 1e-6
        half = cosine.shape[-1] // 2
        assert torch.allclose(found[0][:, 0, :half], cosine[0, :, :half], atol=tolerance)
        assert torch.allclose(found[1][:, 0, half:], sine[0, :, half:], atol=tolerance)


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
    options: dict[str, Any] = {
        "max_new_tokens": NEW,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    found = model.generate(
        torch.tensor([prompt]), return_dict_in_generate=True, output_logits=True, **options
    )
    tokens = found.sequences[0, len(prompt) :]
    chosen = torch.cat(found.logits).log_softmax(-1).gather(1, tokens[:, None])
    return Text(tokens.tolist(), chosen[:, 0].tolist())


@pytest.fixture(scope="module", params=[1, 2])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(RankOptions(request.param)) as started:
        yield started


DEFAULT = [
    (1, "longrope", "auto"),
    (1, "dynamic", "static"),
    (1, "computed anew", "auto"),
    (2, "dynamic", "auto"),
]
CASES = [
    case(*each, default=each in DEFAULT)
    for each in product((1, 2), MODELS, ("auto", "dynamic", "static"))
]


@pytest.mark.parametrize(("ranks", "name", "decoding"), CASES, indirect=["ranks"])
def test_texts_of_all_lengths_in_every_company(
    name: str, decoding: Any, ranks: Ranks, tmp_path: Path
) -> None:
    family, overrides = MODELS[name]
    tiny_model(family, **overrides).save_pretrained(tmp_path)
    # Each by a model of its own: transformers' dynamic frequencies remember longer texts.
    wanted = [continued(tiny_model(family, **overrides), prompt) for prompt in PROMPTS]
    plan = replace(make_plan(tmp_path, len(ranks.pids), 80), decoding=decoding)
    ranks.call(load, plan)
    blocks, everybody = 7 * -(-80 // BLOCK_TOKENS), list(range(len(PROMPTS)))

    def check(
        order: list[int],
        sampling: Sampling,
        max_batch: int = 8,
        pass_tokens: int = 512,
        room: int = blocks,
    ) -> None:
        limits = Limits(
            max_batch, 80, pass_tokens=pass_tokens, expected_share=0, long_texts=plan.long_texts
        )
        requests = [Request(number, tuple(PROMPTS[number]), sampling) for number in order]
        outputs, _ = ranks.call(complete, requests, room, limits, ENGINE)[0]
        for number in order:
            own = [output for output in outputs if output.request == number]
            assert [output.token for output in own] == wanted[number].tokens, PROMPTS[number]
            if sampling.logprobs is not None:
                found = [output.logprob.logprob for output in own if output.logprob is not None]
                assert found == pytest.approx(wanted[number].logprobs, abs=1e-4)

    greedy, told = (
        Sampling(max_new_tokens=NEW, ignore_end=True, logprobs=logprobs) for logprobs in (None, 0)
    )
    check(everybody, told, max_batch=1)  # one after the other, with prefixes from those before
    check(everybody[::-1], greedy)  # in one batch
    check(everybody, told, max_batch=3, pass_tokens=7)  # prompts in chunks beside continuations
    check(everybody, greedy, room=9)  # with preemption
    # Each token of a prompt like one that continues a text.
    check(everybody[-2:], greedy, max_batch=1, pass_tokens=1)
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
    assert (
        make_plan(tmp_path / "fused", 1, 80).long_texts
        == make_plan(tmp_path / "source", 1, 80).long_texts
    )
