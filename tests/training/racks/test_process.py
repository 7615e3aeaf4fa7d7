"""Racks started by hand, as on several machines."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from surgeon.runtime.comm.collectives import Link
from surgeon.training.checkpoints import write_manifest
from surgeon.training.racks.process import agree, main, prepare
from surgeon.training.racks.run import (
    RackOptions,
    RacksPlan,
    RacksToTrain,
    gather,
    read_texts,
    train_in_turn,
)
from surgeon.training.racks.streams import RackPace
from surgeon.training.settings import TrainSettings
from tests import warm
from tests.processes.test_torchrun import free_port
from tests.training.racks.local_run import (
    TEXTS,
    THREE,
    TWO,
    in_step,
    rack_options,
    racks_of,
    require_close,
    whole,
)
from tests.training.racks.test_exchange import together
from tests.waiting import PATIENCE

REPOSITORY = Path(__file__).parents[3]
SHORT = TrainSettings(scope="all", steps=2, batch=4, learning_rate=1e-2, evaluate_every=1, save_every=1)


def prepared(run: Path, options: RackOptions | None = None, racks: str = THREE) -> None:
    model = whole(0.0)
    prepare(RacksToTrain(model, racks_of(model, racks), TEXTS, SHORT, run), options or rack_options())


def begin(
    run: Path, rack: int, *more: str, anew: bool = False, **environment: str
) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"} | environment
    command = [*warm.RACK, str(run), str(rack), *more]
    if not anew:
        command = [*warm.CODE, warm.BE_A_RACK, *command[len(warm.RACK) :]]
    begun: Any = warm.ColdPopen if anew else warm.Popen
    process: subprocess.Popen[str] = begun(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    return process


def test_racks_that_meet_at_an_address(tmp_path: Path) -> None:
    """Each has a copy of what was prepared, and two processes as torchrun starts them; one begins as users' do."""
    meet = f"127.0.0.1:{free_port()}"
    runs = [tmp_path / str(rack) for rack in range(2)]
    for run in runs:
        prepared(run, rack_options(replicas=2), TWO)
    (runs[1] / "racks.json").write_bytes((runs[0] / "racks.json").read_bytes())
    processes = []
    for rack, run in enumerate(runs):
        together = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        together["MASTER_PORT"] = str(free_port())
        for replica in range(2):
            own = together | {"RANK": str(replica), "LOCAL_RANK": str(replica)}
            anew = rack == replica == 1
            processes.append(begin(run, rack, "--meet", meet, anew=anew, **own))
    for process in processes:
        said = process.communicate(timeout=PATIENCE)[1]
        assert process.returncode == 0, said
    (runs[1] / "rack-1").rename(runs[0] / "rack-1")
    expected, _ = in_step(SHORT, TWO)
    require_close(runs[0], expected)
    found = gather(RacksToTrain(whole(), racks_of(whole(), TWO), TEXTS, SHORT, runs[0]))
    assert [each.steps for each in found.results] == [2, 2]


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Be a rack of a run in this process; returns what it said as it ended."""
    monkeypatch.setattr("os._exit", sys.exit)

    def ended(options: RackOptions | None, *arguments: str) -> str:
        prepared(tmp_path, options)
        with pytest.raises(SystemExit) as end:
            main([str(tmp_path), *arguments])
        assert end.value.code != 0
        return capsys.readouterr().err

    return ended


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["3", "--meet", "127.0.0.1:3"], "rack 3: .* has racks 0 to 2, and no rack 3"),
        (["0", "--meet", "here"], "'here' is no address; write it as HOST:PORT"),
        (["1"], "required: --meet"),
        (
            ["1", "--meet", "no.such.invalid:3"],
            "rack 1: no.such.invalid cannot be found from here .*--meet names rack 0",
        ),
    ],
)
def test_what_is_wrong_is_said_in_a_line(more: list[str], expected: str, refused: Any) -> None:
    assert re.search(expected, refused(None, *more))


def test_a_port_that_is_taken(refused: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused(None, "0", "--meet", f"127.0.0.1:{port}")
    assert re.search(f"error: rack 0: rack 0 cannot listen at 127.0.0.1:{port} .*--meet", said)


def test_as_many_processes_as_were_prepared(refused: Any, tmp_path: Path) -> None:
    said = refused(rack_options(replicas=2), "0", "--meet", "127.0.0.1:3")
    wanted = "a rack of this run has 2 processes, and this one has 1; start it with torchrun --standalone --nproc-per-"
    assert wanted in said
    with pytest.raises(
        ValueError, match="3 processes cannot share a batch of 4 windows; change the batch"
    ):
        prepared(tmp_path / "other", rack_options(replicas=3))
    sharded = replace(SHORT, arguments={"fsdp": True})
    asked = RacksToTrain(whole(), racks_of(whole()), TEXTS, sharded, tmp_path / "other")
    for train in (partial(prepare, options=rack_options()), train_in_turn):
        with pytest.raises(ValueError, match="among its processes.* 2 replicas or more of each"):
            train(asked)
    with pytest.raises(ValueError, match="at least 1 process, not 0; give 1 replica or more"):
        rack_options(replicas=0)


def test_racks_that_never_come(refused: Any) -> None:
    meet = f"127.0.0.1:{free_port()}"
    said = refused(rack_options(away=0.5), "1", "--meet", meet)
    assert (
        f"error: rack 1: rack 0 has not come to {meet} within 0.5 s; start it, then the same command goes on"
        in said
    )
    said = refused(rack_options(away=0.5), "0", "--meet", meet)
    assert (
        "error: rack 0: rack 1 has not come within 0.5 s; start it, then the same command goes on"
        in said
    )


def test_all_go_on_from_the_newest_checkpoint_that_all_have(tmp_path: Path) -> None:
    """A rack that is done does it, too; a checkpoint that is not whole is none."""
    steps = {0: (2, 4, 6), 1: (2, 4), 2: (4, 6)}
    for rack, there in steps.items():
        for step in there:
            (tmp_path / f"rack-{rack}" / f"checkpoint-{step}").mkdir(parents=True)
            write_manifest(tmp_path / f"rack-{rack}" / f"checkpoint-{step}")
    (tmp_path / "rack-1" / "checkpoint-6").mkdir()
    (tmp_path / "rack-0" / "result.json").write_text("{}")
    store = HashStore()
    assert together(3, lambda rack: agree(store, tmp_path, rack, 3, True, 9.0)) == [False] * 3
    left = {rack: sorted(path.name for path in (tmp_path / f"rack-{rack}").iterdir()) for rack in steps}
    assert left == {
        0: ["checkpoint-2", "checkpoint-4"],
        1: ["checkpoint-2", "checkpoint-4"],
        2: ["checkpoint-4"],
    }
    for rack in steps:
        (tmp_path / f"rack-{rack}" / "result.json").write_text("{}")
    other = HashStore()
    assert together(3, lambda rack: agree(other, tmp_path, rack, 3, True, 9.0)) == [True] * 3


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    paces = (RackPace(2.0), RackPace(), RackPace(least=0.1))
    options = rack_options(
        average="always", ahead=3, link=Link(0.001, 1e7), pace=paces, away=9.0, threads=2, replicas=4
    )
    prepared(tmp_path, options)
    plan = RacksPlan.read(tmp_path)
    assert plan.options == options
    assert plan.settings == TrainSettings(**SHORT.to_json())
    texts = read_texts(tmp_path)
    assert torch.equal(texts.training.ids, TEXTS.training.ids)
    assert (texts.training.digest, texts.held_out.digest) == (
        TEXTS.training.digest,
        TEXTS.held_out.digest,
    )
    (tmp_path / "racks.json").write_text("{}")
    with pytest.raises(ValueError, match="is damaged .* begin the run again"):
        RacksPlan.read(tmp_path)


def test_paces_are_of_each_rack(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are 3 racks, and the pace of 1 is given"):
        prepared(tmp_path, rack_options(pace=(RackPace(2.0),)))
    with pytest.raises(ValueError, match="at least 1 micro-batch ahead"):
        rack_options(ahead=0)
