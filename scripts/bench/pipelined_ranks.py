"""Ranks that train a model together with `torch.distributed.pipelining`, each a process (gloo).

The peer of block-wise local training (racks.py): the same Llama from the same seed, the same windows in the same order,
the same micro-batches, AdamW and schedule of the learning rate as surgeon's own runs; the gradient's norm is that of
all ranks together, as in one process (a sum of one number over the ranks in every step).
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from transformers import LlamaConfig, PreTrainedModel

from scripts.bench.pipelined_p2p import Pace, Trace, TracedStage, Traffic, peak_resident, shared_file
from scripts.bench.rack_model import Optimisation, cut, load_stretch, next_token_loss, whole_name
from surgeon.checkpoint.stored import read_json
from surgeon.processes.files import write_json
from surgeon.runtime.comm.link import Link

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
        record = {"times": times, "losses": losses, "sent": self.traffic.sent, "peak": peak_resident()}
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
