"""scripts/real/run.py and tasks.py: verdicts; plain.py: the programs it computes, against the executor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import surgeon
from scripts.real import plain, run, tasks
from surgeon.language.operations import OPERATIONS
from surgeon.language.program import Program


def test_programs_are_those_that_the_recipes_make() -> None:
    own = Program.parse(" ".join(map(run.layer, range(run.LAYERS))))
    assert own == Program.dense(run.LAYERS)
    made = OPERATIONS["pair"].function(own, range(24, 28))
    assert str(made) == run.paired(24, 28)


@pytest.mark.parametrize(
    "edit", ["A0 F0 [A1 A2] [F1 F2] A3 F3", "A0 F0 >A1 >F1 >A2 >F2 A3 F3", "A0 F0 A3 F3"]
)
def test_plain_computes_programs(tiny_checkpoint: Path, edit: str) -> None:
    with torch.no_grad():
        alone = plain.Plain(tiny_checkpoint)
        ids = torch.arange(3, 19)[None]
        assert torch.allclose(
            alone.logits(ids, "A0 F0 A1 F1 A2 F2 A3 F3"), alone.logits(ids, None), atol=1e-5
        )
        edited = surgeon.edit(alone.model, edit)
        wanted = edited(ids).logits
        surgeon.restore(alone.model)
        found = alone.logits(ids, edit)
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_verdicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check_right(way: run.Way) -> Iterator[run.Row]:
        assert way.text.stat().st_size > 0
        yield run.perplexity_row("perplexity", [10.0, 20.0], [10.0, 20.01])
        yield run.texts_row("texts", ["a", "b"], ["a", "b"])

    def check_open(_: run.Way) -> Iterator[run.Row]:
        yield run.Row("ranks", "", "refused", None)

    def check_wrong(_: run.Way) -> Iterator[run.Row]:
        yield run.perplexity_row("scan", [10.0, 20.0], [np.float64(10.02), 20.0])
        raise RuntimeError("surgeon scan ended with 1: error: no such file")

    class NoProcess:
        def __init__(self, *_: Any) -> None: ...

        def close(self) -> None: ...

    monkeypatch.setattr(run, "Plain", NoProcess)
    monkeypatch.setattr(run, "CHECKS", {"right": check_right, "open": check_open, "wrong": check_wrong})
    model = tmp_path / "model"
    for names, code in ((["right", "open"], 0), (["right", "open", "wrong"], 1)):
        table = tmp_path / "table.txt"
        assert run.main(["--model", str(model), "--only", *names, "-o", str(table)]) == code
        assert capsys.readouterr().out == table.read_text()
    lines = table.read_text().splitlines()
    verdicts = [line.split()[-1] for line in lines if line.endswith((" right", " open", " WRONG"))]
    assert verdicts == ["right", "right", "open", "WRONG", "WRONG"]
    assert "wrong: RuntimeError: surgeon scan ended with 1: error: no such file" in lines
    assert lines[-1].startswith("2 of 5 comparisons are right, in 0 minutes; 2 WRONG: scan; wrong")


def test_commands_run_as_a_user_types_them(tmp_path: Path) -> None:
    way = run.Way(tmp_path, tmp_path, tmp_path, plain=None)  # type: ignore[arg-type]
    ran = way.surgeon("--version")
    assert ran.said == f"surgeon {surgeon.__version__}\n"
    assert ran.peak > 1 << 20
    with pytest.raises(RuntimeError, match="surgeon scam ended with 2: error: No such command"):
        way.surgeon("scam", refused=True)


def test_a_process_of_plain_has_no_surgeon(tiny_checkpoint: Path, tmp_path: Path) -> None:
    asked = run.Plain(tiny_checkpoint, tmp_path / "log")
    try:
        (text,) = asked.ask("greedy", prompts=["def"], new=3)
        assert isinstance(text, str)
        with pytest.raises(RuntimeError, match=r"plain\.py: AttributeError"):
            asked.ask("surgeon")
    finally:
        asked.close()


def test_others_figures_are_inside_the_interval_or_not() -> None:
    columns = ["task", "metric", "value", "stderr", "rows"]
    found = [("arc_easy", "acc", 0.56, 0.01, 300), ("arc_challenge", "acc_norm", 0.30, 0.02, 300)]
    rows = tasks.compare(pd.DataFrame([*found, ("piqa", "acc_norm", 0.5, 0.02, 300)], columns=columns))
    assert [row.right for row in rows] == [True, True, False]
    assert rows[0] == run.Row("arc_easy acc, 300", "54.1", "56.0 (54.0 to 58.0)", True)
