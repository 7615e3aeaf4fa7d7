"""`surgeon generate`: text from a checkpoint, on one rank or several."""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surgeon.cli.grouped import grouped
from surgeon.cli.options import CheckpointArgument, DraftArguments, RunArguments
from surgeon.cli.prompts import read_prompts

if TYPE_CHECKING:
    from surgeon.checkpoint.encoding import Encoder
    from surgeon.checkpoint.generation_defaults import Defaults
    from surgeon.runtime.batching.request import Event, Sampling, Usage
    from surgeon.runtime.service import Stream

SHOWN_CHARACTERS = 60  # of a prompt, above its text


@dataclass(frozen=True)
class SamplingArguments:
    """How tokens are chosen, in the user's words; a group of options (see grouped.py)."""

    max_new_tokens: Annotated[int, typer.Option(min=1, help="How many tokens to add to each at most.")] = 64
    temperature: Annotated[
        float,
        typer.Option(
            help="0 takes the most likely token each time (greedy); the higher, the more often unlikely ones."
        ),
    ] = 0.0
    top_p: Annotated[
        float,
        typer.Option(help="Draw among the fewest most likely tokens that have this probability together; 0 is greedy."),
    ] = 1.0
    top_k: Annotated[int, typer.Option(help="Draw among this many of the most likely tokens; 0 is all.")] = 0
    min_p: Annotated[
        float, typer.Option(help="Draw among tokens at least this times as likely as the most likely one.")
    ] = 0.0
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            help="Above 1, tokens of prompt and text so far become less likely. Default: the checkpoint's own "
            "(generation_config.json), or 1, which is none.",
            show_default=False,
        ),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(
            help="The same seed draws the same texts again, for any --tp and --max-batch: each prompt has random "
            "numbers of its own, by the seed and its place (the first prompt, the second, and so on), whatever the "
            "others are. Default: another seed each time.",
            show_default=False,
        ),
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(
            help="A text that ends what is written, and is no part of it; may be repeated.", show_default=False
        ),
    ] = None

    def sampling(self, defaults: Defaults) -> Sampling:
        """The same, with what the checkpoint wants where the user does not say.

        Raises:
            ValueError: if a number is out of its range.
        """
        from surgeon.runtime.batching.request import Sampling

        penalty = self.repetition_penalty
        return Sampling(
            self.temperature,
            self.top_p,
            self.top_k,
            self.min_p,
            defaults.repetition_penalty if penalty is None else penalty,
            self.seed,
            self.max_new_tokens,
            stop=tuple(self.stop or ()),
            suppress_tokens=defaults.suppress_tokens,
            begin_suppress_tokens=defaults.begin_suppress_tokens,
        )


@grouped
def generate(
    model: CheckpointArgument,
    prompt: Annotated[
        list[str] | None, typer.Option(help="A text to go on from; may be repeated.", show_default=False)
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='A file of such texts: one on each line, or a .jsonl file (or .parquet) whose rows have a "prompt".',
            show_default=False,
        ),
    ] = None,
    *,
    choosing: SamplingArguments,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Write a line of JSON for each prompt: prompt, text, finish_reason (stop or length), and tokens, the "
            "ids of the new ones; with --draft also how many were drafted and accepted, and tokens_per_second.",
        ),
    ] = False,
    max_batch: Annotated[
        int, typer.Option(min=1, help="Texts that are computed together; others follow as these end.")
    ] = 32,
    drafting: DraftArguments,
    run: RunArguments,
) -> None:
    """Continue texts on one or more ranks; what they write goes to stdout, figures to stderr.

    The text of one prompt is shown as it comes, those of several in the order of the prompts, each below a line with
    the prompt's beginning. Of generation_config.json, repetition_penalty and suppressed tokens apply; what else it sets
    and would change the text, drawing tokens among it, is named and not applied. The ranks are started here, or by
    torchrun (see --tp); every rank loads its own slices of the weights only. The texts are the same for any number of
    ranks.
    """
    from surgeon.checkpoint.generation_defaults import read_defaults
    from surgeon.runtime.worker.ranks import early_ranks

    defaults = read_defaults(model)
    sampling = choosing.sampling(defaults)
    _warn_of_ignored(sampling)
    _warn_of_unapplied(defaults, sampling)
    sending = run.sending()
    drafts = drafting.options()
    texts = read_prompts(prompt or [], prompts)
    ranks = run.ranks(sending)
    with early_ranks(ranks) as started:
        # These need `transformers`, and take as long to import as ranks take to start.
        from surgeon.checkpoint.encoding import Encoder
        from surgeon.checkpoint.texts import open_tokenizer
        from surgeon.reports.generation import describe_generation
        from surgeon.runtime.plan.checks import make_plan
        from surgeon.runtime.service import Service

        tokenizer, most = open_tokenizer(model), make_plan(model, run.tp, None, run.program).max_tokens
        encoder = Encoder(tokenizer)
        tokens = [_encode(encoder, text, most, place if len(texts) > 1 else None) for place, text in texts.items()]
        options = run.service(
            ranks,
            max_batch=min(max_batch, len(tokens)),
            max_tokens=max(map(len, tokens)) + sampling.max_new_tokens,
            max_waiting=len(tokens),
            **drafts,
        )
        with Service(model, options, tokenizer, started) as service:
            if service.capacity.texts(service.capacity.longest) < options.max_batch:
                print(service.capacity.line(), file=sys.stderr)  # some texts have to wait for others
            streams = [service.submit(ids, replace(sampling, place=(number, 0))) for number, ids in enumerate(tokens)]
            usages = _write_all([*texts.values()], streams, as_json, bool(drafts))
            place = f"{options.ranks.device}, {options.ranks.collectives}{sending.words}"
            figures = service.figures()
        print(describe_generation(service.plan, figures, usages, place, sending.compression), file=sys.stderr)


def _warn_of_ignored(sampling: Sampling) -> None:
    if sampling.temperature:
        return
    given = {
        "--top-p": sampling.top_p < 1,
        "--top-k": sampling.top_k,
        "--min-p": sampling.min_p,
        "--seed": sampling.seed is not None,
    }
    if ignored := ", ".join(option for option, value in given.items() if value):
        warnings.warn(f"{ignored}: of no effect without --temperature, which draws tokens", stacklevel=2)


def _warn_of_unapplied(defaults: Defaults, sampling: Sampling) -> None:
    asked = {"do_sample", "temperature"} if sampling.temperature else set()
    plain = type(sampling)()
    asked |= {name for name in ("top_p", "top_k", "min_p") if getattr(sampling, name) != getattr(plain, name)}
    if complaint := defaults.complaint(asked):
        warnings.warn(complaint, stacklevel=2)


def _encode(encoder: Encoder, prompt: str, most: int, place: str | None) -> list[int]:
    """The tokens of a prompt; an error says where it stands, if that is given."""
    from surgeon.checkpoint.texts import encode

    try:
        return encode(encoder, prompt, most)
    except ValueError as error:
        raise (error if place is None else ValueError(f"{place}: {error}")) from None


def _write_all(prompts: list[str], streams: list[Stream], as_json: bool, drafting: bool) -> list[Usage]:
    """Write what comes for each prompt, in their order; returns how many tokens each took."""
    if len(prompts) == 1 and not as_json:
        return [_write_as_it_comes(streams[0])]
    usages: list[Usage] = []
    for number, (prompt, stream) in enumerate(zip(prompts, streams, strict=True), start=1):
        events = list(stream)
        heading = f"==> {number} of {len(prompts)}: {_beginning(prompt)} <==\n"
        line = _json_line(prompt, events, drafting)
        _write(line if as_json else f"{chr(10) if usages else ''}{heading}{_text_of(events)}\n")
        usages.append(events[-1].usage)
    return usages


def _write_as_it_comes(stream: Stream) -> Usage:
    for event in stream:
        _write(event.text)
    _write("\n")
    return event.usage


def _text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events)


def _json_line(prompt: str, events: list[Event], drafting: bool) -> str:
    record: dict[str, Any] = {
        "prompt": prompt,
        "text": _text_of(events),
        "finish_reason": events[-1].finish_reason,
        "tokens": [token for event in events for token in event.tokens],
    }
    if drafting:
        usage = events[-1].usage
        rate = round((usage.new - 1) / usage.seconds, 2) if usage.seconds else None  # None: nothing after the first
        record |= {"drafted": usage.drafted, "accepted": usage.accepted, "tokens_per_second": rate}
    return json.dumps(record) + "\n"


def _beginning(prompt: str) -> str:
    line = " ".join(prompt.split())
    return line if len(line) <= SHOWN_CHARACTERS else line[: SHOWN_CHARACTERS - 3] + "..."


def _write(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()
