"""Files are whole or what they were."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pandas as pd
import pytest

from surgeon.processes import files
from surgeon.processes.files import whole_file, write_json, write_table, write_text


def test_files_are_whole_or_what_they_were(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_json(path, {"wörd": 1.5})
    assert json.loads(path.read_text(encoding="utf-8")) == {"wörd": 1.5}
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "half\udcff")
    assert json.loads(path.read_text(encoding="utf-8")) == {"wörd": 1.5}
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing/record\.json'$"):
        write_text(tmp_path / "missing" / "record.json", "{}")


def test_an_error_is_not_hidden_by_what_cannot_be_removed(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()

    def fail() -> None:
        with whole_file(folder / "record.json"):
            folder.rmdir()
            folder.write_text("")
            raise ValueError("the first")

    with pytest.raises(ValueError, match="the first"):
        fail()


def test_a_table_is_written_as_csv(tmp_path: Path) -> None:
    table = pd.DataFrame({"first": [0, 1], "value": [1 / 3, math.nan], "last": [math.inf, 2e-7]})
    write_table(tmp_path / "nine.csv", table)
    assert (tmp_path / "nine.csv").read_text() == "first,value,last\n0,0.333333333,inf\n1,nan,2e-07\n"
    write_table(tmp_path / "three.csv", table, digits=3, missing="")
    assert (tmp_path / "three.csv").read_text() == "first,value,last\n0,0.333,inf\n1,,2e-07\n"


@pytest.mark.parametrize("durable", [True, False])
def test_what_is_to_last_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    path, synced = tmp_path / "library.so", list[tuple[str, bool]]()
    monkeypatch.setattr(files, "sync", lambda file: synced.append((file.read_text(), path.exists())))
    with whole_file(path, durable) as beside:
        beside.write_text("all of it")
    assert synced == ([("all of it", False)] if durable else [])
    assert path.read_text() == "all of it"
