"""All racks of a model trained at once, in processes that are started, watched, started again, and gathered at the end.

Torchrun's elastic agent does not do this: it starts all processes again when one ends, also after an error that comes
again, gives up after so many starts however far the run has got, and leaves processes behind when it is killed. Here
only the rack is started again of which a process was killed, as often as it gets further in between.

One rack is one process, or several that train together. These find each other as the processes of torchrun do: by a
store, which the supervisor holds, and by variables in the environment. One that ends takes the others with it, since
none of them can take a step alone.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import PartialState
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does export it

from surgeon.errors import Diverged
from surgeon.gpus import gpus_in_turn
from surgeon.processes.children import LIKELY_MEMORY, Child
from surgeon.processes.rendezvous import serve_store
from surgeon.processes.sockets import interface_of, interface_variables
from surgeon.processes.torchrun import HOSTED, VARIABLES, TorchrunEnvironment
from surgeon.progress import progress
from surgeon.threads import threads_per_rank
from surgeon.training.checkpoints import OTHERS_ENDED, newest_checkpoint, step_of
from surgeon.training.held_out import HeldOutQuality
from surgeon.training.racks.in_turn import train_in_turn
from surgeon.training.racks.outbox import ended_mark
from surgeon.training.racks.preparing import prepare
from surgeon.training.racks.process import DIVERGED
from surgeon.training.racks.run_files import LOG_FILE, RESULT_FILE, ProcessOptions, RacksPlan, rack_folder
from surgeon.training.racks.subject import RacksToTrain
from surgeon.training.racks.trained import RacksTrained, gather, is_done
from surgeon.training.resume import alone
from surgeon.training.run_log import HELD_OUT_FILE, TRAINING_FILE, read_rows

_HOST = "127.0.0.1"
_OTHERS_SECONDS = 1.0  # within which those that end because another one did can be told from that one
_LOOK_SECONDS = 0.1
_PROGRESS_SECONDS = 1.0
_VAIN_STARTS = 3  # in a row that end before another checkpoint


class RackFailed(ChildProcessError):
    """A rack's process could not go on; the message is what it said last."""


def train_racks(asked: RacksToTrain, options: ProcessOptions | None) -> RacksTrained:
    """Train them as `train_in_turn` does, or as `train_in_processes` where there are options of processes."""
    if options is None:
        return train_in_turn(asked)
    return train_in_processes(asked, options)


def train_in_processes(asked: RacksToTrain, options: ProcessOptions | None = None) -> RacksTrained:
    """Train all racks of a model at once, each in a process of its own, which hand their streams on over TCP.

    A rack's process that is killed is started again and goes on from its checkpoint while the others wait. Killed as a
    whole, the same call goes on. Without averaging the numbers are those of `train_in_turn`, bit for bit; with several
    processes for each rack, which share its batches, up to rounding. The run's files are described in `run_files`.

    Raises:
        RackFailed: if one could not go on; the run can, once that is mended.
        Diverged: if the loss of one is not finite any more.
        ValueError: if settings, text and racks do not fit, or the folder has another run; or if there are several
            processes already.
        OSError: if the folder cannot be written, or another process works on it.
    """
    if PartialState(cpu=asked.device == "cpu").num_processes > 1:
        raise ValueError(
            "racks start their processes themselves; leave accelerate launch or torchrun out, and ask for replicas of "
            "each rack to have several processes in it"
        )
    replicas = options.replicas if options else 1
    gpus = torch.cuda.device_count()
    if asked.device == "cuda" and replicas > gpus:
        raise ValueError(
            f"{replicas} processes of a rack need a GPU each, and there are {gpus}; ask for fewer, or the CPU"
        )
    with alone(asked.folder, asked.device):
        plan = prepare(asked, options)
        _Supervisor(asked.folder, plan, asked.settings.steps_on(len(asked.texts.training))).work()
    found = gather(asked.whole, asked.racks, asked.folder)
    if asked.original is None:
        return found
    judge = HeldOutQuality(asked.texts.held_out, asked.original())
    before, after = (judge.measure(model) for model in (asked.whole, found.model))
    last = replace(found.results[-1], original=judge.original, before=before, after=after)
    return replace(found, results=(*found.results[:-1], last))


class _End(NamedTuple):
    """How a rack's processes have ended: which one was the reason, its exit code (negative for a signal), its words."""

    who: str
    code: int
    said: str = ""


class _Rack:
    """The processes of one rack."""

    def __init__(self, run: Path, index: int, plan: RacksPlan) -> None:
        self.run = run
        self.index = index
        self.plan = plan
        self.processes: list[Child] = []
        self.starts_in_vain = 0
        self.step_of_start = -1
        self._store: TCPStore | None = None

    def start(self) -> None:
        """Start all of them; none may run."""
        assert not self.processes
        own = {name: value for name, value in os.environ.items() if name not in (*VARIABLES, HOSTED)}
        port = 0
        count = self.plan.options.replicas
        if self.plan.device == "cuda":
            own |= gpus_in_turn(self.index, count)
        if count > 1:  # they meet at a new store for each start, on this machine alone
            self._store = serve_store(socket.create_server((_HOST, 0)))
            port = self._store.port
            if interface := interface_of(_HOST):
                own |= interface_variables(interface)
        threads = self.plan.options.threads or threads_per_rank(self.plan.racks * count)
        command = ["-P", "-m", "surgeon.training.racks.process", str(self.run.resolve()), str(self.index), "--child"]
        for replica in range(count):
            place = TorchrunEnvironment(replica, count, replica, count, _HOST, port, hosted=True)
            together = place.variables() if count > 1 else {}
            log = self._log(replica)
            log.parent.mkdir(parents=True, exist_ok=True)
            self.processes.append(Child(command, log, threads, environment=own | together))

    def _log(self, replica: int) -> Path:
        return rack_folder(self.run, self.index, replica) / LOG_FILE

    def look(self) -> _End | None:
        """How they have ended; None as long as they go on. When one has failed, all are ended."""
        codes = [process.poll() for process in self.processes]
        if None in codes and not any(codes):
            return None
        end = _End("", 0)
        if any(codes):
            until = time.monotonic() + _OTHERS_SECONDS
            while (reason := self._reason()) is None and time.monotonic() < until:
                time.sleep(_OTHERS_SECONDS / 20)
            end = reason or self._end_of(next(replica for replica, code in enumerate(codes) if code))
        self.kill()
        self.wait()
        return end

    def _reason(self) -> _End | None:
        """The end of the one that did not end because of another; a signal comes before an error."""
        codes = [process.poll() or 0 for process in self.processes]
        ends = (self._end_of(replica) for replica in sorted(range(len(codes)), key=codes.__getitem__) if codes[replica])
        return next((end for end in ends if not end.said.endswith(OTHERS_ENDED)), None)

    def _end_of(self, replica: int) -> _End:
        child = self.processes[replica]
        code = self.processes[replica].wait()
        who = f"rack {self.index}" + (f", process {replica}" if len(self.processes) > 1 else "")
        if code < 0:
            return _End(who, code)
        said = f"{who} {child.ending()} (see {self._log(replica)})"
        errors = (line.removeprefix("error: ") for line in reversed(child.said().splitlines()) if line[:7] == "error: ")
        return _End(who, code, next(errors, said))

    def kill(self) -> None:
        """Have them end at once."""
        for process in self.processes:
            process.kill()

    def wait(self) -> None:
        """Wait until they have."""
        for process in self.processes:
            process.wait()
        self.processes.clear()

    def step_of_checkpoint(self) -> int:
        """The step that the rack goes on from."""
        folder = rack_folder(self.run, self.index)
        newest = newest_checkpoint(folder) if folder.is_dir() else None
        if newest is None:
            return 0
        return step_of(newest)

    def last_row(self, table: str) -> dict[str, str] | None:
        """Of a table of its run."""
        rows = read_rows(rack_folder(self.run, self.index) / table)
        if rows:
            return rows[-1]
        return None


class _Supervisor:
    """Racks' processes, none of which outlives this one."""

    def __init__(self, run: Path, plan: RacksPlan, steps: int) -> None:
        self.run = run
        self.plan = plan
        self.steps = steps
        self.racks = [_Rack(run, index, plan) for index in range(plan.racks)]

    def work(self) -> None:
        """Start them, and wait until all are done."""
        done = [is_done(self.run, rack.index) for rack in self.racks]
        if all(done):
            return
        for rack in self.racks:
            path = rack_folder(self.run, rack.index) / RESULT_FILE
            said = next(self.run.glob(f"rack-*/**/{ended_mark(rack.index)}"), None)  # once its result was written
            if said is not None and not done[rack.index]:
                raise FileNotFoundError(
                    f"{path} is gone ({said} says that rack {rack.index} was done); put it back, or remove {self.run} "
                    "to begin the run again"
                )
            rack.step_of_checkpoint()  # what a rack lacks is said here, too: its own process writes to a log
        try:
            for rack in self.racks:
                rack.start()
            self._watch()
        finally:  # whatever a rack has not kept it makes again
            for rack in self.racks:
                rack.kill()
            for rack in self.racks:
                rack.wait()

    def _watch(self) -> None:
        active = list(self.racks)
        looked = 0.0
        shown = self._steps()
        with progress("racks", self.steps * self.plan.racks, "steps", shown, self._note) as advance:
            while active:
                for rack in list(active):
                    end = rack.look()
                    if end is not None and end.code:
                        self._start_again(rack, end)
                    elif end is not None:
                        active.remove(rack)
                if time.monotonic() - looked > _PROGRESS_SECONDS or not active:
                    looked = time.monotonic()
                    now = self._steps()
                    advance(max(0, now - shown))  # a rack that came back repeats some steps
                    shown = max(shown, now)
                time.sleep(_LOOK_SECONDS)

    def _start_again(self, rack: _Rack, end: _End) -> None:
        """Start a rack again that was ended by a signal; an error is the run's."""
        if end.code == DIVERGED:
            raise Diverged(end.said)
        if end.code > 0:
            raise RackFailed(end.said)
        name = signal.Signals(-end.code).name
        saved = rack.step_of_checkpoint()
        rack.starts_in_vain = rack.starts_in_vain + 1 if saved <= rack.step_of_start else 1
        rack.step_of_start = saved
        if rack.starts_in_vain > _VAIN_STARTS:
            raise RackFailed(
                f"{end.who} was ended by {name} {rack.starts_in_vain} times without getting further than step {saved}"
                + (LIKELY_MEMORY if name == "SIGKILL" else "")
                + "; mend that, and the same command goes on"
            )
        goes_on = "it goes on" if self.plan.options.replicas == 1 else "the rack goes on"
        print(f"{end.who} was ended by {name}; {goes_on} from step {saved}", file=sys.stderr, flush=True)
        rack.start()

    def _steps(self) -> int:
        return sum(int((rack.last_row(TRAINING_FILE) or {"step": "0"})["step"]) for rack in self.racks)

    def _note(self) -> str:
        """Each rack's step and loss."""
        parts = []
        for rack in self.racks:
            row = rack.last_row(TRAINING_FILE)
            held_out = rack.last_row(HELD_OUT_FILE)
            if row is not None:
                parts.append(f"rack {rack.index}: step {row['step']}, loss {float(row['loss']):.4g}")
            elif held_out is not None:
                parts.append(f"rack {rack.index}: perplexity {float(held_out['perplexity']):.4g}")
        return "; ".join(parts)
