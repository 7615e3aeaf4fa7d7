"""Records of runs."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pandas as pd
import pytest

import surgeon
from surgeon.provenance import FORMAT, provenance, write_json, write_table, write_text


def test_a_record_says_what_was_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/some/where/bin/surgeon", "scan", "my model", "--seed", "3"])
    record = provenance("my model", "abc", seed=3, data="demo")
    assert record["format"] == FORMAT
    assert record["command"] == "surgeon scan 'my model' --seed 3"
    assert (record["model"], record["model_hash"], record["seed"], record["data"]) == ("my model", "abc", 3, "demo")
    assert record["versions"]["surgeon"] == surgeon.__version__
    assert {"torch", "transformers", "python"} <= set(record["versions"])
    assert "seed" not in provenance("m", "abc")


def test_files_are_whole_or_what_they_were(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_json(path, {"wörd": 1.5})
    assert json.loads(path.read_text(encoding="utf-8")) == {"wörd": 1.5}
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "half\udcff")
    assert json.loads(path.read_text(encoding="utf-8")) == {"wörd": 1.5}
    assert list(tmp_path.iterdir()) == [path]


def test_a_table_is_written_as_csv(tmp_path: Path) -> None:
    table = pd.DataFrame({"first": [0, 1], "value": [1 / 3, math.nan], "last": [math.inf, 2e-7]})
    write_table(tmp_path / "nine.csv", table)
    assert (tmp_path / "nine.csv").read_text() == "first,value,last\n0,0.333333333,inf\n1,nan,2e-07\n"
    write_table(tmp_path / "three.csv", table, digits=3, missing="")
    assert (tmp_path / "three.csv").read_text() == "first,value,last\n0,0.333,inf\n1,,2e-07\n"
