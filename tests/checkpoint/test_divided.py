"""Checkpoints and edited models on ranks by transformers' own tensor parallelism: the numbers of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from surgeon.exports.in_memory import export
from surgeon.models.edit import edit
from tests.checkpoint.divided import EDITED
from tests.processes.together import together
from tests.selection import case
from tests.tiny_models import tiny_model

LOW = "A0@q4,o5 F0@up8,gate9,down7 >A1@q4,o5 >F1@up8,gate9,down7"
SLICES = "{A0/2:0 F0/2:0 | A0/2:1 F0/2:1} A1 F1"


@pytest.mark.parametrize(
    "family",
    [
        case("qwen3", default=True),
        *(case(name, default=False) for name in ("llama", "gpt_neox", "mixtral")),
    ],
)
def test_two_processes_compute_what_one_does(family: str, tmp_path: Path) -> None:
    """Layers side by side in one (fused), repeated, late; an edit of a divided model; factors. Slices are refused."""
    programs = {"ladder": EDITED if family != "gpt_neox" else "[A0 F0] [A1 F1 A1 F1] [A2 F2]"}
    if family == "qwen3":
        programs |= {"fused": "A0 F0 [A1 A2] [F1 F2]", "low": LOW, "slices": SLICES}
        tiny_model(family, 3, dropout=0.0).save_pretrained(tmp_path / "stock")
    for name, program in programs.items():
        model = edit(tiny_model(family, 3, dropout=0.0, num_key_value_heads=4), program)
        export(model, tmp_path / name, form="fused" if name == "fused" else "program")
    together(
        "tests.checkpoint.divided", str(tmp_path), *sorted(path.name for path in tmp_path.iterdir())
    )
