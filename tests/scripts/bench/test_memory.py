"""A scan that takes more than its limit has missed a goal, one with other numbers is wrong; nothing is scanned here."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from scripts.bench import memory
from scripts.bench.goals import MISSED
from scripts.bench.memory import Outcome, main


@pytest.mark.parametrize(
    ("peak", "divergence", "code", "said"),
    [
        (1 << 30, 0.5, None, "difference between their numbers: 0.0e+00\n"),
        (
            2 << 30,
            0.5,
            MISSED,
            "goal missed: the scan with a limit took more: 2.15 GB, not at most 1.5 GB\n",
        ),
        (
            2 << 30,
            0.6,
            "the numbers differ by more than 0.0001",
            "difference between their numbers: 1.7e-01\n",
        ),
    ],
)
def test_how_it_ends(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    peak: int,
    divergence: float,
    code: int | str | None,
    said: str,
) -> None:
    def scanned(*given: object) -> Outcome:
        limited = given[-1] is not None
        cell = {"operation": "prune", "first": 0, "last": 1, "perplexity": 3.0}
        cells = pd.DataFrame([cell | {"divergence": 0.5 if limited else divergence}])
        return Outcome(peak if limited else 5 << 30, 7.0, cells)

    monkeypatch.setattr(memory, "scan", scanned)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    monkeypatch.setattr("sys.argv", ["memory.py", "--folder", str(tmp_path)])
    ended = None
    try:
        main()
    except SystemExit as stopped:
        ended = stopped.code
    assert ended == code
    page = capsys.readouterr().out
    assert "peak resident" in page
    assert page.endswith(said)
