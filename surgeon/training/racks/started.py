"""The processes of one rack as their supervisor has them: one, or several that train together.

These find each other as the processes of torchrun do: by a store, which the supervisor holds, and by variables in the
environment. One that ends takes the others with it, since none of them can take a step alone.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does export it

from surgeon.processes.sockets import interface_of
from surgeon.runtime.worker.rank import threads_per_rank
from surgeon.training.checkpoints import OTHERS_ENDED
from surgeon.training.racks.run_files import LOG_FILE, RacksPlan, replica_folder

_HOST = "127.0.0.1"
_TOGETHER = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "TORCHELASTIC_USE_AGENT_STORE",
)
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
    """One rack's processes.

    Args:
        lifeline: a descriptor that they read from, to end when its other end is closed.
    """

    def __init__(self, run: Path, index: int, plan: RacksPlan, lifeline: int) -> None:
        self.run, self.index, self.plan, self.lifeline = run, index, plan, lifeline
        self.replicas = range(plan.options.replicas)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._logged: dict[int, int] = {}  # bytes of their logs that earlier processes have written
        self._store: TCPStore | None = None

    def start(self) -> None:
        """Start all of them; none may run."""
        assert not self.processes
        together = self._meeting_place() if len(self.replicas) > 1 else {}
        own = {name: value for name, value in os.environ.items() if name not in _TOGETHER}
        search_path = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        threads = str(self.plan.options.threads or threads_per_rank(self.plan.racks * len(self.replicas)))
        shared = own | {"PYTHONPATH": search_path, "OMP_NUM_THREADS": threads} | together
        for replica in self.replicas:
            number = {"RANK": str(replica), "LOCAL_RANK": str(replica)} if together else {}
            folder = replica_folder(self.run, self.index, replica)
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / LOG_FILE).open("ab") as log:
                self._logged[replica] = log.tell()
                self.processes[replica] = subprocess.Popen(
                    [
                        *(sys.executable, "-P", "-m", "surgeon.training.racks.process"),
                        *(str(self.run.resolve()), str(self.index), "--lifeline", str(self.lifeline)),
                    ],
                    env=shared | number,
                    pass_fds=[self.lifeline],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    process_group=0,  # Ctrl-C at a terminal reaches the supervisor only, which ends the racks
                )

    def _meeting_place(self) -> dict[str, str]:
        """What tells processes where they find each other: a new store at a port that is free, for each start."""
        count = str(len(self.replicas))
        server = socket.create_server((_HOST, 0))  # a store by itself would listen on all interfaces
        port = server.getsockname()[1]
        self._store = TCPStore(_HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())
        found = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        found |= {"MASTER_ADDR": _HOST, "MASTER_PORT": str(port)}
        interface = interface_of(_HOST)
        return found if interface is None else {"GLOO_SOCKET_IFNAME": interface} | found

    def look(self) -> RackEnd | None:
        """How they have ended; None as long as they go on. When one has failed, all are ended."""
        codes = {replica: process.poll() for replica, process in self.processes.items()}
        if all(code == 0 for code in codes.values()):
            self.processes.clear()
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
        who, code = self._who(replica), int(self.processes[replica].returncode)
        return RackEnd(who, code, self._last_line(replica, who, code) if code > 0 else "")

    def _last_line(self, replica: int, who: str, code: int) -> str:
        """What a process that failed said at its end."""
        path = replica_folder(self.run, self.index, replica) / LOG_FILE
        with path.open("rb") as log:
            log.seek(self._logged[replica])
            lines = log.read().decode(errors="replace").strip().splitlines()
        said = next((line for line in reversed(lines) if line.startswith("error: ")), None)
        if said is not None:
            return said.removeprefix("error: ")
        return f"{who} ended with exit code {code}: {lines[-1].strip() if lines else 'it wrote nothing'} (see {path})"

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
