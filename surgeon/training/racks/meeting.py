"""All connections of one process of a rack, and what sees to it that they and its checkpoints fit together."""

from __future__ import annotations

import os
import time
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
from surgeon.training.racks.outbox import Outbox
from surgeon.training.racks.run_files import ADDRESS_FILE, SPOOL, RacksPlan, replica_folder
from surgeon.training.racks.shelf import ended_mark
from surgeon.training.racks.traffic import Timeline, Traffic
from surgeon.training.racks.wire import Lane

Address = tuple[str, int]
_LOOK_SECONDS = 1.0


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
    """All of a rack's connections, or of one of its processes': what it hands on, and what it asks others for."""

    def __init__(self, run: Path, index: int, plan: RacksPlan, place: RackPlace) -> None:
        """Listen, and begin to connect.

        Raises:
            OSError: if the port is taken, or the folder cannot be written.
        """
        folder, last = replica_folder(run, index, place.replica), plan.racks - 1
        folder.mkdir(parents=True, exist_ok=True)
        self.run, self.index, self.plan, self.place = run, index, plan, place
        self.traffic, self.timeline = Traffic(folder), Timeline(folder)
        others = [rack for rack in range(plan.racks) if rack != index]
        averaged = parse_averaging(plan.options.average) is not None and others
        askers: dict[Lane, list[int]] = {Lane.CODAS: others} if averaged else {}
        askers |= {Lane.STREAMS: [index + 1]} if index < last else {}
        windows = share_of_batch(plan.settings, plan.options.replicas)
        self.outbox = Outbox(
            folder / SPOOL, plan.token_of(index, place.replica), askers, plan.options.ahead * windows,
            place.listen, plan.options.link, self.traffic, self.timeline,
        )  # fmt: skip
        host, port = self.outbox.address
        write_json(folder / ADDRESS_FILE, {"host": host, "port": port, "process": os.getpid()})
        self.before = self._inbox(index - 1, Lane.STREAMS) if index else None
        self.codas = {rack: self._inbox(rack, Lane.CODAS) for rack in (others if averaged else [])}

    def _inbox(self, rack: int, lane: Lane) -> Inbox:
        token, absence = self.plan.token_of(rack, self.place.replica), Absence(limit=self.plan.options.away)
        return Inbox(self.index, rack, lambda: self._where(rack), token, lane, absence, self.traffic, self.timeline)

    def _where(self, rack: int) -> Address | None:
        if rack in self.place.peers:
            return self.place.peers[rack]
        path = self._folder_of(rack) / ADDRESS_FILE
        if not path.is_file():
            return None
        said = read_json(path)
        return str(said["host"]), int(said["port"])

    def _folder_of(self, rack: int) -> Path:
        """Of what another rack's process of the same number has for itself."""
        return replica_folder(self.run, rack, self.place.replica)

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
        lane = self._folder_of(inbox.other) / SPOOL / inbox.lane.name.lower()
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
