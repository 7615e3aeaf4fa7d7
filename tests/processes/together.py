"""Two processes that train or compute together, as torchrun starts them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests import warm
from tests.processes.test_torchrun import free_port
from tests.waiting import PATIENCE

REPOSITORY = Path(__file__).parents[2]


def together(module: str, *arguments: str) -> None:
    """Call `main(*arguments)` of a module in two processes, and wait for both.

    Raises:
        AssertionError: with what one has said, if it failed.
    """
    code = f"import sys; from {module} import main; main(*sys.argv[1:])"
    shared = os.environ | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(free_port()), "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    started = [
        warm.Popen(
            [*warm.CODE, code, *arguments],
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    for process in started:
        said, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, said
