"""A teacher's logits on disk."""

from __future__ import annotations

import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from surgeon.quality.data import Windows
from surgeon.training import distiller
from surgeon.training.distiller import TeacherLogits
from surgeon.training.texts import TrainingText
from tests import tiny_models as models
from tests import warm
from tests.waiting import PATIENCE

WINDOWS, WINDOW, KEPT, TEMPERATURE = 7, 12, 5, 1.5
# Three windows a file; killed while the teacher runs on the window of this number.
MAKE = """
import os, signal, sys
from pathlib import Path
from surgeon.training import distiller
from tests.training import test_teacher_logits as this

folder, killed_at = Path(sys.argv[1]), int(sys.argv[2])
distiller._MOST_WINDOWS = 3
teacher = this.CountedTeacher()
teacher.before = lambda: teacher.calls == killed_at and os.kill(os.getpid(), signal.SIGKILL)
this.make(teacher, folder)
"""


class CountedTeacher:
    """A tiny model that counts how often it is called, and does something before."""

    def __init__(self) -> None:
        self.model = models.tiny_model("llama", 2)
        self.calls = 0
        self.before: Callable[[], Any] = lambda: None
        self.model.base_model.register_forward_pre_hook(self.count)

    def count(self, *_: object) -> None:
        self.before()
        self.calls += 1


def text() -> Tensor:
    return torch.randint(
        2, models.VOCABULARY, (WINDOWS, WINDOW), generator=torch.Generator().manual_seed(3)
    )


def make(teacher: CountedTeacher, folder: Path, kept: int = KEPT) -> TeacherLogits:
    made = TeacherLogits(folder, TrainingText.of(Windows(text(), "random", "")), kept, TEMPERATURE)
    made.make(teacher.model)
    return made


@pytest.fixture
def teacher() -> CountedTeacher:
    return CountedTeacher()


@pytest.fixture(autouse=True)
def three_windows_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distiller, "_MOST_WINDOWS", 3)


@torch.no_grad()
def plainly(model: Any, index: list[int]) -> Tensor:
    """All log-probabilities of some windows, (windows * tokens, vocabulary)."""
    logits = model(input_ids=text()[index], use_cache=False).logits
    return torch.log_softmax(logits / TEMPERATURE, -1).flatten(0, 1)


def test_what_is_kept(teacher: CountedTeacher, tmp_path: Path) -> None:
    kept = make(teacher, tmp_path / "kept")
    index = [6, 0, 3, 2, 0]
    wanted = plainly(teacher.model, index)
    found = kept.read(torch.tensor(index))
    assert found.ids.dtype == torch.int32
    assert torch.allclose(wanted.gather(-1, found.ids.long()), found.log_p, atol=1e-5)
    assert torch.allclose(found.log_p, wanted.sort(-1, descending=True).values[:, :KEPT], atol=1e-5)
    assert torch.allclose(found.rest.exp() + found.log_p.exp().sum(-1), torch.ones(len(wanted)))
    sizes = [path.stat().st_size for path in (tmp_path / "kept").glob("*.safetensors")]
    assert len(sizes) == 3
    assert sum(sizes) < WINDOWS * kept.window_bytes + 3000  # headers


def test_once_is_enough(teacher: CountedTeacher, tmp_path: Path) -> None:
    make(teacher, tmp_path)
    assert teacher.calls == WINDOWS
    make(teacher, tmp_path)
    assert teacher.calls == WINDOWS


def test_killed_it_goes_on(teacher: CountedTeacher, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    process = warm.Popen([sys.executable, "-c", MAKE, folder, "5"], cwd=Path.cwd())
    assert process.wait(PATIENCE) == -signal.SIGKILL
    (first,) = folder.glob("windows-*")
    made = first.stat().st_mtime_ns
    (folder / f".windows-0000003.safetensors.{process.pid}.part").write_bytes(b"half")
    kept = make(teacher, folder)
    assert teacher.calls == WINDOWS - 3
    assert first.stat().st_mtime_ns == made
    assert not list(folder.glob("*.part"))
    at_once = make(CountedTeacher(), tmp_path / "at once")
    every = torch.arange(WINDOWS)
    assert all(map(torch.equal, kept.read(every), at_once.read(every)))


def test_more_than_there_are(teacher: CountedTeacher, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocabulary has 97 tokens; keep at most as many, not 98"):
        make(teacher, tmp_path, 98)


def test_a_broken_teacher(teacher: CountedTeacher, tmp_path: Path) -> None:
    teacher.model.model.embed_tokens.weight.data[text()[4, 2]] = torch.nan
    broken = int((text() == text()[4, 2]).any(-1).nonzero()[0])
    with pytest.raises(
        ValueError, match=f"not finite in training window {broken}; are its weights damaged"
    ):
        make(teacher, tmp_path)


def test_a_damaged_file_is_made_again(teacher: CountedTeacher, tmp_path: Path) -> None:
    kept = make(teacher, tmp_path)
    before = kept.read(torch.arange(WINDOWS))
    damaged = tmp_path / "windows-0000003.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:200])
    with pytest.raises(OSError, match="windows-0000003.safetensors cannot be read any more"):
        kept.read(torch.tensor([4]))
    with pytest.warns(UserWarning, match="is damaged .*; it is made again"):
        kept = make(teacher, tmp_path)
    assert teacher.calls == WINDOWS + 3
    assert torch.equal(kept.read(torch.arange(WINDOWS)).log_p, before.log_p)


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """The operating system refuses to write more than so many bytes to a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_without_room_what_is_whole_stays(teacher: CountedTeacher, tmp_path: Path) -> None:
    process = warm.Popen([sys.executable, "-c", MAKE, tmp_path, "3"], cwd=Path.cwd())
    assert process.wait(PATIENCE) == -signal.SIGKILL
    with (
        no_file_above(1000),
        pytest.raises(OSError, match="cannot be written to .*make room and start again"),
    ):
        make(teacher, tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.name != ".lock"] == [
        "windows-0000000.safetensors"
    ]
    make(teacher, tmp_path)
    assert teacher.calls == 3 + WINDOWS - 3


def test_of_two_at_once_one_makes_them(tmp_path: Path) -> None:
    teachers = [CountedTeacher(), CountedTeacher()]
    threads = [Thread(target=make, args=(teacher, tmp_path)) for teacher in teachers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(teacher.calls for teacher in teachers) == WINDOWS
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
