"""Conversations: each answer is the model's to all that was said, also after one that was ended early."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import surgeon
from surgeon.runtime.batching.request import Sampling
from surgeon.runtime.conversation import Conversation
from surgeon.runtime.service import Service, ServiceOptions
from tests.tiny_models import chat_checkpoint

NEW = 12
SYSTEM = {"role": "system", "content": "the quick fox"}
DRAFT = "A0 F0 A1 F1 A3 F3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers do not end by themselves."""
    return chat_checkpoint(tmp_path_factory.mktemp("conversation") / "tiny-chat", eos_token_id=None)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def answer(folder: Path, tokenizer: Any, messages: list[dict[str, Any]], new: int = NEW) -> str:
    """What `transformers` answers."""
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    assert ids.count(tokenizer.bos_token_id) == 1
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False)[0].tolist()
    before = tokenizer.decode(ids, skip_special_tokens=True)
    text: str = tokenizer.decode(tokens, skip_special_tokens=True)
    return text.removeprefix(before)


@pytest.mark.parametrize(("ranks", "draft"), [(1, None), (2, DRAFT)])
def test_answers_are_to_all_that_was_said(
    ranks: int, draft: str | None, folder: Path, tokenizer: Any
) -> None:
    said: list[dict[str, Any]] = [SYSTEM]
    with surgeon.chat(
        folder,
        system=SYSTEM["content"],
        ranks=ranks,
        draft=draft,
        draft_tokens=draft and 2,
        max_new_tokens=NEW,
    ) as conversation:
        for text in ("the lazy dog", "and the dog"):
            said.append({"role": "user", "content": text})
            said.append({"role": "assistant", "content": answer(folder, tokenizer, said)})
            assert "".join(conversation.say(text)) == said[-1]["content"]
            assert conversation.messages == said
        # All but the newest message were computed before.
        assert conversation.answers[1].usage.cached > 16
        assert bool(conversation.answers[1].usage.drafted) == (draft is not None)
        conversation.reset()
        anew = [SYSTEM, {"role": "user", "content": "fox"}]
        assert "".join(conversation.say("fox")) == answer(folder, tokenizer, anew)


@pytest.fixture(scope="module")
def service(folder: Path, tokenizer: Any) -> Iterator[Service]:
    with Service(folder, ServiceOptions(max_batch=1, max_waiting=0), tokenizer) as started:
        yield started


@pytest.mark.parametrize("way", ["stopped", "left"])
def test_an_answer_that_is_ended_stays_as_far_as_it_came(
    way: str, service: Service, folder: Path, tokenizer: Any
) -> None:
    conversation = Conversation(service, tokenizer, Sampling(max_new_tokens=5000))
    pieces = conversation.say("the lazy dog")
    shown = next(pieces)
    if way == "stopped":
        conversation.stop()
        shown += "".join(pieces)
    else:
        pieces.close()  # type: ignore[attr-defined]
    ended = conversation.answers[0]
    assert ended.finish_reason == "cancelled"
    assert len(ended.tokens) < 5000
    assert ended.text.startswith(shown)
    said = [{"role": "user", "content": "the lazy dog"}, {"role": "assistant", "content": ended.text}]
    assert conversation.messages == said
    assert ended.text == answer(folder, tokenizer, said[:1], len(ended.tokens))
    said.append({"role": "user", "content": "the fox"})
    following = conversation.say("the fox")
    text = ""
    while len(text) < 8:
        text += next(following)
    following.close()  # type: ignore[attr-defined]
    assert answer(folder, tokenizer, said).startswith(text[:8])
    assert service.stats().running == 0


def test_an_answer_that_is_stopped_before_it_begins_leaves_nothing(
    service: Service, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = Conversation(service, tokenizer, Sampling(max_new_tokens=5000))

    def stop_and_submit(*arguments: Any) -> Any:
        conversation.stop()
        return submit(*arguments)

    submit = service.submit
    monkeypatch.setattr(service, "submit", stop_and_submit)
    assert len("".join(conversation.say("the lazy dog"))) < 100
    assert conversation.answers[0].finish_reason == "cancelled"
    assert bool(conversation.messages) == bool(conversation.answers[0].text)


def test_a_conversation_that_is_longer_than_the_model_takes(tokenizer: Any, tmp_path: Path) -> None:
    folder = chat_checkpoint(tmp_path / "short", max_position_embeddings=64, eos_token_id=None)
    with Service(folder, ServiceOptions(max_batch=1), tokenizer) as started:
        conversation = Conversation(started, tokenizer, Sampling(max_new_tokens=5000))
        list(conversation.say("the dog"))
        usage = conversation.answers[0].usage
        assert usage.prompt + usage.new == 64  # an answer has what room there is
        said = conversation.messages
        with pytest.raises(ValueError, match=r"has come to \d+ tokens, .* room for 64, .*/reset"):
            next(conversation.say("the fox"))
        assert conversation.messages == said
        conversation.reset()
        assert next(conversation.say("the fox"))
