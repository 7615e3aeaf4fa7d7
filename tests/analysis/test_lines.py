"""Files of JSON lines: what was written is there again, and what is not ours is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from surgeon.analysis.lines import Lines

IDENTITY = {"seed": 3, "text": "abc"}


def test_lines_come_back_and_a_torn_one_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "new" / "lines.jsonl"
    with Lines(path, "survey", IDENTITY) as lines:
        assert lines.held == []
        lines.append({"a": 0.1 + 0.2})
        lines.append({"b": [1, None]})
    with path.open("a") as file:
        file.write('{"c": 1')
    with Lines(path, "survey", IDENTITY) as lines:
        assert lines.held == [{"a": 0.1 + 0.2}, {"b": [1, None]}]
        lines.append({"d": 4})
    with Lines(path, "survey", IDENTITY) as lines:
        assert lines.held[-1] == {"d": 4}


def test_what_belongs_to_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    Lines(path, "survey", IDENTITY).__exit__(None, None, None)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="holds a survey of another seed: 3, now 4; use another output folder"):
        Lines(path, "survey", IDENTITY | {"seed": 4})
    with pytest.raises(ValueError, match="another text: abc, now " + "x" * 12 + r"\.\.\."):
        Lines(path, "survey", IDENTITY | {"text": "x" * 64})
    with pytest.raises(ValueError, match="another seed: None"):
        Lines(path, "poll", IDENTITY)
    assert path.read_bytes() == before


@pytest.mark.parametrize("bad", ["not json", "[1]", '"text"'])
def test_a_damaged_line_is_named(bad: str, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    with Lines(path, "survey", IDENTITY) as lines:
        lines.append({"a": 1})
    path.write_text(path.read_text() + bad + "\n")
    with pytest.raises(ValueError, match="damaged in line 3; delete the file"):
        Lines(path, "survey", IDENTITY)


def test_two_do_not_write_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    with Lines(path, "survey", IDENTITY), pytest.raises(OSError, match="another survey is writing"):
        Lines(path, "survey", IDENTITY)
    Lines(path, "survey", IDENTITY).__exit__(None, None, None)
