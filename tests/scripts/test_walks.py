"""The count of files that run in a command."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.walks import files_run, table


def test_a_file_runs_if_a_function_of_it_is_called_behind_its_import(tmp_path: Path) -> None:
    found = files_run(["--version"], tmp_path)
    assert "commands/app.py" in found
    assert not {"version.py", "opened.py", "checkpoint/stored.py"} & found


def test_a_command_that_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="surgeon shwo failed:"):
        files_run(["shwo"], tmp_path)


def test_the_table_counts_by_room() -> None:
    walks = {
        "prompt": {"opened.py", "models/edit.py"},
        "export": {"opened.py", "exports/export.py", "exports/prove.py"},
    }
    lines = [line.split() for line in table(walks).splitlines()]
    assert lines[0] == ["room", "prompt", "export", "common"]
    assert ["(top)", "1", "1", "1"] in lines
    assert ["exports", "2"] in lines
    assert lines[-2:] == [["all", "2", "3", "1"], ["at", "most", "70", "50", "20"]]
