"""Endpoints and parameters, asked for with OpenAI's own client, against `transformers` in this process."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM

import surgeon
from tests.server.servers import serving
from tests.tiny_models import TEMPLATE, save_checkpoint, tiny_tokenizer

if TYPE_CHECKING:
    from tests.server.servers import Server

PROMPT = "The quick brown fox"
NEW = 24
GREEDY: dict[str, Any] = {"model": "tiny-chat", "temperature": 0, "max_tokens": NEW}
IGNORE_END = {"ignore_eos": True}


@pytest.fixture(scope="session")
def reference(chat_model: Path) -> Any:
    """The model on one device."""
    return surgeon.load(chat_model)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def greedy_tokens(reference: Any, tokens: list[int], new: int = NEW) -> list[int]:
    """What `transformers` adds, end tokens or not."""
    sampled = reference.generate(
        torch.tensor([tokens]),
        do_sample=False,
        max_new_tokens=new,
        min_new_tokens=new,
        eos_token_id=None,
    )
    return sampled[0, len(tokens) :].tolist()


def text_of(tokenizer: Any, prompt: list[int], new: list[int]) -> str:
    """What new tokens add to the text of a prompt."""
    before = tokenizer.decode(prompt, skip_special_tokens=True)
    return tokenizer.decode(prompt + new, skip_special_tokens=True)[len(before) :]


def streamed(chunks: Any) -> tuple[str, list[Any]]:
    """The text of a completion's stream, and its chunks."""
    found = list(chunks)
    return "".join(choice.text for chunk in found for choice in chunk.choices), found


def test_the_only_model_is_listed(client: OpenAI) -> None:
    assert [card.id for card in client.models.list()] == ["tiny-chat"]
    assert client.models.retrieve("tiny-chat").owned_by == "surgeon"
    with pytest.raises(
        openai.NotFoundError, match="there is no model 'tiny-chad' here; did you mean 'tiny-chat'"
    ):
        client.models.retrieve("tiny-chad")


def test_whole_and_streamed_are_what_the_model_says(
    client: OpenAI, reference: Any, tokenizer: Any
) -> None:
    tokens = tokenizer(PROMPT).input_ids
    expected = text_of(tokenizer, tokens, greedy_tokens(reference, tokens))
    whole = client.completions.create(prompt=PROMPT, **GREEDY, extra_body=IGNORE_END)
    assert whole.choices[0].text == expected
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(tokens), NEW)
    assert whole.usage.total_tokens == len(tokens) + NEW
    text, chunks = streamed(
        client.completions.create(prompt=PROMPT, **GREEDY, stream=True, extra_body=IGNORE_END)
    )
    assert text == expected
    assert len(chunks) > 3
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [
        "length"
    ]


def test_offline_service_says_the_same(client: OpenAI, chat_model: Path, tokenizer: Any) -> None:
    from surgeon.runtime.batching.request import Sampling
    from surgeon.runtime.service import Service, ServiceOptions
    from surgeon.runtime.worker.rank import RankOptions

    wanted = Sampling(
        temperature=0.9,
        top_k=20,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.1,
        seed=7,
        max_new_tokens=NEW,
    )
    with Service(chat_model, ServiceOptions(RankOptions(2)), tokenizer) as service:
        offline = "".join(event.text for event in service.submit(tokenizer(PROMPT).input_ids, wanted))
    asked: dict[str, Any] = {**GREEDY, "temperature": 0.9, "top_p": 0.95, "seed": 7}
    extra = {"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1}
    assert client.completions.create(prompt=PROMPT, **asked, extra_body=extra).choices[0].text == offline
    text, _ = streamed(client.completions.create(prompt=PROMPT, **asked, stream=True, extra_body=extra))
    assert text == offline


@pytest.mark.parametrize(
    "change", [{"top_p": 0}, {"top_p": 0.05}, {"top_k": 1}, {"min_p": 1.0}], ids=str
)
def test_filters_that_leave_one_token_are_greedy(server: Server, change: dict[str, Any]) -> None:
    greedy = server.post("/v1/completions", prompt=PROMPT, temperature=0, max_tokens=NEW).json()
    filtered = server.post(
        "/v1/completions", prompt=PROMPT, temperature=0.7, max_tokens=NEW, **change
    ).json()
    free = server.post("/v1/completions", prompt=PROMPT, temperature=5, max_tokens=NEW, seed=1).json()
    texts = [answer["choices"][0]["text"] for answer in (greedy, filtered, free)]
    assert texts[0] == texts[1] != texts[2]


def test_seeds_repeat_and_differ(client: OpenAI) -> None:
    def text(seed: int) -> str:
        return (
            client.completions.create(prompt=PROMPT, model="tiny-chat", seed=seed, max_tokens=NEW)
            .choices[0]
            .text
        )

    assert text(1) == text(1) != text(2)


def test_several_prompts_and_choices(client: OpenAI, tokenizer: Any) -> None:
    prompts = [PROMPT, PROMPT]
    asked: dict[str, Any] = {"model": "tiny-chat", "seed": 3, "max_tokens": 8}
    found = client.completions.create(prompt=prompts, n=2, **asked)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in found.choices}) == 4  # each draws numbers of its own
    alone = client.completions.create(prompt=PROMPT, **asked)
    assert found.choices[0].text == alone.choices[0].text
    beside = client.completions.create(prompt=["lazy dog", PROMPT], n=2, **asked)
    assert [choice.text for choice in beside.choices[2:]] == [
        choice.text for choice in found.choices[2:]
    ]
    assert found.usage is not None
    assert found.usage.prompt_tokens == sum(len(tokenizer(prompt).input_ids) for prompt in prompts)
    texts = [""] * 4
    for chunk in client.completions.create(prompt=prompts, n=2, stream=True, **asked):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in found.choices]


def test_token_ids_and_echo(client: OpenAI, tokenizer: Any) -> None:
    tokens = tokenizer(PROMPT).input_ids
    as_text = client.completions.create(prompt=PROMPT, **GREEDY).choices[0].text
    for prompt in (PROMPT, tokens, [tokens]):
        found = client.completions.create(prompt=prompt, echo=True, **GREEDY)
        assert found.choices[0].text == PROMPT + as_text
        assert (
            streamed(client.completions.create(prompt=prompt, echo=True, stream=True, **GREEDY))[0]
            == PROMPT + as_text
        )


def test_stop_texts(client: OpenAI) -> None:
    whole = client.completions.create(prompt=PROMPT, **GREEDY, extra_body=IGNORE_END).choices[0].text
    stop = whole[len(whole) // 2 :][:2]
    before = whole[: whole.index(stop)]
    for given in (stop, ["never written", stop]):
        found = client.completions.create(prompt=PROMPT, stop=given, **GREEDY, extra_body=IGNORE_END)
        assert (found.choices[0].text, found.choices[0].finish_reason) == (before, "stop")
        text, chunks = streamed(
            client.completions.create(
                prompt=PROMPT, stop=given, stream=True, **GREEDY, extra_body=IGNORE_END
            )
        )
        assert (text, chunks[-1].choices[0].finish_reason) == (before, "stop")


def test_end_tokens_end_unless_ignored(client: OpenAI, tokenizer: Any) -> None:
    """A penalty near 0 makes tokens of the prompt, the end token among them, far likelier than all others."""
    prompt = [*tokenizer(PROMPT).input_ids, tokenizer.eos_token_id]
    extra = {"repetition_penalty": 0.1}
    ended = client.completions.create(prompt=prompt, **GREEDY, extra_body=extra)
    assert ended.choices[0].finish_reason == "stop"
    assert ended.usage is not None
    assert ended.usage.completion_tokens < NEW
    going_on = client.completions.create(prompt=prompt, **GREEDY, extra_body=extra | IGNORE_END)
    assert going_on.choices[0].finish_reason == "length"
    assert going_on.usage is not None
    assert going_on.usage.completion_tokens == NEW


def test_logprobs_are_the_models(client: OpenAI, reference: Any, tokenizer: Any) -> None:
    tokens = tokenizer(PROMPT).input_ids
    new = greedy_tokens(reference, tokens, 6)
    with torch.no_grad():
        logits = reference(torch.tensor([tokens + new])).logits[0, len(tokens) - 1 : -1]
    expected = logits.double().log_softmax(-1)
    best = expected.topk(3)
    asked: dict[str, Any] = {**GREEDY, "max_tokens": 6}
    found = (
        client.completions.create(prompt=PROMPT, logprobs=3, **asked, extra_body=IGNORE_END)
        .choices[0]
        .logprobs
    )
    assert found is not None
    chosen = [expected[place, token].item() for place, token in enumerate(new)]
    assert found.token_logprobs == pytest.approx(chosen, abs=1e-4)
    assert found.top_logprobs is not None
    for place, top in enumerate(found.top_logprobs):
        assert sorted(top.values(), reverse=True)[:1] == pytest.approx(
            best.values[place, :1].tolist(), abs=1e-4
        )
        assert top[found.tokens[place]] == pytest.approx(chosen[place], abs=1e-4)
    pieces = [
        chunk.choices[0].logprobs
        for chunk in client.completions.create(
            prompt=PROMPT, logprobs=3, stream=True, **asked, extra_body=IGNORE_END
        )
    ]
    assert [value for piece in pieces for value in piece.token_logprobs] == found.token_logprobs
    assert [value for piece in pieces for value in piece.text_offset] == found.text_offset


def test_echoed_prompts_are_scored(client: OpenAI, reference: Any, tokenizer: Any) -> None:
    are_scored(client, reference, tokenizer)


@pytest.mark.thorough
def test_echoed_prompts_are_scored_where_drafts_are_on(
    chat_model: Path, reference: Any, tokenizer: Any
) -> None:
    """As without them: prompts are the verifying model's, and so are the chances of tokens that were drafted."""
    with serving(
        str(chat_model), "--draft", "A0 F0 [A1 A2] [F1 F2] A3 F3", "--draft-tokens", "3"
    ) as server:
        are_scored(OpenAI(base_url=f"{server.url}/v1", api_key="none"), reference, tokenizer)
        assert server.metrics()["surgeon_accepted_total"] > 0


def are_scored(client: OpenAI, reference: Any, tokenizer: Any) -> None:
    """As `transformers` does, whole and streamed, given as text and as token ids, with new tokens and without."""
    tokens = tokenizer(PROMPT).input_ids
    new = greedy_tokens(reference, tokens, 4)
    with torch.no_grad():
        expected = reference(torch.tensor([tokens + new])).logits[0, :-1].double().log_softmax(-1)
    chosen = [expected[place, token].item() for place, token in enumerate((tokens + new)[1:])]
    for prompt, added in ((PROMPT, 4), (tokens, 4), (tokens, 0)):
        asked: dict[str, Any] = {
            **GREEDY,
            "max_tokens": added,
            "logprobs": 2,
            "echo": True,
            "extra_body": IGNORE_END,
        }
        found = client.completions.create(prompt=prompt, **asked)
        choice, logprobs = found.choices[0], found.choices[0].logprobs
        assert logprobs is not None
        assert choice.text == PROMPT + text_of(tokenizer, tokens, new[:added])
        assert choice.finish_reason == "length"
        assert found.usage is not None
        assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(tokens), added)
        values = logprobs.token_logprobs
        assert values is not None
        assert values[0] is None
        assert values[1:] == pytest.approx(chosen[: len(tokens) - 1 + added], abs=1e-4)
        assert logprobs.top_logprobs is not None
        assert logprobs.top_logprobs[0] is None
        for place, (token, top) in enumerate(
            zip(logprobs.tokens[1:], logprobs.top_logprobs[1:], strict=True)
        ):
            assert max(top.values()) == pytest.approx(expected[place].max().item(), abs=1e-4)
            assert top[token] == pytest.approx(chosen[place], abs=1e-4)
        assert logprobs.tokens[0] == "<s>"
        assert "".join(logprobs.tokens[1 : len(tokens)]) == PROMPT
        # The first token, <s>, is no text.
        assert logprobs.text_offset is not None
        starts = [0, *(len("".join(logprobs.tokens[1:end])) for end in range(1, len(tokens)))]
        assert logprobs.text_offset[: len(tokens)] == starts
        for token, offset in zip(
            logprobs.tokens[len(tokens) :], logprobs.text_offset[len(tokens) :], strict=True
        ):
            assert choice.text[offset:].startswith(token) or "\ufffd" in token or token == "</s>"
        chunks = list(client.completions.create(prompt=prompt, stream=True, **asked))
        assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
        pieces = [chunk.choices[0].logprobs for chunk in chunks]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [one for piece in pieces for one in getattr(piece, name)] == getattr(logprobs, name)


def test_several_echoed_prompts_are_scored_apart(client: OpenAI, tokenizer: Any) -> None:
    prompts = [tokenizer(text).input_ids for text in (PROMPT, "lazy dog", PROMPT + " jumps")]
    asked: dict[str, Any] = {**GREEDY, "max_tokens": 1, "logprobs": 1, "echo": True}
    together = client.completions.create(prompt=prompts, **asked).choices
    for prompt, choice in zip(prompts, together, strict=True):
        alone = client.completions.create(prompt=prompt, **asked).choices[0]
        assert choice.logprobs is not None
        assert alone.logprobs is not None
        assert choice.logprobs.tokens == alone.logprobs.tokens
        assert len(choice.logprobs.tokens) == len(prompt) + 1
        values = [logprobs.token_logprobs for logprobs in (choice.logprobs, alone.logprobs)]
        assert values[0] is not None
        assert values[1] is not None
        assert values[0][1:] == pytest.approx(values[1][1:], abs=1e-4)


def test_echo_without_anything_else(client: OpenAI) -> None:
    asked: dict[str, Any] = {**GREEDY, "max_tokens": 0, "echo": True}
    found = client.completions.create(prompt=PROMPT, **asked).choices[0]
    assert (found.text, found.finish_reason, found.logprobs) == (PROMPT, "length", None)
    assert streamed(client.completions.create(prompt=PROMPT, stream=True, **asked))[0] == PROMPT


def chat_text(chunks: list[Any]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def test_chat_uses_the_models_template(client: OpenAI, reference: Any, tokenizer: Any) -> None:
    messages: Any = [
        {"role": "system", "content": "Be quick."},
        {"role": "user", "content": "Who jumps?"},
    ]
    tokens = tokenizer("[system] Be quick. [user] Who jumps? [assistant] ").input_ids
    expected = text_of(tokenizer, tokens, greedy_tokens(reference, tokens))
    asked: dict[str, Any] = {
        "model": "tiny-chat",
        "temperature": 0,
        "max_completion_tokens": NEW,
        "extra_body": IGNORE_END,
    }
    whole = client.chat.completions.create(messages=messages, **asked)
    assert (whole.choices[0].message.role, whole.choices[0].message.content) == ("assistant", expected)
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(tokens)
    chunks = list(client.chat.completions.create(messages=messages, stream=True, **asked))
    assert chat_text(chunks) == expected
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "length"
    parts = [{"type": "text", "text": "Who "}, {"type": "text", "text": "jumps?"}]
    in_parts = client.chat.completions.create(
        messages=[messages[0], {"role": "user", "content": parts}], **asked
    )
    assert in_parts.choices[0].message.content == expected


def test_the_template_gets_what_clients_give_it(client: OpenAI, tokenizer: Any) -> None:
    asked: dict[str, Any] = {**GREEDY, "messages": [{"role": "user", "content": "the lazy dog"}]}
    for thinking, text in ((False, "[quiet] "), (True, "")):
        kwargs = {"enable_thinking": thinking, "of no meaning here": [1, {"a": None}]}
        found = client.chat.completions.create(**asked, extra_body={"chat_template_kwargs": kwargs})
        prompt = f"<s>[user] the lazy dog {text}[assistant] "
        assert found.usage is not None
        assert found.usage.prompt_tokens == len(tokenizer(prompt, add_special_tokens=False).input_ids)
        same = client.completions.create(
            prompt=tokenizer(prompt, add_special_tokens=False).input_ids, **GREEDY
        )
        assert found.choices[0].message.content == same.choices[0].text


def test_chat_logprobs_and_usage(client: OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny-chat",
        "messages": [{"role": "user", "content": "Who jumps?"}],
        "temperature": 0,
        "max_tokens": 5,
        "logprobs": True,
        "top_logprobs": 2,
        "n": 2,
        "extra_body": IGNORE_END,
    }
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == whole.choices[1].message.content
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 5
    for token in logprobs.content:
        assert token.logprob == token.top_logprobs[0].logprob > token.top_logprobs[1].logprob
        assert math.exp(token.logprob) <= 1
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 10
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_begun_prompts_are_shared(server: Server) -> None:
    before = server.metrics()
    prompt = "a fox that nobody has seen before " * 4
    first, second = (
        server.post("/v1/completions", prompt=prompt, max_tokens=2).json()["usage"] for _ in range(2)
    )
    assert first["prompt_tokens_details"]["cached_tokens"] < 16
    assert second["prompt_tokens_details"]["cached_tokens"] == (second["prompt_tokens"] - 1) // 16 * 16
    after = server.metrics()
    assert after["surgeon_cached_tokens_total"] > before["surgeon_cached_tokens_total"]


def test_metrics_count(server: Server, tokenizer: Any) -> None:
    before = server.metrics()
    assert server.ask("GET", "/health").json() == {"status": "ok"}
    server.post("/v1/completions", prompt=PROMPT, temperature=0, max_tokens=10, ignore_eos=True)
    after = server.wait_for(lambda found: found["surgeon_running"] == 0)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown['surgeon_http_requests_total{path="/v1/completions",status="200"}'] == 1
    assert grown["surgeon_new_tokens_total"] == 10
    assert grown["surgeon_prompt_tokens_total"] == len(tokenizer(PROMPT).input_ids)
    assert grown["surgeon_passes_total"] == 10
    for name in ("queue", "time_to_first_token", "time_per_output_token"):
        assert grown[f"surgeon_{name}_seconds_count"] == 1
    assert after["surgeon_used_blocks"] == 0
    assert after["surgeon_up"] == 1


def test_settings_of_the_checkpoint_are_what_requests_that_do_not_say_get(
    chat_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "with-settings"
    shutil.copytree(chat_model, folder)
    settings = {
        "repetition_penalty": 2.5,
        "suppress_tokens": [40, 41, 42, 43],
        "do_sample": True,
        "top_k": 3,
    }
    (folder / "generation_config.json").write_text(json.dumps(settings))
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokens = tokenizer(PROMPT).input_ids
    expected = model.generate(
        torch.tensor([tokens]), do_sample=False, top_k=None, max_new_tokens=NEW, eos_token_id=None
    )[0].tolist()
    with serving(str(folder)) as server:
        fields: dict[str, Any] = {"prompt": PROMPT, "max_tokens": NEW, "temperature": 0, **IGNORE_END}
        own, other = (
            server.post("/v1/completions", **fields, **more).json()["choices"][0]["text"]
            for more in ({}, {"repetition_penalty": 1.0})
        )
        assert own == text_of(tokenizer, tokens, expected[len(tokens) :])
        assert other != own
        complaints = [line for line in server.lines if "generation_config.json" in line]
        assert len(complaints) == 1
        assert (
            "do_sample (true), top_k (3), which is not applied; requests have to say so" in complaints[0]
        )


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_mixtures_answer_several_at_once(family: str, tokenizer: Any, tmp_path: Path) -> None:
    """Prompts that begin alike, asked for together and again, with room for two texts at a time."""
    folder = save_checkpoint(tmp_path / family, family)
    model = surgeon.load(folder)
    prompts = [
        f"{PROMPT} jumps over the lazy dog, and the dog {end}"
        for end in ("", "went on", "1234567890", PROMPT)
    ]
    tokens = [tokenizer(prompt).input_ids for prompt in prompts]
    expected = [text_of(tokenizer, each, greedy_tokens(model, each)) for each in tokens]
    with serving(str(folder), "--tp", "2", "--max-batch", "2") as server:
        for _ in range(2):
            asked = server.post(
                "/v1/completions", prompt=prompts, temperature=0, max_tokens=NEW, **IGNORE_END
            )
            assert [choice["text"] for choice in asked.json()["choices"]] == expected
        assert server.metrics()["surgeon_cached_tokens_total"] > 0
