"""What native tracks win on CPU ranks over the dense model with as many parameters, beside tracks cut out of it.

    python scripts/bench/tracks.py [-o FILE.md] [--ranks 2 4] [--links 0 0.2 1] [--depths 1 2 4 8] [--minutes 10]

A random Llama of 16 layers, 512 wide, 8 heads, 4 KV heads (vocabulary 4,096), float32, on n ranks; native tracks of its
parameters (training/scratch/tracks.py: n tracks, one on each rank, narrower; their embedding and head are narrower,
too, and so the whole a little smaller, which the heading says); and the `tracks` operation on the dense model itself,
whose tracks have slices of its layers, and streams as wide as it: the same collectives, each larger. They meet every D
layers. What they generate is not compared here: weights are random, and speed does not depend on them.

For each number of ranks and each link (a delay in ms per collective, emulated over shared memory) all programs are
loaded at once, and every round runs each of them at every batch, so that what else the machine does disturbs all alike;
there are as many rounds as its share of the time has room for. Figures are medians over the rounds; percentages are
medians of the rounds' ratios to dense: the first token (of the prompt's pass, Parallel Track Transformers, tables 6 and
9), the time per token after it (tables 7 and 10), the throughput of both together (tables 5 and 8). KB are what a rank
sends per token in the layers' collectives.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.bench.decoding import DENSE, add_options, llama_config, parse, write_tables
from scripts.commands import add_defaults, make_parser
from scripts.markdown import format_table
from surgeon.benchmarks.measure import RankBench, Result, bench_record, bench_table, summarise
from surgeon.cost.deployment import Workload
from surgeon.language.operations import tracks
from surgeon.language.program import Program
from surgeon.machine import threads_per_rank, usable_cores
from surgeon.runtime.comm.collectives import Link
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.specification import Plan
from surgeon.runtime.worker.rank import RankOptions
from surgeon.runtime.worker.ranks import Ranks
from surgeon.training.scratch.tracks import narrow, track_program
from tests.tiny_models import sizes_of

LAYERS = 16
CONFIG = llama_config(num_hidden_layers=LAYERS)
COLUMNS = ["batch", "program", "syncs", "KB", "first token, ms", "", "per token, ms", "", "tokens/s", ""]


@dataclass(frozen=True)
class Models:
    """Where the dense model lies, and the narrow one of as many tracks as there are ranks."""

    dense: Path
    native: Path
    ranks: int

    @classmethod
    def write(cls, folder: Path, ranks: int) -> Models:
        """Write both with random weights, once."""
        models = cls(folder / DENSE, folder / f"native-{ranks}", ranks)
        for path, config in ((models.dense, CONFIG), (models.native, narrow(CONFIG, ranks, 1)[0])):
            if not path.is_dir():
                torch.manual_seed(0)
                AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
        return models

    def plans(self, depths: Sequence[int], tokens: int) -> dict[str, Plan]:
        """All that is compared, the dense model first."""
        dense = Program.dense(LAYERS)
        programs = [(DENSE, self.dense, dense)]
        programs += [
            (f"native, D = {d}", self.native, track_program(LAYERS, self.ranks, d)[0]) for d in depths
        ]
        programs += [
            (f"sliced, D = {d}", self.dense, tracks(dense, range(LAYERS), self.ranks, d)) for d in depths
        ]
        return {
            name: make_plan(folder, self.ranks, tokens, str(program))
            for name, folder, program in programs
        }


def measure_link(
    models: Models, delay: float, until: float, options: argparse.Namespace
) -> list[Result]:
    """Every program at every batch over one link, in rounds that begin before a time of the monotonic clock."""
    link = Link(delay=delay / 1e3) if delay else None
    plans = models.plans(options.depths, options.prompt + options.new)
    loads = [Workload(batch, options.prompt, options.new) for batch in options.batch]
    with Ranks(RankOptions(models.ranks, collectives="shm", link=link)) as ranks:
        bench = RankBench.load(ranks, plans)
        results = bench.measure(loads, 0, lambda _: None)  # warms up
        began = time.monotonic()
        took = 0.0
        while len(results[0].rounds) < options.rounds or time.monotonic() + took < until:
            for result in results:
                runs = bench.run(result.name, result.load)
                result.rounds.append(summarise(runs, result.load, connected=True))
            took = (time.monotonic() - began) / len(results[0].rounds)
    return results


def lines(
    models: Models, delay: float, results: Sequence[Result], options: argparse.Namespace
) -> Iterator[str]:
    native = narrow(CONFIG, models.ranks, 1)[0]
    sizes = {name: sizes_of(config) for name, config in (("dense", CONFIG), ("native", native))}
    said = (f"{name} {layers / 1e6:.2f}M + {ends / 1e6:.2f}M" for name, (layers, ends) in sizes.items())
    yield f"### {models.ranks} ranks, {f'a link of {delay:g} ms' if delay else 'shared memory'}\n"
    yield (
        f"Parameters of layers + ends: {', '.join(said)}; tracks are {native.hidden_size} wide with "
        f"{native.num_attention_heads} heads, {native.num_key_value_heads} KV heads and {native.intermediate_size} "
        f"neurons. Prompt {options.prompt}, {options.new} new tokens, {len(results[0].rounds)} rounds.\n"
    )
    yield from format_table(COLUMNS, rows(results), left=(1,))


def rows(results: Sequence[Result]) -> Iterator[list[object]]:
    """The table's, of results of which the dense one of each load comes first."""
    for one in bench_table(results).itertuples():
        changes = (1 / one.first_token_speedup, 1 / one.per_token_speedup, one.tokens_per_second_speedup)
        first, each, whole = ("" if one.program == DENSE else f"{change - 1:+.0%}" for change in changes)
        yield [
            one.batch,
            one.program,
            one.decode_all_reduces,
            f"{one.decode_bytes / one.batch / 1e3:.1f}",
            f"{one.first_token_ms:.1f}",
            first,
            f"{one.per_token_ms:.1f}",
            each,
            f"{one.tokens_per_second:.1f}",
            whole,
        ]


def main() -> None:
    parser = make_parser(__doc__)
    add_defaults(
        parser,
        ranks=[2, 4],
        links=([0.0, 0.2, 1.0], "delays in ms; 0 is none"),
        depths=[1, 2, 4, 8],
        minutes=(10.0, "to share out, after --rounds of each"),
    )
    add_options(parser)
    parser.set_defaults(new=12, rounds=1)
    options = parse(parser)
    began = time.monotonic()
    texts: list[str] = []
    record: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for place, number in enumerate(options.ranks):
            models = Models.write(Path(temporary), number)
            for nth, delay in enumerate(options.links, start=1):
                share = (place * len(options.links) + nth) / (len(options.ranks) * len(options.links))
                results = measure_link(models, delay, began + 60 * options.minutes * share, options)
                texts.append("\n".join(lines(models, delay, results, options)) + "\n")
                record[f"{number} ranks, {delay:g} ms"] = bench_record(results)
                print(texts[-1], flush=True)
    texts.append(
        f"{platform.processor() or platform.machine()}, {usable_cores()} cores, threads per rank: "
        f"{', '.join(f'{threads_per_rank(number)} of {number}' for number in options.ranks)}; load average "
        f"{os.getloadavg()[0]:.1f} at the end; {time.monotonic() - began:.0f} s in all.\n"
    )
    print(texts[-1])
    write_tables(options.output, texts, record)


if __name__ == "__main__":
    main()
