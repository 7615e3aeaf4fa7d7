"""Decoding with drafts of another program over the same weights, beside decoding without and beside that program alone.

    python scripts/bench/drafts.py -o TABLE.md [--model demo] [--ranks 2] [--links 0us 200us 1ms gloo] [--batch 1 4 8]
                                   [--draft NAME=PROGRAM ...] [--only NAME ...] [--drawn 0.8] [--rounds 3]

All ways of decoding take turns in every round, so that whatever else the machine does happens to all of them; tables
have medians over rounds of the speed beside dense decoding in the same round. Every run starts cold: what drafts are
worth is found out while it decodes, as in `surgeon generate`. Prompts are of text that the demo model has not seen.

"alone" is the edited program itself, whose text is another one; "lookup" drafts what came in the text itself before,
without a pass of anything. Greedy texts of drafts are compared with dense ones: those that differ are counted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from transformers.utils import logging

from scripts.bench.decoding import DENSE, write_tables
from scripts.bench.draft_runs import prompts_of
from surgeon.benchmarks.drafting import decode_together
from surgeon.language.operations import ladder, pair, prune, tracks
from surgeon.language.program import Program
from surgeon.opened import Model, open_model
from surgeon.runtime.batching.request import Sampling
from surgeon.runtime.comm.link import Link, parse_seconds
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.drafts import with_draft
from surgeon.runtime.worker.options import RankOptions
from surgeon.runtime.worker.ranks import Ranks
from surgeon.runtime.worker.worker import load

LOOKUP, ALONE, GLOO = "lookup", "alone", "gloo"


@dataclass
class Run:
    """Some texts, decoded together in one way.

    Attributes:
        way: DENSE, LOOKUP, the name of a draft, or that and ALONE.
        seconds: of passes behind the prompts'.
        new: tokens that these brought.
        passes: of the model, behind the prompts'.
    """

    place: str
    batch: int
    way: str
    turn: int
    tokens: list[list[int]]
    new: int
    seconds: float
    passes: int
    drafted: int
    accepted: int


def edits(model: Model, ranks: int) -> dict[str, str]:
    """Programs that synchronise less, or compute less, in all layers but the first and the last two."""
    dense, layers = model.program, model.config.num_hidden_layers
    inner = range(2, layers - 2)
    pairs = pair(dense, inner)
    found = {
        "pairs": pairs,
        "ladder of pairs": ladder(pairs, inner),
        "tracks, D = 4": tracks(dense, inner, ranks, 4),
        "tracks, D = all": tracks(dense, inner, ranks, len(inner)),
        "every third left out": reduce(lambda kept, layer: prune(kept, range(layer, layer + 1)), inner[1::3], dense),
    }
    return {name: str(program) for name, program in found.items()}


def runs(
    model: Model, place: str, options: RankOptions, drafts: dict[str, str], asked: argparse.Namespace
) -> Iterator[Run]:
    """All ways of decoding, in turns."""
    plan = make_plan(model, options.ranks, asked.prompt + asked.new)
    plans = {DENSE: plan}
    for name, program in drafts.items():
        plans[f"{name} {ALONE}"] = make_plan(model, options.ranks, plan.max_tokens, program)
        plans[name] = with_draft(plan, model, program)
    with Ranks(options) as started:
        for name, each in plans.items():
            started.call(load, each, name)
        for batch in asked.batch:
            prompts = prompts_of(model.folder, batch, asked.prompt)
            for turn in range(asked.rounds + 1):
                for way in (DENSE, LOOKUP, *[name for name in plans if name != DENSE]):
                    found = decoded(started, place, way, turn, prompts, asked)
                    if turn:  # the first one warms up
                        yield found


def decoded(
    started: Ranks, place: str, way: str, turn: int, prompts: list[list[int]], asked: argparse.Namespace
) -> Run:
    """One run."""
    sampling = Sampling(temperature=asked.drawn, max_new_tokens=asked.new, ignore_end=True, seed=turn)
    drafting, name = way != DENSE and not way.endswith(ALONE), DENSE if way == LOOKUP else way
    found = decode_together(started, name, prompts, sampling, drafting, looked_up=way == LOOKUP)
    return Run(place, len(prompts), way, turn, **vars(found))


def table(found: Sequence[Run]) -> Iterator[str]:
    """Medians by place, batch and way."""
    yield "| where | texts | way | x dense (range) | tokens/s | accepted | tokens of a text per pass | other texts |"
    yield "|:--|--:|:--|--:|--:|--:|--:|--:|"
    for place, batch, way in dict.fromkeys((run.place, run.batch, run.way) for run in found):
        own = [run for run in found if (run.place, run.batch, run.way) == (place, batch, way)]
        dense = {run.turn: run for run in found if (run.place, run.batch, run.way) == (place, batch, DENSE)}
        ratios = sorted(run.new / run.seconds * dense[run.turn].seconds / dense[run.turn].new for run in own)
        drafted, accepted = sum(run.drafted for run in own), sum(run.accepted for run in own)
        new = sum(run.new for run in own)
        others = sum(text != dense[run.turn].tokens[at] for run in own for at, text in enumerate(run.tokens))
        cells = [
            *(place, str(batch), way, f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"),
            f"{median(run.new / run.seconds for run in own):.1f}",
            f"{accepted / drafted:.0%} of {drafted}" if drafted else "",
            f"{new / (new - accepted):.2f}",
            str(others),
        ]
        yield "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--links", nargs="*", default=["0us", "200us", "1ms", GLOO], help="delays of links, and gloo")
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 4, 8])
    parser.add_argument("--draft", nargs="*", default=[], metavar="NAME=PROGRAM", help="besides those it has itself")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="of the drafts")
    parser.add_argument("--drawn", type=float, default=0.0, metavar="TEMPERATURE", help="drawn texts, not greedy ones")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path, help="write the table here too, every run beside it as JSON")
    options = parser.parse_args()
    logging.disable_progress_bar()
    model = open_model(options.model)
    drafts = edits(model, options.ranks)
    drafts |= {name: str(Program.parse(text)) for name, _, text in (each.partition("=") for each in options.draft)}
    drafts = {name: text for name, text in drafts.items() if not options.only or name in options.only}
    found = list[Run]()
    for link in options.links:
        delay = 0.0 if link == GLOO else parse_seconds(link)
        ranks = RankOptions(options.ranks, "cpu", "gloo" if link == GLOO else "auto", Link(delay) if delay else None)
        found += runs(model, link if delay or link == GLOO else "shared memory", ranks, drafts, options)
    programs = [f"- {name}: `{text}`" for name, text in drafts.items()]
    texts = ["\n".join(table(found)), "", *programs, "", f"Load average at the end: {os.getloadavg()[0]:.1f}."]
    print("\n".join(texts))
    write_tables(options.output, texts, {"runs": [asdict(run) for run in found]})


if __name__ == "__main__":
    main()
