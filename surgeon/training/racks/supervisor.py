"""All racks of a model trained at once, in processes that are started, watched, restarted, and gathered at the end.

All racks restart where a process was killed, as often as they get further in between. Torchrun's elastic agent restarts
after an error that comes again, gives up after so many starts, and leaves processes behind when it is killed.

Replicas of a rack find each other as torchrun's processes do, by a store, which the supervisor holds, and the
environment.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import PartialState

from surgeon.errors import Diverged
from surgeon.machine import gpus_in_turn, threads_per_rank
from surgeon.processes.children import LIKELY_MEMORY, Child
from surgeon.processes.rendezvous import serve_store
from surgeon.processes.torchrun import HOSTED, VARIABLES, TorchrunEnvironment
from surgeon.progress import progress
from surgeon.quality.text import HeldOutQuality
from surgeon.training.arguments import share_of_batch
from surgeon.training.checkpoints import OTHERS_ENDED, TRAINING_FILE, read_rows
from surgeon.training.racks.model import rack_of, save_rack
from surgeon.training.racks.process import DIVERGED, find_newest_common, list_whole_checkpoints
from surgeon.training.racks.run import (
    LOG_FILE,
    PLAN_FILE,
    START,
    RackOptions,
    RacksPlan,
    RacksToTrain,
    gather,
    is_done,
    rack_folder,
    start_file,
    teacher_file,
    teacher_of,
    write_texts,
)
from surgeon.training.run import TrainedModel, lock_run, open_run


def prepare(asked: RacksToTrain, options: RackOptions) -> RacksPlan:
    """Write the files that processes begin with, unless they are there; errors as of `train_in_processes`."""
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
    identity = asked.identity_of_racks() | averaged
    open_run(folder, identity | asked.settings_and_text())
    if not (folder / PLAN_FILE).is_file():
        (folder / START).mkdir(exist_ok=True)
        for index in range(len(racks)):
            save_rack(rack_of(asked.whole, racks, index, asked.seed), start_file(folder, index))
        if settings.distillation is not None:
            assert asked.original is not None
            teacher = asked.original()
            for index in range(len(racks)):
                save_rack(teacher_of(teacher, racks, index), teacher_file(folder, index))
        write_texts(folder, asked.texts)
    plan = RacksPlan(len(racks), identity, settings, options, asked.device)
    plan.write(folder)  # the last one: a run that has it is prepared
    return plan


def commands_by_hand(folder: Path, plan: RacksPlan) -> list[str]:
    """Commands that start the racks of a prepared run; none where all are done."""
    if all(is_done(folder, index) for index in range(plan.racks)):
        return []
    python = "python"
    if plan.options.replicas > 1:
        python = f"torchrun --standalone --nproc-per-node {plan.options.replicas}"
    module = f"{python} -m surgeon.training.racks.process {folder}"
    return [f"{module} {index} --meet HOST0:PORT" for index in range(plan.racks)]


_HOST = "127.0.0.1"
_OTHERS_SECONDS = 1.0  # within which those that end because another one did can be told from that one
_LOOK_SECONDS = 0.1
_PROGRESS_SECONDS = 1.0
_VAIN_STARTS = 3  # in a row that end before another checkpoint


def train_in_processes(asked: RacksToTrain, options: RackOptions) -> TrainedModel:
    """Train all racks of a model at once, each in a process of its own, which send each other their streams.

    Where a process is killed all racks resume from the newest checkpoint that each of them has. Killed as a whole, the
    same call resumes. Without averaging the numbers are those of `train_in_turn`, bit for bit; with replicas, up to
    rounding. `surgeon.training.racks.run` describes the files.

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


class _Processes:
    """Processes of all racks, by their names in messages, from one start to their end."""

    def __init__(self, run: Path, plan: RacksPlan) -> None:
        self.children: dict[str, Child] = {}
        # New for each start, on this machine alone: of all racks, and of the processes of each.
        self._stores = [serve_store(socket.create_server((_HOST, 0))) for _ in range(1 + plan.racks)]
        count = plan.options.replicas
        threads = plan.options.threads or threads_per_rank(plan.racks * count)
        own = {name: value for name, value in os.environ.items() if name not in (*VARIABLES, HOSTED)}
        meet = ["--meet", f"{_HOST}:{self._stores[0].port}", "--child"]
        module = ["-P", "-m", "surgeon.training.racks.process", str(run.resolve())]
        for rack in range(plan.racks):
            gpus = gpus_in_turn(rack, count) if plan.device == "cuda" else {}
            for replica in range(count):
                who = f"rack {rack}"
                together = {}
                if count > 1:
                    who += f", process {replica}"
                    port = self._stores[1 + rack].port
                    place = TorchrunEnvironment(replica, count, replica, count, _HOST, port, True)
                    together = place.variables()
                log = rack_folder(run, rack, replica) / LOG_FILE
                log.parent.mkdir(parents=True, exist_ok=True)
                self.children[who] = Child(
                    [*module, str(rack), *meet], log, threads, environment=own | gpus | together
                )

    def watch(self, look: Callable[[], object]) -> str | None:
        """Wait for their end, and end all when one has failed; returns that and by which signal one was ended.

        The reason is the one that did not end because of another; a signal comes before an error.

        Args:
            look: called meanwhile.

        Raises:
            Diverged, ChildProcessError: if one has failed by itself, with its last words.
        """
        try:
            while any(child.poll() is None for child in self.children.values()):
                if any(child.poll() for child in self.children.values()):
                    break
                look()
                time.sleep(_LOOK_SECONDS)
            until = time.monotonic() + _OTHERS_SECONDS
            ends = self._failures()
            while ends and ends[0][0] and time.monotonic() < until:
                time.sleep(_LOOK_SECONDS)
                ends = self._failures()
        finally:
            for child in self.children.values():
                child.kill()
            for child in self.children.values():
                child.wait()
        if not ends:
            return None
        _, code, said = ends[0]
        if code > 0:
            raise (Diverged if code == DIVERGED else ChildProcessError)(said)
        return said

    def _failures(self) -> list[tuple[bool, int, str]]:
        """Sort failures so far by whether another one was the reason, and exit code; with last words."""
        found = []
        for who, child in self.children.items():
            if code := child.poll():
                said = f"{who} {child.ending()}"
                if code > 0:
                    lines = child.said().splitlines()
                    errors = [line for line in lines if line.startswith("error: ")]
                    said = errors[-1].removeprefix("error: ") if errors else f"{said} (see {child.log})"
                found.append((said.endswith(OTHERS_ENDED), code, said))
        return sorted(found)


def _run_until_done(run: Path, plan: RacksPlan, steps: int) -> None:
    """Run processes until they are done, again where one was ended by a signal, unless that happens in vain."""
    folders = [rack_folder(run, index) for index in range(plan.racks)]

    def find_newest() -> int:
        return find_newest_common([list_whole_checkpoints(folder) for folder in folders])

    def read_last() -> list[dict[str, str]]:
        return [(read_rows(folder / TRAINING_FILE) or [{}])[-1] for folder in folders]

    def count_steps() -> int:
        return sum(int(row.get("step", 0)) for row in read_last())

    def note() -> str:
        rows = ((index, row) for index, row in enumerate(read_last()) if row)
        return "; ".join(
            f"rack {index}: step {row['step']}, loss {float(row['loss']):.4g}" for index, row in rows
        )

    shown = count_steps()
    looked = time.monotonic()
    starts_in_vain = 0
    newest = find_newest()
    with progress("racks", steps * plan.racks, "steps", shown, note) as advance:

        def look(pause: float = _PROGRESS_SECONDS) -> None:
            nonlocal shown, looked
            if time.monotonic() - looked >= pause:
                looked = time.monotonic()
                made = max(shown, count_steps())  # racks that are started again repeat some steps
                advance(made - shown)
                shown = made

        while (ended := _Processes(run, plan).watch(look)) is not None:
            before = newest
            newest = find_newest()
            starts_in_vain = 1 if newest > before else starts_in_vain + 1
            if starts_in_vain > _VAIN_STARTS:
                raise ChildProcessError(
                    f"{ended}: {starts_in_vain} starts did not get further than step {newest}"
                    + (LIKELY_MEMORY if ended.endswith("SIGKILL") else "")
                    + "; mend that, and the same command goes on"
                )
            print(f"{ended}; all racks go on from step {newest}", file=sys.stderr, flush=True)
        look(pause=0)
