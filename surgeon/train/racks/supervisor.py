"""All racks of a model trained at once, a process each: started, watched, started again, and gathered at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from surgeon.checkpoint.read import read_json
from surgeon.progress import progress
from surgeon.runtime.processes.rank import threads_per_rank
from surgeon.train.checkpoints import checkpoints_of
from surgeon.train.held_out import HeldOutQuality
from surgeon.train.racks.averaging import NEVER
from surgeon.train.racks.build import assemble, rack_of
from surgeon.train.racks.files import open_rack, save_rack
from surgeon.train.racks.in_turn import RACK_FILE, RacksTrained, rack_folder
from surgeon.train.racks.partition import Racks
from surgeon.train.racks.run_files import (
    LOG_FILE,
    PLAN_FILE,
    RESULT_FILE,
    START,
    ProcessOptions,
    RacksPlan,
    new_token,
    start_file,
    write_texts,
)
from surgeon.train.racks.task import check_settings
from surgeon.train.resume import alone, open_run
from surgeon.train.run import RunFigures
from surgeon.train.run_log import HELD_OUT_FILE, TRAINING_FILE, read_rows
from surgeon.train.settings import TrainSettings
from surgeon.train.texts import TrainTexts

_LOOK_SECONDS = 0.1
_TELL_SECONDS = 1.0
_VAIN_STARTS = 3  # in a row that end before another checkpoint


class RackFailed(ChildProcessError):
    """A rack's process could not go on; the message is what it said last."""


def train_in_processes(
    whole: PreTrainedModel,
    racks: Racks,
    texts: TrainTexts,
    settings: TrainSettings,
    folder: Path,
    original: Callable[[], PreTrainedModel] | None = None,
    identity: Mapping[str, Any] | None = None,
    seed: int | None = None,
    device: str = "cpu",
    options: ProcessOptions | None = None,
) -> RacksTrained:
    """Train all racks of a model at once, each in a process of its own, which hand their streams on over TCP.

    A rack's process that is killed is started again and goes on from its checkpoint while the others wait. Killed as a
    whole, the same call goes on. Without averaging the numbers are those of `train_in_turn`, bit for bit.

    Args:
        whole: edited or not; it is left as it is, and not needed by the racks' processes.
        folder: of the run; its files are described in `run_files`.
        original: loads what the whole model's divergence is from, before and after; None where it is not known.
        identity: what the model follows from, as JSON values.
        seed: of the random numbers that codas begin with; None for copies of the model's last layers.

    Raises:
        RackFailed: if one could not go on; the run can, once that is mended.
        ValueError: if settings, text and racks do not fit, or the folder has another run.
        OSError: if the folder cannot be written, or another process works on it.
    """
    with alone(folder, device):
        plan = prepare(whole, racks, texts, settings, folder, identity, seed, device, options)
        _Supervisor(folder, plan, settings.steps_on(len(texts.training.ids))).work()
    found = gather(whole, racks, folder)
    if original is None:
        return found
    judge = HeldOutQuality(texts.held_out, original())
    before, after = (judge.measure(model) for model in (whole, found.model))
    last = replace(found.results[-1], original=judge.original, before=before, after=after)
    return replace(found, results=(*found.results[:-1], last))


def prepare(
    whole: PreTrainedModel,
    racks: Racks,
    texts: TrainTexts,
    settings: TrainSettings,
    folder: Path,
    identity: Mapping[str, Any] | None = None,
    seed: int | None = None,
    device: str = "cpu",
    options: ProcessOptions | None = None,
) -> RacksPlan:
    """Write what the racks' processes begin with, unless it is there; arguments and errors as `train_in_processes`."""
    check_settings(settings)
    settings.steps_on(len(texts.training.ids))
    options = options or ProcessOptions()
    if options.pace and len(options.pace) != len(racks):
        raise ValueError(f"there are {len(racks)} racks, and the pace of {len(options.pace)} is given")
    averaged = {"processes": True, "average": str(options.average)}
    of_racks = {**(identity or {}), "racks": racks.texts, "coda": racks.depth, "coda_seed": seed} | averaged
    data = {"data": texts.training.digest, "held_out": texts.held_out.digest}
    open_run(folder, {**of_racks, "settings": settings.to_json()} | data)
    if (folder / PLAN_FILE).is_file():
        plan = replace(RacksPlan.read(folder), options=options, device=device)
        plan.write(folder)
        return plan
    (folder / START).mkdir(exist_ok=True)
    for index in range(len(racks)):
        save_rack(rack_of(whole, racks, index, seed), start_file(folder, index))
    write_texts(folder, texts)
    plan = RacksPlan(len(racks), of_racks, settings, options, device, new_token())
    plan.write(folder)  # the last one: a run that has it is prepared
    return plan


def gather(whole: PreTrainedModel, racks: Racks, folder: Path) -> RacksTrained:
    """What came of the racks of a run that is done.

    Raises:
        FileNotFoundError: if one is not.
        ValueError: if a file is damaged.
    """
    folders = [rack_folder(folder, index) for index in range(len(racks))]
    found = [open_rack(each / RACK_FILE) for each in folders]
    results = tuple(RunFigures.from_json(read_json(each / RESULT_FILE)) for each in folders)
    return RacksTrained(assemble(whole, racks, found), tuple(rack.coda() for rack in found[:-1]), results)


def commands_by_hand(folder: Path, racks: int) -> list[str]:
    """How the racks of a run that was prepared are started by hand; none where all are done."""
    if all((rack_folder(folder, index) / RESULT_FILE).is_file() for index in range(racks)):
        return []
    python, hosts = "python -m surgeon.train.racks.process", [f"HOST{index}:PORT{index}" for index in range(racks)]
    averaged = RacksPlan.read(folder).options.average != NEVER
    peers = [range(racks) if averaged else range(max(0, index - 1), index) for index in range(racks)]
    return [
        " ".join(
            [
                *(python, str(folder), str(index), "--listen", hosts[index]),
                *(f"--peer {peer}={hosts[peer]}" for peer in peers[index] if peer != index),
            ]
        )
        for index in range(racks)
    ]


class _Supervisor:
    """Racks' processes, none of which outlives this one."""

    def __init__(self, run: Path, plan: RacksPlan, steps: int) -> None:
        self.run, self.plan, self.steps = run, plan, steps
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.vain = [0] * plan.racks
        self.saved: list[int] = [-1] * plan.racks

    def work(self) -> None:
        """Start them, and wait until all are done."""
        missing = [index for index in range(self.plan.racks) if not self._is_done(index)]
        if not missing:
            return
        reader, writer = os.pipe()
        with ExitStack() as stack:
            stack.callback(os.close, reader)
            stack.callback(os.close, writer)
            stack.callback(self._end)
            for index in range(self.plan.racks):
                self._start(index, reader)
            self._watch(reader)

    def _is_done(self, index: int) -> bool:
        return (rack_folder(self.run, index) / RESULT_FILE).is_file()

    def _start(self, index: int, lifeline: int) -> None:
        folder = rack_folder(self.run, index)
        folder.mkdir(exist_ok=True)
        search_path = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        threads = str(self.plan.options.threads or threads_per_rank(self.plan.racks))
        with (folder / LOG_FILE).open("ab") as log:
            self.processes[index] = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "surgeon.train.racks.process"),
                    *(str(self.run.resolve()), str(index), "--lifeline", str(lifeline)),
                ],
                env=os.environ | {"PYTHONPATH": search_path, "OMP_NUM_THREADS": threads},
                pass_fds=[lifeline],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C at a terminal reaches this process only, which then ends the racks
            )

    def _watch(self, lifeline: int) -> None:
        told, shown = 0.0, sum(self._step(index) for index in range(self.plan.racks))
        total = self.steps * self.plan.racks
        with progress("racks", total, "steps", shown, self._note) as advance:
            while self.processes:
                for index, process in list(self.processes.items()):
                    code = process.poll()
                    if code is not None:
                        del self.processes[index]
                        self._ended(index, code, lifeline)
                if time.monotonic() - told > _TELL_SECONDS or not self.processes:
                    told, now = time.monotonic(), sum(self._step(index) for index in range(self.plan.racks))
                    advance(max(0, now - shown))  # a rack that came back repeats some steps
                    shown = max(shown, now)
                time.sleep(_LOOK_SECONDS)

    def _ended(self, index: int, code: int, lifeline: int) -> None:
        """One process has ended: well, by a signal, or by an error, which is the run's."""
        if code == 0:
            return
        if code > 0:
            raise RackFailed(_last_line(rack_folder(self.run, index) / LOG_FILE, index, code))
        name = signal.Signals(-code).name
        saved = max(checkpoints_of(rack_folder(self.run, index)), default=0)
        self.vain[index] = self.vain[index] + 1 if saved <= self.saved[index] else 1
        self.saved[index] = saved
        if self.vain[index] > _VAIN_STARTS:
            raise RackFailed(
                f"rack {index} was ended by {name} {self.vain[index]} times without getting further than step {saved}"
                + (", as the system does when memory runs out" if name == "SIGKILL" else "")
                + "; mend that, and the same command goes on"
            )
        print(f"rack {index} was ended by {name}; it goes on from step {saved}", file=sys.stderr, flush=True)
        self._start(index, lifeline)

    def _end(self) -> None:
        """End what still runs: whatever a rack has not kept it makes again."""
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()

    def _step(self, index: int) -> int:
        return int((_last_row(rack_folder(self.run, index) / TRAINING_FILE) or {"step": "0"})["step"])

    def _note(self) -> str:
        """Each rack's step and loss."""
        parts = []
        for index in range(self.plan.racks):
            row = _last_row(rack_folder(self.run, index) / TRAINING_FILE)
            held_out = _last_row(rack_folder(self.run, index) / HELD_OUT_FILE)
            if row is not None:
                parts.append(f"rack {index}: step {row['step']}, loss {float(row['loss']):.4g}")
            elif held_out is not None:
                parts.append(f"rack {index}: perplexity {float(held_out['perplexity']):.4g}")
        return "; ".join(parts)


def _last_row(path: Path) -> dict[str, str] | None:
    rows = read_rows(path)
    return rows[-1] if rows else None


def _last_line(log: Path, index: int, code: int) -> str:
    """What a process that failed said at its end."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
    said = next((line for line in reversed(lines) if line.startswith("error: ")), None)
    if said is not None:
        return said.removeprefix("error: ")
    last = lines[-1].strip() if lines else "it wrote nothing"
    return f"rack {index} ended with exit code {code}: {last} (see {log})"
