"""Racks as real processes, which are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
import torch

from surgeon.errors import Diverged
from surgeon.models.edit import edit
from surgeon.training.racks import process
from surgeon.training.racks.process import train_in_processes
from surgeon.training.racks.run import (
    RacksPlan,
    RacksToTrain,
    finish_racks,
    gather,
    rack_folder,
    train_in_turn,
)
from surgeon.training.run import TrainedModel
from tests import warm
from tests.selection import case
from tests.tiny_models import tiny_model
from tests.training.racks.local_run import (
    SETTINGS,
    TEXTS,
    TWO,
    in_processes,
    in_step,
    one_after_the_other,
    rack_options,
    racks_of,
    require_close,
    weights,
    whole,
)
from tests.waiting import PATIENCE, wait_until

REPOSITORY = Path(__file__).parents[3]
CODE = "import sys; from tests.training.racks import local_run as run; run.main(*sys.argv[1:])"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainedModel]:
    folder = tmp_path_factory.mktemp("expected")
    return folder, one_after_the_other(folder)


def require_same(folder: Path, found: TrainedModel, expected: tuple[Path, TrainedModel]) -> None:
    """Weights, losses and what was measured, bit for bit."""
    other, wanted = expected
    for mine, theirs in zip(weights(folder), weights(other), strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    states = [one.whole.model.state_dict() for one in (found, wanted)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])
    for coda, other_coda in zip(found.codas, wanted.codas, strict=True):
        assert all(torch.equal(coda.tensors[name], one) for name, one in other_coda.tensors.items())
    for index, (result, other_result) in enumerate(zip(found.results, wanted.results, strict=True)):
        assert replace(result, seconds=0) == replace(other_result, seconds=0)
        for table in ("training.csv", "held_out.csv"):
            ours, others = (pd.read_csv(run / f"rack-{index}" / table) for run in (folder, other))
            pd.testing.assert_frame_equal(
                ours.drop(columns="seconds"), others.drop(columns="seconds"), check_exact=True
            )


def process_of(folder: Path, rack: int, replica: int = 0) -> int:
    found: dict[str, Any] = json.loads((rack_folder(folder, rack, replica) / "process.json").read_text())
    return int(found["process"])


def kill_at(folder: Path, *ends: tuple[int, int, int]) -> threading.Thread:
    """Kill a rack's process when the rack has a checkpoint of a step, one after the other: (rack, process, step)."""

    def kill() -> None:
        for rack, replica, step in ends:
            wait_until((folder / f"rack-{rack}" / f"checkpoint-{step}").is_dir)
            os.kill(process_of(folder, rack, replica), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


def test_processes_come_to_the_same_and_leave_what_they_did(
    tmp_path: Path, expected: tuple[Path, TrainedModel]
) -> None:
    """What is done is not done again; another run's folder is refused; and what is left when it is written."""
    require_same(tmp_path, in_processes(tmp_path), expected)
    traffic = [json.loads((tmp_path / f"rack-{rack}" / "traffic.json").read_text()) for rack in range(3)]
    for before, after in ((traffic[0], traffic[1]), (traffic[1], traffic[2])):
        assert before["sent"] == after["received"]
        assert before["sent"]["training"]["items"] == 6 * 4
        assert before["sent"]["held_out"]["items"] == 4 * 3
    timeline = pd.read_csv(tmp_path / "rack-1" / "timeline.csv")
    assert set(timeline["what"]) == {"compute", "wait_input", "wait_room", "send"}
    assert (timeline["end"] >= timeline["start"]).all()
    own = timeline[timeline["what"] != "send"].sort_values("start", kind="stable")
    assert (own["start"].to_numpy()[1:] >= own["end"].to_numpy()[:-1] - 1e-5).all()
    require_same(tmp_path, in_processes(tmp_path), expected)
    with pytest.raises(
        ValueError, match="its average was 'never', and now it is '3'; choose another output"
    ):
        in_processes(tmp_path, average=3)
    finish_racks(tmp_path, racks_of(whole()), {"said": 1})
    names = ["held_out.csv", "rack-0", "rack-1", "rack-2", "run.json", "training.csv"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    left = sorted(path.name for path in (tmp_path / "rack-0").iterdir())
    assert left == [
        "held_out.csv", "log.txt", "run.json", "tensorboard", "timeline.csv", "traffic.json", "training.csv"
    ]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_racks_of_mixtures_come_to_the_same(family: str, tmp_path: Path) -> None:
    """Some experts left out, and balanced where the architecture asks for it."""
    asked = {} if family == "gpt_oss" else {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    model = edit(tiny_model(family, 3, dropout=0.2, **asked), "A0 F0!e0,e3 A1 F1 A2 F2")
    settings, racks = replace(SETTINGS, steps=2), racks_of(model)
    wanted = train_in_turn(RacksToTrain(model, racks, TEXTS, settings, tmp_path / "turn"))
    told = RacksToTrain(model, racks, TEXTS, settings, tmp_path / "once")
    found = train_in_processes(told, rack_options(threads=1, away=60.0))
    require_same(tmp_path / "once", found, (tmp_path / "turn", wanted))


def test_one_after_the_other_is_killed(
    tmp_path: Path, expected: tuple[Path, TrainedModel], capfd: pytest.CaptureFixture[str]
) -> None:
    """The last, the one in the middle, the first; all go on from the newest checkpoint that all have."""
    killing = kill_at(tmp_path, (2, 0, 2), (1, 0, 4), (0, 0, 6))
    found = in_processes(tmp_path, ahead=1)
    killing.join()
    said = capfd.readouterr().err
    for rack in range(3):
        assert f"rack {rack} was ended by SIGKILL; all racks go on from step" in said
    require_same(tmp_path, found, expected)


@pytest.mark.thorough
@pytest.mark.parametrize("fsdp", [case(False, default=True), case(True, default=False)])
def test_replicas_of_each_rack_come_to_the_same_up_to_rounding(
    fsdp: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two racks, two processes in each; one of them is killed, and all go on from their checkpoint.

    They hold all of the rack's parameters, or share them out.
    """
    settings = replace(SETTINGS, steps=4, micro_batch=1)
    shared = replace(settings, arguments=SETTINGS.arguments | {"fsdp": True}) if fsdp else settings
    killing = kill_at(tmp_path, (1, 1, 2))
    found = in_processes(tmp_path, shared, dropout=0.0, racks=TWO, replicas=2, ahead=1)
    killing.join()
    assert "rack 1, process 1 was ended by SIGKILL; all racks go on from step" in capfd.readouterr().err
    expected, losses = in_step(settings, TWO)
    require_close(tmp_path, expected)
    for rack in range(2):
        table = pd.read_csv(tmp_path / f"rack-{rack}" / "training.csv")
        assert table["loss"].tolist() == pytest.approx([step[rack] for step in losses], rel=1e-5)
    assert [result.steps for result in found.results] == [4, 4]
    for replica in range(2):  # half of the windows each
        traffic = json.loads((rack_folder(tmp_path, 0, replica) / "traffic.json").read_text())
        assert traffic["sent"]["training"]["items"] >= 4 * 2
    finish_racks(tmp_path, racks_of(whole(), TWO), {})
    assert not list(tmp_path.rglob("process.json"))


def start(folder: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return warm.Popen(
        [*warm.CODE, CODE, str(folder), "1"],
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def listen_since(folder: Path, moment: float) -> bool:
    """Whether all racks have begun to listen after a moment, by the clock."""
    return all((folder / f"rack-{rack}" / "process.json").stat().st_mtime > moment for rack in range(3))


def test_the_supervisor_ends_and_no_rack_is_left(
    tmp_path: Path, expected: tuple[Path, TrainedModel]
) -> None:
    """By Ctrl-C, then by a kill as soon as all are there again: the same command goes on each time."""
    begun = -1.0
    for end in (signal.SIGINT, signal.SIGKILL):
        supervisor = start(tmp_path)
        wait_until(
            lambda: all((tmp_path / f"rack-{rack}" / "checkpoint-2").is_dir() for rack in range(2))
        )
        wait_until(lambda after=begun: listen_since(tmp_path, after))  # type: ignore[misc]
        begun = time.time()
        racks = [psutil.Process(process_of(tmp_path, rack)) for rack in range(3)]
        supervisor.send_signal(end)
        supervisor.communicate(timeout=PATIENCE)
        _, alive = psutil.wait_procs(racks, timeout=PATIENCE)
        assert not [rack for rack in alive if rack.status() != psutil.STATUS_ZOMBIE]
    require_same(tmp_path, in_processes(tmp_path), expected)


def test_an_error_is_the_run_s_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        Diverged, match=r"rack \d: the (loss is|gradient's norm is) .* step .* use a lower learning rate"
    ) as error:
        in_processes(tmp_path, replace(SETTINGS, learning_rate=1e30))
    assert "\n" not in str(error.value)
    racks = [
        process_of(tmp_path, rack)
        for rack in range(3)
        if (tmp_path / f"rack-{rack}" / "process.json").exists()
    ]
    assert not [rack for rack in racks if psutil.pid_exists(rack)]


def test_a_result_that_is_gone_is_made_again(
    tmp_path: Path, expected: tuple[Path, TrainedModel]
) -> None:
    """From the last checkpoint; only where nobody makes it again is it missed."""
    in_processes(tmp_path)
    (tmp_path / "rack-1" / "result.json").unlink()
    model = whole()
    with pytest.raises(FileNotFoundError, match=r"rack-1/result\.json is gone; put it back, or remove"):
        gather(RacksToTrain(model, racks_of(model), TEXTS, SETTINGS, tmp_path))
    require_same(tmp_path, in_processes(tmp_path), expected)


def test_racks_have_gpus_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two racks of two processes on three GPUs; each finds its own among those that its rack sees."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    started: list[Any] = []
    monkeypatch.setattr(process, "Child", lambda *_, environment: started.append(environment))
    plan = RacksPlan(2, {}, SETTINGS, rack_options(replicas=2), "cuda")
    for device in ("cuda", "cpu"):
        process._Processes(tmp_path, replace(plan, device=device))
    said = [(own.get("CUDA_VISIBLE_DEVICES"), own["LOCAL_RANK"]) for own in started]
    on_cpu = [(None, "0"), (None, "1")]
    assert said == [("0,1", "0"), ("0,1", "1"), ("2,0", "0"), ("2,0", "1"), *on_cpu, *on_cpu]


def test_processes_of_a_rack_need_a_gpu_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    model = whole()
    asked = RacksToTrain(model, racks_of(model, TWO), TEXTS, SETTINGS, tmp_path, device="cuda")
    with pytest.raises(ValueError, match="2 processes of a rack need a GPU each, and there are 1"):
        process.train_in_processes(asked, rack_options(replicas=2))
