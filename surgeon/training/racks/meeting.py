"""All connections of one process of a rack, and what sees to it that they and its checkpoints fit together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from surgeon.checkpoint.read import read_json
from surgeon.processes.files import write_json
from surgeon.training.arguments import share_of_batch
from surgeon.training.checkpoints import checkpoints_of
from surgeon.training.racks.averaging import parse_averaging
from surgeon.training.racks.inbox import Absence, Inbox
from surgeon.training.racks.outbox import Outbox, ended_mark
from surgeon.training.racks.rack_log import RackLog
from surgeon.training.racks.run_files import ADDRESS_FILE, SPOOL, RacksPlan, rack_folder
from surgeon.training.racks.wire import Address, Lane


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
