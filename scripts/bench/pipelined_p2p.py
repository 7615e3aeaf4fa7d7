"""What stages of `torch.distributed.pipelining` send each other: through an emulated link, counted and traced.

All schedules post their messages with `torch.distributed.pipelining.schedules._batch_p2p` and wait for what it returns.
That is where the link stands: a message takes its time from when it is posted, on a line for each neighbour and
direction, as `surgeon.runtime.comm.link` has it; it travels by gloo meanwhile, which does not keep the rank from
computing. A sender that waits for its message waits until the last byte has left, a receiver until it has arrived.
When that is, the receiver reads from memory that the ranks share, written before the message is posted.
"""

from __future__ import annotations

import math
import resource
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules

from surgeon.runtime.comm.link import Line, Link, SystemClock

COLUMNS = ["start", "end", "what", "part", "micro_batch", "step"]
REMEMBERED = 4096  # messages from one rank to another whose arrival is still known


@dataclass
class Trace:
    """What a rank did, and when: computed, waited for input, waited for a message to leave, had one under way."""

    rows: list[tuple[float, float, str, str, int, int]] = field(default_factory=list)
    step: int = 0

    def add(self, start: float, end: float, what: str, part: str, micro_batch: int = -1) -> None:
        """Times are seconds of a clock that all processes share."""
        self.rows.append((start, end, what, part, micro_batch, self.step))

    def write(self, path: Path) -> None:
        pd.DataFrame(self.rows, columns=COLUMNS).to_csv(path, index=False, float_format="%.6f")


@dataclass(frozen=True)
class Pace:
    """How long computing takes.

    Attributes:
        factor: times as long as it takes; a slow rack has one above 1.
        unit: seconds that one layer takes on one micro-batch, at least, forward; backward takes twice as long. 0 takes
            as long as it takes.
    """

    factor: float = 1.0
    unit: float = 0.0

    def keep(self, begun: float, units: float) -> None:
        """Sleep until what has begun then, and is done now, has taken its time."""
        now = time.perf_counter()
        asleep = begun + max(now - begun, units * self.unit) * self.factor - now
        if asleep > 0:
            time.sleep(asleep)


class Message:
    """A send or a receive that was posted."""

    def __init__(
        self, work: Any, until: Callable[[], float], what: str, op: Any, traffic: Traffic
    ) -> None:
        self.work = work
        self.until = until
        self.what = what
        self.op = op
        self.traffic = traffic

    def wait(self) -> None:
        """Return when it has left, or arrived."""
        clock = self.traffic.clock
        begun = clock.now()
        self.work.wait()
        end = self.until()
        if end > -math.inf:
            clock.wait_until(end)
        self.traffic.trace.add(begun, clock.now(), self.what, self.op.part, self.op.micro_batch)


class Traffic:
    """All messages of one rank.

    Args:
        shared: a file of `shared_file`, the same for all ranks.
    """

    def __init__(self, rank: int, ranks: int, link: Link | None, shared: Path, trace: Trace) -> None:
        self.rank = rank
        self.link = link
        self.trace = trace
        self.clock = SystemClock()
        self.arrivals = np.memmap(shared, np.float64, "r+", shape=(ranks, ranks, REMEMBERED))
        self.lines = [Line(link or Link(), self.clock) for _ in range(ranks)]
        self.posted: Counter[tuple[bool, int]] = Counter()
        self.sent: Counter[str] = Counter()

    def install(self) -> None:
        """Have the schedules of this process post their messages here."""
        plain = schedules._batch_p2p

        def linked(ops: list[Any], desc: str | None = None) -> list[Any]:
            return self._post(ops, lambda: plain(ops, desc))

        schedules._batch_p2p = linked  # type: ignore[assignment]

    def _post(self, ops: Sequence[Any], post: Callable[[], list[Any]]) -> list[Message]:
        begun = [self._begin(op) for op in ops]
        return [
            Message(work, until, what, op, self)
            for work, op, (until, what) in zip(post(), ops, begun, strict=True)
        ]

    def _begin(self, op: Any) -> tuple[Callable[[], float], str]:
        sends = op.op is dist.isend
        place = self.posted[sends, op.peer] % REMEMBERED
        self.posted[sends, op.peer] += 1
        if not sends:
            return lambda: float(self.arrivals[op.peer, self.rank, place]), "wait_input"
        size = op.tensor.nbytes
        self.sent[op.part] += size
        line = self.lines[op.peer]
        starts = max(self.clock.now(), line.free_from)
        arrives = leaves = -math.inf
        if self.link is not None:
            arrives = line.send(size)
            leaves = line.free_from
        self.arrivals[self.rank, op.peer, place] = arrives
        self.trace.add(starts, max(arrives, starts), "send", op.part, op.micro_batch)
        return lambda: leaves, "wait_room"

    def sum(self, value: float) -> float:
        """The sum of a number of every rank; over a link it takes one delay, which is less than any way it could go."""
        begun = self.clock.now()
        total = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(total)
        if self.link is not None:
            self.clock.wait_until(begun + self.link.delay)
        self.trace.add(begun, self.clock.now(), "wait_input", "norm")
        return float(total)


def shared_file(path: Path, ranks: int) -> None:
    """Make the file in which ranks tell each other when messages arrive."""
    np.memmap(path, np.float64, "w+", shape=(ranks, ranks, REMEMBERED)).flush()


def peak_resident() -> int:
    """The most bytes that this process had resident so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class TracedStage(PipelineStage):
    """A stage that tells what its messages are for, and how long it computes."""

    def __init__(self, *arguments: Any, trace: Trace, pace: Pace, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.trace = trace
        self.pace = pace

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return named(super().get_fwd_recv_ops(fwd_chunk_id), "forward", fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return named(super().get_bwd_recv_ops(bwd_chunk_id), "backward", bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return named(super().get_fwd_send_ops(fwd_chunk_id), "forward", fwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return named(super().get_bwd_send_ops(bwd_chunk_id), "backward", bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *others: Any, **options: Any) -> Any:
        begun = time.perf_counter()
        output = super().forward_one_chunk(fwd_chunk_id, *others, **options)
        self._done(begun, 1.0, "forward", fwd_chunk_id)
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *others: Any, **options: Any) -> Any:
        begun = time.perf_counter()
        found = super().backward_one_chunk(bwd_chunk_id, *others, **options)
        self._done(begun, 2.0, "backward", bwd_chunk_id)
        return found

    def _done(self, begun: float, times: float, part: str, micro_batch: int) -> None:
        stretch: Any = self.submod
        self.pace.keep(begun, times * stretch.units)
        self.trace.add(begun, time.perf_counter(), "compute", part, micro_batch)


def named(ops: list[dist.P2POp], part: str, micro_batch: int) -> list[dist.P2POp]:
    """Messages with what they are for."""
    for op in ops:
        op.part = part  # type: ignore[attr-defined]
        op.micro_batch = micro_batch  # type: ignore[attr-defined]
    return ops
