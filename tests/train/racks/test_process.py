"""Racks started by hand, as on several machines."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from surgeon.runtime.comm.link import Link
from surgeon.train.racks.pace import RackPace
from surgeon.train.racks.run_files import ProcessOptions, RacksPlan, read_texts
from surgeon.train.racks.supervisor import gather, prepare
from surgeon.train.settings import TrainSettings
from tests import warm
from tests.runtime.processes.test_torchrun import free_port
from tests.train.racks.local_run import TEXTS, one_after_the_other, racks_of, weights, whole

REPOSITORY = Path(__file__).parents[3]
SHORT = TrainSettings(scope="all", steps=2, batch=4, learning_rate=1e-2, evaluate_every=1, save_every=1)


def prepared(run: Path, options: ProcessOptions | None = None) -> None:
    prepare(whole(), racks_of(whole()), TEXTS, SHORT, run, options=options)


def begin(run: Path, rack: int, *more: str, anew: bool = False) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [*warm.RACK, str(run), str(rack), *more]
    if not anew:
        command = [*warm.CODE, warm.BE_A_RACK, *command[len(warm.RACK) :]]
    begun: Any = warm.ColdPopen if anew else warm.Popen
    process: subprocess.Popen[str] = begun(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    return process


def test_racks_with_addresses_of_their_neighbours(tmp_path: Path) -> None:
    """Each has a copy of what was prepared, and its own folder only; one is a process as users start it."""
    ports, runs = [free_port() for _ in range(3)], [tmp_path / str(rack) for rack in range(3)]
    for rack in range(3):
        prepared(runs[rack])
    plan = (runs[0] / "racks.json").read_bytes()
    for run in runs[1:]:
        (run / "racks.json").write_bytes(plan)
    racks = []
    for rack, (run, port) in enumerate(zip(runs, ports, strict=True)):
        before = [] if rack == 0 else ["--peer", f"{rack - 1}=127.0.0.1:{ports[rack - 1]}"]
        racks.append(begin(run, rack, "--listen", f"127.0.0.1:{port}", *before, anew=rack == 1))
    for rack, process in enumerate(racks):
        said = process.communicate(timeout=120)[1]
        assert process.returncode == 0, said
        if rack:
            (runs[rack] / f"rack-{rack}").rename(runs[0] / f"rack-{rack}")
    found, wanted = gather(whole(), racks_of(whole()), runs[0]), one_after_the_other(tmp_path / "whole", SHORT)
    for mine, theirs in zip(weights(runs[0]), weights(tmp_path / "whole"), strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert [each.after for each in found.results] == [each.after for each in wanted.results]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["3"], "rack 3: .* has racks 0 to 2, and no rack 3"),
        (["0", "--listen", "here"], "'here' is no address; write it as HOST:PORT"),
        (["1", "--peer", "127.0.0.1:3"], "does not say which rack; write it as RACK=HOST:PORT"),
        (["0", "--listen", "127.0.0.1:1"], "rack 0: a rack cannot listen at 127.0.0.1:1 .*--listen"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(more: list[str], expected: str, tmp_path: Path) -> None:
    prepared(tmp_path)
    if "127.0.0.1:1" in more:
        taken = socket.create_server(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        more = [text.replace(":1", f":{port}") for text in more]
        expected = expected.replace(":1 ", f":{port} ")
    process = begin(tmp_path, int(more[0]), *more[1:])
    said = process.communicate(timeout=60)[1]
    assert process.returncode != 0
    assert re.search(expected, said), said
    assert "Traceback" not in said


def test_a_rack_before_that_never_comes(tmp_path: Path) -> None:
    prepared(tmp_path, ProcessOptions(away=0.5))
    process = begin(tmp_path, 1)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert "error: rack 1: rack 0 at an address that it has not said yet has been away for" in said


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    options = ProcessOptions("always", 3, Link(0.001, 1e7), (RackPace(2.0), RackPace(), RackPace(least=0.1)), 9.0, 2)
    prepared(tmp_path, options)
    plan = RacksPlan.read(tmp_path)
    assert plan.options == options
    assert plan.settings == TrainSettings(**SHORT.to_json())
    assert len(bytes.fromhex(plan.token)) == 16
    texts = read_texts(tmp_path)
    assert torch.equal(texts.training.ids, TEXTS.training.ids)
    assert (texts.training.digest, texts.held_out.digest) == (TEXTS.training.digest, TEXTS.held_out.digest)
    (tmp_path / "racks.json").write_text("{}")
    with pytest.raises(ValueError, match="is damaged .* begin the run again"):
        RacksPlan.read(tmp_path)


def test_paces_are_of_each_rack(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are 3 racks, and the pace of 1 is given"):
        prepared(tmp_path, ProcessOptions(pace=(RackPace(2.0),)))
    with pytest.raises(ValueError, match="at least 1 micro-batch ahead"):
        ProcessOptions(ahead=0)
