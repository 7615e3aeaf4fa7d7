"""What scripts/gpu/check's processes are told, and what a check is: something computed on a CPU and on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from scripts.gpu.judges import Judge
from surgeon.runtime.plan.specification import Decoding

Side = Literal["expected", "found", "speed"]


@dataclass(frozen=True)
class Setup:
    """What the processes of a run are told.

    Attributes:
        device: what is found is found on: "cuda" or, to try the script, "cpu".
        gpus: how many there are.
        folder: for models and results.
    """

    device: str
    gpus: int
    folder: str

    @property
    def demo(self) -> Path:
        """The demo model in float32, which GPUs compute in then, too."""
        return Path(self.folder) / "demo"

    @property
    def wide(self) -> Path:
        """A random one in bfloat16, with heads of 128 and fewer than 8 KV heads."""
        return Path(self.folder) / "wide"

    def on(self, side: Side) -> str:
        """Where one side computes."""
        if side == "expected":
            return "cpu"
        return self.device

    @property
    def ways(self) -> tuple[Decoding, ...]:
        """How passes that add a token are computed."""
        if self.device == "cuda":
            return ("dynamic", "static", "auto")
        return ("dynamic", "static")

    @property
    def collectives(self) -> tuple[str, ...]:
        """How two ranks talk: over NCCL where each has a GPU of its own, and over gloo on one GPU."""
        if self.gpus > 1:
            return ("nccl", "gloo")
        return ("gloo",)


@dataclass(frozen=True)
class Check:
    """Something that is computed on both sides.

    Attributes:
        compute: yields the names of rows of the table with values as JSON has them.
        rows: how each is judged.
        against: what is expected of a row, where that is another row of another check.
    """

    compute: Callable[[Setup, Side], Iterator[tuple[str, Any]]]
    rows: Mapping[str, Judge]
    against: Mapping[str, str] = field(default_factory=dict)

    def key(self, row: str) -> str:
        """The row that has what is expected of a row."""
        return self.against.get(row, row)
