"""What becomes of events in OpenAI's words, without a server: where tokens lie in the text that is returned."""

from __future__ import annotations

from typing import Any

import pytest

from surgeon.checkpoint.texts import UNFINISHED
from surgeon.runtime.batching.request import Event, Request, Sampling, TokenLogprob
from surgeon.runtime.batching.scheduler import Output
from surgeon.runtime.service import OpenRequest
from surgeon.server.answers import ChatFormat, CompletionFormat, Reply
from surgeon.server.bodies import Texts
from tests.checkpoint.test_texts import byte_fallback_tokenizer
from tests.tiny_models import tiny_tokenizer

PROMPT = "The naïve 🦊 dog"
NEW = " went — on:\u200b 🦊🦊 狐狸, sleeping"


def tokens_of(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def events_of(
    tokenizer: Any, prompt: list[int], tokens: list[int], stop: tuple[str, ...] = ()
) -> list[Event]:
    """What a service tells of new tokens."""
    opened = OpenRequest(Request(0, tuple(prompt), Sampling(stop=stop)), tokenizer)
    events = []
    for place, token in enumerate(tokens):
        reason = "length" if place == len(tokens) - 1 else None
        event = opened.event(Output(0, token, TokenLogprob(token, -1.0), reason, 0, 0.0))
        assert isinstance(event, Event)
        events.append(event)
    return events


def check(tokenizer: Any, found: dict[str, Any]) -> int:
    """How many tokens are visible: all of these begin where it is said, and no token where the text has ended."""
    text, logprobs = found["text"], found["logprobs"]
    visible = 0
    assert len(logprobs["tokens"]) == len(logprobs["text_offset"])
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert 0 <= offset <= len(text)
        if UNFINISHED not in token and token not in tokenizer.all_special_tokens:
            assert text[offset:].startswith(token), (token, text[offset:])
            visible += 1
    return visible


@pytest.mark.parametrize("echo", [False, True])
def test_offsets_after_special_tokens_and_characters_of_several_tokens(echo: bool) -> None:
    tokenizer = tiny_tokenizer()
    texts, special = Texts(tokenizer), tokenizer.eos_token_id
    new = tokens_of(tokenizer, NEW)
    # A special token within the text, one within a character, and a byte that never becomes a character.
    tokens = [
        *new,
        special,
        *tokens_of(tokenizer, "dog"),
        *tokens_of(tokenizer, "🦊")[:1],
        *new,
        special,
    ]
    for given in (PROMPT, tokenizer(PROMPT).input_ids):
        prompt = texts.locate(texts.prompt(given, 99))
        style = CompletionFormat("tiny", texts, wants_logprobs=True, echo=echo)
        events = events_of(tokenizer, prompt.tokens, tokens)
        whole, streamed = Reply(prompt=prompt), Reply(prompt=prompt)
        pieces = []
        for event in events:
            for answer in (whole, streamed):
                answer.add(event)
            pieces += style.pieces(0, streamed, event)
        for answer in (whole, streamed):
            answer.prompt_logprobs = [TokenLogprob(token, -1.0) for token in prompt.tokens[1:]]
        found = style.whole([whole], {})["choices"][0]
        assert check(tokenizer, found) >= 20
        assert found["text"] == (PROMPT if echo else "") + NEW + "dog" + UNFINISHED + NEW
        assert "".join(piece["text"] for piece in pieces) == found["text"]
        offsets = [offset for piece in pieces for offset in piece["logprobs"]["text_offset"]]
        assert offsets == found["logprobs"]["text_offset"]


def test_offsets_of_bytes_that_are_shown_one_by_one_until_they_are_a_character() -> None:
    tokenizer = byte_fallback_tokenizer()
    ids = tokenizer.convert_tokens_to_ids
    fox = ids([f"<0x{byte:02X}>" for byte in "🦊".encode()])
    events = events_of(
        tokenizer, [ids("▁The")], [ids("▁fox"), *fox, ids(","), fox[0], ids("▁sees"), *fox, ids("fox")]
    )
    text = "".join(event.text for event in events)
    assert text == " fox🦊,\ufffd sees🦊fox"
    assert [event.offsets[0] for event in events] == [0, 4, 4, 4, 4, 5, 6, 7, 12, 12, 12, 12, 13]


@pytest.mark.parametrize("text", ["fox</s>jumps", "</s></s>naïve dog", "dog 🦊</s>"])
def test_prompts_with_special_tokens_in_their_text(text: str) -> None:
    tokenizer = tiny_tokenizer()
    texts = Texts(tokenizer)
    prompt = texts.locate(texts.prompt(text, 99))
    assert len(prompt.offsets) == len(prompt.tokens)
    assert prompt.offsets == sorted(prompt.offsets)
    for token, offset in list(zip(prompt.tokens, prompt.offsets, strict=True))[1:]:
        piece = texts.piece(token)
        assert UNFINISHED in piece or text[offset:].startswith(piece)


def test_offsets_in_long_texts() -> None:
    """Tokens of long ago are forgotten, their characters are not."""
    tokenizer = tiny_tokenizer()
    tokens = tokens_of(tokenizer, NEW * 12)
    events = events_of(tokenizer, tokenizer(PROMPT).input_ids, tokens)
    text, texts = "".join(event.text for event in events), Texts(tokenizer)
    assert text == NEW * 12
    for token, event in zip(tokens, events, strict=True):
        piece = texts.piece(token)
        assert UNFINISHED in piece or text[event.offsets[0] :].startswith(piece)
    whole = [event.offsets[0] for event in events_of(tokenizer, [], tokens)]
    assert whole == [event.offsets[0] for event in events]


def test_tokens_whose_text_is_kept_back_have_chunks_of_a_stream() -> None:
    tokenizer = tiny_tokenizer()
    texts, tokens = Texts(tokenizer), tokens_of(tokenizer, "🦊 dog")
    events = events_of(tokenizer, [5], tokens)
    assert "" in [event.text for event in events]
    completion, chat = CompletionFormat("model", texts, False, False), ChatFormat("model", texts, False)
    answers = Reply(prompt=texts.prompt([5], 99)), Reply(prompt=texts.prompt([5], 99))
    pieces = [completion.pieces(0, answers[0], event) for event in events]
    assert [[piece["text"] for piece in found] for found in pieces] == [[event.text] for event in events]
    deltas = [[piece["delta"] for piece in chat.pieces(0, answers[1], event)] for event in events]
    assert [found[0].get("content") for found in deltas[1:-1]] == [event.text for event in events[1:-1]]
    assert deltas[0][0] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("wants_logprobs", [False, True])
def test_chats_have_a_chunk_for_every_token_the_end_token_among_them(wants_logprobs: bool) -> None:
    tokenizer = tiny_tokenizer()
    texts, tokens = Texts(tokenizer), [*tokens_of(tokenizer, "🦊 dog"), tokenizer.eos_token_id]
    opened = OpenRequest(Request(0, (5,), Sampling()), tokenizer)
    chat, answer = ChatFormat("model", texts, wants_logprobs), Reply(prompt=texts.prompt([5], 99))
    pieces = []
    for token in tokens:
        logprob = TokenLogprob(token, -1.0) if wants_logprobs else None
        event = opened.event(Output(0, token, logprob, "stop" if token == tokens[-1] else None, 0, 0.0))
        assert isinstance(event, Event)
        pieces += chat.pieces(0, answer, event)
    assert pieces[0]["delta"] == {"role": "assistant", "content": ""}
    assert len(pieces) == 1 + len(tokens) + 1
    assert "".join(piece["delta"]["content"] for piece in pieces[:-1]) == "🦊 dog"
    assert (pieces[-1]["delta"], pieces[-1]["finish_reason"]) == ({}, "stop")
    cancelled = chat.pieces(
        0, answer, OpenRequest(Request(1, (5,), Sampling()), tokenizer).cancelled_event()
    )
    assert [piece["delta"] for piece in cancelled] == [{}]
