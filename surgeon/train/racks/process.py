"""One rack's process: `python -m surgeon.train.racks.process RUN RACK`.

The supervisor starts one for each rack, and again where one is killed. By hand, on several machines: a copy of RUN as
it was prepared (racks.json, texts.safetensors, start/) lies on each of them, and for rack 1 of three, say,

    python -m surgeon.train.racks.process RUN 1 --listen 10.0.0.2:4000 --peer 0=10.0.0.1:4000 --peer 2=10.0.0.3:4000

where only the rack before is needed if codas are never averaged. Killed, the same command goes on. When all are done,
and every RUN/rack-R is back in RUN, the command that prepared it gathers the result.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from surgeon.checkpoint.read import read_json
from surgeon.errors import first_line
from surgeon.provenance import write_json
from surgeon.train.checkpoints import checkpoints_of
from surgeon.train.held_out import HeldOutQuality
from surgeon.train.racks.averaging import CodaAveraging, parse_averaging
from surgeon.train.racks.channels import ChannelSink, ChannelSource
from surgeon.train.racks.files import open_rack, save_rack
from surgeon.train.racks.in_turn import RACK_FILE, rack_folder
from surgeon.train.racks.inbox import Absence, Inbox
from surgeon.train.racks.model import RackModel
from surgeon.train.racks.outbox import Outbox
from surgeon.train.racks.pace import PacedLoss
from surgeon.train.racks.run_files import (
    ADDRESS_FILE,
    RESULT_FILE,
    SPOOL,
    RacksPlan,
    read_texts,
    start_file,
)
from surgeon.train.racks.shelf import ended_mark
from surgeon.train.racks.task import rack_task
from surgeon.train.racks.traffic import Timeline, Traffic
from surgeon.train.racks.wire import Lane
from surgeon.train.run import TrainingTask, train

Address = tuple[str, int]
FAILED = 1
_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class RackPlace:
    """Where a rack listens, and where the others do.

    Attributes:
        listen: port 0 for one that is free, which is then written to address.json.
        peers: by rack; of the others address.json is read.
    """

    listen: Address = ("127.0.0.1", 0)
    peers: Mapping[int, Address] = field(default_factory=dict)


class Meeting:
    """All of a rack's connections: what it hands on, and what it asks others for."""

    def __init__(self, run: Path, index: int, plan: RacksPlan, place: RackPlace) -> None:
        """Listen, and begin to connect.

        Raises:
            OSError: if the port is taken, or the folder cannot be written.
        """
        folder, last = rack_folder(run, index), plan.racks - 1
        folder.mkdir(parents=True, exist_ok=True)
        self.run, self.index, self.plan, self.place = run, index, plan, place
        self.traffic, self.timeline = Traffic(folder), Timeline(folder)
        others = [rack for rack in range(plan.racks) if rack != index]
        averaged = parse_averaging(plan.options.average) is not None and others
        askers: dict[Lane, list[int]] = {Lane.CODAS: others} if averaged else {}
        askers |= {Lane.STREAMS: [index + 1]} if index < last else {}
        windows = plan.settings.micro_batch or plan.settings.batch
        self.outbox = Outbox(
            folder / SPOOL, bytes.fromhex(plan.token), askers, plan.options.ahead * windows,
            place.listen, plan.options.link, self.traffic, self.timeline,
        )  # fmt: skip
        host, port = self.outbox.address
        write_json(folder / ADDRESS_FILE, {"host": host, "port": port, "process": os.getpid()})
        self.before = self._inbox(index - 1, Lane.STREAMS) if index else None
        self.codas = {rack: self._inbox(rack, Lane.CODAS) for rack in (others if averaged else [])}

    def _inbox(self, rack: int, lane: Lane) -> Inbox:
        token, absence = bytes.fromhex(self.plan.token), Absence(limit=self.plan.options.away)
        return Inbox(self.index, rack, lambda: self._where(rack), token, lane, absence, self.traffic, self.timeline)

    def _where(self, rack: int) -> Address | None:
        if rack in self.place.peers:
            return self.place.peers[rack]
        path = rack_folder(self.run, rack) / ADDRESS_FILE
        if not path.is_file():
            return None
        said = read_json(path)
        return str(said["host"]), int(said["port"])

    @property
    def inboxes(self) -> list[Inbox]:
        """What this rack asks with."""
        return [*([] if self.before is None else [self.before]), *self.codas.values()]

    def write(self) -> None:
        """Write what was counted."""
        self.traffic.write()
        self.timeline.write()

    def finish(self) -> None:
        """Nothing is needed any more: say so, and wait until the others do."""
        for inbox in self.inboxes:
            until = time.monotonic() + self.plan.options.away
            while not (self._has_noted(inbox) or inbox.end(_LOOK_SECONDS)) and time.monotonic() < until:
                pass
        self.outbox.wait_until_taken()
        self.write()

    def _has_noted(self, inbox: Inbox) -> bool:
        """Whether another rack, on this machine, has noted this one's end, and so may have ended itself."""
        lane = rack_folder(self.run, inbox.other) / SPOOL / inbox.lane.name.lower()
        return (lane / ended_mark(self.index)).is_file()

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
        self.meeting.timeline.begin()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """What a checkpoint is made after must be on disk before it."""
        del args, state
        if control.should_save:
            self.meeting.outbox.sync()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The same of what was handed on meanwhile."""
        self.on_step_end(args, state, control)

    def on_save(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        """There is another checkpoint."""
        self._cover(args)
        self.meeting.write()

    def _cover(self, args: TrainingArguments) -> None:
        """Where the newest checkpoint should be damaged, the run goes on from the one before it."""
        steps = list(checkpoints_of(Path(str(args.output_dir))))
        if len(steps) > 1:
            for inbox in self.meeting.inboxes:
                inbox.covered(steps[-2])


def run_rack(run: Path, index: int, place: RackPlace | None = None) -> None:
    """Train one rack, or go on with it, until it is done and nobody needs anything of it any more.

    Raises:
        FileNotFoundError: if the run was not prepared.
        ValueError, OSError: as `train`; and if another rack is gone for good, a disk is full, or a port is taken.
    """
    plan, folder = RacksPlan.read(run), rack_folder(run, index)
    if not 0 <= index < plan.racks:
        raise ValueError(f"{run} has racks 0 to {plan.racks - 1}, and no rack {index}")
    meeting = Meeting(run, index, plan, place or RackPlace())
    with ExitStack() as stack:
        stack.callback(meeting.close)
        if not (folder / RESULT_FILE).is_file():
            _train_rack(meeting)
        meeting.finish()


def _train_rack(meeting: Meeting) -> None:
    run, index, plan = meeting.run, meeting.index, meeting.plan
    folder, texts = rack_folder(run, index), read_texts(run)
    rack = open_rack(start_file(run, index))
    task = _task(meeting, rack, HeldOutQuality(texts.held_out, None))
    identity = plan.identity | {"task": "rack", "rack": index}
    found = train(rack.model, texts, plan.settings, folder, identity=identity, device=plan.device, task=task)
    if found is None:
        raise ValueError("each rack is one process; start it without torchrun or accelerate launch")
    rack.model = found.model.cpu()
    save_rack(rack, folder / RACK_FILE)
    write_json(folder / RESULT_FILE, found.figures.to_json())  # the last one: a rack that has it is done


def _task(meeting: Meeting, rack: RackModel, held_out: HeldOutQuality) -> TrainingTask:
    """What a rack is trained by: its streams over channels, and the callbacks that go with them."""
    settings, options = meeting.plan.settings, meeting.plan.options
    source = None if meeting.before is None else ChannelSource(meeting.before, settings.batch)
    sink = None if rack.is_last else ChannelSink(meeting.outbox, settings.batch)
    task = rack_task(rack, held_out, source, sink)
    callbacks: list[TrainerCallback] = [RackKeeper(meeting)]
    if meeting.codas:
        every = parse_averaging(options.average)
        assert every is not None
        averaging = CodaAveraging(rack.coda_parameters(), every, meeting.index, meeting.outbox, meeting.codas)
        callbacks.insert(0, averaging)
    if options.pace:
        assert task.towards is not None
        task = replace(task, towards=PacedLoss(task.towards, options.pace[meeting.index], meeting.timeline))
    return replace(task, callbacks=callbacks)


def end_with(lifeline: int) -> None:
    """End this process when the other end of a pipe is closed: when the supervisor has gone, however it ended."""

    def watch() -> None:
        os.read(lifeline, 1)
        os._exit(FAILED)

    threading.Thread(target=watch, daemon=True).start()


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
    parser = argparse.ArgumentParser(prog="python -m surgeon.train.racks.process", description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run that was prepared")
    parser.add_argument("rack", type=int, metavar="RACK", help="which rack, from 0")
    parser.add_argument("--listen", type=_address, default=("127.0.0.1", 0), metavar="HOST:PORT")
    parser.add_argument("--peer", type=_peer, action="append", default=[], metavar="RACK=HOST:PORT")
    parser.add_argument("--lifeline", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.lifeline is not None:
        end_with(given.lifeline)
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        run_rack(given.run, given.rack, RackPlace(given.listen, dict(given.peer)))
    except (ValueError, OSError) as error:
        print(f"error: rack {given.rack}: {first_line(error)}", file=sys.stderr, flush=True)
        os._exit(FAILED)  # threads may still wait for other racks


if __name__ == "__main__":
    main()
