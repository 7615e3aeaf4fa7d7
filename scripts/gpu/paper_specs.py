"""What a paper's rows need to be measured: which program of which shape, on how many ranks, under which load."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from scripts.cost.cases import Case, Run
from scripts.cost.models import CONFIGS, LOW_RANK, SHAPES, program_of
from surgeon.checkpoint.tensor_file import read_json
from surgeon.cost.deployment import Workload
from surgeon.language.program import Program
from surgeon.models.shapes import ModelShapes

SMALL_LAYERS = 8
SMALL_HEADS = 8
SMALL_WIDTH = 16
SMALL = {"batch": 2, "prompt": 24, "new": 4}
Measured = Mapping[str, Any]  # what `paper_bench` stores of a spec


@dataclass(frozen=True)
class Spec:
    """One program under one load, measured once for all rows that it is in.

    Attributes:
        model: a key of `CONFIGS`.
        system: as of `Run`.
        layers: how many of the model's layers the program has; None for all.
        p2p: whether GPUs may read each other's memory.
    """

    model: str
    system: str
    ranks: int
    p2p: bool
    batch: int
    prompt: int
    new: int
    layers: int | None = None

    @property
    def key(self) -> str:
        """A name for a file."""
        parts = [
            self.model,
            self.system,
            f"{self.ranks}-ranks",
            f"{self.batch}x{self.prompt}+{self.new}",
        ]
        parts += [] if self.p2p else ["no-p2p"]
        parts += [] if self.layers is None else [f"{self.layers}-layers"]
        return re.sub(r"[^A-Za-z0-9.+x-]", "_", "-".join(parts))

    @property
    def load(self) -> Workload:
        """Its texts."""
        return Workload(self.batch, self.prompt, self.new)

    @property
    def name(self) -> str:
        """Of the program among those of its model."""
        if self.layers is None:
            return self.system
        return f"{self.system} {self.layers}"

    @property
    def low_rank(self) -> str:
        """How factors are shared."""
        return LOW_RANK.get(self.system, "auto")

    def program(self, shapes: ModelShapes) -> Program:
        """What ranks run.

        Raises:
            ValueError: if the model cannot be changed so.
        """
        return program_of(self.system, self.layers or shapes.layers, shapes.layer_shapes)


@dataclass(frozen=True)
class Row:
    """A printed row and what it takes to measure it here.

    Attributes:
        own, baseline: what is measured; of a part of a layer the whole program, then one with half of its layers.
        layers: of the whole program, and how many of them the row is about, where it is about some.
    """

    case: Case
    own: tuple[Spec, ...]
    baseline: tuple[Spec, ...]
    layers: tuple[int, int] = (0, 0)

    @cached_property
    def specs(self) -> tuple[Spec, ...]:
        """All of them."""
        return self.own + self.baseline

    def seconds(self, found: Mapping[str, Measured], specs: Sequence[Spec]) -> float:
        """What the row times, of measured specs."""
        run = self.case.run
        times = [timed(found[spec.key], run) for spec in specs]
        if len(times) == 1:
            return times[0]
        whole, of = self.layers
        return (times[0] - times[1]) / (whole - whole // 2) * of

    def speedup(self, found: Mapping[str, Measured]) -> float | None:
        """Times as fast as the baseline; None for a baseline."""
        if not self.baseline:
            return None
        return self.seconds(found, self.baseline) / self.seconds(found, self.own)

    def value(self, found: Mapping[str, Measured]) -> float:
        """What was measured, in the unit that is printed."""
        unit = self.case.unit
        run = self.case.run
        speedup = self.speedup(found)
        if unit in ("times dense", "percent improvement"):
            assert speedup is not None
            if unit == "times dense":
                return speedup
            return 100 * (speedup - 1 if run.measure == "rate" else 1 - 1 / speedup)
        seconds = self.seconds(found, self.own)
        if unit == "tokens/s":
            return self.own[0].batch * self.own[0].new / seconds
        return seconds * {"ms": 1e3, "as printed": 1e6}[unit]


def timed(measured: Measured, run: Run) -> float:
    """Seconds of what a run's row shows, the median of the rounds."""
    spec = measured["spec"]
    rounds = measured["rounds"]
    if run.measure == "first":
        return median(one["first_token"] for one in rounds)
    if run.measure == "token":
        return median(one["per_token"] for one in rounds)
    if run.measure == "rate":
        return float(spec["batch"] * spec["new"] / median(one["rate"] for one in rounds))
    splits = [one["prefill_pass" if spec["new"] == 1 else "decode_pass"] for one in rounds]
    parts = {"compute": ("compute",), "exchange": ("waiting",), "total": ("compute", "waiting")}[
        run.measure
    ]
    return median(sum(split[part] for part in parts) for split in splits)


@dataclass(frozen=True)
class Place:
    """What there is to run on.

    Attributes:
        gpus: how many, or None for ranks on the CPU.
        exact: whether a row runs on as many ranks as it is printed for, or not at all.
        small: tiny shapes and loads, on two ranks.
        model: a shape of docs/shapes in place of the rows' own.
    """

    gpus: int | None
    exact: bool = False
    small: bool = False
    model: str | None = None

    def rows(self, cases: Iterable[Case]) -> list[Row]:
        """The rows of cases, as they are measured here."""
        return [self._row(case) for case in cases]

    def _row(self, case: Case) -> Row:
        model = self.model or case.run.model
        layers = self.config(model)["num_hidden_layers"]
        own, baseline = (self._specs(run, model, layers) for run in (case.run, case.baseline))
        return Row(case, own, baseline, (layers, case.run.per_layers))

    def _specs(self, run: Run | None, model: str, layers: int) -> tuple[Spec, ...]:
        if run is None:
            return ()
        sizes = SMALL | ({"new": 1} if run.new == 1 else {}) if self.small else {}
        sizes = {"batch": run.batch, "prompt": run.prompt, "new": run.new} | sizes
        system = run.system
        if system.startswith("lp:"):
            printed = CONFIGS[run.model]["num_hidden_layers"]
            pairs, end = (int(number) for number in system.split(":")[1:])
            end = min(layers, max(2, -(-end * layers // printed)))
            system = f"lp:{min(max(1, pairs * layers // printed), end // 2)}:{end}"
        ranks = self.ranks(run.ranks)
        p2p = self.small or ranks == 1 or run.link != "nvlink-off"  # one GPU reads no other's memory
        spec = Spec(model, system, ranks, p2p, **sizes)
        if not run.per_layers:
            return (spec,)
        half = layers // 2
        name, *numbers = system.split(":")
        if name == "lp":
            system = f"lp:{int(numbers[0]) // 2}:{half}"
        return spec, replace(spec, system=system, layers=half)

    def ranks(self, printed: int) -> int:
        """How many run what is printed for so many: as many GPUs as there are, a power of two."""
        if self.small:
            return 2
        if self.gpus is None or self.exact or printed <= self.gpus:
            return printed
        return 1 << max(1, self.gpus).bit_length() - 1

    def config(self, model: str) -> dict[str, Any]:
        """The configuration of a model, or of a tiny one of its kind."""
        entries = dict(CONFIGS.get(model) or read_json(SHAPES / f"{model}.json"))
        if not self.small:
            return entries
        grouped = entries.get("num_key_value_heads") != entries["num_attention_heads"]
        kv_heads = 4 if grouped and not model.startswith(("track", "pt-")) else SMALL_HEADS
        sizes = {
            "num_hidden_layers": SMALL_LAYERS,
            "num_attention_heads": SMALL_HEADS,
            "hidden_size": SMALL_HEADS * SMALL_WIDTH,
            "word_embed_proj_dim": SMALL_HEADS * SMALL_WIDTH,
            "num_key_value_heads": kv_heads,
            "head_dim": SMALL_WIDTH,
            "intermediate_size": 256,
            "ffn_dim": 256,
            "vocab_size": 512,
            "max_position_embeddings": 512,
        }
        return (
            entries
            | {name: size for name, size in sizes.items() if name in entries}
            | {"dtype": "float32"}
        )

    def write_config(self, folder: Path, model: str) -> Path:
        """The configuration as a file, which stands for a model with random weights."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{model}.json"
        path.write_text(json.dumps(self.config(model), indent=2) + "\n", encoding="utf-8")
        return path


def record_of(spec: Spec, program: Program, rounds: Sequence[Any], **more: Any) -> dict[str, Any]:
    """What is stored of a measured spec, as JSON has it."""
    return {
        "spec": asdict(spec),
        "program": str(program),
        "rounds": [asdict(one) for one in rounds],
        **more,
    }
