"""scripts/load/run.py: what its figures are made of."""

from __future__ import annotations

from scripts.load.run import Tally, figures_of


def test_figures() -> None:
    figures = figures_of(Tally(answers=4, tokens=40, first=[0.1, 0.2, 0.3, 0.4], each=[0.01, 0.03]), 2.0)
    assert (figures["requests/s"], figures["tokens/s"]) == (2, 20)
    assert round(figures["TTFT p50 ms"]) == 250
    assert round(figures["TPOT p50 ms"]) == 20
    assert figures["TTFT p50 ms"] < figures["TTFT p90 ms"] < figures["TTFT p99 ms"] < 400
