"""Many clients at once against `surgeon serve`, every answer checked.

    python scripts/load/run.py [MODEL] [--tp 2] [--clients 64] [--seconds 60] [--dtype float32] [-o FILE.json]

The clients ask for greedy streams without a pause, and every answer has to be the text that transformers gives for the
prompt on one device, alone. Prompts are held-out source files of Python's standard library, cut at many lengths, each
asked for again and again. Client, server and ranks share this machine's cores. TTFT is the time to a request's first
token, TPOT the mean time between its later ones, both as a client sees them. Exit code 1 if an answer is wrong, as
some are where a GPU computes in 16 bits. Faults are provoked by the tests (tests/server).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

import surgeon
from scripts.commands import add_defaults, make_parser
from scripts.load.server import SURGEON, free_port, serving
from scripts.markdown import print_table
from surgeon.checkpoint.texts import open_tokenizer
from surgeon.demo import library_files
from surgeon.opened import versions
from surgeon.processes.files import write_json
from surgeon.progress import progress

PERCENTILES = (50, 90, 99)
COMPLETIONS = "/v1/completions"
LONGEST_SECONDS = 300


@dataclass(frozen=True)
class Case:
    """A prompt, and the greedy answer to it."""

    prompt: list[int]
    answer: str


def make_cases(options: argparse.Namespace) -> list[Case]:
    """Prompts of many lengths and what `transformers` makes of them, one at a time."""
    tokenizer = open_tokenizer(options.model)
    model = surgeon.load(options.model)
    if options.program:
        model = surgeon.edit(model, options.program)
    generator = random.Random(0)
    found = []
    files = library_files(held_out=True)
    with progress("offline answers", options.prompts, "prompts") as done:
        for number in range(options.prompts):
            text = files[number % len(files)].read_text(encoding="utf-8", errors="ignore")
            length = generator.randint(options.prompt_tokens // 8 + 1, options.prompt_tokens)
            tokens = tokenizer(text[: 20 * length]).input_ids[:length]
            sampled: Any = model.generate(
                torch.tensor([tokens]), do_sample=False, max_new_tokens=options.max_tokens
            )
            before = tokenizer.decode(tokens, skip_special_tokens=True)
            answer = tokenizer.decode(sampled[0].tolist(), skip_special_tokens=True)[len(before) :]
            found.append(Case(tokens, answer))
            done(1)
    return found


@dataclass
class Tally:
    """What the clients have seen; times in seconds, one per answer."""

    answers: int = 0
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    each: list[float] = field(default_factory=list)


async def ask(client: httpx2.AsyncClient, case: Case, options: argparse.Namespace, tally: Tally) -> None:
    """One streaming request, checked and timed."""
    body = {
        "prompt": case.prompt,
        "max_tokens": options.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begun = time.monotonic()
    first = 0.0
    last = 0.0
    text = []
    tokens = 0
    async with client.stream("POST", COMPLETIONS, json=body) as response:
        if response.status_code != 200:
            tally.errors.append(f"{response.status_code}: {(await response.aread()).decode()[:200]}")
            return
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if chunk.get("choices"):
                last = time.monotonic()
                first = first or last
                text.append(chunk["choices"][0]["text"])
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
    tally.answers += 1
    tally.tokens += tokens
    tally.first.append(first - begun)
    if tokens > 1:
        tally.each.append((last - first) / (tokens - 1))
    if "".join(text) != case.answer:
        tally.wrong.append(f"{''.join(text)!r} instead of {case.answer!r}")


async def load(url: str, cases: list[Case], options: argparse.Namespace) -> tuple[Tally, float]:
    """All clients at once, who finish what they have begun when the time is up; what they saw, and the seconds."""
    tally = Tally()
    begun = time.monotonic()
    limits = httpx2.Limits(max_connections=options.clients)

    async def be_a_client(number: int) -> None:
        generator = random.Random(number)
        while time.monotonic() - begun < options.seconds:
            await ask(client, generator.choice(cases), options, tally)

    async with httpx2.AsyncClient(base_url=url, timeout=LONGEST_SECONDS, limits=limits) as client:
        await asyncio.gather(*(be_a_client(number) for number in range(options.clients)))
    return tally, time.monotonic() - begun


def metrics(url: str) -> dict[str, float]:
    """What the server has counted."""
    text = httpx2.get(f"{url}/metrics", timeout=60).text
    pairs = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def figures_of(tally: Tally, seconds: float) -> dict[str, float]:
    figures = {"requests/s": tally.answers / seconds, "tokens/s": tally.tokens / seconds}
    for name, times in (("TTFT", tally.first), ("TPOT", tally.each)):
        for percent in PERCENTILES:
            figures[f"{name} p{percent} ms"] = (
                1000 * float(np.percentile(times, percent)) if times else float("nan")
            )
    return figures


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument(
        "model", nargs="?", default="demo", help="a checkpoint folder, a hub name, or demo"
    )
    add_defaults(
        parser,
        tp=(2, "ranks"),
        clients=64,
        seconds=(60.0, "for how long clients begin new requests"),
        prompts=(24, "different prompts"),
        prompt_tokens=(128, "of the longest prompt"),
        max_tokens=(48, "of an answer"),
        max_batch=16,
        dtype=("auto", "to compute in; float32 where every answer has to be as offline"),
    )
    parser.add_argument("--program", help="run this one instead of the checkpoint's own")
    parser.add_argument("-o", "--output", type=Path, help="a JSON file for the figures")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    transformers.utils.logging.disable_progress_bar()
    cases = make_cases(options)
    port = free_port()
    limits = f"--tp {options.tp} --max-batch {options.max_batch} --max-waiting {options.clients}"
    command = [*SURGEON, options.model, "--port", port, "--dtype", options.dtype, *limits.split()]
    if options.program:
        command += ["--program", options.program]
    with tempfile.TemporaryDirectory() as folder, serving(command, port, Path(folder) / "log") as url:
        tally, seconds = asyncio.run(load(url, cases, options))
        after = metrics(url)
    figures = figures_of(tally, seconds)
    figures["prompt tokens shared"] = after["surgeon_cached_tokens_total"] / max(
        1, after["surgeon_prompt_tokens_total"]
    )
    verdict = f"{len(tally.wrong)} DIFFER" if tally.wrong else "all as offline"
    print(*(tally.wrong + tally.errors)[:3], sep="\n")
    title = f"{tally.answers} answers, {verdict}; {len(tally.errors)} errors"
    print_table(title, ["figure", "value"], [[name, f"{value:.4g}"] for name, value in figures.items()])
    if options.output:
        record = {"command": sys.argv, "versions": versions(), "cores": os.cpu_count()}
        seen = {name: getattr(tally, name) for name in ("answers", "wrong", "errors")}
        write_json(options.output, record | seen | {"seconds": seconds, "figures": figures})
    if tally.answers and not tally.wrong and not tally.errors:
        return 0
    return 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the server ends, too
    sys.exit(main())
