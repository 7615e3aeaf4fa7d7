"""Pipelines beside one rank that holds all layers: one text, batches, and tokens drafted by the first rack's coda.

    python scripts/bench/coda_drafts.py -o TABLE.md [--folder DIR] [--cut 8] [--depth 2] [--train-seconds 300]
                                   [--links 0us 200us 1ms] [--ranks 2 4] [--in-flight 2 4 8] [--batch 1 4] [--rounds 5]

--folder is a checkpoint with codas; where there is none, it is made: the demo model with a coda behind layer --cut
(coda_training.py). What a coda is worth where all ranks share every layer, scripts/bench/drafts.py --model DIR says.
Greedy; prompts are of text that the demo model has not seen. With 1 in flight no coda drafts. All ways take turns in
every round, so that whatever else the machine does happens to all of them; tables have medians over rounds. Texts are
compared with those of one rank: those that differ are counted.

On a machine that is not alone, ranks are measured in slow motion, as if each had a machine of its own: --paces 10ms
--links 20ms 100ms is 0.1 ms a node with links of 0.2 and 1 ms, a hundred times slower. One rank with all layers then
takes so long for all nodes, which is not run.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from transformers.utils import logging

from scripts.bench.coda_training import demo_with_coda
from scripts.bench.decoding import prompts_of, write_tables
from surgeon.language.program import Program
from surgeon.runtime.batching.limits import Limits
from surgeon.runtime.batching.request import Request, Sampling
from surgeon.runtime.batching.windows import blocks_for
from surgeon.runtime.comm.link import Link, parse_seconds
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.specification import Plan
from surgeon.runtime.plan.stretches import with_stretches
from surgeon.runtime.worker.messages import Progress
from surgeon.runtime.worker.options import RankOptions
from surgeon.runtime.worker.ranks import Ranks
from surgeon.runtime.worker.ring import connect, emulate
from surgeon.runtime.worker.worker import complete, load

PLAIN, DRAFTING = "plain", "drafting"


@dataclass
class Run:
    """Some texts, decoded together one way.

    Attributes:
        in_flight: tokens, 0 for one rank with all layers.
        tokens: new ones of each text.
        seconds: from the first new token of any to the last of all.
    """

    place: str
    ranks: int
    batch: int
    in_flight: int
    turn: int
    tokens: list[list[int]]
    seconds: float
    drafted: int
    accepted: int

    @property
    def rate(self) -> float:
        """New tokens per second."""
        return (sum(map(len, self.tokens)) - len(self.tokens)) / self.seconds


def decoded(ranks: Ranks, plan: Plan, name: str, prompts: Sequence[list[int]], new: int, in_flight: int) -> Run:
    """Continue prompts together, with an engine that the ranks have loaded."""
    sampling = Sampling(max_new_tokens=new, ignore_end=True)
    requests = [Request(number, tuple(prompt), sampling) for number, prompt in enumerate(prompts)]
    limits = Limits(len(prompts), plan.max_tokens, stretches=max(1, len(plan.stretches)), in_flight=in_flight)
    times = list[float]()

    def heard(progress: Progress) -> None:
        if any(output.token is not None for output in progress.outputs):
            times.append(time.perf_counter())

    blocks = len(prompts) * (blocks_for(plan.max_tokens) + 1)
    outputs, _ = ranks.call(complete, requests, blocks, limits, name, True, notify=heard)[0]
    tokens = [[one.token for one in outputs if one.request == request.id] for request in requests]
    last = [[one for one in outputs if one.request == request.id][-1] for request in requests]
    counts = sum(one.drafted for one in last), sum(one.accepted for one in last)
    return Run("", ranks.options.ranks, len(prompts), in_flight, 0, tokens, times[-1] - times[0], *counts)


def runs_of(folder: Path, prompts: list[list[int]], options: argparse.Namespace) -> Iterator[Run]:
    """All ways, in turns; the first round warms up."""
    whole = make_plan(folder, 1, options.prompt + options.new)
    with ExitStack() as open_ranks:
        alone = open_ranks.enter_context(Ranks(RankOptions(1, "cpu")))
        alone.call(load, whole, PLAIN)
        pipelines = list[tuple[Ranks, dict[str, Plan]]]()
        for count in options.ranks:
            ranks = open_ranks.enter_context(Ranks(RankOptions(count, "cpu")))
            connect(ranks)
            plans = {name: with_stretches(whole, count, name == DRAFTING) for name in (PLAIN, DRAFTING)}
            for name, plan in plans.items():
                ranks.call(load, plan, name)
            pipelines.append((ranks, plans))
        for turn, batch in product(range(options.rounds + 1), options.batch):
            texts = prompts[:batch]
            found = [decoded(alone, whole, PLAIN, texts, options.new, 1)]
            found[0].in_flight, found[0].place = 0, "one rank"
            for (ranks, plans), delay, pace in product(pipelines, options.links, options.paces):
                emulate(ranks, Link(delay), pace)
                own = f", {pace * 1e3:g} ms a node" if pace else ""
                for in_flight in (1, *options.in_flight):
                    name = PLAIN if in_flight == 1 else DRAFTING
                    found.append(decoded(ranks, plans[name], name, texts, options.new, in_flight))
                    found[-1].place = f"{len(plans[name].stretches)} ranks, {delay * 1e3:g} ms{own}"
                if pace:
                    seconds = pace * len(Program.parse(whole.program)) * (options.new - 1)
                    slow = f"one rank{own}"
                    found.append(Run(slow, 1, batch, 0, 0, found[0].tokens, seconds, 0, 0))
            for run in found:
                run.turn = turn
                if turn:
                    yield run


def table(runs: Sequence[Run]) -> Iterator[str]:
    """Medians by texts, place and tokens in flight, beside one rank of the same pace."""
    yield "| texts | where | in flight | accepted | tokens/s (range) | x one rank | other texts |"
    yield "|--:|:--|--:|--:|--:|--:|--:|"
    for batch, place, in_flight in dict.fromkeys((run.batch, run.place, run.in_flight) for run in runs):
        here = [run for run in runs if (run.batch, run.place, run.in_flight) == (batch, place, in_flight)]
        pace = place.partition(", ")[2].rpartition(", ")[2] if place.endswith("a node") else ""
        beside = f"one rank, {pace}" if pace else "one rank"
        base = {
            run.turn: run for run in runs if run.batch == batch and run.place in (place, beside) and not run.in_flight
        }
        rates = sorted(run.rate for run in here)
        drafted, accepted = sum(run.drafted for run in here), sum(run.accepted for run in here)
        others = {text for run in here for text in range(batch) if run.tokens[text] != base[run.turn].tokens[text]}
        cells = [
            *(str(batch), place, str(in_flight or ""), f"{accepted / drafted:.0%}" if drafted else ""),
            f"{median(rates):.1f} ({rates[0]:.1f} to {rates[-1]:.1f})",
            f"{median(run.rate / base[run.turn].rate for run in here):.2f}",
            str(len(others)),
        ]
        yield "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="a checkpoint with codas; made where there is none")
    parser.add_argument("--cut", type=int, default=8)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--train-seconds", type=float, default=300)
    parser.add_argument("--in-flight", nargs="*", type=int, default=[2, 4, 8], help="tokens, where the coda drafts")
    parser.add_argument("--links", nargs="*", type=parse_seconds, default=[0.0, 0.0002, 0.001], help="between ranks")
    parser.add_argument(
        "--paces", nargs="*", type=parse_seconds, default=[0.0], help="seconds of a node, in slow motion"
    )
    parser.add_argument("--ranks", nargs="*", type=int, default=[2])
    parser.add_argument("--batch", nargs="*", type=int, default=[1], help="texts that are decoded together")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path, help="write the table here too, every run beside it as JSON")
    options = parser.parse_args()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary) / "demo-with-coda"
        demo_with_coda(folder, options.cut, options.depth, options.train_seconds)
        runs = [*runs_of(folder, prompts_of(folder, max(options.batch), options.prompt), options)]
        texts = ["\n".join(table(runs)), f"\nLoad average at the end: {os.getloadavg()[0]:.1f}."]
        print("\n".join(texts))
        write_tables(options.output, texts, {"runs": [asdict(run) for run in runs]})


if __name__ == "__main__":
    main()
