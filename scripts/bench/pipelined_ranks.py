"""Ranks that train a model together, each a process (gloo): with `torch.distributed.pipelining`, or rack by rack."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.bench.local_ranks import LocalSchedule
from scripts.bench.pipelined_p2p import Pace, Trace, TracedStage, Traffic, shared_file
from scripts.bench.rack_memory import HeldBytes, peak_resident
from scripts.bench.rack_model import Optimisation, Rack, cut, load_stretch, next_token_loss, rack_name, whole_name
from surgeon.runtime.comm.link import Link

LOCAL = "local"
SCHEDULES = ("gpipe", "1f1b", "interleaved", LOCAL)
STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2, LOCAL: 1}
INITIAL, WINDOWS = "initial.safetensors", "windows.safetensors"
JOB, SHARED, STORE, RECORD = "job.json", "arrivals", "store", "rank.json"


@dataclass(frozen=True)
class Job:
    """What the ranks do.

    Attributes:
        model: the configuration's fields.
        delay, bandwidth: of the link, seconds and bytes per second; None where there is no link.
        factors: how many times as long each rank computes.
        unit: seconds that a layer takes on a micro-batch, forward; 0 takes as long as it takes.
        snapshots: steps after which the weights are kept.
        held: whether to count the bytes that autograd holds.
        coda: layers of a rack's coda, for local training.
        ahead: micro-batches that a rack may have sent and the next one not taken, for local training.
    """

    schedule: str
    ranks: int
    model: dict[str, Any]
    optimisation: Optimisation
    delay: float | None = None
    bandwidth: float | None = None
    factors: tuple[float, ...] = ()
    unit: float = 0.0
    snapshots: tuple[int, ...] = ()
    held: bool = False
    coda: int = 1
    ahead: int = 4

    @property
    def link(self) -> Link | None:
        """Between neighbours."""
        return None if self.delay is None else Link(self.delay, self.bandwidth or float("inf"))

    @property
    def config(self) -> LlamaConfig:
        """Of the whole model."""
        return LlamaConfig.from_dict(self.model)

    def write(self, folder: Path) -> None:
        (folder / JOB).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Job:
        values = json.loads((folder / JOB).read_text(encoding="utf-8"))
        values["optimisation"] = Optimisation(**values["optimisation"])
        return cls(**values | {name: tuple(values[name]) for name in ("factors", "snapshots")})


class Rank:
    """One process: its stages, its optimiser, its messages."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.job, self.folder, self.rank = Job.read(folder), folder, rank
        self.own = folder / f"rank-{rank}"
        self.own.mkdir(exist_ok=True)
        ranks, config = self.job.ranks, self.job.config
        store = dist.FileStore(str(folder / STORE), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        self.trace = Trace()
        self.traffic = Traffic(rank, ranks, self.job.link, folder / SHARED, self.trace)
        self.traffic.install()
        spans = cut(config.num_hidden_layers, ranks * STAGES_PER_RANK[self.job.schedule])
        self.stretches = {
            stage: load_stretch(config, spans[stage], folder / INITIAL) for stage in range(rank, len(spans), ranks)
        }
        self.before = peak_resident()
        factors = self.job.factors
        self.pace = Pace(factors[rank] if factors else 1.0, self.job.unit)
        self.schedule, self.parameters = self._local() if self.job.schedule == LOCAL else self._pipelined(len(spans))
        self.optimiser, self.rates = self.job.optimisation.optimiser(list(self.parameters.items()))

    def _pipelined(self, count: int) -> tuple[Any, dict[str, nn.Parameter]]:
        from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

        stages = [
            TracedStage(stretch, stage, count, torch.device("cpu"), trace=self.trace, pace=self.pace)
            for stage, stretch in self.stretches.items()
        ]
        kinds: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
        given = stages if self.job.schedule == "interleaved" else stages[0]
        schedule = kinds[self.job.schedule](given, self.job.optimisation.micro_batches, loss_fn=self._loss)
        named = (pair for stretch in self.stretches.values() for pair in stretch.named_parameters())
        return schedule, {whole_name(name): one for name, one in named}

    def _local(self) -> tuple[Any, dict[str, nn.Parameter]]:
        rack = Rack(self.stretches[self.rank], self.job.coda, self.job.optimisation.seed)
        schedule = LocalSchedule(rack, self.traffic, self.pace, self.job.optimisation, self.job.ahead)
        return schedule, {rack_name(name): one for name, one in rack.named_parameters()}

    def _loss(self, logits: Tensor, ids: Tensor) -> Tensor:
        begun = time.perf_counter()
        loss = next_token_loss(logits, ids)
        self.trace.add(begun, time.perf_counter(), "compute", "loss")
        return loss

    def train(self, ids: Tensor) -> None:
        """All steps; then what is known of them is written."""
        times, losses = list[tuple[float, float]](), list[float]()
        held = HeldBytes(self.parameters.values()) if self.job.held else None
        dist.barrier()
        for step, batch in enumerate(self.job.optimisation.batches(ids), 1):
            self.trace.step = step
            begun = time.perf_counter()
            with held or nullcontext():
                found = self._gradients(batch)
            self._take_step()
            times.append((begun, time.perf_counter()))
            losses += [float(torch.stack(found).mean())] if found else []
            if step in self.job.snapshots or step == self.job.optimisation.steps:
                save_file(self.parameters, self.own / f"step-{step}.safetensors")
        self.trace.write(self.own / "timeline.csv")
        record = {
            "times": times,
            "losses": losses,
            "sent": self.traffic.sent,
            "received": self.traffic.received,
            "peak": peak_resident(),
            "before": self.before,
            "held": None if held is None else held.most,
        }
        record_of(self.folder, self.rank).write_text(json.dumps(record), encoding="utf-8")
        dist.barrier()
        dist.destroy_process_group()

    def _gradients(self, batch: Tensor) -> list[Tensor]:
        if self.job.schedule == LOCAL:
            return list(self.schedule.step(batch))
        first, last = self.rank == 0, self.rank == self.job.ranks - 1
        losses = list[Tensor]()
        inputs = (batch,) if first else ()
        self.schedule.step(
            *inputs, target=batch if last else None, losses=losses if last else None, return_outputs=False
        )
        return [loss.detach() for loss in losses]

    def _take_step(self) -> None:
        """As the Trainer does: gradients cut to a norm, AdamW, the next learning rate."""
        own = nn.utils.get_total_norm([one.grad for one in self.parameters.values() if one.grad is not None])
        norm = float(own) if self.job.schedule == LOCAL else self.traffic.sum(float(own) ** 2) ** 0.5
        begun = time.perf_counter()
        nn.utils.clip_grads_with_norm_(self.parameters.values(), self.job.optimisation.norm, torch.tensor(norm))
        self.optimiser.step()
        self.rates.step()
        self.optimiser.zero_grad()
        self.trace.add(begun, time.perf_counter(), "compute", "update")


@dataclass(frozen=True)
class Outcome:
    """What a run of all ranks came to.

    Attributes:
        records: what each rank has written.
        folder: where its files are.
    """

    job: Job
    folder: Path
    records: list[dict[str, Any]]

    @property
    def losses(self) -> list[float]:
        return list(self.records[-1]["losses"])

    def seconds(self, warm: int) -> float:
        """Of all steps but the first `warm`: from the end of those in the last rank to come there to the end of all."""
        ends = [[end for _, end in record["times"]] for record in self.records]
        return max(each[-1] for each in ends) - max(each[warm - 1] for each in ends)

    def tokens_per_second(self, warm: int) -> float:
        """Of all steps but the first `warm`."""
        made = self.job.optimisation
        return made.batch * int(self.job.model["max_position_embeddings"]) * (made.steps - warm) / self.seconds(warm)

    def weights(self, step: int) -> dict[str, Tensor]:
        """Of the whole model after a step, codas left out."""
        files = [self.folder / f"rank-{rank}" / f"step-{step}.safetensors" for rank in range(self.job.ranks)]
        found = {name: tensor for file in files for name, tensor in load_file(file).items()}
        return {name: tensor for name, tensor in found.items() if not name.startswith("coda.")}


def run_ranks(job: Job, model: PreTrainedModel, ids: Tensor, folder: Path) -> Outcome:
    """Train in processes of their own; a run that is there whole is read.

    Raises:
        RuntimeError: if a rank fails; its error is on standard error.
    """
    if not all(record_of(folder, rank).is_file() for rank in range(job.ranks)):
        prepare(job, model, ids, folder)
        os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        forks = multiprocessing.get_context("forkserver")  # importing torch is most of what a rank costs
        forks.set_forkserver_preload(["scripts.bench.pipelined_ranks"])
        ranks = [forks.Process(target=run_rank, args=(folder, rank), daemon=True) for rank in range(job.ranks)]
        for rank in ranks:
            rank.start()
        finish(ranks)
        for left in (INITIAL, WINDOWS, SHARED, STORE):
            (folder / left).unlink(missing_ok=True)
    return read_outcome(job, folder)


def record_of(folder: Path, rank: int) -> Path:
    """Where a rank says what it has done; the last file that it writes."""
    return folder / f"rank-{rank}" / RECORD


def prepare(job: Job, model: PreTrainedModel, ids: Tensor, folder: Path) -> None:
    """Write what the ranks read."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in (folder / STORE, *(record_of(folder, rank) for rank in range(job.ranks))):
        stale.unlink(missing_ok=True)
    save_file(dict(model.named_parameters()), folder / INITIAL)
    save_file({"ids": ids}, folder / WINDOWS)
    shared_file(folder / SHARED, job.ranks)
    job.write(folder)


def read_outcome(job: Job, folder: Path) -> Outcome:
    """What all ranks have written."""
    records = [json.loads(record_of(folder, rank).read_text(encoding="utf-8")) for rank in range(job.ranks)]
    return Outcome(job, folder, records)


def run_rank(folder: Path, rank: int) -> None:
    """What each process does."""
    torch.set_num_threads(1)
    Rank(folder, rank).train(load_file(folder / WINDOWS)["ids"])


def finish(ranks: Sequence[Any]) -> None:
    """Wait for all; if one fails, end the others.

    Raises:
        RuntimeError: if one fails.
    """
    try:
        while any(rank.is_alive() for rank in ranks) and not any(rank.exitcode for rank in ranks):
            time.sleep(0.05)
    finally:
        for rank in ranks:
            if rank.is_alive():
                rank.kill()
            rank.join()
    failed = [number for number, rank in enumerate(ranks) if rank.exitcode]
    if failed:
        raise RuntimeError(f"rank {failed[0]} ended with {ranks[failed[0]].exitcode}; what it said stands above")
