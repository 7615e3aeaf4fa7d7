"""One text, decoded in every way that scripts/bench/coda_drafts.py compares, in turns."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from scripts.bench.wavefront import Racks
from surgeon.checkpoint.texts import open_tokenizer
from surgeon.quality.data import DEMO, load_windows
from surgeon.runtime.batching.request import Request, Sampling
from surgeon.runtime.batching.scheduler import Limits, Output
from surgeon.runtime.batching.windows import blocks_for
from surgeon.runtime.comm.link import Link
from surgeon.runtime.model.engine import Figures
from surgeon.runtime.plan.specification import Plan
from surgeon.runtime.worker.options import RankOptions
from surgeon.runtime.worker.rank import Rank
from surgeon.runtime.worker.ranks import Ranks
from surgeon.runtime.worker.worker import complete, load

PLAIN, CODA = "plain", "coda"
DRAWN = Sampling(temperature=0.8, top_p=0.95)


@dataclass
class Run:
    """One text, decoded one way.

    Attributes:
        drafts: at a time (in flight, for racks); 0 for none.
        seconds: behind the first new token.
        processor: seconds of rank 0's processor for the whole text; 0 where they are not known.
    """

    place: str
    kind: str
    drafts: int
    prompt: int
    tokens: list[int]
    seconds: float
    drafted: int
    accepted: int
    processor: float = 0.0

    @property
    def rate(self) -> float:
        """New tokens per second, the first left out."""
        return (len(self.tokens) - 1) / self.seconds


def prompts_of(folder: Path, count: int, length: int) -> list[list[int]]:
    """Beginnings of text that the demo model has not seen."""
    windows = load_windows(open_tokenizer(folder), DEMO, 2 * length, 2 * length * count).ids
    return [window[:length].tolist() for window in windows]


def on_ranks(
    plan: Plan, ranks: int, link: Link | None, prompts: list[list[int]], options: argparse.Namespace
) -> Iterator[Run]:
    """Plain decoding and every number of drafts, in turns."""
    place = f"{ranks} rank{'s' if ranks > 1 else ''}" + ("" if link is None else f", {show(link.delay)}")
    plan = replace(plan, ranks=ranks)
    assert plan.coda is not None
    plan = replace(plan, coda=replace(plan.coda, plan=replace(plan.coda.plan, ranks=ranks)))
    blocks = blocks_for(plan.max_tokens)
    with Ranks(RankOptions(ranks, link=link)) as started:
        started.call(load, replace(plan, coda=None), PLAIN)
        started.call(load, plan, CODA)
        for turn in range(options.rounds + 1):
            for number, prompt in enumerate(prompts):
                for kind, sampling in (("greedy", Sampling()), ("drawn", DRAWN)):
                    for drafts in (0, *options.drafts):
                        asked = replace(sampling, max_new_tokens=options.new, ignore_end=True, seed=number)
                        limits = Limits(1, plan.max_tokens, draft_tokens=drafts)
                        request = Request(number, tuple(prompt), asked)
                        name = CODA if drafts else PLAIN
                        outputs, figures, processor = started.call(timed, request, blocks, limits, name)[0]
                        if turn:  # the first one warms up
                            seconds = figures.decode.seconds + figures.drafting.seconds
                            tokens = [output.token for output in outputs]
                            last = outputs[-1]
                            told = last.drafted, last.accepted, processor
                            yield Run(place, kind, drafts, number, tokens, seconds, *told)


def timed(rank: Rank, request: Request, blocks: int, limits: Limits, name: str) -> tuple[list[Output], Figures, float]:
    """Runs on a rank: `complete`, and the seconds that this process computed meanwhile."""
    before = time.process_time()
    outputs, figures = complete(rank, [request], blocks, limits, name)
    return outputs, figures, time.process_time() - before


def over_racks(
    plan: Plan, nodes: tuple[int, ...], delays: Sequence[float], prompts: list[list[int]], options: argparse.Namespace
) -> Iterator[Run]:
    """Racks on processes of their own: sequential (1 in flight) and as a wavefront."""
    racks = Racks(plan, nodes)
    try:
        for turn in range(options.rounds + 1):
            for delay, pace in product(delays, options.paces):
                racks.emulate(delay, pace)
                for number, prompt in enumerate(prompts):
                    for window in (1, *options.windows):
                        found = racks.decode(prompt, options.new, window)
                        if turn:
                            own = f", {pace * 1e3:g} ms a node" if pace else ""
                            place = f"{len(nodes)} racks, {show(delay)}{own}"
                            told = found.tokens, found.seconds, found.drafts, found.accepted
                            yield Run(place, "greedy", window, number, *told)
    finally:
        racks.close()


def show(seconds: float) -> str:
    """A delay."""
    return f"{seconds * 1e3:g} ms"
