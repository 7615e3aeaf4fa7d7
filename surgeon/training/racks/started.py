"""The processes of one rack as their supervisor has them: one, or several that train together.

These find each other as the processes of torchrun do: by a store, which the supervisor holds, and by variables in the
environment. One that ends takes the others with it, since none of them can take a step alone.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does export it

from surgeon.processes.children import Child
from surgeon.processes.sockets import interface_of
from surgeon.processes.store import serve_store
from surgeon.processes.torchrun import HOSTED, VARIABLES, TorchrunEnvironment
from surgeon.threads import threads_per_rank
from surgeon.training.checkpoints import OTHERS_ENDED
from surgeon.training.racks.run_files import LOG_FILE, RacksPlan, replica_folder

_HOST = "127.0.0.1"
_OTHERS_SECONDS = 1.0  # within which those that end because another one did can be told from that one


@dataclass(frozen=True)
class RackEnd:
    """How a rack's processes have ended.

    Attributes:
        who: of them was the reason, for people.
        code: its exit code, negative for a signal; 0 if all ended well.
        said: what it said last.
    """

    who: str
    code: int
    said: str = ""


class RackProcesses:
    """One rack's processes."""

    def __init__(self, run: Path, index: int, plan: RacksPlan) -> None:
        self.run, self.index, self.plan = run, index, plan
        self.replicas = range(plan.options.replicas)
        self.processes: dict[int, Child] = {}
        self._store: TCPStore | None = None

    def start(self) -> None:
        """Start all of them; none may run."""
        assert not self.processes
        own = {name: value for name, value in os.environ.items() if name not in (*VARIABLES, HOSTED)}
        port, count = 0, len(self.replicas)
        if count > 1:  # they meet at a new store for each start, on this machine alone
            self._store = serve_store(socket.create_server((_HOST, 0)))
            port = self._store.port
            if interface := interface_of(_HOST):
                own["GLOO_SOCKET_IFNAME"] = interface
        threads = self.plan.options.threads or threads_per_rank(self.plan.racks * len(self.replicas))
        command = ["-P", "-m", "surgeon.training.racks.process", str(self.run.resolve()), str(self.index), "--child"]
        for replica in self.replicas:
            place = TorchrunEnvironment(replica, count, replica, count, _HOST, port, hosted=True)
            together = place.variables() if count > 1 else {}
            folder = replica_folder(self.run, self.index, replica)
            folder.mkdir(parents=True, exist_ok=True)
            self.processes[replica] = Child(command, folder / LOG_FILE, threads, environment=own | together)

    def look(self) -> RackEnd | None:
        """How they have ended; None as long as they go on. When one has failed, all are ended."""
        codes = {replica: process.poll() for replica, process in self.processes.items()}
        if all(code == 0 for code in codes.values()):
            self.end()
            return RackEnd(self._who(0), 0)
        if not any(codes.values()):
            return None
        until = time.monotonic() + _OTHERS_SECONDS
        while not self._reason() and time.monotonic() < until:
            time.sleep(_OTHERS_SECONDS / 20)
        end = self._reason() or self._end_of(next(replica for replica, code in codes.items() if code))
        self.kill()
        self.end()
        return end

    def _reason(self) -> RackEnd | None:
        """The end of the one that did not end because of another; a signal comes before an error."""
        codes = {replica: process.poll() or 0 for replica, process in self.processes.items()}
        ends = [self._end_of(replica) for replica in sorted(codes, key=lambda one: codes[one]) if codes[replica]]
        return next((end for end in ends if not end.said.endswith(OTHERS_ENDED)), None)

    def _end_of(self, replica: int) -> RackEnd:
        who, child = self._who(replica), self.processes[replica]
        code = child.wait()
        if code < 0:
            return RackEnd(who, code)
        for line in reversed(child.said().splitlines()):
            if line.startswith("error: "):
                return RackEnd(who, code, line.removeprefix("error: "))
        log = replica_folder(self.run, self.index, replica) / LOG_FILE
        return RackEnd(who, code, f"{who} {child.ending()} (see {log})")

    def _who(self, replica: int) -> str:
        return f"rack {self.index}" + (f", process {replica}" if len(self.replicas) > 1 else "")

    def kill(self) -> None:
        """Have them end at once."""
        for process in self.processes.values():
            process.kill()

    def end(self) -> None:
        """Wait until they have."""
        for process in self.processes.values():
            process.wait()
        self.processes.clear()
