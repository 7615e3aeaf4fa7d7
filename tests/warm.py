"""Processes that begin with torch imported: forks of one that has done nothing else.

Importing torch is most of what a rank or a command costs in a test, and hundreds of them are started. The first one
starts a process that imports what they import, and waits; this one and all after it are forks of it, which go on as the
command would. They become children of the process that has asked for them, which so sees no difference.

Ranks that a test's own process starts are forks (`install`), and so is every `Popen` made here, with its ranks. What
`subprocess` starts otherwise begins as it does for users, and so do its ranks: each command has a test that does that.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import psutil

RANK = [sys.executable, "-P", "-m", "surgeon.runtime"]
RACK = [sys.executable, "-P", "-m", "surgeon.training.racks.process"]
CODE = [sys.executable, "-c"]
FOR_RANKS = ("surgeon.runtime.worker.worker",)
FOR_TRAINING = (
    "surgeon.training.racks.process",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "torch.utils.tensorboard",
)
FOR_SEARCHES = ("surgeon.searches.study",)
FOR_COMMANDS = (
    "surgeon.commands.app",
    "surgeon.runtime.service",
    "surgeon.server.run",
    "transformers.models.llama.modeling_llama",
)
BE_A_RACK = "from surgeon.training.racks.process import main; main()"
NAME = "surgeon.runtime"  # of forks that are ranks; Linux keeps 15 characters
MOST_BYTES, MOST_DESCRIPTORS = 1 << 20, 64
SET_NAME, SET_CHILD_SUBREAPER = 15, 36  # of Linux's prctl

ColdPopen = subprocess.Popen


@dataclass(frozen=True)
class Request:
    """What a fork is to be.

    Attributes:
        code: what it runs; nothing for ranks.
        descriptors: the numbers it knows the descriptors by that are sent along.
    """

    code: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    descriptors: list[int]
    own_group: bool


class Forks:
    """The connection to the process that forks for this one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.connection: socket.socket | None = None

    def start(self, request: Request, descriptors: Sequence[int]) -> int:
        """The process id of a new child of this process."""
        with self.lock:
            if self.connection is None:
                self.connection = _start_forking()
            _adopt_orphans(True)
            try:
                socket.send_fds(self.connection, [json.dumps(asdict(request)).encode()], descriptors)
                return int(self.connection.recv(MOST_BYTES))
            finally:
                _adopt_orphans(False)


FORKS = Forks()


def _start_forking() -> socket.socket:
    """It ends when the connection is closed, so at the latest when this process ends."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = ColdPopen(
            [sys.executable, "-P", __file__, str(theirs.fileno())],
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            process_group=0,
        )
    atexit.register(process.wait)
    atexit.register(ours.close)
    return ours


class RankPopen(ColdPopen):  # type: ignore[type-arg]
    """A `subprocess.Popen` by which ranks are forks."""

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, *others: Any
    ) -> None:
        asked = self.read_command(args)
        if asked is None or sys.platform != "linux":
            super()._execute_child(args, executable, preexec_fn, close_fds, *others)  # type: ignore[misc]
            return
        pass_fds, folder, environment, _, _, _, *pipes = others[:12]
        own = [
            standard if end < 0 else end for standard, end in enumerate((pipes[0], pipes[3], pipes[5]))
        ]
        request = Request(
            *asked,
            dict(os.environ if environment is None else environment),
            os.fspath(folder or Path.cwd()),
            [0, 1, 2, *pass_fds],
            own_group=others[18] == 0,
        )
        try:
            self.pid = FORKS.start(request, [*own, *pass_fds])
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def read_command(self, command: Any) -> tuple[str, list[str]] | None:
        """Code and arguments of what is to be a fork."""
        command = list(command)
        if command[: len(RACK)] == RACK:
            return BE_A_RACK, command[len(RACK) :]
        return ("", command[len(RANK) :]) if command[: len(RANK)] == RANK else None


class Popen(RankPopen):
    """A `subprocess.Popen` of `python -c` that is a fork, too."""

    def read_command(self, command: Any) -> tuple[str, list[str]] | None:
        assert list(command[: len(CODE)]) == CODE
        return command[len(CODE)], [str(argument) for argument in command[len(CODE) + 1 :]]


def install() -> None:
    """Have ranks that this process starts be forks from now on."""
    subprocess.Popen = RankPopen  # type: ignore[misc]


def spawn(_: str, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """What `multiprocessing.util.spawnv_passfds` does, with a fork."""
    code, *others = arguments[list(arguments).index("-c") + 1 :]
    request = Request(
        code, others, dict(os.environ), str(Path.cwd()), [0, 1, 2, *descriptors], own_group=False
    )
    return FORKS.start(request, [0, 1, 2, *descriptors])


def ranks_of(command: int) -> list[psutil.Process]:
    """The processes of a command's ranks, by rank."""
    children = psutil.Process(command).children()
    ranks = [child for child in children if NAME in (child.name(), *child.cmdline())]
    return sorted(ranks, key=lambda rank: rank.pid)


def _adopt_orphans(adopt: bool) -> None:
    """Whether descendants whose parent ends become this process's children."""
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def serve(connection: socket.socket) -> None:
    """Fork for every request, until the other end closes."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, MOST_BYTES, MOST_DESCRIPTORS)
        if not message:
            return
        request = Request(**json.loads(message))
        for module in modules_for(request.code):
            importlib.import_module(module)
        gc.freeze()  # or collecting would write to all the pages that forks share
        reader, writer = os.pipe()
        middle = os.fork()
        if middle == 0:
            between = os.getpid()
            child = os.fork()  # an orphan as soon as the process in the middle has ended
            if child == 0:
                while os.getppid() == between:  # or it could still see who will not be its parent
                    time.sleep(0.001)
                for descriptor in (connection.detach(), reader, writer):
                    os.close(descriptor)
                become(request, descriptors)
            os.write(writer, str(child).encode())
            os._exit(0)
        os.waitpid(middle, 0)
        connection.send(os.read(reader, MOST_BYTES))
        for descriptor in (reader, writer, *descriptors):
            os.close(descriptor)


def modules_for(code: str) -> tuple[str, ...]:
    """What is imported before a fork, once."""
    if not code:
        return FOR_RANKS
    if "training" in code:
        return FOR_TRAINING
    if "searches" in code:
        return FOR_SEARCHES
    return FOR_COMMANDS if any(name in code for name in ("surgeon", "tests", "spawn_main")) else ()


def become(request: Request, descriptors: Sequence[int]) -> NoReturn:
    """Go on as the command."""
    code: Any = 1
    try:
        if request.own_group:
            os.setpgid(0, 0)
        _take_over(descriptors, request.descriptors)
        os.chdir(request.folder)
        os.environ.clear()
        os.environ.update(request.environment)
        tempfile.tempdir = None  # the environment says which
        sys.path[:0] = request.environment.get("PYTHONPATH", "").split(os.pathsep)
        if request.code:
            if request.code != BE_A_RACK:
                _fork_for_ranks()
            sys.path.insert(0, "")
            sys.argv = ["-c", *request.arguments]
            sys.modules["__main__"] = main = ModuleType("__main__")
            exec(request.code, main.__dict__)
        else:
            ctypes.CDLL(None).prctl(SET_NAME, NAME.encode(), 0, 0, 0)
            sys.argv = [NAME, *request.arguments]
            runpy.run_module(NAME, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001 - whatever ends an interpreter it shows
        traceback.print_exc()
    finally:
        _end(code)


def _take_over(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give descriptors other numbers, of which some may be those of others among them."""
    above = max([*descriptors, *numbers]) + 1
    for index, descriptor in enumerate(descriptors):
        os.dup2(descriptor, above + index)
        os.close(descriptor)
    for index, number in enumerate(numbers):
        os.dup2(above + index, number)
        os.close(above + index)


def _fork_for_ranks() -> None:
    """Have a process like this one fork for it, as long as it is nothing but imports."""
    FORKS.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    install()
    if os.fork():
        theirs.close()
        return
    FORKS.connection.close()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):  # who reads what the command writes sees when it ends
        os.dup2(nowhere, standard)
    serve(theirs)
    os._exit(0)


def _end(code: Any) -> NoReturn:
    """End this process as an interpreter does."""
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined] # waits for threads
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    # The first who asks may be multiprocessing about to start its resource tracker, which blocks Ctrl-C meanwhile.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    serve(socket.socket(fileno=int(sys.argv[1])))
