"""Racks in processes, each `python -m surgeon.training.racks.process RUN RACK --meet HOST:PORT`.

`train_in_processes` starts all, watches them, starts all again where one was killed, as often as they get further in
between, and gathers their results. Torchrun's elastic agent restarts after an error that comes again, gives up after so
many starts, and leaves processes behind when it is killed.

By hand, on several machines, each has a copy of the prepared RUN (racks.json, texts.arrow, texts.safetensors, start/),
and every rack gets the same address, of rack 0's machine, at a free port:

    python -m surgeon.training.racks.process RUN 1 --meet 10.0.0.1:4000

Where one ends, all do, and the same commands resume from the newest checkpoint that all racks have. When all are done,
and every RUN/rack-R is back in RUN, the command that prepared it gathers the result. Like torchrun's, the connections
are neither encrypted nor authenticated: the machines need a network of their own.

Replicas of a rack are started by torchrun, with the same arguments, and see one folder RUN:

    torchrun --standalone --nproc-per-node 2 -m surgeon.training.racks.process RUN 1 --meet 10.0.0.1:4000

Each exchanges its windows' streams with the replica of its number in other racks, and finds its own rack's by torchrun
(RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor, nn
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch does export it
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from surgeon.errors import Diverged
from surgeon.machine import gpus_in_turn, threads_per_rank
from surgeon.processes.children import LIKELY_MEMORY, Child, when_parent_ends
from surgeon.processes.files import write_json
from surgeon.processes.rendezvous import connect_store, key_prefix, serve_store
from surgeon.processes.torchrun import (
    HOSTED,
    VARIABLES,
    TorchrunEnvironment,
    interface_of,
    interface_variables,
)
from surgeon.progress import progress
from surgeon.quality.head import HeldOutQuality
from surgeon.training.checkpoints import (
    OTHERS_ENDED,
    TRAINING_FILE,
    checkpoints_of,
    fault_of,
    naming_ended_process,
    read_rows,
    remove_checkpoint,
)
from surgeon.training.racks.model import open_rack, rack_of, save_rack
from surgeon.training.racks.run import (
    LOG_FILE,
    PLAN_FILE,
    PROCESS_FILE,
    RESULT_FILE,
    START,
    TEXTS_FILE,
    RackOptions,
    RacksPlan,
    RacksToTrain,
    gather,
    is_done,
    parse_averaging,
    rack_folder,
    rack_task,
    read_texts,
    start_file,
    stream_bytes,
    teacher_of,
    train_rack,
    write_texts,
)
from surgeon.training.racks.streams import PATIENCE, RackExchange, RackLog, paced_loss
from surgeon.training.run import TrainedModel, lock_run
from surgeon.training.settings import share_of_batch
from surgeon.words import first_line

FAILED = 1  # exit statuses
DIVERGED = 4
AWAY = 600.0  # seconds
Address = tuple[str, int]


def open_store(meet: Address, index: int, is_held: bool, away: float) -> Store:
    """Open the store in which racks find each other, on rack 0's machine; all else goes by the interface towards it.

    Args:
        index: of this process's rack: the first one's holds the store.
        is_held: whether another process holds it already.
        away: seconds to wait for the other racks.
    """
    host, port = meet
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    except socket.gaierror as error:
        raise OSError(
            f"{host} cannot be found from here ({error.strerror}); --meet names rack 0's machine"
        ) from None
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        os.environ.update(interface_variables(interface_of(probe.getsockname()[0])))
    place = TorchrunEnvironment(index, index + 1, 0, 1, host, port, patience=away)
    if index == 0 and not is_held:
        try:
            listening = socket.create_server((host, port), family=family)
        except OSError as error:
            raise OSError(
                f"rack 0 cannot listen at {host}:{port} ({error.strerror or error}); give another --meet to all racks, "
                "or end what listens there"
            ) from None
        return PrefixStore(key_prefix(place), serve_store(listening, timedelta(seconds=away)))
    try:
        return connect_store(place)
    except TimeoutError:
        raise OSError(
            f"rack 0 has not come to {host}:{port} within {away:g} s; start it, then the same command goes on"
        ) from None


def agree(store: Store, run: Path, index: int, racks: int, first: bool, away: float) -> bool:
    """Have all racks resume from the newest checkpoint that every one of them has; later ones are removed.

    A rack that is done begins there again, too, if another one is not, which needs its streams.

    Args:
        first: whether this is the first of the rack's processes, which answers for all of them.
        away: seconds to wait for the others.

    Returns:
        Whether all racks are done.
    """

    def wait_for(key: str, rack: int) -> bytes:
        try:
            return bytes(store.get(key))
        except RuntimeError:
            raise OSError(
                f"rack {rack} has not come within {away:g} s; start it, then the same command goes on"
            ) from None

    folder = rack_folder(run, index)
    if first:
        done = (folder / RESULT_FILE).is_file()
        store.set(f"checkpoints of {index}", json.dumps([done, list_whole_checkpoints(folder)]))
    said = [json.loads(wait_for(f"checkpoints of {rack}", rack)) for rack in range(racks)]
    all_done = all(done for done, _ in said)
    if first:
        if not all_done:
            (folder / RESULT_FILE).unlink(missing_ok=True)
            common = find_newest_common([steps for _, steps in said])
            for step, path in checkpoints_of(folder).items():
                if step > common:
                    remove_checkpoint(path)
        store.set(f"{index} is ready", "")
    wait_for(f"{index} is ready", index)
    return all_done


def list_whole_checkpoints(folder: Path) -> list[int]:
    """Steps of a run's whole checkpoints."""
    return [step for step, path in checkpoints_of(folder).items() if fault_of(path) is None]


def find_newest_common(steps: Sequence[Sequence[int]]) -> int:
    """The last step that all have a checkpoint of; 0, the beginning, without one."""
    return max(set.intersection(*map(set, steps)), default=0)


@dataclass(eq=False)
class RackKeeper(TrainerCallback):
    """Keeps a rack in step with the others: checkpoints, so that all have one in common, and averaged codas.

    The last rack's coda, the model's own end, takes part. Each rack's optimiser keeps its own state.

    Args:
        exchange: with the other racks.
        parameters: gives those of this rack's coda, in the same order in all racks; sharding replaces them before the
            first step.
        every: steps, after which a coda is set to the mean of all racks', waiting for the slowest; None for never.
    """

    exchange: RackExchange
    parameters: Callable[[], Sequence[nn.Parameter]]
    every: int | None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.exchange.log.begin_computing()

    @torch.no_grad()
    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Average codas, and wait for the others before a checkpoint is written, and the oldest one removed."""
        del args
        if self.every is not None and state.global_step % self.every == 0:
            coda = self.parameters()
            parts = []
            for one in coda:
                whole: Tensor = one
                if isinstance(one, DTensor):  # sharded: all its processes ask at the same time
                    whole = one.full_tensor()
                parts.append(whole.flatten().cpu())
            mean = self.exchange.average(state.global_step, torch.cat(parts))
            for one, part in zip(coda, mean.split([one.numel() for one in coda]), strict=True):
                numbers = part.view(one.shape)
                if isinstance(one, DTensor):  # every process has all numbers, and takes its own
                    mesh = one.device_mesh
                    numbers = distribute_tensor(
                        numbers.to(one.device), mesh, one.placements, src_data_rank=None
                    )
                one.copy_(numbers)
        if control.should_save:
            self.exchange.before_checkpoint()

    def on_save(self, *_: Any, **__: Any) -> None:
        self.exchange.checkpoint_saved()
        self.exchange.log.write()


def run_rack(run: Path, index: int, meet: Address, is_held: bool) -> None:
    """Train one rack, or resume it, until all racks are done; each of its replicas calls this.

    Args:
        meet: address of the store in which all find each other.
        is_held: whether another process holds it already.

    Raises:
        FileNotFoundError: if the run was not prepared.
        ValueError, OSError: as `train`; and if another rack does not come, or ends, a disk is full, or a port is taken.
    """
    plan = RacksPlan.read(run)
    options = plan.options
    settings = plan.settings
    if not 0 <= index < plan.racks:
        raise ValueError(f"{run} has racks 0 to {plan.racks - 1}, and no rack {index}")
    there = int(os.environ.get("WORLD_SIZE", "1"))
    replica = int(os.environ.get("RANK", "0"))
    if there != options.replicas:
        how = "without torchrun"
        if options.replicas > 1:
            how = f"with torchrun --standalone --nproc-per-node {options.replicas}"
        raise ValueError(
            f"a rack of this run has {options.replicas} processes, and this one has {there}; start it {how}"
        )
    folder = rack_folder(run, index, replica)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / PROCESS_FILE, {"process": os.getpid()})
    away = options.away or AWAY
    store = open_store(meet, index, is_held or replica > 0, away)
    if agree(store, run, index, plan.racks, replica == 0, away):
        return
    PartialState(cpu=plan.device == "cpu", timeout=PATIENCE)
    rack = open_rack(start_file(run, index))
    teacher = None
    if settings.distillation is not None:
        teacher = open_rack(start_file(run, index, "teacher"))
    texts = read_texts(run)
    log = RackLog(folder)
    exchange = RackExchange(
        PrefixStore(str(replica), store),
        index,
        plan.racks,
        options.ahead * share_of_batch(settings, options.replicas),
        stream_bytes(rack, texts, settings),
        options.link,
        log,
    )
    held_out = HeldOutQuality(texts.held_out, None)
    task = rack_task(rack, held_out, settings, exchange, exchange, teacher)
    every = parse_averaging(options.average)
    task = replace(task, callbacks=[RackKeeper(exchange, rack.coda_parameters, every)])
    if options.pace:
        assert task.towards is not None
        task = replace(task, towards=paced_loss(task.towards, options.pace[index], log))
    train_rack(rack, task, texts, settings, run, plan.identity, plan.device)
    exchange.finish()
    log.write()


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
    identity = asked.open(processes=True, average=str(options.average), replicas=options.replicas)
    if not all((folder / name).is_file() for name in (PLAN_FILE, TEXTS_FILE)):
        (folder / START).mkdir(exist_ok=True)
        for index in range(len(racks)):
            save_rack(rack_of(asked.whole, racks, index, asked.seed), start_file(folder, index))
        if settings.distillation is not None:
            assert asked.original is not None
            teacher = asked.original()
            for index in range(len(racks)):
                save_rack(teacher_of(teacher, racks, index), start_file(folder, index, "teacher"))
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
            while True:
                codes = [child.poll() for child in self.children.values()]
                if any(codes) or None not in codes:
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
                said = f"{who} {child.describe_end()}"
                if code > 0:
                    lines = child.read_output().splitlines()
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


def _parse_address(text: str) -> Address:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no address; write it as HOST:PORT")
    return host.strip("[]"), int(port)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a rack by its command line."""
    parser = argparse.ArgumentParser(
        prog="python -m surgeon.training.racks.process", description=__doc__.split("\n")[0]
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run that was prepared")
    parser.add_argument("rack", type=int, metavar="RACK", help="which rack, from 0")
    parser.add_argument(
        "--meet",
        type=_parse_address,
        required=True,
        metavar="HOST:PORT",
        help="of the machine of rack 0; the same for all",
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)  # of a supervisor
    given = parser.parse_args(arguments)
    if given.child:
        when_parent_ends(lambda: os._exit(FAILED))
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        with naming_ended_process():
            run_rack(given.run, given.rack, given.meet, is_held=given.child)
    except (ValueError, OSError) as error:
        print(f"error: rack {given.rack}: {first_line(error)}", file=sys.stderr, flush=True)
        # What was asked of other racks may never come.
        os._exit(DIVERGED if isinstance(error, Diverged) else FAILED)


if __name__ == "__main__":
    main()
