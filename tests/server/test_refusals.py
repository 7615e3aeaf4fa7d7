"""What is refused, and in which words; that clients which go away take their requests with them."""

from __future__ import annotations

import json
import re
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import openai
import psutil
import pytest

from tests.waiting import takes_less_than

if TYPE_CHECKING:
    from openai import OpenAI

    from tests.server.servers import Server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "a"}
LONG = {"prompt": "The quick brown fox", "max_tokens": 4000, "ignore_eos": True, "temperature": 0}

NO_JSON = "chat_template_kwargs", "chat_template_kwargs is no JSON"

# Path, body, the field named, and what the message says.
BAD: list[tuple[str, Any, str | None, str]] = [
    (COMPLETIONS, b"{", None, "the body is not valid JSON: .* \\(at character 1\\)"),
    (COMPLETIONS, b"\xff", None, "the body"),
    (COMPLETIONS, b"[" * 100_000, None, "the body"),
    (COMPLETIONS, [], None, "the body must be a JSON object"),
    (COMPLETIONS, "text", None, "the body must be a JSON object"),
    (COMPLETIONS, {}, "prompt", "prompt is missing"),
    (COMPLETIONS, {"prompt": 5}, "prompt", "prompt must be a text, a list of texts, .*, not 5"),
    (COMPLETIONS, {"prompt": []}, "prompt", "prompt is empty"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt", "prompt is empty"),
    (COMPLETIONS, {"prompt": ["a", 1]}, "prompt", "prompt must be"),
    (COMPLETIONS, {"prompt": [True]}, "prompt", "prompt must be"),
    (COMPLETIONS, {"prompt": [5, 1000]}, "prompt", "token ids .* 0\\.\\.299"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt", "token ids .* 0\\.\\.299"),
    (COMPLETIONS, b'{"prompt": "\\ud800"}', "prompt", "prompt is not text in UTF-8"),
    (
        COMPLETIONS,
        {"prompt": [7] * 8192},
        "prompt",
        "the prompt has 8192 tokens; at most 8191 leave room",
    ),
    (
        COMPLETIONS,
        {"prompt": ["a"] * 13},
        "prompt",
        "prompts times n are 13 answers; this server takes 12",
    ),
    (COMPLETIONS, {"prompt": "a", "n": 13}, "n", "prompts times n are 13 answers; this server takes 12"),
    (COMPLETIONS, {"prompt": "a", "n": 0}, "n", "n must be in 1..128, not 0"),
    (
        COMPLETIONS,
        {"prompt": "a", "max_tokens": 0},
        "max_tokens",
        "at least 1, not 0 \\(with echo it may be 0\\)$",
    ),
    (
        COMPLETIONS,
        {"prompt": [7], "max_tokens": 10**30},
        "max_tokens",
        "max_tokens is 10+ .* 1 tokens; .* 8192 at most",
    ),
    (
        COMPLETIONS,
        {"prompt": [7], "max_completion_tokens": 8192},
        "max_completion_tokens",
        "is 8192 .* 8192 at most",
    ),
    (
        COMPLETIONS,
        {"prompt": "a", "max_tokens": 1, "max_completion_tokens": 2},
        "max_completion_tokens",
        "one of them",
    ),
    (
        COMPLETIONS,
        {"prompt": "a", "max_tokens": "9"},
        "max_tokens",
        "max_tokens must be a valid integer, not '9'",
    ),
    (
        COMPLETIONS,
        {"prompt": "a", "temperature": "hot"},
        "temperature",
        "temperature must be a valid number, not 'hot'",
    ),
    (
        COMPLETIONS,
        {"prompt": "a", "temperature": -1},
        "temperature",
        "temperature must be at least 0, not -1",
    ),
    (
        COMPLETIONS,
        b'{"prompt": "a", "temperature": NaN}',
        "temperature",
        "temperature must be at least 0, not nan",
    ),
    (COMPLETIONS, {"prompt": "a", "top_p": -0.1}, "top_p", "top_p must be in 0..1, not -0.1"),
    (COMPLETIONS, {"prompt": "a", "top_k": -2}, "top_k", "top_k must be at least 0"),
    (COMPLETIONS, {"prompt": "a", "min_p": 2}, "min_p", "min_p must be in 0..1, not 2"),
    (
        COMPLETIONS,
        {"prompt": "a", "repetition_penalty": 0},
        "repetition_penalty",
        "repetition_penalty must be above 0",
    ),
    (COMPLETIONS, {"prompt": "a", "seed": 1 << 70}, "seed", "seed must be within 64 bits"),
    (COMPLETIONS, {"prompt": "a", "stop": 3}, "stop", "stop must be a text or a list of texts, not 3"),
    (COMPLETIONS, {"prompt": "a", "stop": [""]}, "stop", "stop must be up to 64 texts"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 65}, "logprobs", "logprobs must be in 0..64, not 65"),
    (
        COMPLETIONS,
        {"prompt": "a", "logprobs": 65, "echo": True},
        "logprobs",
        "logprobs must be in 0..64, not 65",
    ),
    (
        COMPLETIONS,
        {"prompt": [7] * 8193, "max_tokens": 0, "echo": True},
        "prompt",
        "8193 tokens; at most 8192 fit",
    ),
    (COMPLETIONS, {"prompt": "a", "max_tokens": -1, "echo": True}, "max_tokens", "at least 0, not -1"),
    (CHAT, {"messages": [USER], "max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, not 0$"),
    (
        COMPLETIONS,
        {"prompt": "a", "stream": "yes"},
        "stream",
        "stream must be a valid boolean, not 'yes'",
    ),
    (
        COMPLETIONS,
        {"prompt": "a", "stream": True, "stream_options": 1},
        "stream_options",
        "must be an object",
    ),
    (
        COMPLETIONS,
        {"prompt": "a", "stream": True, "stream_options": {"include_usage": "x", "of_others": 1}},
        "stream_options",
        "stream_options.include_usage must be true or false, not 'x'",
    ),
    (
        COMPLETIONS,
        {"prompt": "a", "stream_options": {}},
        "stream_options",
        "stream_options needs stream",
    ),
    (
        COMPLETIONS,
        {"prompt": "a", "temprature": 1},
        "temprature",
        "no field 'temprature'; did you mean 'temperature'",
    ),
    (
        COMPLETIONS,
        {"prompt": "a", "logit_bias": {"5": 1}},
        "logit_bias",
        "logit_bias is not supported; leave it out",
    ),
    (COMPLETIONS, {"prompt": "a", "presence_penalty": 0.5}, "presence_penalty", "is not supported"),
    (CHAT, {}, "messages", "messages is missing"),
    (CHAT, {"messages": []}, "messages", "messages is empty"),
    (CHAT, {"messages": "hello"}, "messages", "messages must be a list of messages"),
    (
        CHAT,
        {"messages": [USER, 1]},
        "messages",
        'messages.1 must be a message such as {"role": "user", "content": "Hello"}, not 1',
    ),
    (CHAT, {"messages": [{"content": "a"}]}, "messages", "messages.0.role must be a text"),
    (CHAT, {"messages": [USER, {"role": "user"}]}, "messages", "messages.1.content must be a text"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages",
        "messages.0.content.0",
    ),
    (
        CHAT,
        {"messages": [{"role": "oracle", "content": "a"}]},
        "messages",
        "roles are system, user and assistant",
    ),
    (CHAT, {"messages": [USER], "top_logprobs": 2}, "top_logprobs", "top_logprobs needs logprobs"),
    (
        CHAT,
        {"messages": [USER], "logprobs": True, "top_logprobs": 99},
        "top_logprobs",
        "top_logprobs must be in 0..64",
    ),
    (CHAT, {"messages": [USER], "tools": [{"type": "function"}]}, "tools", "tools is not supported"),
    (
        CHAT,
        {"messages": [USER], "chat_template_kwargs": [1]},
        "chat_template_kwargs",
        "must be an object such as",
    ),
    *(
        (
            CHAT,
            {"messages": [USER], "chat_template_kwargs": {name: 1}},
            "chat_template_kwargs",
            f"must not have {name},",
        )
        for name in (
            "messages",
            "tools",
            "chat_template",
            "add_generation_prompt",
            "tokenize",
            "bos_token",
        )
    ),
    (
        CHAT,
        b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": NaN}}',
        *NO_JSON,
    ),
    (
        CHAT,
        b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": "\\ud800"}}',
        *NO_JSON,
    ),
    (
        CHAT,
        {"messages": [USER], "chat_template_kwargs": {"a": "b" * 70_000}},
        "chat_template_kwargs",
        "has 70009 bytes of JSON; at most 65536 are taken",
    ),
    (
        COMPLETIONS,
        {"prompt": "a", "chat_template_kwargs": {}},
        "chat_template_kwargs",
        "there is no field",
    ),
]


@pytest.mark.parametrize(("path", "body", "param", "message"), BAD, ids=lambda value: repr(value)[:40])
def test_bad_bodies(server: Server, path: str, body: Any, param: str | None, message: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = server.ask("POST", path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert re.search(message, error["message"]), error["message"]


FAR_TOO_LONG = "The quick brown fox jumps over the lazy dog. " * 200_000


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt": FAR_TOO_LONG}),
        (COMPLETIONS, {"prompt": ["a", FAR_TOO_LONG], "echo": True, "logprobs": 1}),
        (COMPLETIONS, {"prompt": [7] * 2_000_000, "echo": True, "logprobs": 1}),
        (CHAT, {"messages": [USER, USER | {"content": FAR_TOO_LONG}]}),
        (COMPLETIONS, {"prompt": "a", "stop": FAR_TOO_LONG}),
        (COMPLETIONS, {"prompt": "a", "stop": ["a b c"] * 1_000_000}),
    ],
    ids=["text", "texts", "tokens", "chat", "stop", "stops"],
)
def test_what_is_far_too_long_is_refused_at_once(
    server: Server, path: str, fields: dict[str, Any]
) -> None:
    rss = psutil.Process(server.process.pid).memory_info().rss

    def seconds() -> float:
        began = time.monotonic()
        answer = server.post(path, **fields)
        ended = time.monotonic()
        assert answer.status_code == 400
        assert len(answer.text) < 1000
        return ended - began

    assert takes_less_than(6, seconds)
    assert psutil.Process(server.process.pid).memory_info().rss - rss < 400 << 20


def test_ids_of_no_token_are_refused_in_scored_prompts_too(server: Server) -> None:
    answer = server.post(COMPLETIONS, prompt=[5, 10**30], echo=True, logprobs=1)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    "prompt", [[1.5] * 500_000, [[1.5]] * 500_000, ["a"] * 500_000], ids=["a", "b", "c"]
)
def test_many_mistakes_are_one(server: Server, prompt: list[Any]) -> None:
    rss = psutil.Process(server.process.pid).memory_info().rss
    answer = server.post(COMPLETIONS, prompt=prompt)
    assert answer.status_code == 400
    assert len(answer.text) < 1000
    assert psutil.Process(server.process.pid).memory_info().rss - rss < 300 << 20


def test_fields_that_change_nothing_pass(server: Server) -> None:
    neutral = {
        "user": "me",
        "metadata": {"a": "b"},
        "priority": 1,
        "request_id": "mine",
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "best_of": 1,
        "suffix": None,
        "response_format": None,
        "temperature": None,
        "max_tokens": 2,
        "top_k": -1,
    }
    assert server.post(COMPLETIONS, prompt="a", **neutral).status_code == 200


def test_framework_errors_have_the_same_format(server: Server) -> None:
    plain = server.ask(
        "POST", COMPLETIONS, content=b'{"prompt": "a"}', headers={"Content-Type": "text/plain"}
    )
    answers = {
        404: server.ask("GET", "/v1/embeddings"),
        405: server.ask("GET", COMPLETIONS),
        413: server.ask("POST", COMPLETIONS, content=b" " * (17 << 20)),
        400: plain,
    }
    for status, answer in answers.items():
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    chunks = server.ask(
        "POST",
        COMPLETIONS,
        content=(b" " * (1 << 20) for _ in range(17)),
        headers={"Content-Type": "application/json"},
    )
    assert chunks.status_code == 413
    assert chunks.json() == answers[413].json()


def test_unknown_model(client: OpenAI) -> None:
    with pytest.raises(
        openai.NotFoundError, match="there is no model 'gpt-4' here; known: tiny-chat"
    ) as error:
        client.completions.create(model="gpt-4", prompt="a")
    assert error.value.code == "model_not_found"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_blocks(server: Server, stream: bool) -> None:
    before = server.wait_for(lambda found: found["surgeon_running"] == 0)
    with server.open_request(COMPLETIONS, LONG | {"stream": stream}) as connection:
        if stream:
            assert connection.recv(12) == b"HTTP/1.1 200"
        server.wait_for(lambda found: found["surgeon_used_blocks"] > 0)
    after = server.wait_for(
        lambda found: found["surgeon_running"] == 0 and found["surgeon_used_blocks"] == 0
    )
    assert after["surgeon_new_tokens_total"] - before["surgeon_new_tokens_total"] < LONG["max_tokens"]
    gone = 'surgeon_http_requests_total{path="/v1/completions",status="499"}'
    server.wait_for(lambda found: found.get(gone, 0) == before.get(gone, 0) + 1)
    assert server.post(COMPLETIONS, prompt="a", max_tokens=1).status_code == 200


def test_a_full_queue_says_when_to_come_again(server: Server) -> None:
    """Four are computed and eight wait, so the thirteenth is refused, and let in once they are gone."""
    with ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(server.open_request(COMPLETIONS, LONG))
        found = server.wait_for(lambda found: found["surgeon_running"] + found["surgeon_waiting"] == 12)
        assert (found["surgeon_running"], found["surgeon_waiting"]) == (4, 8)
        refused = server.post(COMPLETIONS, prompt="a")
        assert refused.status_code == 429
        assert int(refused.headers["Retry-After"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
        assert "12 requests are open" in refused.json()["error"]["message"]
    server.wait_for(lambda found: found["surgeon_running"] + found["surgeon_waiting"] == 0)
    assert server.post(COMPLETIONS, prompt="a", max_tokens=1).status_code == 200
