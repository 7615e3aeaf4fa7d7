"""Several processes measure what one does, and none outlives trouble."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from surgeon.analysis.engine import measure as workers
from surgeon.analysis.engine.measure import Job, MeasureOptions, measure, measure_in_workers, split
from surgeon.analysis.engine.sharing import share
from surgeon.language.operations import prune
from surgeon.language.program import Program
from tests import warm
from tests.tiny_models import VOCABULARY, tiny_model

DENSE = Program.dense(4)
PROGRAMS = [prune(DENSE, layers=range(a, b)) for a in range(4) for b in range(a + 1, 4)]
IDS = torch.randint(2, VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", 4).save_pretrained(folder)
    return Job(folder, IDS, (DENSE, *PROGRAMS), "cpu", 1, batch=2)


@pytest.mark.thorough
def test_two_workers_measure_what_one_process_does(job: Job) -> None:
    ran: list[float] = []
    got: dict[tuple[Program, int], Any] = {
        (m.program, m.start): m.quality for m in measure_in_workers(job, 2, ran.append)
    }
    expected = list(measure(tiny_model("llama", 4), IDS, share([DENSE, *PROGRAMS]), MeasureOptions(2)))
    assert got.keys() == {(m.program, m.start) for m in expected}
    for one in expected:
        torch.testing.assert_close(got[one.program, one.start]["nll"], one.quality["nll"])
        torch.testing.assert_close(got[one.program, one.start]["divergence"], one.quality["divergence"])
    assert sum(ran) > 8 * 2  # each worker runs the unedited model for itself


def test_programs_are_shared_out_evenly_and_once(job: Job) -> None:
    for count in (1, 2, 3, 50):
        jobs = split(job, count)
        assert {part.programs[0] for part in jobs} == {DENSE}
        shared_out = [str(one) for part in jobs for one in part.programs[1:]]
        assert sorted(shared_out) == sorted(map(str, PROGRAMS))
        assert all(part.programs[1:] for part in jobs)
        assert len(jobs) <= count
    assert min(len(part.programs) for part in split(job, 2)) >= 3


def test_what_a_worker_raises_is_raised_here(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multiprocessing.util.spawnv_passfds", warm.spawn)
    model = tiny_model("llama", 4)
    model.model.layers[1].self_attn.o_proj.weight.data[:] = torch.nan
    model.save_pretrained(tmp_path)
    broken = Job(tmp_path, IDS, job.programs, "cpu", 1)
    with pytest.raises(ValueError, match="appears first in A1"):
        list(measure_in_workers(broken, 1))  # a process of its own, too


def test_a_killed_worker_is_said(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiprocessing.util.spawnv_passfds", warm.spawn)
    seen: list[Any] = []
    check = workers._check_alive

    def kill_first(processes: list[Any]) -> None:
        if not seen:
            seen.extend(processes)
            os.kill(processes[1].pid, signal.SIGKILL)
            processes[1].join()
        check(processes)

    monkeypatch.setattr(workers, "_check_alive", kill_first)
    monkeypatch.setattr(workers, "_PATIENCE", 0.01)
    with pytest.raises(OSError, match=r"worker 1 of 2 ended early \(killed by signal 9\)"):
        list(measure_in_workers(job, 2))
    assert not any(process.is_alive() for process in seen)


def test_a_worker_opens_its_own_gpu_alone(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """What PyTorch does on "cuda" without a number would take memory of the first GPU, too."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    happened: list[Any] = []

    def load(*_: Any) -> Any:
        happened.append("load")
        raise ValueError("enough")

    for name in ("signal", "when_parent_ends"):
        monkeypatch.setattr(workers, name, MagicMock())
    monkeypatch.setattr(torch.cuda, "set_device", happened.append)
    monkeypatch.setattr(workers, "load_for_analysis", load)
    with warnings.catch_warnings():
        workers._work(split(job, 2)[1], SimpleNamespace(put=happened.append))
    assert happened == ["cuda:1", "load", ("failed", "ValueError", "enough")]
