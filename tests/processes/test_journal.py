"""Files that only grow: what was written is there again, and what is not ours is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from surgeon.processes.journal import Journal

SHEEP = {"of": "sheep", "seed": 3}


class Count(Journal):
    """Keeps the numbers of its lines."""

    def __init__(
        self, path: Path | None, identity: dict[str, Any] | None = SHEEP, work: str = "count"
    ) -> None:
        self.numbers: list[Any] = []
        super().__init__(path, work, identity)

    def take(self, line: Any) -> None:
        self.numbers.append(line["number"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "journal.jsonl"


@pytest.mark.parametrize("identity", [SHEEP, None], ids=["identity", "no identity"])
def test_lines_are_found_again_whatever_is_cut_off(path: Path, identity: dict[str, Any] | None) -> None:
    with Count(path, identity) as count:
        count.append({"number": 0.1 + 0.2}, {"number": [1, None]})
        assert count.numbers == []
        count.keep({"number": 2})
        assert count.numbers == [2]
    expected = [0.1 + 0.2, [1, None], 2]
    content = path.read_bytes()
    for length in range(len(content) + 1):
        path.write_bytes(content[:length])
        whole = max(0, content[:length].count(b"\n") - (identity is not None))
        with Count(path, identity) as count:
            assert count.numbers == expected[:whole]
            count.append({"number": -1})
        with Count(path, identity) as count:
            assert count.numbers == [*expected[:whole], -1]


def test_empty_lines_mean_nothing_and_what_is_damaged_has_its_number(path: Path) -> None:
    with Count(path) as count:
        count.append({"number": 1}, {"number": 2})
    first, *rest = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"\n" + first + b"\n \n".join(rest) + b"\n\n")
    with Count(path) as count:
        assert count.numbers == [1, 2]
        count.append({"number": 3})
    with Count(path) as count:
        assert count.numbers == [1, 2, 3]
    path.write_bytes(b"\n" + first + b"\n" + rest[0][:-3] + b"\n")
    with pytest.raises(
        ValueError, match=r"journal\.jsonl is damaged in line 4; delete the file to begin again"
    ):
        Count(path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, the device without space")
def test_a_full_disk_names_the_file(path: Path) -> None:
    with Count(path) as count, Path("/dev/full").open("wb", buffering=0) as full:
        own, count._file = count._file, full
        with pytest.raises(OSError, match="No space left") as raised:
            count.append({"number": 1})
        count._file = own
    assert raised.value.filename == str(path)


def test_a_line_is_in_the_file_at_once(path: Path) -> None:
    with Count(path) as count:
        count.keep({"number": 1})
        assert path.read_text() == '{"count":{"of":"sheep","seed":3}}\n{"number":1}\n'


def test_without_a_file_lines_are_taken_in_all_the_same() -> None:
    with Count(None) as count:
        count.keep({"number": 1})
        assert count.numbers == [1]


def test_two_at_a_time_are_refused(path: Path) -> None:
    with Count(path), pytest.raises(OSError, match="another count is writing to .*new; wait for it"):
        Count(path)
    Count(path).close()


def test_a_folder_in_which_nothing_was_measured_is_free(path: Path) -> None:
    Count(path).close()
    with Count(path, SHEEP | {"seed": 4}) as count:
        count.keep({"number": 1})
    with pytest.raises(ValueError, match="another seed: 4, now 3"):
        Count(path)


@pytest.mark.filterwarnings("ignore:.*is cut short")
def test_a_folder_with_a_result_is_not_free_whatever_is_lost_of_its_journal(path: Path) -> None:
    Count(path).close()
    (path.parent / "count.json").write_text("{}")
    with pytest.raises(ValueError, match="another seed: 3, now 4"):
        Count(path, SHEEP | {"seed": 4})


def test_what_belongs_to_something_else_is_refused(path: Path) -> None:
    with Count(path) as count:
        count.keep({"number": 1})
    before = path.read_bytes()
    with pytest.raises(
        ValueError, match="holds a count of another seed: 3, now 4; use another output folder"
    ):
        Count(path, SHEEP | {"seed": 4})
    with pytest.raises(ValueError, match="another of: sheep, now " + "x" * 12 + r"\.\.\.;"):
        Count(path, SHEEP | {"of": "x" * 64})
    with pytest.raises(
        ValueError, match="of an earlier version, which does not say its window size; use"
    ):
        Count(path, SHEEP | {"window": 8})
    with pytest.raises(
        ValueError, match="journal.jsonl was not written by surgeon poll; use another output folder"
    ):
        Count(path, work="poll")
    assert path.read_bytes() == before
    Count(path).close()  # those that were refused hold no lock


@pytest.mark.parametrize("damage", [b"not JSON", b"[1]", b'"text"', b"5", b'{"other":1}', b"\xff\xfe"])
def test_a_damaged_line_is_named(damage: bytes, path: Path) -> None:
    with Count(path) as count:
        count.append({"number": 1})
    path.write_bytes(path.read_bytes() + damage + b'\n{"number":2}\n')
    for _ in range(2):
        with pytest.raises(
            ValueError, match="journal.jsonl is damaged in line 3; delete the file to begin again"
        ):
            Count(path)


@pytest.mark.parametrize(
    ("first", "message"),
    [("{", "damaged in line 1"), ("[1]", "not written by"), ('{"count":1}', "not written by")],
)
def test_a_damaged_first_line(first: str, message: str, path: Path) -> None:
    path.parent.mkdir()
    path.write_text(first + "\n")
    with pytest.raises(ValueError, match=message):
        Count(path)
