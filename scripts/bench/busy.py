"""A busy process beside what is measured."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

BUSY = "import os\nos.nice(19)\nwhile True: pass"


@contextmanager
def neighbour(busy: bool, own_session: bool = False) -> Iterator[None]:
    """A busy process of the lowest priority, if wanted.

    Args:
        own_session: where Linux groups processes by session, priorities count within one only.
    """
    if not busy:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=own_session)
    try:
        time.sleep(0.5)
        yield
    finally:
        process.kill()
        process.wait()
