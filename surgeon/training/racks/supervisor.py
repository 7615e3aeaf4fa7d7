"""All racks of a model trained at once, in processes that are started, watched, restarted, and gathered at the end.

All racks restart where a process was killed, as often as they get further in between. Torchrun's elastic agent restarts
after an error that comes again, gives up after so many starts, and leaves processes behind when it is killed.

Replicas of a rack find each other as torchrun's processes do, by a store, which the supervisor holds, and the
environment.
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

from surgeon.errors import Diverged
from surgeon.machine import gpus_in_turn, threads_per_rank
from surgeon.processes.children import LIKELY_MEMORY, Child
from surgeon.processes.rendezvous import serve_store
from surgeon.processes.sockets import interface_of, interface_variables
from surgeon.processes.torchrun import HOSTED, VARIABLES, TorchrunEnvironment
from surgeon.progress import progress
from surgeon.quality.head import HeldOutQuality
from surgeon.training.arguments import share_of_batch
from surgeon.training.checkpoints import HELD_OUT_FILE, OTHERS_ENDED, TRAINING_FILE, read_rows
from surgeon.training.racks.build import rack_of
from surgeon.training.racks.model import save_rack
from surgeon.training.racks.process import DIVERGED, find_newest_common, list_whole_checkpoints
from surgeon.training.racks.run_files import (
    LOG_FILE,
    PLAN_FILE,
    START,
    TEXTS_FILE,
    TRAINING_TEXT_FILE,
    ProcessOptions,
    RacksPlan,
    RacksToTrain,
    is_done,
    rack_folder,
    start_file,
    teacher_file,
    write_texts,
)
from surgeon.training.racks.task import TrainedModel, gather, teacher_of
from surgeon.training.run import lock_run, open_run


def prepare(asked: RacksToTrain, options: ProcessOptions) -> RacksPlan:
    """Write the files that processes begin with, where they are missing; errors as of `train_in_processes`."""
    racks = asked.racks
    settings = asked.settings
    folder = asked.folder
    settings.steps_on(len(asked.texts.training))
    if settings.arguments.get("deepspeed") and options.replicas > 1:
        raise ValueError("deepspeed does not know racks; share their parameters out by fsdp")
    if settings.arguments.get("fsdp") and options.replicas == 1:
        raise ValueError(
            "fsdp shares a rack's parameters out among its processes; ask for 2 replicas or more of each"
        )
    share_of_batch(settings, options.replicas)
    if options.pace and len(options.pace) != len(racks):
        raise ValueError(f"there are {len(racks)} racks, and the pace of {len(options.pace)} is given")
    averaged = {"processes": True, "average": str(options.average), "replicas": options.replicas}
    of_racks = asked.identity_of_racks() | averaged
    open_run(folder, of_racks | asked.settings_and_text())
    if (folder / PLAN_FILE).is_file():
        plan = replace(RacksPlan.read(folder), options=options, device=asked.device)
    else:
        plan = RacksPlan(len(racks), of_racks, settings, options, asked.device)
    kinds = [start_file]
    if settings.distillation is not None:
        kinds.append(teacher_file)
    files = [kind(folder, index) for kind in kinds for index in range(len(racks))]
    if not all(path.is_file() for path in (*files, folder / TRAINING_TEXT_FILE, folder / TEXTS_FILE)):
        (folder / START).mkdir(exist_ok=True)
        for index in range(len(racks)):
            save_rack(rack_of(asked.whole, racks, index, asked.seed), start_file(folder, index))
        if settings.distillation is not None:
            assert asked.original is not None
            teacher = asked.original()
            for index in range(len(racks)):
                save_rack(teacher_of(teacher, racks, index), teacher_file(folder, index))
        write_texts(folder, asked.texts)
    plan.write(folder)  # the last one: a run that has it is prepared
    return plan


def commands_by_hand(folder: Path, racks: int) -> list[str]:
    """Commands that start the racks of a prepared run; none where all are done."""
    if all(is_done(folder, index) for index in range(racks)):
        return []
    replicas = RacksPlan.read(folder).options.replicas
    if replicas == 1:
        python = "python"
    else:
        python = f"torchrun --standalone --nproc-per-node {replicas}"
    module = f"{python} -m surgeon.training.racks.process {folder}"
    return [f"{module} {index} --meet HOST0:PORT" for index in range(racks)]


_HOST = "127.0.0.1"
_OTHERS_SECONDS = 1.0  # within which those that end because another one did can be told from that one
_LOOK_SECONDS = 0.1
_PROGRESS_SECONDS = 1.0
_VAIN_STARTS = 3  # in a row that end before another checkpoint


def train_in_processes(asked: RacksToTrain, options: ProcessOptions) -> TrainedModel:
    """Train all racks of a model at once, each in a process of its own, which send each other their streams.

    Where a process is killed all racks resume from the newest checkpoint that each of them has. Killed as a whole, the
    same call resumes. Without averaging the numbers are those of `train_in_turn`, bit for bit; with replicas, up to
    rounding. `run_files` describes the files.

    Raises:
        ChildProcessError: if one could not go on, with its last line; the run can, once that is mended.
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
    gpus = torch.cuda.device_count()
    if asked.device == "cuda" and options.replicas > gpus:
        raise ValueError(
            f"{options.replicas} processes of a rack need a GPU each, and there are {gpus}; ask for fewer, or the CPU"
        )
    with lock_run(asked.folder, asked.device):
        plan = prepare(asked, options)
        if not all(is_done(asked.folder, index) for index in range(plan.racks)):
            _run_until_done(asked.folder, plan, asked.settings.steps_on(len(asked.texts.training)))
    found = gather(asked)
    if asked.original is None:
        return found
    judge = HeldOutQuality(asked.texts.held_out, asked.original())
    before, after = (judge.measure(model) for model in (asked.whole, found.whole.model))
    whole, last = (
        replace(one, original=judge.original, before=before, after=after)
        for one in (found.whole, found.results[-1])
    )
    return replace(found, whole=whole, results=(*found.results[:-1], last))


class _End(NamedTuple):
    """End of the process that took the others with it: its rack, exit code (negative for a signal), and last words."""

    who: str
    code: int
    said: str = ""


class _Processes:
    """Processes of all racks, by their names in messages, from one start to their end."""

    def __init__(self, run: Path, plan: RacksPlan) -> None:
        self.children: dict[str, Child] = {}
        # New for each start, on this machine alone: of all racks, and of the processes of each.
        self._stores = [serve_store(socket.create_server((_HOST, 0))) for _ in range(1 + plan.racks)]
        count = plan.options.replicas
        threads = plan.options.threads or threads_per_rank(plan.racks * count)
        own = {name: value for name, value in os.environ.items() if name not in (*VARIABLES, HOSTED)}
        own |= interface_variables(interface_of(_HOST))
        meet = ["--meet", f"{_HOST}:{self._stores[0].port}", "--child"]
        module = ["-P", "-m", "surgeon.training.racks.process", str(run.resolve())]
        for rack in range(plan.racks):
            gpus = gpus_in_turn(rack, count) if plan.device == "cuda" else {}
            for replica in range(count):
                place = TorchrunEnvironment(
                    replica, count, replica, count, _HOST, self._stores[1 + rack].port, True
                )
                together = place.variables() if count > 1 else {}
                log = rack_folder(run, rack, replica) / LOG_FILE
                log.parent.mkdir(parents=True, exist_ok=True)
                who = f"rack {rack}"
                if count > 1:
                    who += f", process {replica}"
                self.children[who] = Child(
                    [*module, str(rack), *meet], log, threads, environment=own | gpus | together
                )

    def look(self) -> _End | None:
        """Find the end of all; None while they go on. When one has failed, all are ended.

        It is that of the one that did not end because of another; a signal comes before an error.
        """
        codes = [child.poll() for child in self.children.values()]
        if None in codes and not any(codes):
            return None
        end = _End("", 0)
        until = time.monotonic() + _OTHERS_SECONDS
        while any(codes):
            ends = [_describe_end(who, child) for who, child in self.children.items() if child.poll()]
            end = min(ends, key=lambda one: (one.said.endswith(OTHERS_ENDED), one.code))
            if not end.said.endswith(OTHERS_ENDED) or time.monotonic() > until:
                break
            time.sleep(_OTHERS_SECONDS / 20)
        self.end()
        return end

    def end(self) -> None:
        for child in self.children.values():
            child.kill()
        for child in self.children.values():
            child.wait()


def _describe_end(who: str, child: Child) -> _End:
    code = child.wait()
    if code < 0:
        return _End(who, code)
    lines = reversed(child.said().splitlines())
    errors = (line.removeprefix("error: ") for line in lines if line.startswith("error: "))
    return _End(who, code, next(errors, f"{who} {child.ending()} (see {child.log})"))


def _run_until_done(run: Path, plan: RacksPlan, steps: int) -> None:
    folders = [rack_folder(run, index) for index in range(plan.racks)]

    def rows(table: str) -> list[dict[str, str]]:
        return [(read_rows(folder / table) or [{}])[-1] for folder in folders]

    def made() -> int:
        return sum(int(row.get("step", 0)) for row in rows(TRAINING_FILE))

    def note() -> str:
        measured = zip(rows(TRAINING_FILE), rows(HELD_OUT_FILE), strict=True)
        parts = []
        for index, (row, held_out) in enumerate(measured):
            if row:
                parts.append(f"rack {index}: step {row['step']}, loss {float(row['loss']):.4g}")
            elif held_out:
                parts.append(f"rack {index}: perplexity {float(held_out['perplexity']):.4g}")
        return "; ".join(parts)

    shown = made()
    looked = 0.0
    starts_in_vain = 0
    saved = find_newest_common([list_whole_checkpoints(folder) for folder in folders])
    processes = _Processes(run, plan)
    try:
        with progress("racks", steps * plan.racks, "steps", shown, note) as advance:
            while (end := processes.look()) is None or end.code:
                if end is not None:
                    before = saved
                    saved = find_newest_common([list_whole_checkpoints(folder) for folder in folders])
                    starts_in_vain = 1 if saved > before else starts_in_vain + 1
                    _require_signal(end, starts_in_vain, saved)
                    processes = _Processes(run, plan)
                if time.monotonic() - looked > _PROGRESS_SECONDS:
                    looked = time.monotonic()
                    now = made()
                    advance(max(0, now - shown))  # racks that are started again repeat some steps
                    shown = max(shown, now)
                time.sleep(_LOOK_SECONDS)
            advance(max(0, made() - shown))
    finally:  # what racks have not kept they make again
        processes.end()


def _require_signal(end: _End, starts_in_vain: int, saved: int) -> None:
    """Announce a restart after a signal; an error ends the run, and so do signals without progress."""
    if end.code == DIVERGED:
        raise Diverged(end.said)
    if end.code > 0:
        raise ChildProcessError(end.said)
    name = signal.Signals(-end.code).name
    if starts_in_vain > _VAIN_STARTS:
        raise ChildProcessError(
            f"{end.who} was ended by {name}: {starts_in_vain} starts did not get further than step {saved}"
            + (LIKELY_MEMORY if name == "SIGKILL" else "")
            + "; mend that, and the same command goes on"
        )
    print(
        f"{end.who} was ended by {name}; all racks go on from step {saved}", file=sys.stderr, flush=True
    )
