"""`surgeon check` from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.commands.conftest import Run


def test_a_table_for_people_and_json(tiny_checkpoint: Path, tmp_path: Path, surgeon_says: Run) -> None:
    code, out, _ = surgeon_says("check", tiny_checkpoint, "--ranks", "1,2", "-o", tmp_path / "found")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert out.startswith("model     tiny-llama: Llama, 4 layers 32 wide")
    assert (tmp_path / "found" / "check.csv").is_file()
    code, out, _ = surgeon_says("check", tiny_checkpoint, "--ranks", "1,2", "--json")
    answers = {(one["area"], one["what"]): one for one in json.loads(out)["answers"]}
    assert answers["ranks", "2 ranks"]["works"] == "yes"
    assert answers["scan", "lp"]["bytes"] is None


def test_what_is_refused_ends_with_1(tmp_path: Path, surgeon_says: Run) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "nosuch"}')
    code, out, _ = surgeon_says("check", path)
    assert code == 1
    assert "architecture 'nosuch' is not supported" in " ".join(out.split())
    path.write_text("{")
    code, _, err = surgeon_says("check", path)
    assert code == 1
    assert "is not valid JSON" in err


def test_what_is_wrong_with_the_command_is_said_at_once() -> None:
    command = [sys.executable, "-m", "surgeon.commands", "check", "demo", "--ranks", "two"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    said = "Invalid value for '--ranks': 'two' is no whole number from 1; write numbers such as 1,8"
    assert done.stderr == f"error: {said} (see surgeon check --help)\n"
