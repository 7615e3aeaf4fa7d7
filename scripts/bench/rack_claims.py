"""What the article on block-wise local training claims, and what was measured; a rule confirms or refutes each."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.bench.pipelined_ranks import LOCAL
from scripts.bench.rack_bench import Bench, Cell, Figures
from scripts.bench.rack_model import head_units
from scripts.bench.rack_processes import PROCESSES
from scripts.bench.rack_quality import HIDDEN, Run, found_in

NOISE = 0.02  # nats: by about so much do seeds of the same run differ at these sizes


@dataclass(frozen=True)
class Claim:
    """One line of the table."""

    claim: str
    article: str
    ours: str
    holds: bool | None

    def __str__(self) -> str:
        verdict = {True: "confirmed", False: "refuted", None: "open"}[self.holds]
        return f"| {self.claim} | {self.article} | {self.ours} | {verdict} |"


def no_worse(difference: float, runs: float = 1) -> bool | None:
    """Whether a loss less another one is below 0; None where that is no more than what seeds make.

    Args:
        runs: that the difference is a mean of; less than one where it is of several differences.
    """
    return None if abs(difference) <= NOISE / math.sqrt(runs) else difference < 0


def show(bench: Bench, found: Mapping[Cell, Sequence[Figures]], quality: Sequence[Path]) -> None:
    """Print the table; of several folders with runs, each on its own."""
    print("\n| claim | the article | here | |\n|---|---|---|---|")
    runs = [dict(found_in(folder)) for folder in quality]
    for claim in (*of_runs(bench, found), *(claim for each in runs for claim in of_losses(each)), *of_lengths(runs)):
        print(claim)


def of_runs(bench: Bench, found: Mapping[Cell, Sequence[Figures]]) -> Iterator[Claim]:
    """What costs, on four ranks without a link."""
    ways = {cell.way: (cell, rounds) for cell, rounds in found.items() if (cell.ranks, cell.link) == (4, "none")}
    if set(ways) < {"gpipe", "1f1b", "interleaved", LOCAL}:
        return
    first = {way: rounds[0] for way, (_, rounds) in ways.items()}
    local, one = first[LOCAL], first["1f1b"]
    yield Claim(
        "no gradient crosses a rack: nothing comes back",
        "none",
        f"{local.backward / 1e6:.2f} MB a step back, 1F1B {one.backward / 1e6:.2f}",
        local.backward == 0 < one.backward,
    )
    ratio = (one.forward + one.backward) / (local.forward + local.backward)
    yield Claim(
        "an order of magnitude less data over the slow link",
        "540 GB each way against 38 GB received, 14 times less",
        f"{one.forward / 1e6:.2f} + {one.backward / 1e6:.2f} MB a step against {local.forward / 1e6:.2f} + "
        f"{local.backward / 1e6:.2f}: {ratio:.1f} times less; activations go forward as before",
        ratio >= 10,
    )
    speeds = {way: max(each.speed for each in rounds) for way, (_, rounds) in ways.items()}
    gains = {way: speeds[LOCAL] / speeds[way] - 1 for way in ("gpipe", "1f1b", "interleaved")}
    if PROCESSES in speeds:
        gains["1f1b by surgeon's processes"] = speeds[PROCESSES] / speeds["1f1b"] - 1
    batches, layers, head = (
        bench.optimisation.micro_batches,
        bench.config.num_hidden_layers / 4,
        head_units(bench.config),
    )
    bubble = (batches + 3) / batches
    yield Claim(
        "throughput at four racks, the same batch",
        "+38% (against what is not said)",
        ", ".join(f"{gain:+.0%} to {way}" for way, gain in gains.items())
        + f"; the bubble of GPipe and 1F1B alone would be {bubble - 1:+.0%}, with codas it is worth "
        f"{bubble * (layers + head) / (layers + 1 + head) - 1:+.0%}",
        gains["1f1b"] >= 0.3,
    )
    idle = {
        way: [statistics.median(rank) for rank in zip(*(one.idle for one in rounds), strict=True)]
        for way, (_, rounds) in ways.items()
    }
    busy = max(idle[LOCAL][:-1])
    yield Claim(
        "every rack is busy every step",
        "no bubble; pipelines: a quarter of four racks idle",
        f"racks with a coda wait at most {busy:.0%} of the time, the last, which has none, {idle[LOCAL][-1]:.0%}; "
        + ", ".join(f"{way} {statistics.mean(idle[way]):.0%}" for way in ("gpipe", "1f1b", "interleaved")),
        busy < 0.05,
    )
    held = {way: bench.held(cell) for way, (cell, _) in ways.items() if way != PROCESSES}
    if all(held.values()):
        megabytes = {way: (each or 0) / 1e6 for way, each in held.items()}
        yield Claim(
            "less memory: one batch of activations in flight",
            "one instead of one per stage",
            ", ".join(f"{way} {each:.1f}" for way, each in megabytes.items()) + " MB held by the rank that holds most",
            megabytes[LOCAL] < min(each for way, each in megabytes.items() if way != LOCAL),
        )


def of_losses(runs: Mapping[Run, dict[str, Any]]) -> Iterator[Claim]:
    """What racks cost in loss."""
    gaps = {size: gap_of(runs, Run(size)) for size in HIDDEN}
    known = {size: gap for size, gap in gaps.items() if gap is not None}
    ratios = {size: per_parameter(runs[Run(size)]) for size in known}
    if len(known) > 1:
        shares = [f"{size} {gap[0]:+.4f} ({gap[1]:+.1%}) at {ratios[size]:.1f}" for size, gap in known.items()]
        relative = [gap[1] for gap in known.values()]
        first, *_, last = (gap[0] for gap in known.values())
        yield Claim(
            "the gap in loss shrinks as models grow (at equal tokens)",
            "1.5% worse at 1B, 15% better at 13B",
            "; ".join(shares) + " tokens per parameter",
            no_worse(last - first, 1 / 2) if relative == sorted(relative, reverse=True) else False,
        )
    full = [size for size in known if ratios[size] >= 19.5]
    if full:
        seeds = [gap_of(runs, Run(full[0], seed=seed)) for seed in range(3)]
        there = [gap[0] for gap in seeds if gap is not None]
        yield Claim(
            "no worse at twenty tokens per parameter",
            "not run",
            f"{full[0]}: " + ", ".join(f"{gap:+.4f}" for gap in there) + f" nats ({len(there)} seeds)",
            no_worse(statistics.mean(there), len(there)),
        )
    spreads = {size: runs[Run(size)]["points"][-1]["losses"] for size in known}
    if spreads:
        between = {size: losses[0] - losses[-1] for size, losses in spreads.items()}
        yield Claim(
            "the shallowest rack is not far behind the deepest",
            "0.29 nats at 1B, 0.1 from 3B on",
            ", ".join(f"{size} {each:+.3f}" for size, each in between.items()),
            all(each < 0.1 for each in between.values()),
        )
    averaged = {every: gap_of(runs, Run("small", average=every)) for every in (0, 10, 1)}
    if all(averaged.values()):
        losses = {every: gap[0] for every, gap in averaged.items() if gap is not None}
        yield Claim(
            "codas need not be averaged",
            "each rack's own is enough",
            f"gap {losses[0]:+.4f} never, {losses[10]:+.4f} every 10 steps, {losses[1]:+.4f} always (1 seed)",
            no_worse(losses[0] - min(losses.values())) is not False,
        )


def of_lengths(folders: Sequence[Mapping[Run, dict[str, Any]]]) -> Iterator[Claim]:
    """Whether what a size wins or loses stays as it is trained longer, from runs of several lengths."""
    for size in HIDDEN:
        known = [(runs, gap_of(runs, Run(size))) for runs in folders]
        gaps = sorted((per_parameter(runs[Run(size)]), gap[0]) for runs, gap in known if gap is not None)
        if len(gaps) > 1:
            yield Claim(
                "what the local method wins is not under-training",
                "open: one size shows it decaying",
                f"{size}: " + ", ".join(f"{gap:+.4f} at {ratio:.1f}" for ratio, gap in gaps) + " tokens per parameter",
                no_worse(gaps[-1][1] - gaps[0][1], 1 / 2),
            )


def gap_of(runs: Mapping[Run, dict[str, Any]], run: Run) -> tuple[float, float] | None:
    """The loss of a run less that of the model trained end to end, and its share of that; None if one is missing."""
    local, whole = runs.get(run), runs.get(Run(run.size, racks=1, seed=run.seed))
    if local is None or whole is None:
        return None
    base = whole["points"][-1]["losses"][-1]
    gap = local["points"][-1]["losses"][-1] - base
    return gap, gap / base


def per_parameter(values: Mapping[str, Any]) -> float:
    """Tokens for each parameter without embedding and head."""
    return float(values["steps"] * values["tokens_per_step"] / values["body"])
