"""What comes before everything else: counting requests, browsers' questions, the key, and refusals while it ends.

Browsers ask which web pages may use the server before a page of another origin does (CORS); that needs no key.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from surgeon.server.errors import GONE, ApiError, draining, failed
from surgeon.server.state import ServerState

GUARDED = "/v1"
MOST_BYTES = 16 << 20  # of a body: a prompt of a million tokens
ANY = "*"  # origin of web pages
_PORTS = {"http": 80, "https": 443}
_COUNTED = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics")
_OUTCOME = "surgeon.outcome"


def note_outcome(scope: Scope, status: int) -> None:
    """Have a request counted with another status than the one it was answered with."""
    scope[_OUTCOME] = status


def counted(app: ASGIApp, state: ServerState) -> ASGIApp:
    """An application whose answers are counted."""

    async def count(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        status = GONE  # if nothing is ever sent

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await app(scope, receive, send_on)
        finally:
            path = scope["path"] if scope["path"] in _COUNTED else "other"
            state.meters.answered(path, scope.get(_OUTCOME, status))

    return count


def guarded(app: ASGIApp, state: ServerState) -> ASGIApp:
    """An application that lets nobody in without the key, nor while the server ends."""

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        error = _refusal(scope, state) if scope["type"] == "http" else None
        await (app if error is None else error.response())(scope, receive, send)

    return guard


def _refusal(scope: Scope, state: ServerState) -> ApiError | None:
    if not scope["path"].startswith(GUARDED):
        return None
    kind, _, sent = _header(scope, b"authorization").partition(b" ")
    # The comparison takes as long for a wrong first character as for a wrong last one.
    if state.key is not None and not (
        hmac.compare_digest(sent.strip(), state.key.encode()) and kind.lower() == b"bearer"
    ):
        return ApiError(
            401,
            "the API key is missing or wrong; send it as Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    length = _header(scope, b"content-length")
    if length.isdigit() and int(length) > MOST_BYTES:
        return too_large()
    if state.service.failure is not None:
        return failed(state.service.failure)
    if state.draining:
        return draining()
    return None


def too_large() -> ApiError:
    """413: a body nobody wants to read."""
    return ApiError(413, f"the body is larger than {MOST_BYTES >> 20} MB")


def _header(scope: Scope, name: bytes) -> bytes:
    found: bytes = next((value for key, value in scope["headers"] if key == name), b"")
    return found


def check_origin(origin: str) -> str:
    """An origin as browsers send it, or "*" for any; what they never send would let nobody in.

    Raises:
        ValueError: if it is none, or written in another way.
    """
    if origin == ANY:
        return origin
    try:
        parts = urlsplit(origin)
        host = (parts.hostname or "").encode("idna").decode()
        port = parts.port
    except ValueError:  # no port, no address, no name that there can be
        host = ""
    if not host or ANY in host or not parts.scheme:
        raise ValueError(f"{origin!r} is no origin of web pages; write one such as http://localhost:3000, or * for any")
    place = f"[{host}]" if ":" in host else host
    written = f"{parts.scheme}://{place}" + ("" if port in (None, _PORTS.get(parts.scheme)) else f":{port}")
    if written != origin:
        raise ValueError(f"browsers never send {origin!r} as an origin of web pages; write {written}")
    return origin


def with_browsers(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """An application that pages of these origins may use, its errors among what they may read.

    What a browser asks beforehand (the preflight) is answered here, without a key, which it does not send then.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "HEAD", "POST"),
        allow_headers=("*",),  # clients add some of their own
        allow_private_network=True,
        expose_headers=("Retry-After",),
    )
