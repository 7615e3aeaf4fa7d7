"""A target appears whole or not at all, whatever ends the run."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from surgeon.exports.export import stage_folder
from surgeon.processes import files
from surgeon.processes.files import MARK, check_space
from tests import warm
from tests.checkpoint.helpers import run_export, save_source, weights_of
from tests.waiting import PATIENCE

DEAD = 2**22 + 1  # above the largest process id
REPOSITORY = Path(__file__).parents[2]


EXPORTED = json.dumps(
    {
        "surgeon": "0.0",
        "form": "plain",
        "program": "A0 F0",
        "files": {"extra.dat": {}, "licenses/own.txt": {}},
    }
)
MODEL = json.dumps({"model_type": "llama"})
FILES = {"config.json", "surgeon.json"}


def write_into(target: Path, text: str = "new", overwrite: bool = False) -> None:
    with stage_folder(target, overwrite) as folder:
        (folder / "config.json").write_text(text)
        (folder / "surgeon.json").write_text(EXPORTED)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_folder_gets_its_name_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "down" / "target"
    with stage_folder(target) as folder:
        assert not target.exists()
        assert folder.parent == target.parent
        (folder / "config.json").write_text("new")
    assert names(target.parent) == {"target"}
    assert (target / "config.json").read_text() == "new"
    assert target.stat().st_mode & 0o777 == 0o777 & ~current_umask()


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize(
    "error", [ValueError("wrong"), KeyboardInterrupt(), SystemExit(1), OSError(28, "full")]
)
@pytest.mark.parametrize("exists", [False, True])
def test_whatever_is_raised_leaves_things_as_they_were(
    tmp_path: Path, error: BaseException, exists: bool
) -> None:
    target = tmp_path / "target"
    if exists:
        write_into(target, "old")

    def fails_halfway() -> None:
        with stage_folder(target, overwrite=True) as folder:
            (folder / "config.json").write_text("half")
            raise error

    with pytest.raises(type(error)):
        fails_halfway()
    assert names(tmp_path) == ({"target"} if exists else set())
    if exists:
        assert (target / "config.json").read_text() == "old"


@pytest.mark.parametrize("can_swap", [True, False])
def test_overwriting_replaces_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_swap: bool
) -> None:
    if not can_swap:
        monkeypatch.setattr(files, "_exchange", lambda *_: False)
    target = tmp_path / "target"
    write_into(target, "old")
    (target / "merges.txt").write_text("gone afterwards")
    write_into(target, "new", overwrite=True)
    assert names(tmp_path) == {"target"}
    assert names(target) == FILES
    assert (target / "config.json").read_text() == "new"


def test_an_existing_target_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "target"
    write_into(target, "old")
    with pytest.raises(FileExistsError, match="choose another name, or pass `overwrite`"):
        write_into(target)
    assert (target / "config.json").read_text() == "old"


def test_a_target_that_appears_meanwhile_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "target"

    def is_too_late() -> None:
        with stage_folder(target):
            target.mkdir()
            (target / "config.json").write_text("of somebody else")

    with pytest.raises(FileExistsError, match="overwrite"):
        is_too_late()
    assert names(tmp_path) == {"target"}
    assert (target / "config.json").read_text() == "of somebody else"


def test_what_is_no_checkpoint_is_never_replaced(tmp_path: Path) -> None:
    for name in ("folder", "real"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("a file")
    (tmp_path / "link").symlink_to("real")
    refusals = {
        "folder": "is no checkpoint",
        "file": "not a folder",
        "link": "not a folder",
        "file/in": "in the way",
    }
    for name, said in refusals.items():
        with pytest.raises(OSError, match=said):
            write_into(tmp_path / name, overwrite=True)
    assert (tmp_path / "folder" / "thesis.tex").read_text() == "years of work"


def test_an_empty_folder_may_be_the_target(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    write_into(tmp_path / "target")
    assert names(tmp_path / "target") == FILES


def test_no_permission_is_said_with_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with (
        pytest.raises(PermissionError, match=f"no permission to write in {tmp_path}"),
        stage_folder(tmp_path / "target"),
    ):
        pass


@pytest.fixture
def locked() -> Iterator[Callable[[Path], None]]:
    """Locks folders as a run does that lives."""
    handles = []

    def lock(folder: Path) -> None:
        handles.append(os.open(folder, os.O_RDONLY))
        fcntl.flock(handles[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)

    yield lock
    for handle in handles:
        os.close(handle)


def test_only_dead_runs_are_cleaned_up_after(tmp_path: Path, locked: Callable[[Path], None]) -> None:
    # Process ids say nothing: in a container that starts again, they are the same ones.
    dead, same = (tmp_path / f".target.{MARK}-{number}-abc" for number in (DEAD, os.getpid()))
    huge = tmp_path / f".target.{MARK}-{10**50}-abc"
    alive = tmp_path / f".target.{MARK}-{DEAD}-def"
    other = tmp_path / f".other.{MARK}-{DEAD}-abc"
    for folder in (dead, same, huge, alive, other):
        folder.mkdir()
        (folder / "half").write_text("half")
    locked(alive)
    write_into(tmp_path / "target")
    assert names(tmp_path) == {"target", alive.name, other.name}


def test_what_only_has_such_a_name_is_left_alone(tmp_path: Path) -> None:
    things = [tmp_path / f".target.{MARK}-{number}-abc" for number in (1, 2, 3, 4)]
    os.mkfifo(things[0])
    things[1].symlink_to("nowhere")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    things[2].symlink_to("mine")
    things[3].write_text("a file")
    write_into(tmp_path / "target")
    assert names(tmp_path) == {"target", "mine", *(thing.name for thing in things)}
    assert names(tmp_path / "mine") == {"thesis.tex"}


def test_without_locks_folders_are_written_and_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    left = tmp_path / f".target.{MARK}-{DEAD}-abc"
    left.mkdir()
    monkeypatch.setattr(fcntl, "flock", refuse)
    write_into(tmp_path / "target")
    assert names(tmp_path) == {"target", left.name}


def test_a_folder_that_was_taken_for_a_left_one_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, taken = os.open, []

    def slow(path: Path, *rest: int) -> int:
        if MARK in str(path) and not taken:  # another run is faster than this one's lock
            taken.append(path)
            files.remove_stale(tmp_path / "target")
        return right(path, *rest)

    monkeypatch.setattr(os, "open", slow)
    write_into(tmp_path / "target")
    assert taken
    assert names(tmp_path) == {"target"}


def test_a_target_moved_aside_by_a_run_that_died_comes_back(tmp_path: Path) -> None:
    write_into(tmp_path / "target", "old")
    (tmp_path / "target").rename(tmp_path / f".target.{MARK}-{os.getpid()}-abc-old")
    files.remove_stale(tmp_path / "target")
    assert names(tmp_path) == {"target"}
    assert (tmp_path / "target" / "config.json").read_text() == "old"


def test_a_target_that_is_being_moved_aside_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, right, seen = tmp_path / "target", Path.rename, []

    def watched(path: Path, to: Path) -> Path:
        found = right(path, to)
        files.remove_stale(target)
        seen.append(sum(name.endswith("-old") for name in names(tmp_path)))
        return found

    write_into(target, "old")
    monkeypatch.setattr(files, "_exchange", lambda *_: False)
    monkeypatch.setattr(Path, "rename", watched)
    write_into(target, "new", overwrite=True)
    assert seen == [1, 1]
    assert names(tmp_path) == {"target"}
    assert (target / "config.json").read_text() == "new"


@pytest.mark.parametrize(
    ("files", "folders", "said"),
    [
        (
            {"config.json": MODEL},
            (),
            "is no checkpoint: it has no surgeon.json of an export, and no config.json with",
        ),
        ({"config.json": "{}", "a.safetensors": ""}, (), "is no checkpoint"),
        ({"config.json": "{", "a.safetensors": ""}, (), "is no checkpoint"),
        ({"surgeon.json": "{}", "a.safetensors": ""}, (), "is no checkpoint"),
        ({"config.json": MODEL, "a.safetensors": ""}, (), None),
        ({"config.json": MODEL, "a.safetensors": "", "README.md": "", "tokenizer.json": ""}, (), None),
        (
            {"config.json": MODEL, "a.safetensors": "", "train.py": ""},
            (),
            r"no part of a checkpoint \(train.py\), so ",
        ),
        (
            {"config.json": MODEL, "a.safetensors": ""},
            (".git", "a", "b", "c"),
            r"\(.git, a, b and 1 more\), so `over",
        ),
        ({"surgeon.json": EXPORTED, "extra.dat": ""}, (), None),
        ({"surgeon.json": EXPORTED, "licenses/own.txt": ""}, (), None),
        (
            {"surgeon.json": EXPORTED, "licenses/own.txt": "", "licenses/b.txt": ""},
            (),
            r"a checkpoint \(licenses\), so",
        ),
        (
            {"config.json": MODEL, "a.safetensors": "", "additional_chat_templates/rag.jinja": ""},
            (),
            None,
        ),
        (
            {"config.json": MODEL, "a.safetensors": "", "additional_chat_templates/b.txt": ""},
            (),
            r"\(additional_chat_te",
        ),
        ({"surgeon.json": EXPORTED}, (".git",), r"holds what is no part of a checkpoint \(.git\)"),
        (
            {"surgeon.json": EXPORTED, "notes.txt": ""},
            (),
            r"\(notes.txt\), so `overwrite` does not replace it; choose",
        ),
    ],
)
def test_what_is_a_checkpoint_and_no_more_is_replaced(
    tmp_path: Path, files: dict[str, str], folders: tuple[str, ...], said: str | None
) -> None:
    target = tmp_path / "target"
    for folder in (target, *(target / name for name in folders)):
        folder.mkdir()
    for name, text in files.items():
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text(text)
    before = names(target)
    if said is None:
        write_into(target, overwrite=True)
        assert names(target) == FILES
    else:
        with pytest.raises(FileExistsError, match=said):
            write_into(target, overwrite=True)
        assert names(target) == before


def test_space_is_checked_where_the_folder_will_be(tmp_path: Path) -> None:
    check_space(tmp_path / "not" / "yet", 1000)
    with pytest.raises(OSError, match=r"too full: 1,000,000 TB are needed"):
        check_space(tmp_path / "not" / "yet", 10**18)


HALFWAY = """
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from surgeon.checkpoint import tensor_file
from tests.checkpoint.helpers import run_export
count = [0]
right = tensor_file.content_of
def stop_halfway(planned):
    count[0] += 1
    if count[0] == 20:
        print("halfway", flush=True)
        signal.pause()
    return right(planned)
tensor_file.content_of = stop_halfway
run_export(Path(sys.argv[1]), Path(sys.argv[2]), "A0 F0 [A1 A2] [F1 F2]", overwrite=True)
"""


def test_killed_halfway_the_old_target_is_whole_and_the_next_run_cleans_up(tmp_path: Path) -> None:
    save_source(tmp_path / "source")
    run_export(tmp_path / "source", tmp_path / "target", "A0 F0 A2 F2")
    before = {path.name: path.read_bytes() for path in (tmp_path / "target").iterdir()}
    process = warm.Popen(
        [sys.executable, "-c", HALFWAY, str(tmp_path / "source"), str(tmp_path / "target")],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "halfway\n", process.stderr.read()  # type: ignore[union-attr]
    process.kill()
    process.communicate(timeout=PATIENCE)
    assert {path.name: path.read_bytes() for path in (tmp_path / "target").iterdir()} == before
    assert len(names(tmp_path)) == 3  # the partial folder is still there
    run_export(tmp_path / "source", tmp_path / "target", "A0 F0 A4 F4", overwrite=True)
    assert names(tmp_path) == {"source", "target"}
    assert len(weights_of(tmp_path / "target")) == 21


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    if (
        mount is None
        or subprocess.run(
            [mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=False
        ).returncode
    ):
        pytest.skip("needs the right to mount a small disk")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_real_disk_that_fills_up(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_source(tmp_path / "large", vocab_size=9000)  # over 1 MB of embeddings
    save_source(tmp_path / "small")
    run_export(tmp_path / "small", small_disk / "target", "A0 F0 A2 F2")
    before = {path.name: path.read_bytes() for path in (small_disk / "target").iterdir()}
    with pytest.raises(OSError, match="too full"):
        run_export(tmp_path / "large", small_disk / "target", "A0 F0 A2 F2", overwrite=True)
    monkeypatch.setattr("surgeon.exports.export.check_space", lambda *_: None)
    with pytest.raises(OSError, match="filled up"):
        run_export(tmp_path / "large", small_disk / "target", "A0 F0 A2 F2", overwrite=True)
    assert names(small_disk) == {"target"}
    assert {path.name: path.read_bytes() for path in (small_disk / "target").iterdir()} == before
