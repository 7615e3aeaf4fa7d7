"""Training over ranks with `torch.distributed.pipelining`: GPipe, 1F1B or interleaved 1F1B, each rank a process (gloo).

    python scripts/bench/pipelined.py -o FOLDER [--schedule gpipe|1f1b|interleaved|local] [--ranks 2|4] [--delay 1ms]
        [--bandwidth 10MB/s] [--slow RANK=FACTOR] [--compute SECONDS] [--steps N] [--check] ...

The peer of block-wise local training (scripts/bench/racks.py): the same Llama from the same seed, the same windows in
the same order, the same micro-batches, AdamW and schedule of the learning rate as surgeon's own runs; the gradient's
norm is that of all ranks together, as in one process (a sum of one number over the ranks in every step). `local` is
block-wise local training in the same processes with the same messages (scripts/bench/local_ranks.py).

--check trains the same model with surgeon's Trainer in one process, and fails unless every step's loss and the final
weights (relative to the largest one) are within 1e-3. --delay and --bandwidth emulate the link between every two
neighbours, both ways, as scripts/bench/pipelined_p2p.py says. --slow has a rank take FACTOR times as long for what it
computes. --compute has a layer take SECONDS on a micro-batch, backward twice that: ranks sleep for the rest, so that
four of them do not wait for two cores; numbers stay what they are.

FOLDER/rank-R/ has timeline.csv (start, end, what, part, micro_batch, step) and rank.json (bytes by direction, memory).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.bench.pipelined_ranks import LOCAL, SCHEDULES, Job, Outcome, run_ranks
from scripts.bench.rack_model import Optimisation, build, config_of, texts_of, train_whole
from surgeon.runtime.comm.link import parse_link

TOLERANCE = 1e-3


@dataclass
class Check:
    """How far a run over ranks is from one process: relative for losses, for weights relative to the largest."""

    losses: list[float] = field(default_factory=list)
    weights: float = 0.0


def compare(outcome: Outcome, losses: Sequence[float], trained: PreTrainedModel) -> Check:
    """Against the losses of every step and the weights that one process came to."""
    found = outcome.weights(outcome.job.optimisation.steps)
    expected = dict(trained.named_parameters())
    assert set(found) == set(expected)
    largest = max(float(one.detach().abs().max()) for one in expected.values())
    apart = max(float((found[name] - one.detach()).abs().max()) for name, one in expected.items())
    pairs = zip(outcome.losses, losses, strict=True)
    return Check([abs(one - other) / other for one, other in pairs], apart / largest)


def parse_slow(text: str, ranks: int) -> tuple[float, ...]:
    """How many times as long each rank computes, from "1=2" or nothing."""
    factors = [1.0] * ranks
    for entry in filter(None, text.split(",")):
        rank, _, factor = entry.partition("=")
        factors[int(rank)] = float(factor)
    return tuple(factors)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--delay")
    parser.add_argument("--bandwidth")
    parser.add_argument("--slow", default="")
    parser.add_argument("--compute", type=float, default=0.0)
    parser.add_argument("--check", action="store_true")
    return parser.parse_args()


def main() -> None:
    arguments = _parse()
    link = parse_link(arguments.delay, arguments.bandwidth)
    optimisation = Optimisation(
        arguments.steps, arguments.batch, arguments.micro_batch, arguments.rate, warmup=arguments.steps // 10
    )
    config = config_of(arguments.hidden, arguments.layers, arguments.window)
    job = Job(
        arguments.schedule,
        arguments.ranks,
        config.to_dict(),
        optimisation,
        None if link is None else link.delay,
        None if link is None else link.bandwidth,
        parse_slow(arguments.slow, arguments.ranks),
        arguments.compute,
    )
    if arguments.check and arguments.schedule == LOCAL:
        raise SystemExit("--check compares with training end to end, which local training is not")
    tokens = arguments.steps * arguments.batch * arguments.window
    texts = texts_of(arguments.window, 16 * arguments.window, tokens)
    model = build(config, optimisation.seed)
    outcome = run_ranks(job, model, texts.training.ids, arguments.output)
    print(f"{outcome.tokens_per_second(1):.0f} tokens/s, loss {outcome.losses[0]:.4f} to {outcome.losses[-1]:.4f}")
    for number, record in enumerate(outcome.records):
        print(
            f"rank {number}: sent {record['sent']}, received {record['received']}, peak {record['peak'] / 1e6:.0f} MB"
        )
    if arguments.check:
        check_against_one(outcome, model, texts)


def check_against_one(outcome: Outcome, model: PreTrainedModel, texts: Any) -> None:
    """Train the same in one process, and compare.

    Raises:
        SystemExit: if they differ by more than the tolerance.
    """
    losses, trained = train_whole(model, texts, outcome.job.optimisation, outcome.folder / "one")
    check = compare(outcome, losses, trained)
    print("relative differences of losses: " + " ".join(f"{each:.0e}" for each in check.losses))
    print(f"largest difference of weights, relative to the largest weight: {check.weights:.1e}")
    if max(*check.losses, check.weights) > TOLERANCE:
        raise SystemExit(f"they differ by more than {TOLERANCE:g}")


if __name__ == "__main__":
    main()
