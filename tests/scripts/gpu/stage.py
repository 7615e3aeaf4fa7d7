"""Where a rehearsal's parts are computed, and the programs that they compute."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.specification import Plan
from surgeon.runtime.worker.rank import RankOptions
from surgeon.runtime.worker.ranks import Ranks
from tests.scripts.gpu.rehearsed import LONGEST
from tests.tiny_models import sample_sentences, save_checkpoint

FACTORS = "A0@q8,k8,v8,o8 F0@up16,gate16,down16"
PROGRAMS = {
    "dense": "A0 F0 A1 F1 A2 F2 A3 F3",
    "pruned": "A0 F0 A3 F3",
    "pair": "A0 F0 [A1 A2] [F1 F2] A3 F3",
    "attention beside MLP": "[A0 F0] [A1 F1] A2 F2 A3 F3",
    "ladder": "A0 F0 >A1 >F1 >A2 >F2 A3 F3",
    "ladder over a pair": "A0 F0 >[A1 A2] >[F1 F2] A3 F3",
    "parallel": "A0 F0 {A1 F1 | A2 F2} A3 F3",
    "tracks": "A0 F0 {A1/2:0 F1/2:0 A2/2:0 F2/2:0 | A1/2:1 F1/2:1 A2/2:1 F2/2:1} A3 F3",
    "dropped sums": "A0 F0 {A1/2:0 F1/2:0 | A1/2:1 F1/2:1} A2 F2 A3 F3",
    "average": "A0 F0 A1~A2 F1~F2 A3 F3",
    "low rank": f"{FACTORS} A1 F1 A2 F2 A3 F3",
    "width": "A0 F0 A1#1 F1#24 A2 F2 A3 F3",
    "repeat": "A0 F0 A1 F1 A1 F1 A3 F3",
}


@dataclass
class Stage:
    """Where parts are rehearsed.

    Attributes:
        folder: for models and results.
    """

    folder: Path
    ended: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.close()

    def model(self, family: str = "llama") -> Path:
        """A tiny random one, in float32, with a tokenizer."""
        folder = self.folder / family
        if not (folder / "tokenizer.json").exists():
            save_checkpoint(folder, family)
        return folder

    @cached_property
    def text(self) -> Path:
        path = self.folder / "text.txt"
        sentences = sample_sentences()
        path.write_text("\n".join(next(sentences) for _ in range(60)) + "\n")
        return path

    @cached_property
    def ranks(self) -> Ranks:
        """Two of them, whose sums go through main memory."""
        return self.ended.enter_context(Ranks(RankOptions(2, "cpu", "gloo")))

    def plan(
        self, device: str, program: str | None, family: str = "llama", ranks: int = 1, **more: Any
    ) -> Plan:
        return make_plan(self.model(family), ranks, LONGEST, program, device, dtype="float32", **more)
