"""Web pages of other origins: who is let in, what they may read, and that browsers' questions need no key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from surgeon.commands.serve import warn_if_open
from surgeon.server.state import check_origin

if TYPE_CHECKING:
    from tests.server.servers import Server

PAGE, OTHER, STRANGER = "http://localhost:3000", "https://chat.example", "http://localhost:3001"
KEY = {"Authorization": "Bearer k"}
CHAT = "/v1/chat/completions"
ALLOWED = "access-control-allow-origin"


@pytest.fixture(scope="module")
def open_server(chat_model: Path) -> Iterator[Server]:
    """One that asks for a key and lets two origins in."""
    from tests.server.servers import serving

    with serving(str(chat_model), "--cors-origin", PAGE, "--cors-origin", OTHER, key="k") as started:
        yield started


def preflight(server: Server, origin: str, path: str = CHAT, **headers: str) -> httpx2.Response:
    """What a browser asks before a page sends JSON."""
    asked = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,x-own",
    }
    return httpx2.request("OPTIONS", server.url + path, headers={"Origin": origin, **asked, **headers})


def test_a_browser_asks_without_a_key(open_server: Server) -> None:
    count = 'surgeon_http_requests_total{path="/v1/chat/completions",status="200"}'
    before = open_server.metrics().get(count, 0)
    for origin in (PAGE, OTHER):
        answer = preflight(open_server, origin, **{"Access-Control-Request-Private-Network": "true"})
        assert answer.status_code == 200
        assert answer.headers[ALLOWED] == origin
        assert answer.headers["access-control-allow-headers"] == "authorization,x-own"
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert answer.headers["access-control-allow-private-network"] == "true"
    assert open_server.metrics()[count] == before + 2
    refused = preflight(open_server, STRANGER)
    assert refused.status_code == 400
    assert ALLOWED not in refused.headers


def test_pages_read_answers_streams_and_errors(open_server: Server) -> None:
    def ask(origin: str, headers: dict[str, str], **fields: Any) -> httpx2.Response:
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, **fields}
        return httpx2.post(
            open_server.url + CHAT, json=body, headers={"Origin": origin, **headers}, timeout=60
        )

    cases: list[tuple[dict[str, str], dict[str, Any], int]] = [
        (KEY, {}, 200),
        (KEY, {"stream": True}, 200),
        (KEY, {"n": 0}, 400),
        (KEY, {"model": "gpt"}, 404),
        ({}, {}, 401),
    ]
    for headers, fields, status in cases:
        answer = ask(PAGE, headers, **fields)
        assert answer.status_code == status
        assert answer.headers[ALLOWED] == PAGE
        assert "Origin" in answer.headers["vary"]
        assert "Retry-After" in answer.headers["access-control-expose-headers"]
        assert ALLOWED not in ask(STRANGER, headers, **fields).headers
    missing = httpx2.get(f"{open_server.url}/v1/nothing", headers={"Origin": OTHER, **KEY})
    assert (missing.status_code, missing.headers[ALLOWED]) == (404, OTHER)


def test_nobody_is_let_in_unless_said(server: Server) -> None:
    assert preflight(server, PAGE).status_code == 405
    answer = httpx2.get(f"{server.url}/v1/models", headers={"Origin": PAGE})
    assert answer.status_code == 200
    assert ALLOWED not in answer.headers


def test_any_page(chat_model: Path) -> None:
    from tests.server.servers import serving

    with serving(str(chat_model), "--cors-origin", "*") as server:
        assert preflight(server, STRANGER).headers[ALLOWED] == "*"
        assert httpx2.get(f"{server.url}/health", headers={"Origin": STRANGER}).headers[ALLOWED] == "*"
        assert any(
            "any web page that is opened on this machine can use the model" in line
            for line in server.lines
        )


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/v1/models/tiny-chat"])
def test_what_is_got_has_a_head(path: str, server: Server) -> None:
    got, head = (httpx2.request(method, server.url + path) for method in ("GET", "HEAD"))
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == got.headers["content-type"]
    assert "head" not in httpx2.get(f"{server.url}/openapi.json").json()["paths"].get(path, {})


@pytest.mark.parametrize(
    "origin", ["*", PAGE, OTHER, "http://[::1]:8080", "http://127.0.0.1", "chrome-extension://abcdef"]
)
def test_origins(origin: str) -> None:
    assert check_origin(origin) == origin


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("http://localhost:3000/", "browsers never send .* write http://localhost:3000$"),
        ("https://Chat.example:443/page?a=b", "write https://chat.example$"),
        ("http://me:secret@[::1]:80", r"write http://\[::1\]$"),
        ("https://bücher.example", "write https://xn--bcher-kva.example$"),
        (
            "localhost:3000",
            "'localhost:3000' is no origin of web pages; write one such as http://localhost:3000, or",
        ),
        ("null", "is no origin"),
        ("http://*.example", "is no origin"),
        ("http://a:b", "is no origin"),
        ("", "is no origin"),
    ],
)
def test_what_browsers_never_send_is_refused(given: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_origin(given)


@pytest.mark.parametrize(
    ("options", "who"),
    [
        ({}, None),
        ({"origins": [PAGE]}, None),
        ({"origins": ["*"], "api_key": "k"}, None),
        ({"origins": [PAGE, "*"]}, "any web page that is opened on this machine can use the model"),
        ({"origins": ["*"], "host": "0.0.0.0"}, "whoever reaches 0.0.0.0 can use the model"),
    ],
    ids=str,
)
def test_who_can_use_the_model_is_said(
    options: dict[str, Any], who: str | None, recwarn: pytest.WarningsRecorder
) -> None:
    warn_if_open(**{"host": "127.0.0.1", "api_key": None, "origins": ()} | options)
    assert [who in str(found.message) for found in recwarn] == ([] if who is None else [True])
