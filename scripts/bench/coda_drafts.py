"""The wavefront over racks, which goes on with what a coda drafts, against sequential pipelined decoding.

    python scripts/bench/coda_drafts.py -o TABLE.md [--folder DIR] [--cut 8] [--depth 2] [--train-seconds 300]
                                   [--links 0us 200us 1ms] [--racks 2] [--windows 2 3 4 6 8] [--rounds 5]

--folder is a checkpoint with codas; where there is none, it is made: the demo model with a coda behind layer --cut
(coda_training.py). What a coda is worth on ranks, scripts/bench/drafts.py --model DIR says. One text at a time, greedy;
prompts are of text that the demo model has not seen. All ways of decoding take turns in every round, so that whatever
else the machine does happens to all of them; tables have medians over rounds and prompts. Texts are compared: those
that differ are counted. A round ends with the first token that was not drafted, or not rightly.

On a machine that is not alone, racks are measured in slow motion: --paces 10ms --links 20ms 100ms is 0.1 ms a node with
links of 0.2 and 1 ms, a hundred times slower.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from transformers.utils import logging

from scripts.bench.coda_training import demo_with_coda
from scripts.bench.decoding import prompts_of, write_tables
from scripts.bench.wavefront import Racks, even_racks, folder_plan
from surgeon.runtime.comm.link import parse_seconds
from surgeon.runtime.plan.specification import Plan


@dataclass
class Run:
    """One text, decoded one way.

    Attributes:
        window: tokens in flight.
        seconds: behind the first new token.
    """

    place: str
    window: int
    prompt: int
    turn: int
    tokens: list[int]
    seconds: float
    drafted: int
    accepted: int

    @property
    def rate(self) -> float:
        """New tokens per second, the first left out."""
        return (len(self.tokens) - 1) / self.seconds


def over_racks(
    plan: Plan, nodes: tuple[int, ...], prompts: list[list[int]], options: argparse.Namespace
) -> Iterator[Run]:
    """Racks on processes of their own: sequential (1 in flight) and as a wavefront."""
    racks = Racks(plan, nodes)
    try:
        for turn in range(options.rounds + 1):
            for delay, pace in product(options.links, options.paces):
                racks.emulate(delay, pace)
                own = f", {pace * 1e3:g} ms a node" if pace else ""
                place = f"{len(nodes)} racks, {delay * 1e3:g} ms{own}"
                for number, prompt in enumerate(prompts):
                    for window in (1, *options.windows):
                        found = racks.decode(prompt, options.new, window)
                        if turn:  # the first one warms up
                            told = found.tokens, found.seconds, found.drafts, found.accepted
                            yield Run(place, window, number, turn, *told)
    finally:
        racks.close()


def table(runs: Sequence[Run]) -> Iterator[str]:
    """Medians by place and tokens in flight."""
    yield "| where | in flight | accepted | tokens per round | tokens/s (range) | x | other texts |"
    yield "|:--|--:|--:|--:|--:|--:|--:|"
    for place, window in dict.fromkeys((run.place, run.window) for run in runs):
        here = [run for run in runs if run.place == place]
        base = {(run.prompt, run.turn): run for run in here if run.window == 1}
        own = [run for run in here if run.window == window]
        ratios = [run.rate / base[run.prompt, run.turn].rate for run in own]
        rates = sorted(run.rate for run in own)
        drafted, accepted = sum(run.drafted for run in own), sum(run.accepted for run in own)
        new = sum(len(run.tokens) - 1 for run in own)
        cells = [
            *(place, str(window), f"{accepted / drafted:.0%}" if drafted else ""),
            f"{new / (new - accepted):.2f}",
            f"{median(rates):.0f} ({rates[len(rates) // 10]:.0f} to {rates[-1 - len(rates) // 10]:.0f})",
            f"{median(ratios):.2f}",
            str(len({run.prompt for run in own if run.tokens != base[run.prompt, run.turn].tokens})),
        ]
        yield "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="a checkpoint with codas; made where there is none")
    parser.add_argument("--cut", type=int, default=8)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--train-seconds", type=float, default=300)
    parser.add_argument("--windows", nargs="*", type=int, default=[2, 3, 4, 6, 8], help="tokens in flight")
    parser.add_argument("--links", nargs="*", type=parse_seconds, default=[0.0, 0.0002, 0.001], help="between racks")
    parser.add_argument(
        "--paces", nargs="*", type=parse_seconds, default=[0.0], help="seconds of a node (wavefront.py)"
    )
    parser.add_argument("--racks", nargs="*", type=int, default=[2])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path, help="write the table here too, every run beside it as JSON")
    options = parser.parse_args()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary) / "demo-with-coda"
        demo_with_coda(folder, options.cut, options.depth, options.train_seconds)
        prompts = prompts_of(folder, options.prompts, options.prompt)
        plan = folder_plan(folder, options.prompt + options.new)
        assert plan.coda is not None
        nodes = plan.coda.nodes
        runs: list[Run] = []
        for count in options.racks:
            runs += over_racks(plan, even_racks(plan, count, nodes), prompts, options)
        texts = [
            f"Rack 0 of {nodes} nodes, coda of {plan.coda.plan.layers} layers, one text:\n",
            "\n".join(table(runs)),
            f"\nLoad average at the end: {os.getloadavg()[0]:.1f}.",
        ]
        print("\n".join(texts))
        write_tables(options.output, texts, {"runs": [asdict(run) for run in runs]})


if __name__ == "__main__":
    main()
