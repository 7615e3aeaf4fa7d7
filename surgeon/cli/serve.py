"""`surgeon serve`: the OpenAI API for a checkpoint, on one rank or several."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from typing import Annotated

import typer

from surgeon.cli.grouped import grouped
from surgeon.cli.options import CheckpointArgument, DraftArguments, RunArguments

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class AddressArguments:
    """Where a server is found, and by whom, in the user's words; a group of options (see grouped.py)."""

    host: Annotated[str, typer.Option(help="The address to listen at; 0.0.0.0 lets other machines in.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes any that is free.")] = 8000
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="SURGEON_API_KEY",
            help="What clients have to send; better set in the environment, where other users do not see it.",
            show_default=False,
            show_envvar=True,
        ),
    ] = None
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Web pages that may use the server from a browser, by where they come from, such as "
            "http://localhost:3000; may be repeated. * is any page that somebody opens, so ask for a key then. "
            "Default: none.",
            show_default=False,
        ),
    ] = None
    served_model_name: Annotated[
        str | None,
        typer.Option(help="What clients call the model. Default: the folder's name.", show_default=False),
    ] = None

    def __post_init__(self) -> None:
        if self.api_key is not None and not self.api_key.strip():
            raise ValueError("the API key is empty; give one, or leave --api-key and SURGEON_API_KEY out")

    def warn_if_open(self) -> None:
        """Say so if others than users of this machine reach it, or any web page they open, and need no key."""
        who = f"whoever reaches {self.host}" if self.host not in LOOPBACK else None
        if who is None and "*" in (self.cors_origin or ()):
            who = "any web page that is opened on this machine"
        if self.api_key is None and who is not None:
            warnings.warn(f"{who} can use the model; set --api-key or SURGEON_API_KEY", stacklevel=1)


@dataclass(frozen=True)
class CapacityArguments:
    """How much a server takes on at a time, in the user's words; a group of options (see grouped.py)."""

    max_batch: Annotated[int, typer.Option(min=1, help="Requests that are computed together.")] = 8
    max_waiting: Annotated[int, typer.Option(min=0, help="Requests that may wait; further ones are refused.")] = 64
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Tokens that prompt and answer of a request may have together. Default: the model's positions.",
            show_default=False,
        ),
    ] = None
    blocks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Blocks of the cache, of 16 tokens each. Default: enough for --max-batch of the longest requests, if "
            "the memory suffices.",
            show_default=False,
        ),
    ] = None
    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for weights and cache, such as 512MB or 2GB: of all ranks together on a CPU, of each GPU. "
            "Default: most of what is free.",
            show_default=False,
        ),
    ] = None

    def limits(self) -> dict[str, int | None]:
        """The same as fields of `ServiceOptions`.

        Raises:
            ValueError: if the memory cannot be read.
        """
        from surgeon.memory import parse_size

        return vars(self) | {"memory": None if self.memory is None else parse_size(self.memory)}


@grouped
def serve(
    model: CheckpointArgument,
    *,
    address: AddressArguments,
    capacity: CapacityArguments,
    drafting: DraftArguments,
    run: RunArguments,
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
    """
    import surgeon.server  # noqa: F401 - first, because it says at once if a package is missing
    from surgeon.checkpoint.generation_defaults import read_defaults
    from surgeon.checkpoint.texts import open_tokenizer
    from surgeon.named import name_of
    from surgeon.runtime.service import Service
    from surgeon.server.browsers import check_origin
    from surgeon.server.run import bind, url_of
    from surgeon.server.run import run as run_server
    from surgeon.server.state import ServerState
    from surgeon.server.texts import Texts

    origins = tuple(map(check_origin, address.cors_origin or ()))
    options = run.service(run.ranks(run.sending()), **capacity.limits(), **drafting.options())
    tokenizer, defaults = open_tokenizer(model), read_defaults(model)
    if complaint := defaults.complaint():
        warnings.warn(f"{complaint}; requests have to say so themselves", stacklevel=1)
    with bind(address.host, address.port) as bound:
        address.warn_if_open()
        with Service(model, options, tokenizer) as service:
            name, key = address.served_model_name or name_of(model), address.api_key
            state = ServerState(service, Texts(tokenizer), name, options.most_open, defaults, key, origins)
            lines = f"serving {name} at {url_of(bound)}\n{service.capacity.line()}"
            run_server(state, bound, lambda: print(lines, file=sys.stderr, flush=True))
