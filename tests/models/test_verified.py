"""Drafts on text: which keys and values they read, beside drafting token by token with a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from surgeon.language.program import Program
from surgeon.language.sublayer import ATTENTION
from surgeon.models.edit import edit
from surgeon.models.families import FAMILIES
from surgeon.models.verified import ROUND, NoVerifiedKeys, VerifiedKeys, draft_on_text, draft_with
from surgeon.quality.head import logits_of, text_quality
from tests.tiny_models import DENSE_FAMILIES, tiny_model

IDS = torch.randint(5, 90, (2, 22), generator=torch.Generator().manual_seed(1))
DRAFTS = {
    "pairs": "A0 F0 [A1 A2] [F1 F2] A3 F3",
    "ladder": "A0 F0 >A1 >F1 >A2 >F2 A3 F3",
    "order": "A2 F2 A0 F0 A3 F3",
    "tracks": "A0 F0 {A1/2:0 F1/2:0 A2/2:0 F2/2:0 | A1/2:1 F1/2:1 A2/2:1 F2/2:1} A3 F3",
}
USUAL = "llama", "gemma2", "llama4_text"
OWN_MASKS = ("falcon", "gpt_neo", "gptj", "stablelm")  # which their attentions make


@torch.no_grad()
def drafted(original: Any, model: Any, program: Program) -> Tensor:
    """Logits of each token, with a cache of what the original has written of the rounds before."""
    found = list[Tensor]()
    for first in range(0, IDS.shape[1], ROUND):
        whole, cache = DynamicCache(), DynamicCache()
        if first:
            original(input_ids=IDS[:, :first], past_key_values=whole, use_cache=True)
            for slot, one in enumerate(one for one in program.sublayers() if one.kind == ATTENTION):
                parts, (index, count) = whole.layers[one.layers[0]], one.piece or (0, 1)
                kept = (tensor.chunk(count, 1)[index] for tensor in (parts.keys, parts.values))
                cache.update(*kept, slot)
        for place in range(first, min(first + ROUND, IDS.shape[1])):
            found.append(
                model(input_ids=IDS[:, place : place + 1], past_key_values=cache, use_cache=True).logits
            )
    return torch.cat(found, 1)


@pytest.mark.parametrize(
    "draft",
    ["tracks", *(pytest.param(name, marks=pytest.mark.thorough) for name in DRAFTS if name != "tracks")],
)
def test_text_in_one_pass_is_as_drafted(draft: str) -> None:
    original, model = (tiny_model("llama").eval() for _ in range(2))
    edit(model, program := Program.parse(DRAFTS[draft]))
    logits, keys = VerifiedKeys.of(original, IDS)
    torch.testing.assert_close(logits, original(input_ids=IDS).logits)
    with torch.no_grad():
        own = model(input_ids=IDS, use_cache=False).logits
        with draft_with(model, keys):
            found = model(input_ids=IDS, use_cache=False).logits
        again = model(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(found, drafted(original, model, program), rtol=1e-4, atol=1e-4)
    assert (found - own).abs().max() > 1e-2
    assert torch.equal(own, again)


@pytest.mark.parametrize(
    "family",
    [
        name if name in USUAL else pytest.param(name, marks=pytest.mark.thorough)
        for name in [*DENSE_FAMILIES, "llama4_text", "mixtral", "gpt_oss"]
        if name not in OWN_MASKS
    ],
)
def test_the_models_own_program_predicts_as_the_model(family: str) -> None:
    """Its own keys are the original's, in and behind windows, whatever they are called."""
    original, model = (tiny_model(family).eval() for _ in range(2))
    edit(model, Program.dense(4, FAMILIES[family].steps_per_layer))
    logits, keys = VerifiedKeys.of(original, IDS)
    with torch.no_grad(), draft_with(model, keys):
        torch.testing.assert_close(
            model(input_ids=IDS, use_cache=False).logits, logits, rtol=1e-3, atol=1e-3
        )


def test_gradients_when_passes_are_made_again() -> None:
    """Gradient checkpointing computes attentions a second time, when nobody says any more what they read."""
    grads = []
    for checkpointed in (False, True):
        original, model = (tiny_model("llama", dropout=0.0) for _ in range(2))
        edit(model, DRAFTS["pairs"])
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        with draft_with(model, VerifiedKeys.of(original.eval(), IDS)[1]):
            loss = model(input_ids=IDS, use_cache=False).logits.square().mean()
        loss.backward()
        grads.append(model.model.layers.layer(1).input_layernorm.weight.grad)
    torch.testing.assert_close(*grads)


@torch.no_grad()
def test_averages_read_their_own_keys() -> None:
    """Those of all tokens, beside attentions that read the original's: token by token with a cache of both kinds."""
    original, model = (tiny_model("llama").eval() for _ in range(2))
    program = Program.parse("A3 F3 A1~A2 F1~F2 A0 F0")
    _, found = draft_on_text(model, program)(IDS)
    expected, cache = list[Tensor](), DynamicCache()
    for place in range(IDS.shape[1]):
        first = place // ROUND * ROUND
        if place == first and first:
            whole = DynamicCache()
            original(input_ids=IDS[:, :first], past_key_values=whole, use_cache=True)
            for slot, layer in ((0, 3), (2, 0)):
                cache.layers[slot].keys, cache.layers[slot].values = (
                    whole.layers[layer].keys,
                    whole.layers[layer].values,
                )
        one = IDS[:, place : place + 1]
        expected.append(model(input_ids=one, past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(found, torch.cat(expected, 1), rtol=1e-4, atol=1e-4)


def test_acceptance_on_text_is_that_of_what_is_drafted() -> None:
    """Divergence and perplexity stay those of the edited model by itself."""
    original, model, program = (
        tiny_model("llama").eval(),
        tiny_model("llama").eval(),
        Program.parse(DRAFTS["tracks"]),
    )
    both = draft_on_text(model, program)
    found = text_quality(logits_of(model), IDS, bar=False, draft=both)
    own = text_quality(logits_of(model), IDS, logits_of(original), bar=False)
    with torch.no_grad():
        p = original(input_ids=IDS).logits[:, :-1].softmax(-1)
        q = drafted(original, model, program)[:, :-1].softmax(-1)
    assert found.greedy_acceptance == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).float().mean()))
    assert found.sampled_acceptance == pytest.approx(
        float(1 - (p - q).abs().sum(-1).mean() / 2), abs=1e-5
    )
    assert own.sampled_acceptance != pytest.approx(found.sampled_acceptance, abs=1e-4)
    assert (found.perplexity, found.divergence) == (own.perplexity, pytest.approx(own.divergence))
    assert found.as_draft().endswith("sampled, by verified keys and values")


def test_what_is_refused() -> None:
    with pytest.raises(NoVerifiedKeys, match="no keys and values of its own for each A0"):
        draft_on_text(tiny_model("llama"), Program.parse("A0 F0 A0 F0"))
    with pytest.raises(ValueError, match="attentions of GPT-Neo cannot be given keys"):
        VerifiedKeys.of(tiny_model("gpt_neo"), IDS)
    with pytest.raises(ValueError, match="runs no program"), draft_with(tiny_model("llama"), None):
        pass
