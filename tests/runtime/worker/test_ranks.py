"""Ranks that fail in every way: the others end, the message names the one that failed, nothing stays behind."""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest

from surgeon.machine import HUGE_PAGES, threads_per_rank
from surgeon.runtime.worker import rank
from surgeon.runtime.worker import ranks as ranks_module
from surgeon.runtime.worker.rank import RankOptions
from surgeon.runtime.worker.ranks import RankFailed, Ranks
from tests import warm
from tests.runtime import on_ranks
from tests.waiting import PATIENCE, wait_until

REPOSITORY = Path(__file__).parents[2]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def gone(pids: list[int]) -> bool:
    return not any(map(is_running, pids))


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@pytest.mark.parametrize(
    ("how", "collectives", "error", "message"),
    [
        ("kill", "shm", RankFailed, r"rank 1 \(process \d+\) was ended by SIGKILL.*"),
        ("kill", "gloo", RankFailed, r"rank 1 \(process \d+\) was ended by SIGKILL.*"),
        ("exit", "gloo", RankFailed, "rank 1 ended with exit code 3: .+"),
        ("value", "shm", ValueError, "7 is too many; use 6"),
        ("runtime", "gloo", RankFailed, "rank 1 failed: RuntimeError: something broke"),
    ],
)
def test_a_rank_that_fails(
    how: str, collectives: str, error: type[Exception], message: str, own_temporary_folder: Path
) -> None:
    with Ranks(RankOptions(2, collectives=collectives)) as ranks:
        pids = ranks.call(on_ranks.process_id)
        assert pids == ranks.pids
        with pytest.raises(error) as caught:
            ranks.call(on_ranks.fail, 1, how)
        assert re.fullmatch(message, str(caught.value))
        assert gone(pids)
    if how in ("value", "runtime"):
        assert "in fail" in caught.value.__notes__[0]  # the rank's traceback, for --debug
    assert list(own_temporary_folder.iterdir()) == []


def test_what_ranks_say_while_they_connect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """How they sum: their own standard error goes to a file that does not stay."""
    ranks = object.__new__(Ranks)
    ranks._connected = False
    ranks._processes = [SimpleNamespace(rank=0)]  # type: ignore[list-item]
    said = [("note", "sums of ranks 0, 1: one shot up to 4.19 MB, NCCL above"), ("result", None)]
    monkeypatch.setattr(
        ranks_module, "_messages", lambda missing: ((missing[0], *message) for message in said)
    )
    ranks._connect()
    assert capsys.readouterr().err == "sums of ranks 0, 1: one shot up to 4.19 MB, NCCL above\n"


def test_a_rank_killed_between_calls() -> None:
    with Ranks(RankOptions(2)) as ranks:
        os.kill(ranks.pids[0], signal.SIGKILL)
        with pytest.raises(RankFailed, match="rank 0 .* was ended by SIGKILL.*"):
            ranks.call(on_ranks.process_id)


def test_what_fails_because_the_ranks_end_is_no_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, failed, reasons = Ranks(RankOptions(2)), threading.Event(), list[str | None]()
    first, second = ranks._processes

    def end_and_wait(reason: str | None, end: Callable[[str | None], None] = first.end) -> None:
        reasons.append(reason)
        end(reason)
        failed.wait(0.3)  # which the call spends on noticing it, and on saying why it fails

    def call() -> None:
        with pytest.raises(RankFailed, match="rank 0 .* was ended by SIGKILL"):
            ranks.call(on_ranks.sleep, 600.0, tmp_path)
        failed.set()

    monkeypatch.setattr(first, "end", end_and_wait)
    monkeypatch.setattr(
        second, "end", lambda reason, end=second.end: (reasons.append(reason), end(reason))
    )
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(call)
        wait_until(lambda: len(list(tmp_path.glob("*.asleep"))) == 2)
        ranks.close()
        calling.result(PATIENCE)
    assert reasons == [None] * 4


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [threads_per_rank(ranks) for ranks in (1, 5, 20)] == [12, 2, 1]
    for value, threads in [("3", 3), ("64", 6), ("", 6), ("0", 1), ("many", 6)]:
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert threads_per_rank(2) == threads


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="the system binds no processes to cores"
)
def test_ranks_share_out_the_cores_and_stay_in_the_session() -> None:
    """So that a neighbour of low priority neither drives two ranks to one core nor counts as much as a rank."""
    mine = os.sched_getaffinity(0)
    with Ranks(RankOptions(2)) as ranks:
        found, pids = ranks.call(on_ranks.whereabouts), ranks.pids
    assert [one.session for one in found] == [os.getsid(0)] * 2
    # What a terminal sends to the command does not reach them.
    assert [one.group for one in found] == pids
    assert [one.crowded for one in found] == [len(mine) < 2] * 2
    if len(mine) >= 2:
        assert found[0].cores | found[1].cores == mine
        assert not found[0].cores & found[1].cores
    assert os.sched_getaffinity(0) == mine


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of other C libraries nothing is asked")
def test_ranks_keep_what_passes_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """48 MB are 12,288 pages, or 24 huge ones."""
    monkeypatch.setenv(HUGE_PAGES, "0")
    with Ranks(RankOptions(1)) as ranks:
        assert ranks.call(on_ranks.faults)[0] < 100


def test_a_rank_without_commands_ends_when_the_folder_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its starter is, too, and only what watches for that removes what it has left."""
    folder, ended, starter_gone = tmp_path / "ranks", list[int](), threading.Event()
    folder.mkdir()

    def watch(act: Callable[[], object]) -> threading.Thread:
        watcher = threading.Thread(target=lambda: (starter_gone.wait(), act()))
        watcher.start()
        return watcher

    monkeypatch.setattr(rank, "when_parent_ends", watch)
    monkeypatch.setattr(rank, "serve", lambda *_: None)
    monkeypatch.setattr(os, "_exit", ended.append)
    with Pipe()[0] as commands:
        monkeypatch.setattr(sys, "argv", ["rank", str(folder), str(os.dup(commands.fileno()))])
    thread = threading.Thread(target=rank.main)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    starter_gone.set()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert ended == [1]
    assert not folder.exists()


STARTER = """
import sys, time
from surgeon.runtime.worker.rank import RankOptions
from surgeon.runtime.worker.ranks import Ranks
with Ranks(RankOptions(2)) as ranks:
    print(*ranks.pids, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT"])
def test_ranks_end_with_the_process_that_started_them(name: str, own_temporary_folder: Path) -> None:
    start = {"SIGKILL": warm.ColdPopen, "SIGINT": warm.Popen}[name]  # one of them as users do
    starter = start(
        [sys.executable, "-c", STARTER],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert starter.stdout is not None
    with starter:
        pids = [int(word) for word in starter.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(is_running, pids))
        starter.send_signal(signal.Signals[name])
        try:
            assert starter.wait(PATIENCE) != 0
        finally:
            starter.kill()
    wait_until(lambda: gone(pids))
    assert list(own_temporary_folder.iterdir()) == []
