"""The file that only grows."""

from __future__ import annotations

from pathlib import Path

import pytest

from surgeon.analysis.append_only import AppendOnlyFile


def opened(path: Path, **identity: str) -> AppendOnlyFile:
    return AppendOnlyFile(path, "count", identity or {"of": "sheep"}, {"of": "animal"})


def test_lines_are_found_again_whatever_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "new" / "journal.jsonl"
    with opened(path) as file:
        for number in range(3):
            file.append({"number": number})
        assert file.lines == []
    content = path.read_bytes()
    for length in range(len(content) + 1):
        path.write_bytes(content[:length])
        with opened(path) as file:
            whole = content[:length].count(b"\n")
            assert file.lines == [{"number": number} for number in range(whole - 1)]
            file.append({"number": -1})
        with opened(path) as file:
            assert file.lines[-1] == {"number": -1}
            assert len(file.lines) == max(whole, 1)


def test_two_at_a_time_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with opened(path), pytest.raises(OSError, match="another count is writing to .*; wait for it"):
        opened(path)
    opened(path).__exit__(None, None, None)


def test_another_identity_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    opened(path).__exit__(None, None, None)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="holds a count of another animal: sheep, now goats; use another output"):
        opened(path, of="goats")
    with pytest.raises(ValueError, match="another where: None, now here"):
        opened(path, of="sheep", where="here")
    assert path.read_bytes() == before
    opened(path).__exit__(None, None, None)  # the refused ones hold no lock


@pytest.mark.parametrize("damage", [b"not JSON", b"[1]", b"\xff\xfe"])
def test_damage_is_said(damage: bytes, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with opened(path) as file:
        file.append({"number": 1})
    path.write_bytes(path.read_bytes() + damage + b"\n")
    with pytest.raises(ValueError, match="journal.jsonl is damaged in line 3; delete the file to begin again"):
        opened(path)
