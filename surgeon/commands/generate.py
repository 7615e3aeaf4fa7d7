"""`surgeon generate`, `surgeon.generate`: texts that go on from prompts, on one rank or several."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

from surgeon.commands.command import command, keyword, later, option
from surgeon.commands.options import Checkpoint, SamplingFlags, System, WritingFlags, flags_in, ranks_of
from surgeon.named import is_recipe
from surgeon.words import show_value

if TYPE_CHECKING:
    from surgeon.commands.generation import GeneratedText, Generation
    from surgeon.opened import Model
    from surgeon.runtime.batching.request import Event, Sampling
    from surgeon.runtime.worker.rank import RankOptions

SHOWN_CHARACTERS = 60  # of a prompt, above its text


def _show(
    call: partial[Generation],
    *,
    prompt: Annotated[Sequence[str], option("A text to go on from; may be repeated.")] = (),
    prompts: Annotated[
        str | Path | None,
        option(
            'A file of such texts: one on each line, or a .jsonl file (or .parquet) whose rows have a "prompt".',
            metavar="FILE",
        ),
    ] = None,
    as_json: Annotated[
        bool,
        option(
            "Write a line of JSON for each prompt: prompt, text, finish_reason (stop or length), and tokens, the ids "
            "of the new ones; with --draft or --pipeline also how many were drafted and accepted, tokens_per_pass of "
            "the model, and tokens_per_second.",
            "--json",
        ),
    ] = False,
    stretches: Annotated[
        int | None,
        option("How many ranks --pipeline has; under torchrun all its processes.", "--ranks", least=1),
    ] = None,
    ranks: Annotated[partial[RankOptions] | int, option("", made_by=later(ranks_of))] = 1,
) -> None:
    assert isinstance(ranks, partial)
    texts = read_prompts(prompt, None if prompts is None else Path(prompts))
    alone = len(texts) == 1 and not as_json
    written = 0

    def show(text: GeneratedText, event: Event) -> None:
        nonlocal written
        if alone:
            print(event.text, end="" if event.finish_reason is None else "\n", flush=True)
        elif event.finish_reason is not None and as_json:
            names = "prompt", "text", "finish_reason", "tokens"
            record: dict[str, Any] = {name: getattr(text, name) for name in names}
            if "draft" in call.keywords or call.keywords["pipeline"]:
                usage = text.usage
                rate = text.tokens_per_second
                record |= {"drafted": usage.drafted, "accepted": usage.accepted}
                record |= {"tokens_per_pass": round(usage.tokens_per_pass, 2)}
                record |= {"tokens_per_second": None if rate is None else round(rate, 2)}
            print(json.dumps(record), flush=True)
        elif event.finish_reason is not None:
            written += 1
            line = " ".join(text.prompt.split())
            if len(line) <= SHOWN_CHARACTERS:
                beginning = line
            else:
                beginning = line[: SHOWN_CHARACTERS - 3] + "..."
            above = "" if written == 1 else "\n"
            print(f"{above}==> {written} of {len(texts)}: {beginning} <==\n{text.text}", flush=True)

    if call.keywords["pipeline"]:
        ranks = _pipeline_ranks(ranks, stretches)
    elif stretches is not None:
        raise ValueError(
            "--ranks is of --pipeline, whose ranks have layers of their own; --tp says how many ranks share every layer"
        )
    print(call(prompts=texts, ranks=ranks(), on_event=show), file=sys.stderr)


def _pipeline_ranks(ranks: partial[RankOptions], stretches: int | None) -> partial[RankOptions]:
    """One for each stretch; under torchrun --tp is the number of its processes."""
    from surgeon.processes.torchrun import read_environment

    shared = ranks.keywords["tp"]
    here = read_environment() is None
    if stretches is None and not here:
        stretches = shared
    if stretches is None:
        raise ValueError(
            "--pipeline needs a number of ranks, each with layers of its own; say --ranks N"
        )
    if here and shared != 1:
        raise ValueError(
            f"--tp {shared} shares every layer among ranks, and --pipeline gives each rank layers of its own; "
            "leave --tp out"
        )
    return partial(ranks, tp=stretches)


@command(_show)
def generate(
    model: Checkpoint,
    prompts: Annotated[
        str | Sequence[str] | Mapping[str, str],
        option("One text, or several; a mapping's keys say in errors where each stands."),
    ],
    *,
    max_new_tokens: Annotated[int, option("How many tokens to add to each at most.", least=1)] = 64,
    chat: Annotated[
        bool,
        option(
            "Put each prompt into the tokenizer's chat template, as what a user says; the text is the answer."
        ),
    ] = False,
    system: System = None,
    max_batch: Annotated[
        int, option("Texts that are computed together; others follow as these end.", least=1)
    ] = 32,
    pipeline: Annotated[
        bool,
        option(
            "Have each of --ranks hold a stretch of the layers, in place of a share of every layer: only streams go "
            "from one to the next. While one computes, those before it go on with other texts, or with drafts of the "
            "coda of the checkpoint's first rack (surgeon heal --racks), which the others verify: the same texts. For "
            "models that do not fit one machine; it was not faster than one rank."
        ),
    ] = False,
    on_event: Annotated[
        Callable[[GeneratedText, Event], None] | None,
        keyword("Called with a text so far and what is new of it, of one prompt after the other."),
    ] = None,
    **writing: Unpack[WritingFlags],
) -> Generation:
    """Continue texts on one or more ranks; what they write goes to stdout, figures to stderr.

    The text of one prompt is shown as it comes, those of several in the order of the prompts, each below a line with
    the prompt's beginning. Of generation_config.json, repetition_penalty and suppressed tokens apply; what else it sets
    and would change the text, drawing tokens among it, is named and not applied. The ranks are started here, or by
    torchrun (see --tp); every rank loads its own slices of the weights only, or with --pipeline its own layers. The
    texts are the same for any number of ranks.

    Raises:
        FileNotFoundError, ValueError: if model or options cannot be used, or a prompt is empty, too long or not text.
        RankFailed: if a rank fails.
    """
    from surgeon.runtime.worker.rank import RankOptions
    from surgeon.runtime.worker.ranks import early_ranks

    if system is not None and not chat:
        raise ValueError("a system message stands in the chat template; ask for chat (--chat), too")
    texts_by_place = _by_place(prompts)
    program = writing.get("program")
    if not isinstance(model, str | Path) or is_recipe(model):  # open, or none at all, which is said here
        from surgeon.commands.opening import open_stored

        model, program = open_stored(model, program)
    sampling = choose_sampling(
        model if isinstance(model, str | Path) else model.folder,
        writing,
        max_new_tokens,
    )
    writing["ranks"] = on = RankOptions.of(writing.get("ranks", 1))
    with early_ranks(on) as started:
        # These need `transformers`, and take as long to import as ranks take to start.
        from surgeon.checkpoint.describe import describe
        from surgeon.commands.generation import GeneratedText, Generation
        from surgeon.commands.opening import service_options
        from surgeon.opened import open_model
        from surgeon.runtime.plan.checks import make_plan
        from surgeon.runtime.service import Service

        opened = open_model(model)
        layers = describe(opened.folder).num_layers
        shared = 1 if pipeline else on.ranks
        most = make_plan(opened, shared, None, program).max_tokens
        tokens = _encode(opened, texts_by_place, most, chat, system)
        options = service_options(
            opened,
            program,
            writing,
            max_batch=min(max_batch, len(tokens)),
            max_tokens=max(map(len, tokens)) + max_new_tokens,
            max_waiting=len(tokens),
            pipeline=pipeline,
        )
        with Service(opened, options, opened.tokenizer, started) as service:
            if service.capacity.texts(service.capacity.longest) < options.max_batch:
                print(service.capacity.line(), file=sys.stderr)  # some texts have to wait for others
            streams = [
                service.submit(ids, replace(sampling, place=(number, 0)))
                for number, ids in enumerate(tokens)
            ]
            texts = [GeneratedText(prompt=prompt) for prompt in texts_by_place.values()]
            for text, stream in zip(texts, streams, strict=True):
                for event in stream:
                    text.add(event)
                    if on_event is not None:
                        on_event(text, event)
            return Generation(
                tuple(texts), service.plan, layers, on, service.figures(), options.draft is not None
            )


def _by_place(prompts: str | Sequence[str] | Mapping[str, str]) -> Mapping[str, str]:
    if isinstance(prompts, str):
        prompts = [prompts]
    if not prompts:
        raise ValueError("there is nothing to go on from; give at least one prompt")
    if not isinstance(prompts, Mapping):
        prompts = {f"prompt {number}": prompt for number, prompt in enumerate(prompts, start=1)}
    for place, prompt in prompts.items():
        if not isinstance(prompt, str):
            raise ValueError(
                f"{place}: a prompt is text, not {type(prompt).__name__} {show_value(prompt)}"
            )
    return prompts


def choose_sampling(folder: str | Path, flags: SamplingFlags, max_new_tokens: int) -> Sampling:
    """Add a checkpoint's defaults to how tokens are to be chosen; warn of all that has no effect."""
    from surgeon.checkpoint.texts import read_defaults
    from surgeon.runtime.batching.request import Sampling

    defaults = read_defaults(folder)
    asked = {name: value for name, value in flags_in(SamplingFlags, flags).items() if value is not None}
    asked["stop"] = tuple(flags.get("stop", ()))
    sampling = Sampling(**defaults.sampling_fields() | asked, max_new_tokens=max_new_tokens)
    changed = [
        name
        for name in ("top_p", "top_k", "min_p")
        if getattr(sampling, name) != getattr(Sampling, name)
    ]
    if not sampling.temperature and (idle := changed + (["seed"] if sampling.seed is not None else [])):
        warnings.warn(
            f"{', '.join(idle)}: of no effect without a temperature, which draws tokens", stacklevel=4
        )
    if sampling.temperature:
        wanted = {*changed, "do_sample", "temperature"}
    else:
        wanted = set(changed)
    if complaint := defaults.complaint(wanted):
        warnings.warn(complaint, stacklevel=4)
    return sampling


def _encode(
    model: Model, prompts: Mapping[str, str], most: int, chat: bool, system: str | None
) -> list[list[int]]:
    """The token ids of the prompts, at most so many of each; of several, an error names the prompt."""
    from surgeon.checkpoint.texts import Encoder, begin_conversation, chat_text, encode

    encoder = Encoder(model.tokenizer)
    found = []
    for place, prompt in prompts.items():
        try:
            if chat:
                messages = [*begin_conversation(system), {"role": "user", "content": prompt}]
                asked = chat_text(model.tokenizer, messages, model.name)
                found.append(encode(encoder, asked, most, special=False))
            else:
                found.append(encode(encoder, prompt, most))
        except ValueError as error:
            raise (error if len(prompts) == 1 else ValueError(f"{place}: {error}")) from None
    return found


def read_prompts(given: Sequence[str], file: Path | None) -> dict[str, str]:
    """The prompts by their places, such as "prompts.txt:3": those of the command line, then a file's.

    A text file has one on each line, blank lines left out; the rows of a .jsonl or .parquet file have it as "prompt".
    """
    from surgeon.quality.sources import Reading, is_table, open_rows, read_column, read_pieces

    prompts = {f"--prompt {number}": prompt for number, prompt in enumerate(given, start=1)}
    if file is not None and is_table(file):
        table = open_rows(f"{file}:prompt", Reading())
        assert table is not None
        for number, (where, text) in enumerate(read_column(table, Reading()), start=1):
            if text is None:  # to leave it out would shift what is written for the others
                raise ValueError(f"{where}: the row has no 'prompt'; every row needs one")
            prompts[f"{file}: prompt {number}"] = text
    elif file is not None:
        lines = "".join(read_pieces(file)).split("\n")
        found = {f"{file}:{number}": line for number, line in enumerate(lines, 1) if line.strip()}
        if not found:
            raise ValueError(f"{file} is empty; write one prompt on each line")
        prompts |= found
    if not prompts:
        raise ValueError("there is nothing to go on from; give --prompt TEXT or --prompts FILE")
    return prompts
