"""Decoding with drafts of another program over the same weights, beside decoding without and beside that program alone.

    python scripts/bench/drafts.py -o TABLE.md [--model demo] [--ranks 2] [--links 0us 200us 1ms gloo] [--batch 1 4 8]
                                   [--draft NAME=PROGRAM|RECIPE|FOLDER ...] [--only NAME ...]
                                   [--draft-tokens N] [--drawn 0.8] [--rounds 3] [--device cuda]

All ways of decoding take turns in every round, in another order each time, so that whatever else the machine does
happens to all of them and none always comes first; tables have medians over rounds of the speed beside dense decoding
in the same round. Passes of half a millisecond differ by a third from round to round: take 30 rounds there. What drafts
are worth every run finds out anew while it decodes, as `surgeon generate` does. Prompts are of text that the demo model
has not seen.

"alone" is the edited program itself, whose text is another one; "lookup" drafts what came in the text itself before,
without a pass of anything; a model with codas drafts with its coda, too. Greedy texts of drafts are compared with
dense ones: those that differ are counted.

Where these were measured, drafts are to come to 1.5 times dense over 1 ms and to 1.2 times over gloo, one text on two
ranks, and nothing to less than 0.97 times dense.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

import pandas as pd

from scripts.bench.decoding import DENSE, add_options, parse, prompts_of, write_tables
from scripts.bench.goals import missed
from scripts.commands import add_defaults, make_parser
from scripts.markdown import format_table, spread
from surgeon.benchmarks.measure import DecodedTexts, decode_together
from surgeon.checkpoint.codas import read_codas
from surgeon.commands.opening import draft_program
from surgeon.language.operations import ladder, pair, prune, tracks
from surgeon.opened import Model, open_model
from surgeon.runtime.batching.request import Sampling
from surgeon.runtime.comm.collectives import Link, parse_seconds
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.drafts import with_coda, with_draft
from surgeon.runtime.worker.rank import RankOptions
from surgeon.runtime.worker.ranks import Ranks
from surgeon.runtime.worker.worker import load

LOOKUP = "lookup"
CODA = "coda"
ALONE = "alone"
SHARED = "shared memory"
GLOO = "gloo"
GOALS = {"1ms": 1.5, GLOO: 1.2}  # times dense, of the best draft of one text
LEAST = 0.97
TRACKS = "tracks, D = all"


@dataclass(frozen=True)
class Run(DecodedTexts):
    """Some texts, decoded together in one way.

    Attributes:
        way: DENSE, LOOKUP, the name of a draft, or that and ALONE.
    """

    place: str
    batch: int
    way: str
    turn: int


def edits(model: Model, ranks: int) -> dict[str, str]:
    """Programs that synchronise less, or compute less, in all layers but the first two and the last two."""
    dense = model.program
    layers = model.config.num_hidden_layers
    inner = range(2, layers - 2)
    pairs = pair(dense, inner)
    fewer = reduce(lambda kept, layer: prune(kept, range(layer, layer + 1)), inner[1::3], dense)
    found = {
        "pairs": pairs,
        "ladder of pairs": ladder(pairs, inner),
        "every third left out": fewer,
    }
    if ranks > 1 and model.config.num_key_value_heads % ranks == 0:
        found |= {
            "tracks, D = 4": tracks(dense, inner, ranks, 4),
            TRACKS: tracks(dense, inner, ranks, len(inner)),
        }
    return {name: str(program) for name, program in found.items()}


def runs(
    model: Model, place: str, options: RankOptions, drafts: dict[str, str], asked: argparse.Namespace
) -> Iterator[Run]:
    """All ways of decoding, in turns."""
    plan = make_plan(model, options.ranks, asked.prompt + asked.new, device=options.device)
    plans = {DENSE: plan} | ({CODA: with_coda(plan)} if read_codas(model.folder) else {})
    for name, draft in drafts.items():
        alone = make_plan(model, options.ranks, plan.max_tokens, draft, options.device)
        plans |= {f"{name} {ALONE}": alone, name: with_draft(plan, model, draft)}
    sampling = Sampling(temperature=asked.drawn, max_new_tokens=asked.new, ignore_end=True)
    with Ranks(options) as started:
        for name, each in plans.items():
            started.call(load, each, name)
        for batch in asked.batch:
            prompts = prompts_of(model.folder, batch, asked.prompt)
            ways = DENSE, LOOKUP, *[name for name in plans if name != DENSE]
            for turn in range(1 - asked.warm, asked.rounds + 1):
                for way in Random(turn).sample(ways, len(ways)):
                    name = DENSE if way == LOOKUP else way
                    drafting = way != DENSE and not way.endswith(ALONE)
                    found = decode_together(
                        started, name, prompts, sampling, drafting, way == LOOKUP, asked.draft_tokens
                    )
                    if turn > 0:
                        yield Run(**vars(found), place=place, batch=batch, way=way, turn=turn)


def beside_dense(found: Sequence[Run]) -> pd.DataFrame:
    """The runs, with their speed beside dense decoding in the same round, and how many of their texts are others."""
    dense = {(run.place, run.batch, run.turn): run for run in found if run.way == DENSE}
    rows = []
    for run in found:
        base = dense[run.place, run.batch, run.turn]
        others = sum(own != text for own, text in zip(run.tokens, base.tokens, strict=True))
        rows.append(vars(run) | {"rate": run.rate, "ratio": run.rate / base.rate, "others": others})
    return pd.DataFrame(rows)


def table(found: Sequence[Run]) -> list[str]:
    """Medians by place, batch and way."""
    columns = [
        "where",
        "texts",
        "way",
        "x dense (range)",
        "tokens/s",
        "accepted",
        "tokens of a text per pass",
    ]
    rows = []
    for key, own in beside_dense(found).groupby(["place", "batch", "way"], sort=False):
        drafted = own["drafted"].sum()
        accepted = own["accepted"].sum()
        new = own["new"].sum()
        rows.append(
            [
                *key,
                spread(own["ratio"].tolist(), 2),
                f"{own['rate'].median():.1f}",
                f"{accepted / drafted:.0%} of {drafted}" if drafted else "",
                f"{new / (new - accepted):.2f}",
                own["others"].sum(),
            ]
        )
    return format_table([*columns, "other texts"], rows, left=(0, 2))


def shortcomings(found: Sequence[Run]) -> Iterator[str]:
    """What is not as good as it should be."""
    speeds = (
        beside_dense(found)
        .groupby(["place", "batch", "way"], sort=False)["ratio"]
        .median()
        .reset_index()
    )
    speeds = speeds[~speeds["way"].str.endswith(ALONE)]  # whose text is another one
    for one in speeds[speeds["ratio"] < LEAST].itertuples():
        yield f"{one.place}, {one.batch}, {one.way}: {one.ratio:.2f}"
    for goal, least in GOALS.items():
        drafted = speeds[(speeds["place"] == goal) & (speeds["batch"] == 1) & (speeds["way"] != LOOKUP)]
        if drafted["ratio"].max() < least:
            yield f"{goal}, the best of one text: {drafted['ratio'].max():.2f}"


def draft_named(model: Model, text: str) -> tuple[str, str]:
    """The name and program of NAME=PROGRAM or NAME=RECIPE."""
    name, _, given = text.partition("=")
    return name, str(draft_program(model, given))


def main() -> None:
    parser = make_parser(__doc__)
    add_defaults(parser, model="demo", ranks=2, device="cpu")
    parser.add_argument(
        "--links", nargs="*", default=["0us", "200us", "1ms", GLOO], help="delays of links, and gloo"
    )
    parser.add_argument(
        "--draft", nargs="*", action="extend", default=[], metavar="NAME=DRAFT", help="besides its own"
    )
    parser.add_argument(
        "--draft-tokens", type=int, default=0, metavar="N", help="always; by default as many as pay"
    )
    parser.add_argument(
        "--only",
        nargs="*",
        action="extend",
        default=[],
        metavar="NAME",
        help="of the drafts it has; none: none",
    )
    parser.add_argument(
        "--drawn", type=float, default=0.0, metavar="TEMPERATURE", help="drawn texts, not greedy ones"
    )
    parser.add_argument(
        "--warm", type=int, default=2, metavar="N", help="rounds before, in which passes are recorded"
    )
    add_options(parser)
    parser.set_defaults(batch=[1, 4, 8], new=192)
    options = parse(parser)
    model = open_model(options.model)
    own = edits(model, options.ranks)
    drafts = {name: text for name, text in own.items() if not options.only or name in options.only}
    drafts |= dict(draft_named(model, each) for each in options.draft)
    found = list[Run]()
    for link in options.links:
        ranks = RankOptions(options.ranks, options.device)
        place = link
        if link == GLOO:
            ranks = replace(ranks, collectives=GLOO)
        elif delay := parse_seconds(link):
            ranks = replace(ranks, link=Link(delay))
        elif options.device == "cpu":
            place = SHARED
        found += runs(model, place, ranks, drafts, options)
    programs = [f"- {name}: `{draft}`" for name, draft in drafts.items()]
    texts = [
        "\n".join(table(found)),
        "",
        *programs,
        "",
        f"Load average at the end: {os.getloadavg()[0]:.1f}.",
    ]
    print("\n".join(texts))
    write_tables(options.output, texts, {"runs": [asdict(run) for run in found]})
    if short := list(shortcomings(found)):
        raise missed("; ".join(short))


if __name__ == "__main__":
    main()
