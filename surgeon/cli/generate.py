"""`surgeon generate`: text from a checkpoint, on one rank or several."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surgeon.cli.grouped import grouped
from surgeon.cli.options import CheckpointArgument, DraftArguments, PipelineArguments, ServedRun

if TYPE_CHECKING:
    from surgeon.library.generation import GeneratedText
    from surgeon.runtime.batching.request import Event

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
            "(generation_config.json), or 1, which is none."
        ),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(
            help="The same seed draws the same texts again, for any --tp and --max-batch: each prompt has random "
            "numbers of its own, by the seed and its place (the first prompt, the second, and so on), whatever the "
            "others are. Default: another seed each time."
        ),
    ] = None
    stop: Annotated[
        list[str] | None, typer.Option(help="A text that ends what is written, and is no part of it; may be repeated.")
    ] = None


@grouped
def generate(
    model: CheckpointArgument,
    prompt: Annotated[list[str] | None, typer.Option(help="A text to go on from; may be repeated.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='A file of such texts: one on each line, or a .jsonl file (or .parquet) whose rows have a "prompt".',
        ),
    ] = None,
    *,
    choosing: SamplingArguments,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Write a line of JSON for each prompt: prompt, text, finish_reason (stop or length), and tokens, the "
            "ids of the new ones; with --draft or --pipeline also how many were drafted and accepted, tokens_per_pass "
            "of the model, and tokens_per_second.",
        ),
    ] = False,
    max_batch: Annotated[
        int, typer.Option(min=1, help="Texts that are computed together; others follow as these end.")
    ] = 32,
    drafting: DraftArguments,
    piping: PipelineArguments,
    run: ServedRun,
) -> None:
    """Continue texts on one or more ranks; what they write goes to stdout, figures to stderr.

    The text of one prompt is shown as it comes, those of several in the order of the prompts, each below a line with
    the prompt's beginning. Of generation_config.json, repetition_penalty and suppressed tokens apply; what else it sets
    and would change the text, drawing tokens among it, is named and not applied. The ranks are started here, or by
    torchrun (see --tp); every rank loads its own slices of the weights only, or with --pipeline its own layers. The
    texts are the same for any number of ranks.
    """
    from surgeon.library.generate import generate as write

    texts = read_prompts(prompt or [], prompts)
    alone = len(texts) == 1 and not as_json
    written = 0

    def show(text: GeneratedText, event: Event) -> None:
        nonlocal written
        if alone:
            print(event.text, end="" if event.finish_reason is None else "\n", flush=True)
        elif event.finish_reason is not None and as_json:
            print(_json_line(text, drafting.draft is not None or piping.pipeline), flush=True)
        elif event.finish_reason is not None:
            written += 1
            line = " ".join(text.prompt.split())
            beginning = line if len(line) <= SHOWN_CHARACTERS else line[: SHOWN_CHARACTERS - 3] + "..."
            above = "" if written == 1 else "\n"
            print(f"{above}==> {written} of {len(texts)}: {beginning} <==\n{text.text}", flush=True)

    choices = vars(choosing) | {"stop": choosing.stop or ()}
    found = write(model, texts, **choices, max_batch=max_batch, **vars(drafting), **piping.over(run), on_event=show)
    print(found, file=sys.stderr)


def read_prompts(given: Sequence[str], file: Path | None) -> dict[str, str]:
    """The prompts by where they stand, such as "prompts.txt:3": those given in the command line, then a file's.

    A text file has one on each line, blank lines left out; the rows of a .jsonl or .parquet file have it as "prompt".

    Raises:
        FileNotFoundError, OSError: if the file cannot be read.
        ValueError: if there are none, the file is not text, or a row of it has none.
    """
    from surgeon.quality.tables import is_table, read_table
    from surgeon.quality.text_files import read_pieces

    prompts = {f"--prompt {number}": prompt for number, prompt in enumerate(given, start=1)}
    if file is not None and is_table(file):
        for number, (where, text) in enumerate(read_table(file, "prompt"), start=1):
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


def _json_line(text: GeneratedText, drafting: bool) -> str:
    names = "prompt", "text", "finish_reason", "tokens"
    record: dict[str, Any] = {name: getattr(text, name) for name in names}
    if drafting:
        usage, rate = text.usage, text.tokens_per_second
        record |= {"drafted": usage.drafted, "accepted": usage.accepted}
        record |= {"tokens_per_pass": round(usage.tokens_per_pass, 2)}
        record |= {"tokens_per_second": None if rate is None else round(rate, 2)}
    return json.dumps(record)
