"""One rack's process: `python -m surgeon.training.racks.process RUN RACK`.

The supervisor starts one for each rack, and again where one is killed. By hand, on several machines: a copy of RUN as
it was prepared (racks.json, texts.arrow, texts.safetensors, start/) lies on each of them, and for rack 1 of three, say,

    python -m surgeon.training.racks.process RUN 1 --listen 10.0.0.2:4000 --peer 0=10.0.0.1:4000 --peer 2=10.0.0.3:4000

where only the rack before is needed if codas are never averaged. Killed, the same command goes on. When all are done,
and every RUN/rack-R is back in RUN, the command that prepared it gathers the result.

Where several processes share a rack's batches, torchrun starts them, with the same arguments:

    torchrun --standalone --nproc-per-node 2 -m surgeon.training.racks.process RUN 1 --listen 10.0.0.2:4000 ...

They listen at this port and those after it, and the first one talks with the first ones of other racks, the second one
with the second ones, ...: each of them hands on, and takes, its own windows' streams. They know each other as
torchrun has it (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), and see one folder RUN.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate import PartialState
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from surgeon.checkpoint.read import read_json
from surgeon.errors import Diverged, first_line
from surgeon.processes.children import when_parent_ends
from surgeon.processes.files import write_json
from surgeon.training.arguments import share_of_batch
from surgeon.training.checkpoints import beside_others, checkpoints_of
from surgeon.training.held_out import HeldOutQuality
from surgeon.training.racks.averaging import CodaAveraging, parse_averaging
from surgeon.training.racks.inbox import Absence, Inbox
from surgeon.training.racks.model import RackModel, open_rack
from surgeon.training.racks.outbox import Outbox, ended_mark
from surgeon.training.racks.pace import PacedLoss
from surgeon.training.racks.rack_log import RackLog
from surgeon.training.racks.run_files import (
    ADDRESS_FILE,
    SPOOL,
    RacksPlan,
    rack_folder,
    read_texts,
    start_file,
    teacher_file,
)
from surgeon.training.racks.streams import RackStreams
from surgeon.training.racks.task import rack_task
from surgeon.training.racks.trained import is_done, train_rack
from surgeon.training.racks.wire import Address, Lane
from surgeon.training.run import TrainingTask


@dataclass(frozen=True)
class RackPlace:
    """Where a process of a rack listens, and where those of the other racks do that it has to do with.

    Attributes:
        listen: port 0 for one that is free, which is then written to address.json.
        peers: by rack; of the others address.json is read.
        replica: which of the rack's processes this is; it has to do with those of the same number.
    """

    listen: Address = ("127.0.0.1", 0)
    peers: Mapping[int, Address] = field(default_factory=dict)
    replica: int = 0

    @classmethod
    def of_replica(cls, replica: int, listen: Address, peers: Mapping[int, Address]) -> RackPlace:
        """The place of one of a rack's processes: the ports that are given for a rack are those of its first one."""

        def own(address: Address) -> Address:
            host, port = address
            return host, port and port + replica

        return cls(own(listen), {rack: own(address) for rack, address in peers.items()}, replica)


class Meeting:
    """All of a rack's connections, or of one of its processes': what it hands on, and what it asks others for.

    Attributes:
        outbox: what it hands on.
        before: asks the rack before for streams; None in the first rack.
        codas: ask the other racks for their codas, where these are averaged.
    """

    def __init__(self, run: Path, index: int, plan: RacksPlan, place: RackPlace) -> None:
        """Listen, and begin to connect.

        Raises:
            OSError: if the port is taken, or the folder cannot be written.
        """
        folder = rack_folder(run, index, place.replica)
        folder.mkdir(parents=True, exist_ok=True)
        self.run = run
        self.index = index
        self.plan = plan
        self.place = place
        self.log = RackLog(folder)
        others = [rack for rack in range(plan.racks) if rack != index]
        averaged = others if parse_averaging(plan.options.average) is not None else []
        askers: dict[Lane, list[int]] = {Lane.CODAS: averaged} if averaged else {}
        if index + 1 < plan.racks:
            askers[Lane.STREAMS] = [index + 1]
        self._ahead = plan.options.ahead * share_of_batch(plan.settings, plan.options.replicas)
        token = plan.token_of(index, place.replica)
        link = plan.options.link
        self.outbox = Outbox(folder / SPOOL, token, askers, self._ahead, place.listen, link, self.log)
        host, port = self.outbox.address
        write_json(folder / ADDRESS_FILE, {"host": host, "port": port, "process": os.getpid()})
        self.before = self._inbox(index - 1, Lane.STREAMS) if index else None
        self.codas = {rack: self._inbox(rack, Lane.CODAS) for rack in averaged}

    def _inbox(self, rack: int, lane: Lane) -> Inbox:
        def where() -> Address | None:
            path = rack_folder(self.run, rack, self.place.replica) / ADDRESS_FILE
            if rack in self.place.peers or not path.is_file():
                return self.place.peers.get(rack)
            said = read_json(path)
            return str(said["host"]), int(said["port"])

        token = self.plan.token_of(rack, self.place.replica)
        absence = Absence(limit=self.plan.options.away)
        return Inbox(self.index, rack, where, token, lane, self._ahead, absence, self.log)

    @property
    def inboxes(self) -> list[Inbox]:
        """What this rack asks with."""
        return [*([] if self.before is None else [self.before]), *self.codas.values()]

    def finish(self) -> None:
        """Nothing is needed any more: say so, and wait until the others do."""
        for inbox in self.inboxes:
            spool = rack_folder(self.run, inbox.other, self.place.replica) / SPOOL
            mark = spool / inbox.lane.name.lower() / ended_mark(self.index)  # of one on this machine that has ended
            inbox.end(self.plan.options.away, mark.is_file)
        self.outbox.wait_until_taken()
        self.log.write()

    def close(self) -> None:
        """Close all connections."""
        for inbox in self.inboxes:
            inbox.close()
        self.outbox.close()


class RackKeeper(TrainerCallback):
    """Sees to it that what is handed on and what checkpoints cover fit together, wherever the run is killed."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """This rack goes on from a checkpoint, or begins."""
        self.meeting.outbox.begin(state.global_step)
        self._cover(args)
        self.meeting.log.begin_computing()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """What a checkpoint is made after must be on disk before it."""
        del args, state
        if control.should_save:
            self.meeting.outbox.sync()

    on_evaluate = on_step_end  # what was handed on meanwhile, too

    def on_save(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        """There is another checkpoint."""
        self._cover(args)
        self.meeting.log.write()

    def _cover(self, args: TrainingArguments) -> None:
        """Where the newest checkpoint should be damaged, the run goes on from the one before it."""
        steps = list(checkpoints_of(Path(str(args.output_dir))))
        if len(steps) > 1:
            for inbox in self.meeting.inboxes:
                inbox.cover(steps[-2])


FAILED, DIVERGED = 1, 4  # exit statuses
# One of a rack's processes waits for the others as long as these wait for other racks; one that ends is seen at once.
_PATIENCE = timedelta(days=1)


def run_rack(run: Path, index: int, place: RackPlace | None = None) -> None:
    """Train one rack, or go on with it, until it is done and nobody needs anything of it any more.

    Where several processes share it, each of them calls this.

    Raises:
        FileNotFoundError: if the run was not prepared.
        ValueError, OSError: as `train`; and if another rack is gone for good, a disk is full, or a port is taken.
    """
    plan = RacksPlan.read(run)
    if not 0 <= index < plan.racks:
        raise ValueError(f"{run} has racks 0 to {plan.racks - 1}, and no rack {index}")
    wanted = plan.options.replicas
    there = int(os.environ.get("WORLD_SIZE", "1"))
    if there != wanted:
        if wanted == 1:
            how = "without torchrun"
        else:
            how = f"with torchrun --standalone --nproc-per-node {wanted}"
        raise ValueError(f"a rack of this run has {wanted} processes, and this one has {there}; start it {how}")
    with closing(Meeting(run, index, plan, place or RackPlace())) as meeting:
        if not is_done(run, index):
            processes = PartialState(cpu=plan.device == "cpu", timeout=_PATIENCE)
            rack = open_rack(start_file(run, index))
            texts = read_texts(run)
            task = _task(meeting, rack, HeldOutQuality(texts.held_out, None))
            train_rack(rack, task, texts, plan.settings, run, plan.identity, plan.device)
            # Whoever comes back would ask again for what a rack that is not done may need: none says before all are
            # done that it needs no more.
            processes.wait_for_everyone()
        meeting.finish()


def _task(meeting: Meeting, rack: RackModel, held_out: HeldOutQuality) -> TrainingTask:
    """What a rack is trained by: its streams from and to other processes, and the callbacks that go with them."""
    settings = meeting.plan.settings
    options = meeting.plan.options
    streams = RackStreams(settings.batch, meeting.before, None if rack.is_last else meeting.outbox)
    if settings.distillation is None:
        teacher = None
    else:
        teacher = open_rack(teacher_file(meeting.run, meeting.index))
    task = rack_task(rack, held_out, streams, teacher, settings.distillation)
    callbacks: list[TrainerCallback] = [RackKeeper(meeting)]
    if meeting.codas:
        every = parse_averaging(options.average)
        assert every is not None
        averaging = CodaAveraging(rack.coda_parameters, every, meeting.index, meeting.outbox, meeting.codas)
        callbacks.insert(0, averaging)
    if options.pace:
        assert task.towards is not None
        task = replace(task, towards=PacedLoss(task.towards, options.pace[meeting.index], meeting.log))
    return replace(task, callbacks=callbacks)


def _address(text: str) -> Address:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no address; write it as HOST:PORT")
    return host.strip("[]"), int(port)


def _peer(text: str) -> tuple[int, Address]:
    rack, equals, address = text.partition("=")
    if not equals or not rack.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} does not say which rack; write it as RACK=HOST:PORT")
    return int(rack), _address(address)


def main(arguments: Sequence[str] | None = None) -> None:
    """Be a rack, as the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m surgeon.training.racks.process", description=__doc__.split("\n")[0]
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run that was prepared")
    parser.add_argument("rack", type=int, metavar="RACK", help="which rack, from 0")
    parser.add_argument("--listen", type=_address, default=("127.0.0.1", 0), metavar="HOST:PORT")
    parser.add_argument("--peer", type=_peer, action="append", default=[], metavar="RACK=HOST:PORT")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)  # of a supervisor
    given = parser.parse_args(arguments)
    if given.child:
        when_parent_ends(lambda: os._exit(FAILED))
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    replica = int(os.environ.get("RANK", "0"))
    try:
        with beside_others():
            run_rack(given.run, given.rack, RackPlace.of_replica(replica, given.listen, dict(given.peer)))
    except Diverged as error:
        _fail(given.rack, first_line(error), DIVERGED)
    except (ValueError, OSError) as error:
        _fail(given.rack, first_line(error))


def _fail(rack: int, said: str, status: int = FAILED) -> NoReturn:
    print(f"error: rack {rack}: {said}", file=sys.stderr, flush=True)
    os._exit(status)  # threads may still wait for other racks


if __name__ == "__main__":
    main()
