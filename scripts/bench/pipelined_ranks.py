"""Ranks that train a model together with `torch.distributed.pipelining`, each a process (gloo).

The peer of block-wise local training (racks.py): the same Llama from the same seed, the same windows in the same order,
the same micro-batches, AdamW and schedule of the learning rate as surgeon's own runs; the gradient's norm is that of
all ranks together, as in one process (a sum of one number over the ranks in every step).

What stages send each other goes through an emulated link, is counted and traced. All schedules post their messages with
`torch.distributed.pipelining.schedules._batch_p2p` and wait for what it returns. That is where the link stands: a
message takes its time from when it is posted, on a line for each neighbour and direction, as
`surgeon.runtime.comm.collectives` has it; it travels by gloo meanwhile, which does not keep the rank from computing. A
sender that waits for its message waits until the last byte has left, a receiver until it has arrived. When that is,
the receiver reads from memory that the ranks share, written before the message is posted.
"""

from __future__ import annotations

import math
import multiprocessing
import os
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
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    schedules,
)
from transformers import LlamaConfig, PreTrainedModel

from scripts.bench.rack_model import Optimisation, cut, load_stretch, next_token_loss, whole_name
from surgeon.checkpoint.tensor_file import read_json
from surgeon.processes.files import write_json
from surgeon.runtime.comm.collectives import Line, Link, SystemClock

COLUMNS = ["start", "end", "what", "part", "micro_batch", "step"]
REMEMBERED = 4096  # messages from one rank to another whose arrival is still known
SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
}
INTERLEAVED_STAGES = 2  # of a rank
INITIAL = "initial.safetensors"
WINDOWS = "windows.safetensors"
SHARED = "arrivals"
STORE = "store"
RECORD = "rank.json"


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


@dataclass
class Message:
    """A send or a receive that was posted."""

    work: Any
    until: Callable[[], float]
    what: str
    op: Any
    traffic: Traffic

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


@dataclass(frozen=True)
class Job:
    """The work of the ranks.

    Attributes:
        link: between neighbours; None where there is none.
        factors: how many times as long each rank computes.
        unit: seconds that a layer takes on a micro-batch, forward; 0 takes as long as it takes.
    """

    schedule: str
    ranks: int
    config: LlamaConfig
    optimisation: Optimisation
    link: Link | None = None
    factors: tuple[float, ...] = ()
    unit: float = 0.0

    def factor(self, rank: int) -> float:
        if self.factors:
            return self.factors[rank]
        return 1.0


class Rank:
    """One process: its stages, its optimiser, its messages."""

    def __init__(self, job: Job, folder: Path, rank: int) -> None:
        self.job = job
        self.folder = folder
        self.rank = rank
        record_of(folder, rank).parent.mkdir(exist_ok=True)
        store = dist.FileStore(str(folder / STORE), job.ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=job.ranks)
        self.trace = Trace()
        self.traffic = Traffic(rank, job.ranks, job.link, folder / SHARED, self.trace)
        self.traffic.install()
        interleaved = job.schedule == "interleaved"
        spans = cut(job.config.num_hidden_layers, job.ranks * (INTERLEAVED_STAGES if interleaved else 1))
        pace = Pace(job.factor(rank), job.unit)
        stages = []
        self.parameters: dict[str, nn.Parameter] = {}
        for stage in range(rank, len(spans), job.ranks):
            stretch = load_stretch(job.config, spans[stage], folder / INITIAL)
            stages.append(
                TracedStage(stretch, stage, len(spans), torch.device("cpu"), trace=self.trace, pace=pace)
            )
            self.parameters |= {whole_name(name): one for name, one in stretch.named_parameters()}
        given = stages if interleaved else stages[0]
        self.schedule = SCHEDULES[job.schedule](
            given, job.optimisation.micro_batches, loss_fn=self._loss
        )
        self.optimiser, self.rates = job.optimisation.optimiser(list(self.parameters.items()))

    def _loss(self, logits: Tensor, ids: Tensor) -> Tensor:
        begun = time.perf_counter()
        loss = next_token_loss(logits, ids)
        self.trace.add(begun, time.perf_counter(), "compute", "loss")
        return loss

    def train(self, ids: Tensor) -> None:
        """All steps; then what is known of them is written."""
        times = list[tuple[float, float]]()
        losses = list[float]()
        dist.barrier()
        for step, batch in enumerate(self.job.optimisation.batches(ids), 1):
            self.trace.step = step
            begun = time.perf_counter()
            losses += self._add_gradients(batch)
            self._take_step()
            times.append((begun, time.perf_counter()))
        self.trace.write(record_of(self.folder, self.rank).with_name("timeline.csv"))
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        record = {"times": times, "losses": losses, "sent": self.traffic.sent, "peak": peak}
        write_json(record_of(self.folder, self.rank), record)
        dist.barrier()
        dist.destroy_process_group()

    def _add_gradients(self, batch: Tensor) -> list[float]:
        """Those of one step's windows, (windows, tokens); the last rank has the loss."""
        inputs = [batch] if self.rank == 0 else []
        if self.rank < self.job.ranks - 1:
            self.schedule.step(*inputs, return_outputs=False)
            return []
        losses = list[Tensor]()
        self.schedule.step(*inputs, target=batch, losses=losses, return_outputs=False)
        return [float(torch.stack(losses).detach().mean())]

    def _take_step(self) -> None:
        """As the Trainer does: gradients cut to a norm, AdamW, the next learning rate."""
        own = nn.utils.get_total_norm(
            [one.grad for one in self.parameters.values() if one.grad is not None]
        )
        norm = self.traffic.sum(float(own) ** 2) ** 0.5
        begun = time.perf_counter()
        nn.utils.clip_grads_with_norm_(
            self.parameters.values(), self.job.optimisation.norm, torch.tensor(norm)
        )
        self.optimiser.step()
        self.rates.step()
        self.optimiser.zero_grad()
        self.trace.add(begun, time.perf_counter(), "compute", "update")


def run_ranks(job: Job, model: PreTrainedModel, ids: Tensor, folder: Path) -> None:
    """Train in processes of their own.

    Raises:
        RuntimeError: if a rank fails; its error is on standard error.
    """
    prepare(job, model, ids, folder)
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    start_ranks(job.ranks, run_rank, (job, folder))
    for left in (INITIAL, WINDOWS, SHARED, STORE):
        (folder / left).unlink(missing_ok=True)


def record_of(folder: Path, rank: int) -> Path:
    """The last file that a rank writes, with what it has done."""
    return folder / f"rank-{rank}" / RECORD


def prepare(job: Job, model: PreTrainedModel, ids: Tensor, folder: Path) -> None:
    """Write what the ranks read."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in (folder / STORE, *(record_of(folder, rank) for rank in range(job.ranks))):
        stale.unlink(missing_ok=True)
    save_file(dict(model.named_parameters()), folder / INITIAL)
    save_file({"ids": ids}, folder / WINDOWS)
    shared_file(folder / SHARED, job.ranks)


def read_records(job: Job, folder: Path) -> list[dict[str, Any]]:
    return [read_json(record_of(folder, rank)) for rank in range(job.ranks)]


def run_rank(job: Job, folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    Rank(job, folder, rank).train(load_file(folder / WINDOWS)["ids"])


def start_ranks(count: int, target: Any, arguments: Sequence[Any]) -> None:
    """Run a function with its arguments and a rank's number in so many processes; if one fails, end the others.

    Raises:
        RuntimeError: if one fails.
    """
    context = multiprocessing.get_context("forkserver")  # importing torch is most of what a rank costs
    context.set_forkserver_preload([target.__module__])
    ranks = [
        context.Process(target=target, args=(*arguments, rank), daemon=True) for rank in range(count)
    ]
    for one in ranks:
        one.start()
    try:
        while any(rank.is_alive() for rank in ranks) and not any(rank.exitcode for rank in ranks):
            time.sleep(0.05)
    finally:
        for rank in ranks:
            if rank.is_alive():
                rank.kill()
            rank.join()
    for number, rank in enumerate(ranks):
        if rank.exitcode:
            raise RuntimeError(f"rank {number} ended with {rank.exitcode}; what it said stands above")
