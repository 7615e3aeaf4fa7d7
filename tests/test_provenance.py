"""Records of runs."""

from __future__ import annotations

import sys

import pytest

import surgeon
from surgeon.provenance import FORMAT, provenance


def test_a_record_says_what_was_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/some/where/bin/surgeon", "scan", "my model", "--seed", "3"])
    record = provenance("my model", "abc", seed=3, data="demo")
    assert record["format"] == FORMAT
    assert record["command"] == "surgeon scan 'my model' --seed 3"
    assert (record["model"], record["model_hash"], record["seed"], record["data"]) == (
        "my model",
        "abc",
        3,
        "demo",
    )
    assert record["versions"]["surgeon"] == surgeon.__version__
    assert {"torch", "transformers", "python"} <= set(record["versions"])
    assert "seed" not in provenance("m", "abc")
