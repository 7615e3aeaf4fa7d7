"""`surgeon.serve`: the OpenAI API for a model, on one rank or several."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import surgeon.server  # noqa: F401 - first, because it says at once if a package is missing
from surgeon.checkpoint.generation_defaults import read_defaults
from surgeon.library.opening import stored_model
from surgeon.library.running import Running, service_options
from surgeon.memory import parse_size
from surgeon.opened import EditedModel, Model, open_model
from surgeon.runtime.plan.memory import Capacity
from surgeon.runtime.service import Service
from surgeon.server.gate import check_origin
from surgeon.server.run import bind, url_of
from surgeon.server.run import run as run_server
from surgeon.server.state import ServerState
from surgeon.server.texts import Texts

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class Serving:
    """A server that answers.

    Attributes:
        name: what clients call the model.
        url: where they find the API.
        capacity: how many texts there is room for.
        kernels, experts: as of a `Service`.
    """

    name: str
    url: str
    capacity: Capacity
    kernels: str
    experts: str | None = None

    def __str__(self) -> str:
        lines = [f"serving {self.name} at {self.url}", self.capacity.line(), f"kernels: {self.kernels}", self.experts]
        return "\n".join(filter(None, lines))


def serve(
    model: str | Path | Model | EditedModel,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    cors_origins: Sequence[str] = (),
    served_model_name: str | None = None,
    max_batch: int = 8,
    max_waiting: int = 64,
    max_tokens: int | None = None,
    blocks: int | None = None,
    memory: int | str | None = None,
    on_start: Callable[[Serving], None] = print,
    **running: Unpack[Running],
) -> None:
    """Answer requests until SIGTERM, which finishes those that are open, or Ctrl-C, which ends at once.

    Args:
        model: a checkpoint's folder, edited or not, a hub name, "demo", or a model that is open, edited
            (`surgeon.edit`) or not.
        host: the address to listen at; "0.0.0.0" lets other machines in.
        port: 0 takes any that is free.
        api_key: what clients have to send; None lets everybody in.
        cors_origins: web pages that may use the server, as browsers name them; "*" for any.
        served_model_name: what clients call the model; by default the folder's name.
        max_batch, max_waiting, max_tokens, blocks: how much it takes on at a time, as of `ServiceOptions`.
        memory: of weights and cache, in bytes or as text ("2GB"); most of what is free by default.
        on_start: called when the first request can be answered.
        running: ranks, program, dtype, decoding, low_rank, kv, halves, draft, draft_tokens: as of `Running`.

    Raises:
        FileNotFoundError, ValueError: if the model cannot be used or cannot run so, not within the memory, the port may
            not be had, the key is empty, or what is to be an origin is none.
        RankFailed: if a rank fails.
        KeyboardInterrupt: at Ctrl-C.
        InterruptedError: at a second SIGTERM.
    """
    if api_key is not None and not api_key.strip():
        raise ValueError("the API key is empty; give one, or none at all (SURGEON_API_KEY may be set to nothing)")
    if not 0 <= port < 2**16:
        raise ValueError(f"port must be at least 0, for any that is free, and at most 65535, not {port}")
    origins = tuple(map(check_origin, cors_origins))
    stored, running["program"] = stored_model(model, running.get("program"))
    opened = open_model(stored)
    options = service_options(
        opened,
        running,
        max_batch=max_batch,
        max_tokens=max_tokens,
        blocks=blocks,
        memory=parse_size(memory) if isinstance(memory, str) else memory,
        max_waiting=max_waiting,
    )
    tokenizer, defaults = opened.tokenizer, read_defaults(opened.folder)
    if complaint := defaults.complaint():
        warnings.warn(f"{complaint}; requests have to say so themselves", stacklevel=2)
    with bind(host, port) as bound:
        warn_if_open(host, api_key, origins)
        with Service(opened, options, tokenizer) as service:
            name = served_model_name or opened.public_name
            state = ServerState(service, Texts(tokenizer), name, options.most_open, defaults, api_key, origins)
            serving = Serving(name, url_of(bound), service.capacity, service.kernels, service.experts)
            run_server(state, bound, lambda: on_start(serving))


def warn_if_open(host: str, api_key: str | None, origins: Sequence[str]) -> None:
    """Say so if others than users of this machine reach a server, or any web page they open, and need no key."""
    who = f"whoever reaches {host}" if host not in LOOPBACK else None
    if who is None and "*" in origins:
        who = "any web page that is opened on this machine"
    if api_key is None and who is not None:
        warnings.warn(f"{who} can use the model; set an API key (SURGEON_API_KEY)", stacklevel=3)
