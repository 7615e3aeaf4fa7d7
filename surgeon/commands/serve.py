"""`surgeon serve`, `surgeon.serve`: the OpenAI API for a checkpoint, on one rank or several."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Unpack

from surgeon.commands.command import command, keyword, option, several
from surgeon.commands.options import CacheMemory, Checkpoint, ServiceFlags

if TYPE_CHECKING:
    from surgeon.runtime.plan.memory import Capacity

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class Serving:
    """A server that answers: the model's name for clients, the API's URL, its capacity and kernels."""

    name: str
    url: str
    capacity: Capacity
    kernels: str

    def __str__(self) -> str:
        return f"serving {self.name} at {self.url}\n{self.capacity.line()}\nkernels: {self.kernels}"


@command(lambda call: call(on_start=partial(print, file=sys.stderr, flush=True)))
def serve(
    model: Checkpoint,
    *,
    host: Annotated[
        str, option("The address to listen at; 0.0.0.0 lets other machines in.")
    ] = "127.0.0.1",
    port: Annotated[int, option("The port; 0 takes any that is free.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        str | None,
        option(
            "What clients have to send; better set in the environment, where other users do not see it.",
            envvar="SURGEON_API_KEY",
            show_envvar=True,
        ),
    ] = None,
    cors_origins: Annotated[
        Sequence[str],
        several(
            "Web pages that may use the server from a browser, by where they come from, such as "
            "http://localhost:3000. * is any page that somebody opens, so ask for a key then. Default: none.",
            "--cors-origin",
            metavar="ORIGIN",
        ),
    ] = (),
    served_model_name: Annotated[
        str | None, option("What clients call the model. Default: the folder's name.")
    ] = None,
    max_batch: Annotated[int, option("Requests that are computed together.", least=1)] = 8,
    max_waiting: Annotated[
        int, option("Requests that may wait; further ones are refused.", least=0)
    ] = 64,
    max_tokens: Annotated[
        int | None,
        option(
            "Tokens that prompt and answer of a request may have together. Default: the model's positions.",
            min=2,
        ),
    ] = None,
    blocks: Annotated[
        int | None,
        option(
            "Blocks of the cache, of 16 tokens each. Default: enough for --max-batch of the longest requests, if the "
            "memory suffices.",
            least=1,
        ),
    ] = None,
    memory: CacheMemory = None,
    on_start: Annotated[
        Callable[[Serving], None], keyword("Called when the first request can be answered.")
    ] = print,
    **serving: Unpack[ServiceFlags],
) -> None:
    """Serve a model with OpenAI's API, on one or more ranks, until SIGTERM or Ctrl-C.

    /v1/completions and /v1/chat/completions answer whole or as a stream; /v1/models names the model; /health and
    /metrics (for Prometheus) need no key. Requests are computed together as they come, with a temperature of 1 unless
    they say otherwise (0 is greedy, and so is a top_p of 0); chat_template_kwargs go to the model's chat template.
    repetition_penalty and suppressed tokens are the checkpoint's own (generation_config.json), and what else that sets
    and would change the text is named at the start. SIGTERM finishes those that are open and takes no more; Ctrl-C, or
    a second SIGTERM, ends at once.

    Try it: curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json'
    -d '{"prompt": "import os", "max_tokens": 20}'

    Raises:
        FileNotFoundError, ValueError: if model, options, port, key or origins cannot be used.
        RankFailed: if a rank fails.
        KeyboardInterrupt: at Ctrl-C.
        InterruptedError: at a second SIGTERM.
    """
    import surgeon.server  # noqa: F401 - first, because it says at once if a package is missing
    from surgeon.checkpoint.texts import read_defaults
    from surgeon.commands.opening import open_stored, service_options
    from surgeon.runtime.service import Service
    from surgeon.server.bodies import Texts
    from surgeon.server.run import bind, run, url_of
    from surgeon.server.state import ServerState, check_origin

    if api_key is not None and not api_key.strip():
        raise ValueError(
            "the API key is empty; give one, or none at all (SURGEON_API_KEY may be set to nothing)"
        )
    if not 0 <= port < 2**16:
        raise ValueError(f"port must be at least 0, for any that is free, and at most 65535, not {port}")
    origins = tuple(map(check_origin, cors_origins))
    opened, program = open_stored(model, serving.get("program"))
    options = service_options(
        opened,
        program,
        serving,
        max_batch=max_batch,
        max_tokens=max_tokens,
        blocks=blocks,
        memory=memory,
        max_waiting=max_waiting,
    )
    tokenizer = opened.tokenizer
    defaults = read_defaults(opened.folder)
    if complaint := defaults.complaint():
        warnings.warn(f"{complaint}; requests have to say so themselves", stacklevel=3)
    with bind(host, port) as bound:
        warn_if_open(host, api_key, origins)
        with Service(opened, options, tokenizer) as service:
            name = served_model_name or opened.public_name
            state = ServerState(
                service, Texts(tokenizer), name, options.most_open, defaults, api_key, origins
            )
            server = Serving(name, url_of(bound), service.capacity, service.kernels)
            run(state, bound, lambda: on_start(server))


def warn_if_open(host: str, api_key: str | None, origins: Sequence[str]) -> None:
    """Warn if others than users of this machine, or any web page they open, reach a server without a key."""
    who = f"whoever reaches {host}" if host not in LOOPBACK else None
    if who is None and "*" in origins:
        who = "any web page that is opened on this machine"
    if api_key is None and who is not None:
        warnings.warn(f"{who} can use the model; set an API key (SURGEON_API_KEY)", stacklevel=3)
