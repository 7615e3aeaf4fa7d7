"""What comes before everything else: counting requests, the key, and that nobody is let in while the server ends.

Between the two are browsers' questions (browsers.py), which are counted and need no key.
"""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from surgeon.server.errors import GONE, ApiError, draining, failed, too_large
from surgeon.server.state import ServerState

GUARDED = "/v1"
MOST_BYTES = 16 << 20  # of a body: a prompt of a million tokens
_COUNTED = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics")
_OUTCOME = "surgeon.outcome"


def note_outcome(scope: Scope, status: int) -> None:
    """Have a request counted with another status than the one it was answered with."""
    scope[_OUTCOME] = status


class Counter:
    """An application in front of another that counts what is answered."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self.app = app
        self.state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request pass."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = GONE  # if nothing is ever sent

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_on)
        finally:
            path = scope["path"] if scope["path"] in _COUNTED else "other"
            self.state.meters.answered(path, scope.get(_OUTCOME, status))


class Gate:
    """An application in front of another that lets nobody in without the key."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self.app = app
        self.state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request pass, or answer it with an error."""
        error = self._refusal(scope) if scope["type"] == "http" else None
        await (self.app if error is None else error.response())(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        if not scope["path"].startswith(GUARDED):
            return None
        if self.state.key is not None and not _has_key(scope, self.state.key):
            return ApiError(
                401,
                "the API key is missing or wrong; send it as Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        length = _header(scope, b"content-length")
        if length.isdigit() and int(length) > MOST_BYTES:
            return too_large(MOST_BYTES)
        if self.state.service.failure is not None:
            return failed(self.state.service.failure)
        return draining() if self.state.draining else None


def _has_key(scope: Scope, key: str) -> bool:
    kind, _, sent = _header(scope, b"authorization").partition(b" ")
    # Takes as long for a wrong first character as for a wrong last one.
    return hmac.compare_digest(sent.strip(), key.encode()) and kind.lower() == b"bearer"


def _header(scope: Scope, name: bytes) -> bytes:
    found: bytes = next((value for key, value in scope["headers"] if key == name), b"")
    return found
