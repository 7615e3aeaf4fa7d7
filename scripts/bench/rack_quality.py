"""What training rack by rack costs in loss: against the same model trained end to end, at equal tokens.

    python scripts/bench/rack_quality.py -o FOLDER [--only NAME,...] [--minutes M] [--steps N] [--table]

All racks are trained in one process here, in step: rack r's stretch of layers reads what rack r - 1 hands on, detached,
and has a coda of its own (k layers, norm and head) and a loss of its own. That is what processes compute, too; time
and traffic are measured by scripts/bench/racks.py. The last rack's coda is the path's own last k layers with the
model's norm and head, so the path is as deep as the model that is trained end to end, which is one rack here. Same
initial weights, windows, order, AdamW, schedule and tokens for both.

Tokens are bytes, so that small models are not mostly embedding and head (which are left out of the parameters all the
same). Three sizes see the same tokens, by default twenty for each parameter of the middle one. For the smallest, three
seeds, and codas of other depths, averaged codas, fewer racks, and an end of the run in which the path is trained end to
end.
A run that is there is not run again; --minutes is a limit after which no further run begins.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.bench.rack_model import (
    Optimisation,
    Rack,
    Stretch,
    body_parameters,
    build,
    bytes_of,
    config_of,
    cut,
    next_token_loss,
)
from surgeon.processes.files import write_json

HIDDEN = {"small": 16, "medium": 32, "large": 64}
RATES = {"small": 6e-3, "medium": 4e-3, "large": 3e-3}
LAYERS, WINDOW, BATCH, BYTES = 8, 128, 8, 256
HELD_OUT = 64 * WINDOW
MEASUREMENTS = 12


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        racks: 1 is end to end.
        coda: layers of a coda.
        average: steps between averagings of the codas; 0 is never.
        joint: share of the steps, at the end, in which the path is trained end to end.
    """

    size: str
    racks: int = 4
    coda: int = 1
    average: int = 0
    joint: float = 0.0
    seed: int = 0

    @property
    def name(self) -> str:
        """Of its file."""
        if self.racks == 1:
            return f"{self.size}-whole-{self.seed}"
        options = f"-average{self.average}" * bool(self.average) + f"-joint{self.joint:g}" * bool(self.joint)
        return f"{self.size}-racks{self.racks}-coda{self.coda}{options}-{self.seed}"


def planned() -> list[Run]:
    """What is compared, the most telling first."""
    base = Run("small")
    whole = replace(base, racks=1)
    sizes = [Run(size, racks) for size in ("small", "medium", "large") for racks in (1, 4)]
    options = [{"coda": 2}, {"average": 10}, {"average": 1}, {"joint": 0.1}, {"joint": 0.3}, {"racks": 2}, {"coda": 0}]
    variants = [replace(base, **option) for option in options]
    best = [replace(base, coda=2, joint=0.3), replace(base, coda=2, average=10)]
    seeds = [replace(each, seed=seed) for seed in (1, 2) for each in (whole, base)]
    return [*sizes, *variants, *best, *seeds]


class Training:
    """All racks in one process."""

    def __init__(self, run: Run, optimisation: Optimisation) -> None:
        model = build(config_of(HIDDEN[run.size], LAYERS, WINDOW, BYTES), run.seed)
        self.run, self.optimisation, self.size = run, optimisation, body_parameters(model)
        spans = cut(LAYERS, run.racks)
        self.racks = [Rack(Stretch(model, span), run.coda, run.seed) for span in spans]
        self.optimisers = [optimisation.optimiser(list(rack.named_parameters())) for rack in self.racks]

    def step(self, number: int, ids: Tensor) -> None:
        """One step of every rack."""
        if number > self.optimisation.steps * (1 - self.run.joint):
            self._joint_gradients(ids)
        else:
            self._own_gradients(ids)
        for optimiser, rates in self.optimisers:
            optimiser.step()
            rates.step()
            optimiser.zero_grad()
        if self.run.average and number % self.run.average == 0:
            self._average()

    def _own_gradients(self, ids: Tensor) -> None:
        stream = ids
        for rack in self.racks:
            passed = rack.stretch.run(stream)
            next_token_loss(rack.predict(passed), ids).backward()
            nn.utils.clip_grad_norm_(rack.parameters(), self.optimisation.norm)
            stream = passed.detach()

    def _joint_gradients(self, ids: Tensor) -> None:
        stream = ids
        for rack in self.racks:
            stream = rack.stretch.run(stream)
        next_token_loss(self.racks[-1].predict(stream), ids).backward()
        nn.utils.clip_grad_norm_([one for rack in self.racks for one in rack.parameters()], self.optimisation.norm)

    @torch.no_grad()
    def _average(self) -> None:
        for same in zip(*(rack.coda() for rack in self.racks), strict=True):
            mean = torch.stack(list(same)).mean(0)
            for one in same:
                one.copy_(mean)

    @torch.inference_mode()
    def measure(self, ids: Tensor) -> list[float]:
        """The held-out loss of every rack; the last one is the model's."""
        sums = [0.0] * len(self.racks)
        parts = ids.split(BATCH)
        for part in parts:
            stream = part
            for place, rack in enumerate(self.racks):
                stream = rack.stretch.run(stream)
                sums[place] += float(next_token_loss(rack.predict(stream), part)) * len(part)
        return [total / len(ids) for total in sums]


def perform(run: Run, steps: int, texts: Any, file: Path) -> None:
    """Train, and write the held-out losses by steps; nothing if that is there."""
    if file.is_file():
        return
    optimisation = Optimisation(steps, BATCH, BATCH, RATES[run.size], warmup=steps // 20, seed=run.seed)
    training, begun, points = Training(run, optimisation), time.perf_counter(), list[dict[str, Any]]()
    points.append({"step": 0, "losses": training.measure(texts.held_out.ids)})
    for number, ids in enumerate(optimisation.batches(texts.training.ids), 1):
        training.step(number, ids)
        if number in measured(steps):
            points.append({"step": number, "losses": training.measure(texts.held_out.ids)})
    seconds = time.perf_counter() - begun
    found = asdict(run) | {"steps": steps, "tokens_per_step": BATCH * WINDOW, "body": training.size, "seconds": seconds}
    write_json(file, found | {"data": texts.training.digest, "held_out": texts.held_out.digest, "points": points})
    print(f"{run.name}: {points[-1]['losses']}, {seconds:.0f} s", flush=True)


def measured(steps: int) -> set[int]:
    """After which steps: ever more apart, as losses fall ever more slowly."""
    return {max(1, round(steps * (place / MEASUREMENTS) ** 1.5)) for place in range(1, MEASUREMENTS + 1)}


def found_in(folder: Path) -> Iterator[tuple[Run, dict[str, Any]]]:
    """The runs that are there."""
    names = set(Run.__dataclass_fields__)
    for file in sorted(folder.glob("*.json")):
        values = json.loads(file.read_text(encoding="utf-8"))
        yield Run(**{name: value for name, value in values.items() if name in names}), values


def show(folder: Path) -> None:
    """Print tables of what is there."""
    runs = dict(found_in(folder))
    print("\n| run | seed | tokens per parameter | loss | gap to end to end | first rack's loss | last rack's loss |")
    print("|---|---|---|---|---|---|---|")
    for run, values in runs.items():
        losses = values["points"][-1]["losses"]
        whole = runs.get(Run(run.size, racks=1, seed=run.seed))
        gap = "" if whole is None or run.racks == 1 else f"{losses[-1] - whole['points'][-1]['losses'][-1]:+.4f}"
        ratio = values["steps"] * values["tokens_per_step"] / values["body"]
        label = run.name.rpartition("-")[0]
        first = f"{losses[0]:.4f}" if run.racks > 1 else ""
        print(f"| {label} | {run.seed} | {ratio:.2f} | {losses[-1]:.4f} | {gap} | {first} | {losses[-1]:.4f} |")


def gaps(folder: Path, racks: int = 4, coda: int = 1) -> dict[str, list[tuple[float, float]]]:
    """The loss gap (local minus end to end) by tokens per parameter, for each size, of the first seed."""
    runs = dict(found_in(folder))
    curves: dict[str, list[tuple[float, float]]] = {}
    for size in HIDDEN:
        local, whole = runs.get(Run(size, racks, coda)), runs.get(Run(size, 1))
        if local is None or whole is None:
            continue
        ratio = local["tokens_per_step"] / local["body"]
        pairs = zip(local["points"], whole["points"], strict=True)
        curves[size] = [(one["step"] * ratio, one["losses"][-1] - other["losses"][-1]) for one, other in pairs][1:]
    return curves


def _parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--only", default="", help="names of runs, as they are in the folder; by default all")
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument(
        "--steps", type=int, help="by default as many as make twenty tokens per parameter of the middle size"
    )
    parser.add_argument("--table", action="store_true", help="print what is there, and run nothing")
    return parser.parse_args(arguments)


def main() -> None:
    arguments, begun = _parse(), time.monotonic()
    arguments.output.mkdir(parents=True, exist_ok=True)
    if not arguments.table:
        torch.set_num_threads(1)
        texts = bytes_of(WINDOW, HELD_OUT)
        middle = body_parameters(build(config_of(HIDDEN["medium"], LAYERS, WINDOW, BYTES), 0))
        steps = arguments.steps or round(20 * middle / (BATCH * WINDOW))
        only = set(filter(None, arguments.only.split(",")))
        for run in planned():
            if only and run.name not in only:
                continue
            if time.monotonic() - begun > 60 * arguments.minutes:
                print(f"{arguments.minutes:g} minutes are over; {run.name} is left out", flush=True)
                continue
            perform(run, steps, texts, arguments.output / f"{run.name}.json")
    show(arguments.output)


if __name__ == "__main__":
    main()
