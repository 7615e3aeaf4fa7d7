"""State that all requests share, /metrics, and the middleware: counting, CORS, the key, and refusals at the end."""

from __future__ import annotations

import hmac
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from surgeon.checkpoint.texts import Defaults
from surgeon.machine import show_size
from surgeon.runtime.service import Service
from surgeon.server.bodies import (
    GONE,
    ApiError,
    Json,
    Texts,
    refuse_after_failure,
    refuse_while_draining,
)
from surgeon.words import did_you_mean

_LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)

_GAUGES = {
    "running": "Requests that are being computed.",
    "waiting": "Requests in the queue.",
    "blocks": "Blocks of the cache.",
    "free_blocks": "Blocks of the cache that no request uses.",
}
_COUNTERS = {
    "prompt_tokens": "Tokens of prompts that were begun.",
    "cached_tokens": "Tokens of prompts that needed no computing, because an earlier request began with the same ones.",
    "new_tokens": "Tokens that were added.",
    "drafted": "Tokens that were drafted.",
    "accepted": "Drafted tokens that were added.",
    "finished": "Requests to the ranks that have ended, in whatever way.",
    "preempted": "How often a running request was put back into the queue.",
    "passes": "Forward passes.",
    "drafting_passes": "Of these, passes that drafted tokens.",
}


class Meters(Collector):
    """Counts of this server, and those of its service, which is asked as often as somebody asks for them."""

    def __init__(self, service: Service) -> None:
        self.service = service
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they would double the number of lines
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.requests = Counter(
            "surgeon_http_requests",
            "HTTP requests that were answered, by path and status (499: the client hung up).",
            ["path", "status"],
            registry=self.registry,
        )
        self.queue = self._seconds(
            "queue", "From a request's arrival in the queue until it was let in.", _LONG
        )
        self.first = self._seconds(
            "time_to_first_token", "From a request's arrival until its first token.", _LONG
        )
        self.each = self._seconds(
            "time_per_output_token", "Between tokens, mean of each request.", _SHORT
        )

    def collect(self) -> Iterator[Metric]:
        """Ask the service."""
        stats = self.service.stats()
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"surgeon_{name}", text, value=getattr(stats, name))
        used = stats.blocks - stats.free_blocks
        yield GaugeMetricFamily(
            "surgeon_used_blocks", "Blocks of the cache that requests use.", value=used
        )
        yield GaugeMetricFamily(
            "surgeon_up",
            "1 while the ranks run, 0 when one has failed.",
            value=self.service.failure is None,
        )
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"surgeon_{name}", text, value=getattr(stats, name))

    def _seconds(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"surgeon_{name}_seconds", f"{text} In seconds.", buckets=buckets, registry=self.registry
        )


@dataclass
class ServerState:
    """A running server.

    Attributes:
        model: the name it is served under.
        capacity: requests that the service takes at a time, waiting ones among them.
        defaults: of sampling, for fields that requests leave out.
        key: None if anybody may use the model.
        origins: of web pages that may use the model; "*" for any.
        draining: whether no more requests are taken.
        created: seconds since 1970.
    """

    service: Service
    texts: Texts
    model: str
    capacity: int
    defaults: Defaults
    key: str | None
    origins: tuple[str, ...]
    draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    meters: Meters = field(init=False)

    def __post_init__(self) -> None:
        self.meters = Meters(self.service)

    def check_model(self, name: str | None) -> None:
        """Refuse requests for another model; they need not name one."""
        if name not in (None, self.model):
            message = f"there is no model {name!r} here; {did_you_mean(str(name), [self.model])}"
            raise ApiError(404, message, "model", code="model_not_found")

    def card(self) -> Json:
        """Build the model's entry of /v1/models."""
        own = {"id": self.model, "object": "model", "created": self.created, "owned_by": "surgeon"}
        return own | {"max_model_len": self.service.max_tokens}


GUARDED = "/v1"
MOST_BYTES = 16_000_000  # of a body: a prompt of a million tokens
TOO_LARGE = f"the body is larger than {show_size(MOST_BYTES)}"
ANY = "*"  # origin of web pages
_PORTS = {"http": 80, "https": 443}
_COUNTED = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics")
OUTCOME = "surgeon.outcome"  # of a request's scope: a status to count in place of its answer's


def count_answers(app: ASGIApp, state: ServerState) -> ASGIApp:
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
            state.meters.requests.labels(path, str(scope.get(OUTCOME, status))).inc()

    return count


def guard_app(app: ASGIApp, state: ServerState) -> ASGIApp:
    """An application that lets nobody in without the key, nor while the server ends."""

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        error = _refusal(scope, state) if scope["type"] == "http" else None
        await (app if error is None else error.response())(scope, receive, send)

    return guard


def _refusal(scope: Scope, state: ServerState) -> ApiError | None:
    if not scope["path"].startswith(GUARDED):
        return None
    headers = Headers(scope=scope)
    kind, _, sent = headers.get("authorization", "").partition(" ")
    # The comparison takes as long for a wrong first character as for a wrong last one.
    if state.key is not None and not (
        hmac.compare_digest(sent.strip().encode("latin-1"), state.key.encode())
        and kind.lower() == "bearer"
    ):
        return ApiError(
            401,
            "the API key is missing or wrong; send it as Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > MOST_BYTES:
        return ApiError(413, TOO_LARGE)
    if state.service.failure is not None:
        return refuse_after_failure(state.service.failure)
    if state.draining:
        return refuse_while_draining()
    return None


def check_origin(origin: str) -> str:
    """Read an origin as browsers send it, or "*" for any."""
    if origin == ANY:
        return origin
    try:
        parts = urlsplit(origin)
        host = (parts.hostname or "").encode("idna").decode()
        port = parts.port
    except ValueError:  # no port, no address, no name that there can be
        host = ""
    if not host or ANY in host or not parts.scheme:
        raise ValueError(
            f"{origin!r} is no origin of web pages; write one such as http://localhost:3000, or * for any"
        )
    place = f"[{host}]" if ":" in host else host
    written = f"{parts.scheme}://{place}" + (
        "" if port in (None, _PORTS.get(parts.scheme)) else f":{port}"
    )
    if written != origin:
        raise ValueError(f"browsers never send {origin!r} as an origin of web pages; write {written}")
    return origin


def with_browsers(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """An application that pages of these origins may use; it answers preflights itself, which have no key."""
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
