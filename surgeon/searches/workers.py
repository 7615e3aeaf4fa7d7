"""Several processes of one machine that work on one search: its first one starts the others.

They have nothing to do with each other but the study's storage, as processes on other machines do.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from surgeon.gpus import gpus_in_turn
from surgeon.processes.children import Child, when_parent_ends
from surgeon.processes.files import make_folder
from surgeon.searches.storage import Say, say_aside
from surgeon.threads import threads_per_rank

FOLDER = "workers"  # in the output folder: what they say
GIVEN = "SURGEON_WORKER"  # of a worker's environment, which others cannot read: addresses may have passwords
SECONDS_TO_END = 20.0  # when all is done
SECONDS_TO_STOP = 10.0  # when they are told to stop


class WorkerProcesses:
    """The workers of a machine beside the process that starts them, from entering to leaving a `with` block.

    At the end of the search they end by themselves. If the block is left by an error or Ctrl-C they are interrupted,
    and give back what they were running; so they do when this process is killed. One that ends otherwise is told of,
    and the others go on.

    Args:
        count: of workers, this process among them.
        command: what the interpreter is to run, as in ["-m", "surgeon.commands.searching"].
        given: to each of them, as JSON values; `given_to_worker` reads it.
        folder: of the results; each worker writes what it has to say into a file in it.
    """

    def __init__(
        self, count: int, command: Sequence[str], given: Mapping[str, Any], folder: Path, say: Say = say_aside
    ) -> None:
        self.count = count
        self.command = command
        self.given = given
        self.folder = folder / FOLDER
        self.say = say
        self.processes: list[Child] = []
        self._ending = False
        self._watches: list[threading.Thread] = []

    def __enter__(self) -> Self:
        if self.count > 1:
            import torch  # takes a second, which a worker only needs for its model

            torch.set_num_threads(threads_per_rank(self.count))
            make_folder(self.folder)
        try:
            for index in range(1, self.count):
                self._start(index)
        except BaseException:
            self._stop(0.0)
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._stop(SECONDS_TO_END if kind is None else 0.0)

    def _start(self, index: int) -> None:
        log = self.folder / f"{index}.log"
        log.unlink(missing_ok=True)  # of an earlier run
        environment = os.environ | gpus_in_turn(index) | {GIVEN: json.dumps([index, self.given])}
        process = Child(self.command, log, threads_per_rank(self.count), environment=environment)
        self.processes.append(process)
        watch = threading.Thread(target=self._watch, args=(index, process), daemon=True)
        watch.start()
        self._watches.append(watch)

    def _watch(self, index: int, process: Child) -> None:
        if process.wait() and not self._ending:
            self.say(f"worker {index} (process {process.pid}) {process.ending()}; the others go on")

    def _stop(self, seconds: float) -> None:
        """Give them so long to end by themselves, then interrupt them."""
        self._wait(seconds)
        self._ending = True
        for process in self.processes:
            process.interrupt()
        self._wait(SECONDS_TO_STOP)
        for process in self.processes:
            process.kill()
        self._wait(SECONDS_TO_STOP)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for watch in self._watches:
            watch.join(max(0.0, deadline - time.monotonic()))


def given_to_worker() -> tuple[int, dict[str, Any]]:
    """In a process that `WorkerProcesses` has started: which of them it is, from 1 on, and what it is given."""
    index, given = json.loads(os.environ[GIVEN])
    return index, given


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
