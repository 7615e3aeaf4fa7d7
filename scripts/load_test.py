"""Many clients at once against `surgeon serve`, every answer checked; then everything that can go wrong.

    python scripts/load_test.py [MODEL] [--tp 2] [--clients 64] [--seconds 60] [-o FILE.json]

The clients ask for greedy streams without a pause, and every answer has to be the text that transformers gives for the
prompt on one device, alone. Prompts are held-out source files of Python's standard library, cut at many lengths, each
asked for again and again. Client, server and ranks share this machine's cores. TTFT is the time to a request's first
token, TPOT the mean time between its later ones, both as a client sees them. Exit code 1 if an answer or a check
is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import psutil
import torch
import transformers
from rich.console import Console
from rich.table import Table

import surgeon
from surgeon.demo.corpus import library_files
from surgeon.progress import progress
from surgeon.provenance import versions
from surgeon.runtime.text import open_tokenizer

COMMAND = [sys.executable, "-c", "from surgeon.cli.app import main; raise SystemExit(main())", "serve"]
COMPLETIONS = "/v1/completions"
PERCENTILES = (50, 90, 99)
DEADLINE_SECONDS = 10  # after a rank's death, for every answer and the end of the process
LONGEST_SECONDS = 300


@dataclass(frozen=True)
class Case:
    """A prompt, and the greedy answer to it."""

    prompt: list[int]
    answer: str


@dataclass
class Tally:
    """What the clients have seen; times in seconds, one per answer."""

    answers: int = 0
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    each: list[float] = field(default_factory=list)


class Server:
    """`surgeon serve` as a process; `lines` is what it has written."""

    def __init__(self, options: argparse.Namespace, *more: str) -> None:
        command = [*COMMAND, options.model, "--tp", str(options.tp), "--port", "0", *more]
        if options.program:
            command += ["--program", options.program]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self.url = ""
        ready = threading.Event()
        threading.Thread(target=self._read, args=(ready,), daemon=True).start()
        if not ready.wait(LONGEST_SECONDS) or not self.url:
            self.process.kill()
            raise SystemExit("the server did not begin:\n" + "\n".join(self.lines))

    def _read(self, ready: threading.Event) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if found := re.match(r"serving .* at (http://.*)/v1", line):
                self.url = found[1]
                ready.set()
        ready.set()

    def metrics(self) -> dict[str, float]:
        text = httpx2.get(f"{self.url}/metrics", timeout=60).text
        pairs = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def wait_for(self, condition: Callable[[dict[str, float]], bool]) -> float:
        """Seconds until the metrics are so."""
        begun = time.monotonic()
        while not condition(found := self.metrics()):
            if time.monotonic() - begun > LONGEST_SECONDS:
                raise SystemExit(f"the server is stuck: {found}")
            time.sleep(0.02)
        return time.monotonic() - begun

    def open(self) -> float:
        found = self.metrics()
        return found["surgeon_running"] + found["surgeon_waiting"]

    def rank(self, number: int) -> psutil.Process:
        children = psutil.Process(self.process.pid).children()
        return sorted((each for each in children if "surgeon.runtime" in each.cmdline()), key=lambda each: each.pid)[
            number
        ]


@contextmanager
def serving(options: argparse.Namespace, *more: str) -> Iterator[Server]:
    server = Server(options, *more)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait()


def make_cases(options: argparse.Namespace) -> list[Case]:
    """Prompts of many lengths and what `transformers` makes of them, one at a time."""
    tokenizer, model = open_tokenizer(options.model), surgeon.load(options.model)
    if options.program:
        model = surgeon.edit(model, options.program)
    generator, found = random.Random(0), []
    files = library_files(held_out=True)
    with progress("offline answers", options.prompts, "prompts") as done:
        for number in range(options.prompts):
            text = files[number % len(files)].read_text(encoding="utf-8", errors="ignore")
            length = generator.randint(options.prompt_tokens // 8 + 1, options.prompt_tokens)
            tokens = tokenizer(text[: 20 * length]).input_ids[:length]
            sampled: Any = model.generate(torch.tensor([tokens]), do_sample=False, max_new_tokens=options.max_tokens)
            before = tokenizer.decode(tokens, skip_special_tokens=True)
            answer = tokenizer.decode(sampled[0].tolist(), skip_special_tokens=True)[len(before) :]
            found.append(Case(tokens, answer))
            done(1)
    return found


async def ask(client: httpx2.AsyncClient, case: Case, options: argparse.Namespace, tally: Tally) -> None:
    """One streaming request, checked and timed."""
    body = {
        "prompt": case.prompt,
        "max_tokens": options.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begun, first, last, text, tokens = time.monotonic(), 0.0, 0.0, [], 0
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
    tally, begun = Tally(), time.monotonic()
    limits = httpx2.Limits(max_connections=options.clients)

    async def be_a_client(number: int) -> None:
        generator = random.Random(number)
        while time.monotonic() - begun < options.seconds:
            await ask(client, generator.choice(cases), options, tally)

    async with httpx2.AsyncClient(base_url=url, timeout=LONGEST_SECONDS, limits=limits) as client:
        await asyncio.gather(*(be_a_client(number) for number in range(options.clients)))
    return tally, time.monotonic() - begun


@dataclass(frozen=True)
class Check:
    """One thing that can go wrong, what should happen, and what did."""

    name: str
    seen: str
    passed: bool


BAD_BODIES: tuple[bytes, ...] = (
    b"{",
    b"[]",
    b'{"prompt": 5}',
    b'{"prompt": []}',
    b'{"prompt": "a", "temperature": "hot"}',
    b'{"prompt": "a", "temperature": -1}',
    b'{"prompt": "a", "max_tokens": 1000000000}',
    b'{"prompt": "a", "temprature": 0}',
    b'{"prompt": "a", "n": 0}',
)


def long_body(server: Server) -> dict[str, Any]:
    """A request that fills all positions but some."""
    room = httpx2.get(f"{server.url}/v1/models").json()["data"][0]["max_model_len"]
    return {"prompt": [5] * 8, "max_tokens": room - 8, "temperature": 0, "ignore_eos": True}


def check_bad_requests(server: Server) -> Check:
    statuses = []
    for body in BAD_BODIES:
        answer = httpx2.post(server.url + COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
        statuses.append(answer.status_code)
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    healthy = httpx2.get(f"{server.url}/health").status_code
    seen = f"{statuses.count(400)} of {len(BAD_BODIES)} answered with 400; healthy after: {healthy == 200}"
    return Check("bad requests", seen, set(statuses) == {400} and healthy == 200)


def check_disconnects(server: Server) -> Check:
    body = long_body(server) | {"stream": True}
    before = server.metrics()["surgeon_new_tokens_total"]
    with httpx2.Client(base_url=server.url, timeout=LONGEST_SECONDS) as client:
        request = client.build_request("POST", COMPLETIONS, json=body)
        streams = [client.send(request, stream=True) for _ in range(4)]
        used = server.metrics()["surgeon_used_blocks"]
        for stream in streams:
            stream.close()
    seconds = server.wait_for(lambda found: found["surgeon_used_blocks"] == 0)
    share = (server.metrics()["surgeon_new_tokens_total"] - before) / (4 * body["max_tokens"])
    seen = f"4 streams used {used:.0f} blocks, free {seconds:.2f} s after they hung up; {share:.0%} was computed"
    return Check("client disconnect", seen, used > 0 and share < 1)


async def post_all(server: Server, number: int, body: dict[str, Any]) -> list[tuple[int, dict[str, Any], float]]:
    """Statuses, answers and times of so many requests at once; answers that break off have the status 0."""

    async def post(client: httpx2.AsyncClient) -> tuple[int, dict[str, Any], float]:
        try:
            answer = await client.post(server.url + COMPLETIONS, json=body)
            return answer.status_code, answer.json(), time.monotonic()
        except httpx2.HTTPError as error:
            return 0, {"error": str(error)}, time.monotonic()

    async with httpx2.AsyncClient(timeout=LONGEST_SECONDS) as client:
        return await asyncio.gather(*(post(client) for _ in range(number)))


class Background:
    """`post_all` in a thread."""

    def __init__(self, server: Server, number: int, body: dict[str, Any]) -> None:
        self.found: list[tuple[int, dict[str, Any], float]] = []
        self._thread = threading.Thread(target=self._run, args=(server, number, body))
        self._thread.start()

    def _run(self, server: Server, number: int, body: dict[str, Any]) -> None:
        self.found = asyncio.run(post_all(server, number, body))

    def results(self) -> list[tuple[int, dict[str, Any], float]]:
        self._thread.join()
        return self.found


def check_queue_limit(server: Server) -> Check:
    """With room for 2 and a queue of 2."""
    others = Background(server, 4, long_body(server))
    server.wait_for(lambda found: found["surgeon_running"] + found["surgeon_waiting"] == 4)
    answer = httpx2.post(server.url + COMPLETIONS, json={"prompt": "a"})
    retry = answer.headers.get("Retry-After")
    statuses = [status for status, _, _ in others.results()]
    seen = f"fifth of 4: {answer.status_code}, Retry-After {retry}; the others: {sorted(set(statuses))}"
    return Check("queue limit", seen, answer.status_code == 429 and retry is not None and set(statuses) == {200})


def check_sigterm(server: Server) -> Check:
    body = long_body(server)
    others = Background(server, 4, body)
    server.wait_for(lambda found: found["surgeon_running"] + found["surgeon_waiting"] == 4)
    server.process.send_signal(signal.SIGTERM)
    late = httpx2.post(server.url + COMPLETIONS, json=body).status_code
    full = [
        status == 200 and answer["usage"]["completion_tokens"] == body["max_tokens"]
        for status, answer, _ in others.results()
    ]
    code = server.process.wait(LONGEST_SECONDS)
    seen = f"{sum(full)} of 4 open ones finished; a new one: {late}; exit code {code}"
    return Check("SIGTERM", seen, all(full) and late == 503 and code == 0)


def check_rank_death(server: Server) -> Check:
    others = Background(server, 4, long_body(server))
    server.wait_for(lambda found: found["surgeon_running"] + found["surgeon_waiting"] == 4)
    killed = time.monotonic()
    server.rank(-1).kill()
    found = others.results()
    code = server.process.wait(LONGEST_SECONDS)
    ended = time.monotonic() - killed
    answered = max(moment for _, _, moment in found) - killed
    statuses = [status for status, _, _ in found]
    named = "rank " in server.lines[-1] and "SIGKILL" in server.lines[-1]
    seen = f"{statuses.count(503)} of 4 got 503 in {answered:.1f} s; exit code {code} in {ended:.1f} s; named: {named}"
    return Check("rank SIGKILL", seen, set(statuses) == {503} and ended < DEADLINE_SECONDS and code == 1 and named)


def run_checks(options: argparse.Namespace) -> list[Check]:
    found: list[Check] = []
    small = ("--max-batch", "2", "--max-waiting", "2")
    with serving(options, "--max-batch", "4") as server:
        found += [check_disconnects(server), check_bad_requests(server)]
    with serving(options, *small) as server:
        found += [check_queue_limit(server), check_sigterm(server)]
    with serving(options, *small) as server:
        found.append(check_rank_death(server))
    return found


def figures_of(tally: Tally, seconds: float) -> dict[str, float]:
    figures = {"requests/s": tally.answers / seconds, "tokens/s": tally.tokens / seconds}
    for name, times in (("TTFT", tally.first), ("TPOT", tally.each)):
        for percent in PERCENTILES:
            figures[f"{name} p{percent} ms"] = 1000 * float(np.percentile(times, percent)) if times else float("nan")
    return figures


def show(tally: Tally, figures: dict[str, float], checks: list[Check]) -> None:
    console = Console(width=80)
    verdict = "all as offline" if not tally.wrong else f"{len(tally.wrong)} DIFFER"
    console.print(f"{tally.answers} answers, {verdict}; {len(tally.errors)} errors")
    for line in (tally.wrong + tally.errors)[:3]:
        console.print(line, markup=False, highlight=False)
    table = Table("figure", "value")
    for name, value in figures.items():
        table.add_row(name, f"{value:.3g}" if value < 1 else f"{value:.1f}")
    console.print(table)
    if checks:
        table = Table("check", "seen", "passed")
        for check in checks:
            table.add_row(check.name, check.seen, "yes" if check.passed else "NO")
        console.print(table)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default="demo", help="a checkpoint folder, a hub name, or demo")
    parser.add_argument("--tp", type=int, default=2, help="ranks")
    parser.add_argument("--program", help="run this one instead of the checkpoint's own")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0, help="for how long clients begin new requests")
    parser.add_argument("--prompts", type=int, default=24, help="different prompts")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="of the longest prompt")
    parser.add_argument("--max-tokens", type=int, default=48, help="of an answer")
    parser.add_argument("--max-batch", type=int, default=16)
    parser.add_argument("--no-checks", action="store_true", help="only the load")
    parser.add_argument("-o", "--output", type=Path, help="a JSON file for the figures")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    transformers.utils.logging.disable_progress_bar()
    cases = make_cases(options)
    with serving(options, "--max-batch", str(options.max_batch), "--max-waiting", str(options.clients)) as server:
        tally, seconds = asyncio.run(load(server.url, cases, options))
        after = server.metrics()
    figures = figures_of(tally, seconds)
    figures["prompt tokens shared"] = after["surgeon_cached_tokens_total"] / max(
        1, after["surgeon_prompt_tokens_total"]
    )
    checks = [] if options.no_checks else run_checks(options)
    show(tally, figures, checks)
    if options.output:
        record = {
            "command": sys.argv,
            "versions": versions(),
            "cores": os.cpu_count(),
            "seconds": seconds,
            "answers": tally.answers,
            "wrong": tally.wrong,
            "errors": tally.errors,
            "figures": figures,
            "checks": [asdict(check) for check in checks],
        }
        options.output.write_text(json.dumps(record, indent=2) + "\n")
    passed = tally.answers and not tally.wrong and not tally.errors and all(check.passed for check in checks)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
