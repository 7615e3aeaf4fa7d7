"""Log-probabilities of prompts: from logits spread over ranks, and through a service, against `transformers`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from surgeon.runtime.batching.request import Sampling, TokenLogprob
from surgeon.runtime.model.ends import score
from surgeon.runtime.service import Service, ServiceOptions
from surgeon.runtime.worker.rank import RankOptions
from tests.tiny_models import save_checkpoint

PROMPT_TOKENS = 700  # more than one pass computes
TOP = 3


def score_on_ranks(logits: Tensor, ranks: int, targets: list[int], top: int) -> list[list[TokenLogprob]]:
    """What each rank makes of its part of some logits, the last parts perhaps short or empty."""
    rows = -(-logits.shape[-1] // ranks)
    parts = [(rank * rows, logits[:, rank * rows : (rank + 1) * rows]) for rank in range(ranks)]
    sent: list[Tensor] = []

    def send(tensor: Tensor) -> Tensor:
        sent.append(tensor)
        return tensor[None]

    for first, own in parts:
        score(own, first, rows, targets, top, send)
    return [score(own, first, rows, targets, top, lambda _: torch.stack(sent)) for first, own in parts]


def check(found: list[TokenLogprob], logits: Tensor, targets: list[int], top: int) -> None:
    expected = logits.double().log_softmax(-1)
    best = expected.topk(top)
    assert [one.token for one in found] == targets
    assert [one.logprob for one in found] == pytest.approx(
        expected[range(len(targets)), targets].tolist(), abs=1e-4
    )
    for place, one in enumerate(found):
        assert [token for token, _ in one.top] == best.indices[place].tolist()
        assert [logprob for _, logprob in one.top] == pytest.approx(
            best.values[place].tolist(), abs=1e-4
        )


@pytest.mark.parametrize(("vocabulary", "ranks"), [(12, 1), (12, 2), (13, 4), (5, 4)])
def test_parts_of_a_vocabulary(vocabulary: int, ranks: int) -> None:
    logits = 5 * torch.randn(9, vocabulary)
    targets = torch.randint(vocabulary, (9,)).tolist()
    for top in (0, 1, 4):
        for found in score_on_ranks(logits, ranks, targets, top):
            check(found, logits, targets, top)


def test_no_more_tokens_are_reported_than_there_are() -> None:
    (found,) = score_on_ranks(torch.randn(1, 5), 1, [2], 64)
    assert len(found[0].top) == 5
    assert {
        len(one.top) for each in score_on_ranks(torch.randn(2, 5), 4, [2, 4], 64) for one in each
    } == {5}


def test_the_likeliest_token_has_its_own_probability_to_the_last_bit() -> None:
    """Clients tell by comparing the two whether a text is what the model would have said."""
    logits = torch.randn(64, 1000)
    for found in score_on_ranks(logits, 2, logits.argmax(-1).tolist(), 1):
        assert all(one.top == ((one.token, one.logprob),) for one in found)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_service_scores_as_transformers_does(ranks: int, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "tiny", max_position_embeddings=1024)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = torch.randint(model.config.vocab_size, (PROMPT_TOKENS,)).tolist()
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0]
    scored = Sampling(max_new_tokens=2, ignore_end=True, logprobs=TOP, prompt_logprobs=TOP)
    with Service(folder, ServiceOptions(RankOptions(ranks))) as service:
        others = [
            service.submit(prompt[:50], Sampling(max_new_tokens=40, ignore_end=True)) for _ in range(2)
        ]
        events = list(service.submit(prompt, scored))
        unscored = list(service.submit(prompt, Sampling(max_new_tokens=2, ignore_end=True)))
        again = list(service.submit(prompt[:40], Sampling(max_new_tokens=0, prompt_logprobs=TOP)))
        assert all(list(other)[-1].finish_reason == "length" for other in others)
    check([one for event in events for one in event.prompt_logprobs], logits[:-1], prompt[1:], TOP)
    # The first new token is one that the prompt's last logits predict.
    new = [token for event in events for token in event.tokens]
    assert new == [token for event in unscored for token in event.tokens]
    check([event.logprobs[0] for event in events if event.tokens][:1], logits[-1:], new[:1], TOP)
    assert all(not event.prompt_logprobs for event in unscored)
    # Nothing is added, and what the cache knows of the prompt by now is computed once more.
    check([one for event in again for one in event.prompt_logprobs], logits[:39], prompt[1:40], TOP)
    assert (again[-1].tokens, again[-1].finish_reason, again[-1].usage.cached) == ((), "length", 0)
    assert unscored[-1].usage.cached > 600
