"""A hardware file for this machine, measured at a model's shapes: figures, and the bounds that rounds had them in.

Every round measures everything once. Figures are made of the medians over the rounds; an interval has the least and the
largest of what each round alone would have given. Shares are those of the peaks that were seen: the most operations and
bytes per second of all ranks together.
"""

from __future__ import annotations

import platform
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import yaml

from surgeon.cost.fit import CACHE, PRODUCTS, Figures, Fit, rising
from surgeon.cost.hardware_file import parse_hardware
from surgeon.cost.samples import Round, Typical, loads, measure_ranks, merged
from surgeon.models.shapes import ModelShapes
from surgeon.opened import Model, open_model
from surgeon.progress import progress
from surgeon.provenance import command_line, versions
from surgeon.runtime.kernels import triton
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.specification import Plan
from surgeon.runtime.worker.options import choose_device
from surgeon.threads import threads_per_rank, usable_cores
from surgeon.words import plural

DIGITS = 4
WIDTH = 120
SHORTEST = 64  # tokens: texts are so long that attention over a cache can be told from the rest
LONGEST = 512
WAYS = {"cpu": ("shm", "gloo"), "cuda": ("nccl", "gloo")}
KINDS = {"shm": "shared-memory", "gloo": "ring", "nccl": "ring"}


@dataclass(frozen=True)
class MachineCalibration:
    """What is measured.

    Attributes:
        shapes: of the model.
        plans: of the unedited model, by number of ranks; one rank is among them.
        device: "cpu" or "cuda".
        rounds: how often everything is measured.
        ways: in which ranks are connected, the first one in passes.
        typical: which of several times of the same counts. The median, unless other work disturbs most of them.
    """

    shapes: ModelShapes
    plans: Mapping[int, Plan]
    device: str = "cpu"
    rounds: int = 5
    ways: tuple[str, ...] = WAYS["cpu"]
    typical: Typical = median

    @property
    def steps(self) -> int:
        """How often `measure` calls `advance`."""
        exchanges = len(self.ways) * sum(ranks > 1 for ranks in self.plans)
        return self.rounds * (exchanges + sum(len(loads(plan.max_tokens)) for plan in self.plans.values()))

    def measure(self, advance: Callable[[float], None]) -> dict[int, list[Round]]:
        """Everything, by number of ranks."""
        return {
            ranks: measure_ranks(plan, self.device, self.ways, self.rounds, self.typical, advance)
            for ranks, plan in sorted(self.plans.items())
        }


def plan_calibration(
    model: str | Path | Model, counts: Sequence[int], rounds: int, device: str = "auto", dtype: str = "auto"
) -> MachineCalibration:
    """What has to be measured for a hardware file at a model's shapes.

    Args:
        model: a checkpoint folder, a hub name, or a model that is open.
        counts: numbers of ranks, as `check_ranks` wants them.
        device: "cpu", "cuda", or "auto".
        dtype: as `make_plan` takes it.

    Raises:
        FileNotFoundError, ValueError: if the model cannot be run by these ranks here, or takes short texts only.
    """
    check_ranks(counts)
    chosen = choose_device(device, max(counts))
    # What a captured graph does cannot be taken apart; on GPUs the same passes are computed without one.
    decoding = "static" if chosen == "cuda" else "auto"
    opened = open_model(model)
    length = min(LONGEST, make_plan(opened, 1, None, device=chosen, dtype=dtype).max_tokens)
    if length < SHORTEST:
        raise ValueError(f"{opened.name} takes texts of {length} tokens at most, and measuring needs {SHORTEST}")
    plans = {count: make_plan(opened, count, length, device=chosen, dtype=dtype, decoding=decoding) for count in counts}
    return MachineCalibration(opened.shapes, plans, chosen, rounds, WAYS[chosen])


def calibrate(
    name: str, model: str | Path | Model, counts: Sequence[int], rounds: int, device: str = "auto", dtype: str = "auto"
) -> str:
    """A hardware file for this machine, as text; arguments and errors as of `plan_calibration`."""
    calibration = plan_calibration(model, counts, rounds, device, dtype)
    with progress("calibrate", calibration.steps, "measurements") as advance:
        return hardware_text(name, calibration, calibration.measure(advance))


def check_ranks(ranks: Sequence[int]) -> None:
    """Refuse numbers of ranks that cannot be measured.

    Raises:
        ValueError: if one rank alone is not among them, or one is named twice.
    """
    if 1 not in ranks or len(set(ranks)) < len(ranks):
        raise ValueError(f"ranks {','.join(map(str, ranks))}: name each number once, and 1 among them, as in 1,2,4")


def hardware_text(name: str, calibration: MachineCalibration, measured: Mapping[int, list[Round]]) -> str:
    """The hardware file.

    Raises:
        ValueError: if what was measured makes no hardware.
    """
    shapes = calibration.shapes
    adding = triton.used_on(calibration.device)

    def figures(ranks: int, one: Round) -> Figures:
        return Fit(calibration.plans[ranks], shapes, one, adding).figures(calibration.ways)

    whole = {ranks: rising(figures(ranks, merged(each, calibration.typical))) for ranks, each in measured.items()}
    rounds = {ranks: [figures(ranks, one) for one in each] for ranks, each in measured.items()}
    content = _content(name, calibration, whole, rounds)
    written = yaml.safe_dump(content, sort_keys=False, width=WIDTH, default_flow_style=None)
    text = f"{_head(calibration, CACHE in whole[1])}\n{written}"
    parse_hardware(text)
    return text


def _head(calibration: MachineCalibration, knows_cache: bool) -> str:
    """The comment before it, which says what could not be measured."""
    plan = calibration.plans[1]
    used = ", ".join(f"{name} {version}" for name, version in versions().items())
    ranks = sorted(calibration.plans)
    threads = ", ".join(f"{plural(count, 'rank')} with {threads_per_rank(count)}" for count in ranks)
    said = (
        f"Measured by `{command_line()}`, every figure: from the medians of {calibration.rounds} rounds; under "
        f"intervals, what single rounds give at least and at most. {platform.machine()}, {usable_cores()} cores, "
        f"threads: {threads}; {plan.hidden} wide, {plan.layers} layers, {plan.dtype}; {used}."
    )
    if not knows_cache:
        said += f" No {CACHE}: with this model's windows attention reads no more of a long text than of a short one."
    return textwrap.fill(said, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def _content(
    name: str, calibration: MachineCalibration, whole: Mapping[int, Figures], rounds: Mapping[int, list[Figures]]
) -> dict[str, Any]:
    """A hardware file's content: rates in parts of their peaks, and with every figure the interval of its rounds.

    Args:
        whole: of all rounds together, by number of ranks.
        rounds: of each.
    """
    plan = calibration.plans[1]
    device = calibration.device

    def peak(prefix: str) -> float:
        """The most that all ranks together were seen to do."""
        return max(n * rate for n, each in whole.items() for key, rate in each.items() if key.startswith(prefix))

    flops = peak(PRODUCTS)
    bandwidth = peak("shares.bandwidth")
    links = {
        way: max(each[f"links.{way}.rate"] for ranks, each in whole.items() if ranks > 1)
        for way in (calibration.ways if len(whole) > 1 else ())
    }
    peaks = dict.fromkeys(("shares.flops", "shares.attention"), flops)
    peaks |= dict.fromkeys(("shares.bandwidth", CACHE, "shares.copies"), bandwidth)
    peaks |= {f"links.{way}.rate": rate for way, rate in links.items()}
    found: dict[Any, Any] = {}
    intervals: dict[str, list[float]] = {}
    for ranks, figures in whole.items():
        for key in figures:
            at = _place(key, ranks)
            if at.startswith("sharing.") and device != "cpu":
                continue  # there every rank has a device of its own
            of = next((rate for prefix, rate in peaks.items() if key.startswith(prefix)), 1.0)
            values = [_rounded(one[key] / of) for one in (figures, *rounds[ranks])]
            intervals[at] = [min(values), max(values)]
            *outer, last = (int(part) if part.isdecimal() else part for part in at.split("."))
            inner = found
            for part in outer:
                inner = inner.setdefault(part, {})
            inner[last] = values[0]
    for host in (found["host"], *(each["host"] for each in found.get("sharing", {}).values())):
        host["collective"] = host.get("collective", 0.0)
        host["asynchronous"] = device == "cuda"
    for way, rate in links.items():
        algorithm = {"kind": KINDS[way], "hop": 0.0, **found["links"][way]["algorithms"][0]}
        found["links"][way] = {"bandwidth": _rounded(rate), "algorithms": [algorithm]}
    if device == "cpu":
        memory = psutil.virtual_memory().total
    else:
        memory = torch.cuda.get_device_properties(0).total_memory
    rates = {"bandwidth": _rounded(bandwidth), "flops": {plan.dtype: _rounded(flops)}}
    about = {
        "name": name,
        "note": f"measured at the shapes of {calibration.shapes.name}",
        "devices": 1 if device == "cpu" else torch.cuda.device_count(),
        "device": {"memory": _rounded(float(memory)), **rates, **found.pop("device")},
    }
    return {**about, "host": found.pop("host"), "links": {}, **found, "intervals": intervals}


def _place(key: str, ranks: int) -> str:
    """Where a figure of so many ranks stands in a hardware file."""
    if key.startswith("links."):
        _, way, what = key.split(".")
        return f"links.{way}.algorithms.0.{'share' if what == 'rate' else what}.{ranks}"
    if ranks > 1:
        return f"sharing.{ranks}.{key}"
    if key.startswith("shares."):
        return f"device.{key}"
    return key


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
