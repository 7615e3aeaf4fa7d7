"""Worker processes of a machine that share a search through its study's storage alone, as other machines do."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from surgeon.machine import gpus_in_turn, threads_per_rank
from surgeon.processes.children import Child
from surgeon.processes.files import make_folder

Say = Callable[[str], None]
FOLDER = "workers"  # in the output folder: what they say
# Variable of a worker's environment, which others cannot read, as addresses may have passwords.
GIVEN = "SURGEON_WORKER"
SECONDS_TO_END = 20.0  # when all is done
SECONDS_TO_STOP = 10.0  # when they are told to stop


def say_aside(line: str) -> None:
    """Put a line on standard error."""
    print(f"search: {line}", file=sys.stderr, flush=True)


@contextmanager
def worker_processes(
    count: int, command: Sequence[str], given: Mapping[str, Any], output: Path, say: Say = say_aside
) -> Iterator[list[Child]]:
    """Run the other workers of a machine beside a block, which gets their processes.

    At the end of the search they end by themselves. Left by an error or Ctrl-C, the block interrupts them, and they
    give back their trials; so they do when this process is killed. Other ends are reported, and the rest goes on.

    Args:
        count: of workers, this process among them, at least 2.
        command: for the interpreter, as in ["-m", "surgeon.commands.searching"].
        given: to each of them, as JSON values; `given_to_worker` reads it.
        output: folder of the search.
    """
    processes: list[Child] = []
    watches: list[threading.Thread] = []
    ending = threading.Event()
    import torch  # takes a second, which a worker only needs for its model

    torch.set_num_threads(threads_per_rank(count))
    make_folder(output / FOLDER)

    def watch(index: int, process: Child) -> None:
        if process.wait() and not ending.is_set():
            say(f"worker {index} (process {process.pid}) {process.describe_end()}; the others go on")

    def wait(seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for one in watches:
            one.join(max(0.0, deadline - time.monotonic()))

    patience = 0.0
    try:
        for index in range(1, count):
            log = output / FOLDER / f"{index}.log"
            log.unlink(missing_ok=True)  # of an earlier run
            environment = os.environ | gpus_in_turn(index) | {GIVEN: json.dumps([index, given])}
            process = Child(command, log, threads_per_rank(count), environment=environment)
            processes.append(process)
            watches.append(threading.Thread(target=watch, args=(index, process), daemon=True))
            watches[-1].start()
        yield processes
        patience = SECONDS_TO_END
    finally:
        wait(patience)
        ending.set()
        for process in processes:
            process.interrupt()
        wait(SECONDS_TO_STOP)
        for process in processes:
            process.kill()
        wait(SECONDS_TO_STOP)


def given_to_worker() -> tuple[int, dict[str, Any]]:
    """Read a worker's number, from 1 on, and its values."""
    index, given = json.loads(os.environ[GIVEN])
    return index, given
