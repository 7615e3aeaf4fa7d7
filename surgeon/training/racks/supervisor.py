"""All racks of a model trained at once, a process each: started, watched, started again, and gathered at the end."""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from accelerate import PartialState

from surgeon.processes.children import LIKELY_MEMORY
from surgeon.progress import progress
from surgeon.training.checkpoints import newest_checkpoint, step_of
from surgeon.training.held_out import HeldOutQuality
from surgeon.training.racks.in_turn import RacksTrained, rack_folder
from surgeon.training.racks.preparing import gather, prepare
from surgeon.training.racks.run_files import RESULT_FILE, ProcessOptions, RacksPlan
from surgeon.training.racks.shelf import ended_mark
from surgeon.training.racks.started import RackEnd, RackProcesses
from surgeon.training.racks.subject import RacksToTrain
from surgeon.training.resume import alone
from surgeon.training.run_log import HELD_OUT_FILE, TRAINING_FILE, read_rows

_LOOK_SECONDS = 0.1
_TELL_SECONDS = 1.0
_VAIN_STARTS = 3  # in a row that end before another checkpoint


class RackFailed(ChildProcessError):
    """A rack's process could not go on; the message is what it said last."""


def train_in_processes(asked: RacksToTrain, options: ProcessOptions | None = None) -> RacksTrained:
    """Train all racks of a model at once, each in a process of its own, which hand their streams on over TCP.

    A rack's process that is killed is started again and goes on from its checkpoint while the others wait. Killed as a
    whole, the same call goes on. Without averaging the numbers are those of `train_in_turn`, bit for bit; with several
    processes for each rack, which share its batches, up to rounding. The run's files are described in `run_files`.

    Raises:
        RackFailed: if one could not go on; the run can, once that is mended.
        ValueError: if settings, text and racks do not fit, or the folder has another run; or if there are several
            processes already.
        OSError: if the folder cannot be written, or another process works on it.
    """
    if PartialState(cpu=asked.device == "cpu").num_processes > 1:
        raise ValueError(
            "racks start their processes themselves; leave accelerate launch or torchrun out, and give --rack-replicas "
            "for several processes in each rack"
        )
    with alone(asked.folder, asked.device):
        plan = prepare(asked, options)
        _Supervisor(asked.folder, plan, asked.settings.steps_on(len(asked.texts.training.ids))).work()
    found = gather(asked.whole, asked.racks, asked.folder)
    if asked.original is None:
        return found
    judge = HeldOutQuality(asked.texts.held_out, asked.original())
    before, after = (judge.measure(model) for model in (asked.whole, found.model))
    last = replace(found.results[-1], original=judge.original, before=before, after=after)
    return replace(found, results=(*found.results[:-1], last))


class _Supervisor:
    """Racks' processes, none of which outlives this one."""

    def __init__(self, run: Path, plan: RacksPlan, steps: int) -> None:
        self.run, self.plan, self.steps = run, plan, steps
        self.racks: dict[int, RackProcesses] = {}
        self.vain = [0] * plan.racks
        self.saved: list[int] = [-1] * plan.racks

    def work(self) -> None:
        """Start them, and wait until all are done."""
        folders = [rack_folder(self.run, index) for index in range(self.plan.racks)]
        if all((folder / RESULT_FILE).is_file() for folder in folders):
            return
        for index, folder in enumerate(folders):
            said = next(self.run.glob(f"rack-*/**/{ended_mark(index)}"), None)  # once its result was written
            if said is not None and not (folder / RESULT_FILE).is_file():
                raise FileNotFoundError(
                    f"{folder / RESULT_FILE} is gone ({said} says that rack {index} was done); put it back, or remove "
                    f"{self.run} to begin the run again"
                )
            self._saved(index)  # what a rack lacks is said here, too: its own process writes to a log
        try:
            for index in range(self.plan.racks):
                self.racks[index] = RackProcesses(self.run, index, self.plan)
                self.racks[index].start()
            self._watch()
        finally:  # whatever a rack has not kept it makes again
            for rack in self.racks.values():
                rack.kill()
            for rack in self.racks.values():
                rack.end()

    def _watch(self) -> None:
        told, shown = 0.0, sum(self._step(index) for index in range(self.plan.racks))
        total = self.steps * self.plan.racks
        with progress("racks", total, "steps", shown, self._note) as advance:
            while self.racks:
                for index, rack in list(self.racks.items()):
                    end = rack.look()
                    if end is not None:
                        self._ended(index, end)
                if time.monotonic() - told > _TELL_SECONDS or not self.racks:
                    told, now = time.monotonic(), sum(self._step(index) for index in range(self.plan.racks))
                    advance(max(0, now - shown))  # a rack that came back repeats some steps
                    shown = max(shown, now)
                time.sleep(_LOOK_SECONDS)

    def _ended(self, index: int, end: RackEnd) -> None:
        """A rack has ended: well, by a signal, or by an error, which is the run's."""
        if end.code == 0:
            del self.racks[index]
            return
        if end.code > 0:
            raise RackFailed(end.said)
        name = signal.Signals(-end.code).name
        saved = self._saved(index)
        self.vain[index] = self.vain[index] + 1 if saved <= self.saved[index] else 1
        self.saved[index] = saved
        if self.vain[index] > _VAIN_STARTS:
            raise RackFailed(
                f"{end.who} was ended by {name} {self.vain[index]} times without getting further than step {saved}"
                + (LIKELY_MEMORY if name == "SIGKILL" else "")
                + "; mend that, and the same command goes on"
            )
        goes_on = "it goes on" if self.plan.options.replicas == 1 else "the rack goes on"
        print(f"{end.who} was ended by {name}; {goes_on} from step {saved}", file=sys.stderr, flush=True)
        self.racks[index].start()

    def _saved(self, index: int) -> int:
        """The step that a rack goes on from."""
        folder = rack_folder(self.run, index)
        newest = newest_checkpoint(folder) if folder.is_dir() else None
        return 0 if newest is None else step_of(newest)

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
