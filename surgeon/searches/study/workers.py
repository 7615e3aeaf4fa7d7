"""Several processes of one machine that work on one search: the command starts others like itself.

They have nothing to do with each other but the study's storage, as processes on other machines do.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from surgeon.processes.children import Child, when_parent_ends
from surgeon.searches.study.patience import Say, say_aside
from surgeon.threads import threads_per_rank

FLAG = "--worker"  # which of the processes one is; users do not see it
FOLDER = "workers"  # in the output folder: what they say
SECONDS_TO_END, SECONDS_TO_STOP = 20.0, 10.0  # when all is done; when they are told to stop


class WorkerProcesses:
    """The workers of a machine beside the process that starts them, from entering to leaving a `with` block.

    At the end of the search they end by themselves. If the block is left by an error or Ctrl-C they are interrupted,
    and give back what they were running; so they do when this process is killed. One that ends otherwise is told of,
    and the others go on.

    Args:
        count: of workers, this process among them.
        program: what the interpreter is to run, as in ["-m", "surgeon.cli"].
        command: of this process, without the interpreter and program: "search demo --budget depth=12 ...".
        folder: of the results; each worker writes what it has to say into a file in it.
    """

    def __init__(
        self, count: int, program: Sequence[str], command: Sequence[str], folder: Path, say: Say = say_aside
    ) -> None:
        self.count, self.program, self.command = count, program, command
        self.folder, self.say = folder / FOLDER, say
        self.processes: list[Child] = []
        self._ending = False
        self._watches: list[threading.Thread] = []

    def __enter__(self) -> Self:
        if self.count > 1:
            torch.set_num_threads(threads_per_rank(self.count))
            self.folder.mkdir(parents=True, exist_ok=True)
        try:
            for index in range(1, self.count):
                self._start(index)
        except BaseException:
            self._stop(0.0)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop(SECONDS_TO_END if kind is None else 0.0)

    def _start(self, index: int) -> None:
        self.log(index).unlink(missing_ok=True)  # of an earlier run
        command = [*self.program, *worker_command(self.command, index)]
        environment = os.environ | gpu_of(index)
        process = Child(command, self.log(index), threads_per_rank(self.count), environment=environment)
        self.processes.append(process)
        watch = threading.Thread(target=self._watch, args=(index, process), daemon=True)
        watch.start()
        self._watches.append(watch)

    def log(self, index: int) -> Path:
        """What a worker has said."""
        return self.folder / f"{index}.log"

    def _watch(self, index: int, process: Child) -> None:
        if process.wait() and not self._ending:
            self.say(f"worker {index} (process {process.pid}) {process.ending()}; the others go on")

    def _stop(self, seconds: float) -> None:
        """Give them so long to end by themselves, then interrupt them."""
        _wait(self._watches, seconds)
        self._ending = True
        for process in self.processes:
            process.interrupt()
        _wait(self._watches, SECONDS_TO_STOP)
        for process in self.processes:
            process.kill()
        _wait(self._watches, SECONDS_TO_STOP)


def worker_command(command: Sequence[str], index: int) -> list[str]:
    """The command line of another worker, without the program: the same, and which one it is.

    Raises:
        ValueError: if it is not one of `surgeon search`, which alone knows workers.
    """
    if "search" not in command:
        raise ValueError(
            "other workers can only be started from the command line, with surgeon search; use --workers 1"
        )
    behind = command.index("search") + 1
    return [*command[:behind], FLAG, str(index), *command[behind:]]


def gpu_of(index: int) -> dict[str, str]:
    """Which GPU a worker has, as its environment says it: they are given out in turn."""
    count = torch.cuda.device_count()
    if count < 2:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return {"CUDA_VISIBLE_DEVICES": visible[index % count] if len(visible) == count else str(index % count)}


@contextmanager
def interruptible(index: int) -> Iterator[None]:
    """While it lasts, SIGTERM is what Ctrl-C is, so that trials are given back: batch systems end jobs by it.

    Args:
        index: which worker of the machine this process is; all but 0 are interrupted when the first one has gone.
    """
    if threading.current_thread() is not threading.main_thread():  # only that one can take signals
        yield
        return
    # A shell that starts something in the background lets it ignore Ctrl-C, and so all that it starts.
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGINT)}
    if index:
        main = threading.main_thread().ident
        assert main is not None
        when_parent_ends(lambda: signal.pthread_kill(main, signal.SIGINT))  # to that thread, as it may be asleep
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(threads: Sequence[threading.Thread], seconds: float) -> None:
    """Wait so long for all of them together."""
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
