"""The article on block-wise local training: a pipeline and racks with codas, the same model on the same ranks.

One process for each rack. The pipeline is 1F1B of `torch.distributed.pipelining`; racks hand their stream on without a
gradient and train themselves and a coda. Weights, gradients and AdamW's
moments are bfloat16 on GPUs, which are connected by NCCL; on CPUs they are float32, and gloo is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, schedules
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from scripts.bench.pipelined_ranks import start_ranks
from scripts.bench.rack_model import Stretch, build, cut, next_token_loss, run_layers
from scripts.cost.racks import SIZES, model_entries
from surgeon.benchmarks.timing import now
from surgeon.checkpoint.tensor_file import read_json
from surgeon.machine import show_size
from surgeon.processes.files import write_json

PIPELINE = "pipeline"
LOCAL = "local"
PRINTED_RACKS = 4
RATE = 1e-4
SMALL = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class RackJob:
    """One size trained in one way.

    Attributes:
        window: tokens of a micro-batch, which is one text.
        coda: layers of a rack's coda.
        warm, measured: steps.
    """

    size: str
    way: str
    racks: int
    device: str
    small: bool
    window: int
    micro_batches: int = 8
    coda: int = 2
    warm: int = 2
    measured: int = 5

    @property
    def key(self) -> str:
        """A name for a file."""
        return f"racks-{self.size}-{self.way}-{self.racks}-ranks"

    @property
    def config(self) -> LlamaConfig:
        """Of the whole model."""
        entries = SMALL if self.small else model_entries(self.size)
        return LlamaConfig(**entries | {"max_position_embeddings": self.window, "use_cache": False})


def jobs(racks: int, device: str, small: bool) -> list[tuple[RackJob, RackJob]]:
    """What the rows need: every size, the smallest first, as a pipeline and as racks."""
    window = 32 if small else 2048
    pipelines = [
        RackJob(size, PIPELINE, racks, device, small, window)
        for size in list(SIZES)[: 1 if small else None]
    ]
    return [(one, replace(one, way=LOCAL)) for one in pipelines]


class Rack(nn.Module):
    """A stretch of layers with a coda of its own: more layers, a norm and a head; the last one's is its own end.

    Args:
        depth: layers of the coda.
    """

    def __init__(self, stretch: Stretch, depth: int) -> None:
        super().__init__()
        self.stretch = stretch
        if stretch.lm_head is None:
            config = LlamaConfig.from_dict(
                stretch.config.to_dict() | {"num_hidden_layers": max(1, depth)}
            )
            private: Any = build(config, 1000 + stretch.span.start)
            self.layers = private.model.layers[:depth]
            self.norm = private.model.norm
            self.head = private.lm_head

    def predict(self, passed: Tensor) -> Tensor:
        """The rack's logits from the stream that it hands on."""
        if self.stretch.lm_head is not None:
            return self.stretch.predict(passed)
        logits: Tensor = self.head(self.norm(run_layers(self.layers, self.stretch.rotary, passed)))
        return logits


class RackRank:
    """One process: its layers, its optimiser, what it sends, and how long it computes."""

    def __init__(self, job: RackJob, rank: int) -> None:
        self.job = job
        self.rank = rank
        self.last = rank == job.racks - 1
        self.on_gpu = job.device == "cuda"
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        if self.on_gpu:
            self.device = torch.device("cuda", rank)
            self.dtype = torch.bfloat16
        self.marks: list[tuple[Any, Any]] = []
        self.sent: Counter[str] = Counter()
        stretch = self._stretch(cut(job.config.num_hidden_layers, job.racks)[rank])
        if job.way == LOCAL:
            self.rack = Rack(stretch, job.coda).to(self.device, self.dtype)
            self.model: nn.Module = self.rack
        else:
            self.model = stretch
            stage = MarkedStage(self, stretch, rank, job.racks, self.device)
            self.schedule = Schedule1F1B(stage, job.micro_batches, loss_fn=next_token_loss)
            plain = schedules._batch_p2p

            def counted(ops: list[Any], desc: str | None = None) -> list[Any]:
                for op in ops:
                    if op.op is dist.isend:
                        self.sent["forward" if op.peer > rank else "backward"] += op.tensor.nbytes
                return plain(ops, desc)

            schedules._batch_p2p = counted  # type: ignore[assignment]
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=RATE, fused=True)

    def _stretch(self, layers: range) -> Stretch:
        """This rank's layers, with random numbers, made where they belong."""
        with torch.device("meta"):
            whole = AutoModelForCausalLM.from_config(self.job.config, dtype=self.dtype)
        stretch = Stretch(whole, layers).to_empty(device=self.device)
        generator = torch.Generator(self.device).manual_seed(layers.start)
        with torch.no_grad():
            for one in stretch.parameters():
                one.fill_(1.0) if one.dim() == 1 else one.normal_(0.0, 0.02, generator=generator)
        stretch.rotary = LlamaRotaryEmbedding(config=self.job.config).to(self.device)
        return stretch.train()

    def marked(self, compute: Callable[[], Any]) -> Any:
        """Compute something, and note when it began and ended, on a GPU by events."""
        began = self._mark()
        found = compute()
        self.marks.append((began, self._mark()))
        return found

    def _mark(self) -> Any:
        if not self.on_gpu:
            return now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _computed(self) -> float:
        """Seconds between the marks, when all of it has ended."""
        if not self.on_gpu:
            return sum(end - began for began, end in self.marks)
        torch.cuda.synchronize(self.device)
        return sum(began.elapsed_time(end) for began, end in self.marks) / 1e3

    def train(self) -> dict[str, Any]:
        """All steps; of those that are measured, when each ended and how long this rank computed."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.job.micro_batches, self.job.window)
        steps = self.job.warm + self.job.measured
        ends = []
        computed = []
        for _ in range(steps):
            batch = torch.randint(self.job.config.vocab_size, shape, generator=generator).to(self.device)
            self.marks.clear()
            self._step(batch)
            self.marked(self.optimiser.step)
            self.optimiser.zero_grad()
            computed.append(self._computed())
            ends.append(now())
        memory = torch.cuda.max_memory_allocated(self.device) if self.on_gpu else None
        sent = {way: size / steps for way, size in self.sent.items()}
        return {"ends": ends, "computed": computed, "sent": sent, "memory": memory}

    def _step(self, batch: Tensor) -> None:
        if self.job.way == LOCAL:
            self._local(batch)
            return
        inputs = [batch] if self.rank == 0 else []
        self.schedule.step(*inputs, target=batch if self.last else None, return_outputs=False)

    def _local(self, batch: Tensor) -> None:
        """Every micro-batch comes from the rack before, goes on without a gradient, and trains this rack."""
        rows = batch.split(1)
        stretch = self.rack.stretch
        leaving = list[Any]()
        asked = None if self.rank == 0 else self._ask()
        for number, ids in enumerate(rows):
            stream = ids
            if asked is not None:
                stream, arrival = asked
                arrival.wait()
                asked = self._ask() if number + 1 < len(rows) else None
            passed = self.marked(lambda taken=stream: stretch.run(taken))
            if not self.last:
                handed = passed.detach().contiguous()
                leaving.append((dist.isend(handed, self.rank + 1), handed))
                self.sent["forward"] += handed.nbytes
            self.marked(
                lambda out=passed, of=ids: (
                    next_token_loss(self.rack.predict(out), of) / len(rows)
                ).backward()
            )
        for message, _ in leaving:
            message.wait()

    def _ask(self) -> tuple[Tensor, Any]:
        room = torch.empty(
            1, self.job.window, self.job.config.hidden_size, dtype=self.dtype, device=self.device
        )
        return room, dist.irecv(room, self.rank - 1)


class MarkedStage(PipelineStage):
    """A stage that notes when it computes."""

    def __init__(self, rank: RackRank, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.rack_rank = rank

    def forward_one_chunk(self, *arguments: Any, **options: Any) -> Any:
        return self.rack_rank.marked(
            lambda: PipelineStage.forward_one_chunk(self, *arguments, **options)
        )

    def backward_one_chunk(self, *arguments: Any, **options: Any) -> Any:
        return self.rack_rank.marked(
            lambda: PipelineStage.backward_one_chunk(self, *arguments, **options)
        )


def be_rank(job: RackJob, folder: Path, rank: int) -> None:
    """What each process does."""
    torch.set_num_threads(1)
    if job.device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if job.device == "cuda" else "gloo"
    store = dist.FileStore(str(folder / "store"), job.racks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=job.racks)
    record = RackRank(job, rank).train()
    write_json(folder / f"rank{rank}.json", record)
    dist.barrier()
    dist.destroy_process_group()


def measure(job: RackJob, folder: Path) -> dict[str, Any]:
    """Train in processes of their own.

    Raises:
        RuntimeError: if one fails; its error is on standard error.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "store").unlink(missing_ok=True)
    start_ranks(job.racks, be_rank, (job, folder))
    records = [read_json(folder / f"rank{rank}.json") for rank in range(job.racks)]
    return {"job": asdict(job), "ranks": records} | figures(job, records)


def figures(job: RackJob, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Tokens per second, the mean share of the time that a rank idles, bytes a step, of what all ranks measured."""
    ends = [record["ends"] for record in records]
    seconds = max(one[-1] for one in ends) - max(one[job.warm - 1] for one in ends)
    busy = [
        sum(record["computed"][job.warm :]) / (one[-1] - one[job.warm - 1])
        for record, one in zip(records, ends, strict=True)
    ]
    memory = [record["memory"] for record in records if record["memory"] is not None]
    return {
        "tokens_per_second": job.measured * job.micro_batches * job.window / seconds,
        "idle": 1 - fmean(busy),
        "forward": sum(record["sent"].get("forward", 0.0) for record in records),
        "backward": sum(record["sent"].get("backward", 0.0) for record in records),
        "memory": max(memory, default=None),
    }


def values(
    found: Mapping[str, Any], pipeline: RackJob, local: RackJob, printed: Sequence[Mapping[str, Any]]
) -> list[float]:
    """What the article's rows are here, in their order and units; NaN where it was not measured.

    Bytes are those of as many tokens as the article's pipeline takes to send forward what it says.
    """
    if pipeline.key not in found or local.key not in found:
        return [math.nan] * len(printed)
    piped = found[pipeline.key]
    own = found[local.key]
    scale = next(row["value"] for row in printed if "sent" in row["what"]) / piped["forward"]
    return [
        100 * (own["tokens_per_second"] / piped["tokens_per_second"] - 1),
        100 * piped["idle"],
        scale * piped["backward"],
        scale * own["backward"],
    ]


def why_not(job: RackJob, gpus: int | None, free: int) -> str | None:
    """Why a job cannot run, if that is known beforehand: activations are not counted."""
    if gpus is not None and job.racks > gpus:
        return f"needs {job.racks} GPUs, {gpus} here"
    if job.racks < 2:
        return "needs 2 GPUs, 1 here"
    config = job.config
    layer = 4 * config.hidden_size**2 + 3 * config.hidden_size * config.intermediate_size
    ends = config.vocab_size * config.hidden_size
    numbers = layer * (config.num_hidden_layers // job.racks + job.coda) + 2 * ends
    needed = numbers * 4 * (2 if job.device == "cuda" else 4)  # weights, gradients, two moments
    if needed <= free:
        return None
    return f"needs {show_size(needed)} and activations on each of {job.racks} GPUs, {show_size(free)} can be used"
