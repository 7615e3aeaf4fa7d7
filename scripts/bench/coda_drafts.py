"""Pipelines beside one rank that holds all layers: with and without tokens that the first rack's coda drafts.

    python scripts/bench/coda_drafts.py -o TABLE.md [--folder DIR] [--cut 8] [--depth 2] [--train-seconds 300]
                                   [--links 0us 200us 1ms] [--ranks 2 4] [--batch 1 4] [--rounds 5]

--folder is a checkpoint with codas; where there is none, it is made: the demo model with a coda behind layer --cut
(coda_training.py). What a coda is worth where all ranks share every layer, scripts/bench/drafts.py --model DIR says.
Greedy; prompts are of text that the demo model has not seen. All ways take turns in every round, so that whatever else
the machine does happens to all of them; tables have medians over rounds. Texts are compared with those of one rank:
those that differ are counted.
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
from surgeon.runtime.batching.limits import Limits
from surgeon.runtime.batching.request import Request, Sampling
from surgeon.runtime.batching.windows import blocks_for
from surgeon.runtime.comm.link import Link, parse_seconds
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.specification import Plan
from surgeon.runtime.plan.stretches import with_stretches
from surgeon.runtime.worker.messages import Progress
from surgeon.runtime.worker.options import RankOptions
from surgeon.runtime.worker.pipeline import connect
from surgeon.runtime.worker.ranks import Ranks
from surgeon.runtime.worker.worker import complete, load

PLAIN, DRAFTING, ALONE = "plain", "with the coda", "one rank"


@dataclass
class Run:
    """Some texts, decoded together one way.

    Attributes:
        tokens: new ones of each text.
        seconds: from the first new token of any to the last of all.
    """

    place: str
    way: str
    batch: int
    turn: int
    tokens: list[list[int]]
    seconds: float
    drafted: int
    accepted: int

    @property
    def rate(self) -> float:
        """New tokens per second."""
        return (sum(map(len, self.tokens)) - len(self.tokens)) / self.seconds


def decoded(ranks: Ranks, plan: Plan, way: str, place: str, turn: int, prompts: Sequence[list[int]], new: int) -> Run:
    """Continue prompts together, with an engine that the ranks have loaded."""
    sampling = Sampling(max_new_tokens=new, ignore_end=True)
    requests = [Request(number, tuple(prompt), sampling) for number, prompt in enumerate(prompts)]
    limits = Limits(len(prompts), plan.max_tokens, stretches=max(1, len(plan.stretches)))
    times = list[float]()

    def heard(progress: Progress) -> None:
        if any(output.token is not None for output in progress.outputs):
            times.append(time.perf_counter())

    blocks = len(prompts) * (blocks_for(plan.max_tokens) + 1)
    outputs, _ = ranks.call(complete, requests, blocks, limits, way, True, notify=heard)[0]
    tokens = [[one.token for one in outputs if one.request == request.id] for request in requests]
    last = [[one for one in outputs if one.request == request.id][-1] for request in requests]
    counts = sum(one.drafted for one in last), sum(one.accepted for one in last)
    return Run(place, way, len(prompts), turn, tokens, times[-1] - times[0], *counts)


def runs_of(folder: Path, prompts: list[list[int]], options: argparse.Namespace) -> Iterator[Run]:
    """All ways, in turns; the first round warms up."""
    whole = make_plan(folder, 1, options.prompt + options.new)
    with ExitStack() as open_ranks:
        places = {ALONE: (open_ranks.enter_context(Ranks(RankOptions(1, "cpu"))), {PLAIN: whole})}
        for count, delay in product(options.ranks, options.links):
            ranks = open_ranks.enter_context(Ranks(RankOptions(count, "cpu", link=Link(delay) if delay else None)))
            connect(ranks)
            plans = {way: with_stretches(whole, count, way == DRAFTING) for way in (PLAIN, DRAFTING)}
            places[f"{count} ranks, {delay * 1e3:g} ms"] = ranks, plans
        for ranks, plans in places.values():
            for way, plan in plans.items():
                ranks.call(load, plan, way)
        for turn, batch in product(range(options.rounds + 1), options.batch):
            for place, (ranks, plans) in places.items():
                for way, plan in plans.items():
                    run = decoded(ranks, plan, way, place, turn, prompts[:batch], options.new)
                    if turn:
                        yield run


def table(runs: Sequence[Run]) -> Iterator[str]:
    """Medians by texts, place and way, beside one rank."""
    yield "| texts | where | way | accepted | tokens/s (range) | x one rank | other texts |"
    yield "|--:|:--|:--|--:|--:|--:|--:|"
    for batch, place, way in dict.fromkeys((run.batch, run.place, run.way) for run in runs):
        here = [run for run in runs if (run.batch, run.place, run.way) == (batch, place, way)]
        alone = {run.turn: run for run in runs if (run.batch, run.place) == (batch, ALONE)}
        rates = sorted(run.rate for run in here)
        drafted, accepted = sum(run.drafted for run in here), sum(run.accepted for run in here)
        others = {text for run in here for text in range(batch) if run.tokens[text] != alone[run.turn].tokens[text]}
        cells = [
            *(str(batch), place, way, f"{accepted / drafted:.0%}" if drafted else ""),
            f"{median(rates):.1f} ({rates[0]:.1f} to {rates[-1]:.1f})",
            f"{median(run.rate / alone[run.turn].rate for run in here):.2f}",
            str(len(others)),
        ]
        yield "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="a checkpoint with codas; made where there is none")
    parser.add_argument("--cut", type=int, default=8)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--train-seconds", type=float, default=300)
    parser.add_argument("--links", nargs="*", type=parse_seconds, default=[0.0, 0.0002, 0.001], help="between ranks")
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
