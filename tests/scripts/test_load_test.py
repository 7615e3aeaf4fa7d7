"""scripts/load_test.py: what its figures are made of, and that its parts find each other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
FIGURES = """
import json, load_test
tally = load_test.Tally(answers=4, tokens=40, first=[0.1, 0.2, 0.3, 0.4], each=[0.01, 0.03])
print(json.dumps(load_test.figures_of(tally, 2.0)))
"""


def test_figures() -> None:
    done = subprocess.run([sys.executable, "-c", FIGURES], cwd=SCRIPTS, capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout)
    assert (figures["requests/s"], figures["tokens/s"]) == (2, 20)
    assert round(figures["TTFT p50 ms"]) == 250
    assert round(figures["TPOT p50 ms"]) == 20
    assert figures["TTFT p50 ms"] < figures["TTFT p90 ms"] < figures["TTFT p99 ms"] < 400
