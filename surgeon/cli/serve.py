"""`surgeon serve`: the OpenAI API for a checkpoint, on one rank or several."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer

from surgeon.cli.grouped import grouped
from surgeon.cli.options import CheckpointArgument, DraftArguments, ServedRun, several


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
            show_envvar=True,
        ),
    ] = None
    cors_origins: Annotated[
        list[str] | None,
        several(
            "--cors-origin",
            metavar="ORIGIN",
            help="Web pages that may use the server from a browser, by where they come from, such as "
            "http://localhost:3000. * is any page that somebody opens, so ask for a key then. "
            "Default: none.",
        ),
    ] = None
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model. Default: the folder's name.")
    ] = None


@dataclass(frozen=True)
class CapacityArguments:
    """How much a server takes on at a time, in the user's words; a group of options (see grouped.py)."""

    max_batch: Annotated[int, typer.Option(min=1, help="Requests that are computed together.")] = 8
    max_waiting: Annotated[int, typer.Option(min=0, help="Requests that may wait; further ones are refused.")] = 64
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=2, help="Tokens that prompt and answer of a request may have together. Default: the model's positions."
        ),
    ] = None
    blocks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Blocks of the cache, of 16 tokens each. Default: enough for --max-batch of the longest requests, if "
            "the memory suffices.",
        ),
    ] = None
    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for weights and cache, such as 512MB or 2GB: of all ranks together on a CPU, of each GPU. "
            "Default: most of what is free."
        ),
    ] = None


@grouped
def serve(
    model: CheckpointArgument,
    *,
    address: AddressArguments,
    capacity: CapacityArguments,
    drafting: DraftArguments,
    run: ServedRun,
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
    from surgeon.library.serve import serve as serve_model

    where = vars(address) | {"cors_origins": address.cors_origins or ()}
    started = partial(print, file=sys.stderr, flush=True)
    serve_model(model, **where, **vars(capacity), **vars(drafting), **run.options(), on_start=started)
