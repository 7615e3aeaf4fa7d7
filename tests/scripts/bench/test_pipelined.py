"""scripts/bench/pipelined_ranks.py: ranks come to the numbers of one process; links, pace, bytes."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

from scripts.bench.pipelined_ranks import Job, Pace, Trace, Traffic, prepare, read_records, shared_file
from scripts.bench.rack_model import Optimisation, Stretch, build, cut, head_units
from surgeon.runtime.comm.collectives import Link
from tests import warm
from tests.clock import HandClock

RANK = (
    "import pickle, sys; from pathlib import Path; from scripts.bench.pipelined_ranks import run_rank; "
    "folder = Path(sys.argv[1]); run_rank(pickle.loads((folder / 'job').read_bytes()), folder, int(sys.argv[2]))"
)
STEPS = Optimisation(steps=3, batch=4, micro_batch=1, rate=1e-2, warmup=1)


def config(layers: int = 4) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=53,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        tie_word_embeddings=False,
        use_cache=False,
    )


def windows() -> Tensor:
    return torch.randint(53, (20, 16), generator=torch.Generator().manual_seed(3))


def run(job: Job, folder: Path) -> list[dict[str, Any]]:
    prepare(job, build(job.config, 0), windows(), folder)
    (folder / "job").write_bytes(pickle.dumps(job))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        warm.Popen([sys.executable, "-c", RANK, str(folder), str(rank)], env=environment)
        for rank in range(2)
    ]
    assert [rank.wait() for rank in ranks] == [0, 0]
    return read_records(job, folder)


def in_one_process(model: PreTrainedModel) -> list[float]:
    """Training end to end by transformers' own forward pass."""
    optimiser, rates = STEPS.optimiser(list(model.named_parameters()))
    losses = []
    for ids in STEPS.batches(windows()):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), STEPS.norm)
        optimiser.step()
        rates.step()
        optimiser.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_stages_come_to_the_losses_of_one_process(tmp_path: Path) -> None:
    records = run(Job("1f1b", 2, config(), STEPS, Link(0.001, 1e6)), tmp_path)
    assert records[-1]["losses"] == pytest.approx(in_one_process(build(config(), 0)), rel=1e-5)
    stream = 16 * 16 * 4 * STEPS.batch * STEPS.steps
    assert [record["sent"] for record in records] == [{"forward": stream}, {"backward": stream}]


def test_stretches_together_are_the_model() -> None:
    model, ids = build(config(), 1), windows()[:2]
    stream = ids
    for layers in cut(4, 2):
        stream = Stretch(model, layers)(stream)
    torch.testing.assert_close(stream, model(input_ids=ids).logits)


def test_layers_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="6 layers cannot be cut into 4"):
        cut(6, 4)


def test_the_head_counts_as_the_layers_that_compute_as_much() -> None:
    layer = build(config(), 0).model.layers[0]
    matrices = sum(one.weight.numel() for one in layer.modules() if isinstance(one, nn.Linear))
    assert head_units(config()) == pytest.approx(53 * 16 / matrices)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    hand = HandClock()
    monkeypatch.setattr("scripts.bench.pipelined_ranks.time", hand)
    monkeypatch.setattr("scripts.bench.pipelined_ranks.SystemClock", lambda: hand)
    return hand


def test_computing_takes_at_least_its_time_and_as_many_times_as_long_as_it_is_slow(
    clock: HandClock,
) -> None:
    for pace, units, took, least in (
        (Pace(1.0, 10), 2.0, 1.0, 20.0),
        (Pace(3.0, 10), 1.0, 1.0, 30.0),
        (Pace(3.0, 10), 1.0, 11.0, 33.0),
        (Pace(), 100.0, 1.0, 1.0),
    ):
        begun = clock.now()
        clock.sleep(took)
        pace.keep(begun, units)
        assert clock.now() - begun == pytest.approx(least)


class Arrived:
    """A message that gloo has delivered."""

    def wait(self) -> None:
        """It is there."""


def op(kind: Any, peer: int, size: int, part: str) -> Any:
    made = object.__new__(dist.P2POp)
    made.op, made.peer, made.tensor = kind, peer, torch.zeros(1, dtype=torch.uint8).expand(size)
    made.part, made.micro_batch = part, 0  # type: ignore[attr-defined]
    return made


def test_a_message_arrives_after_the_links_time_and_leaves_before_that(
    tmp_path: Path, clock: HandClock
) -> None:
    shared_file(tmp_path / "shared", 2)
    link = Link(5, 10)
    ends = [Traffic(rank, 2, link, tmp_path / "shared", Trace()) for rank in range(2)]
    begun = clock.now()
    (sent,) = ends[0]._post([op(dist.isend, 1, 100, "forward")], lambda: [Arrived()])
    (received,) = ends[1]._post([op(dist.irecv, 0, 100, "forward")], lambda: [Arrived()])
    assert clock.now() == begun  # neither keeps the rank from going on
    sent.wait()
    assert clock.now() - begun == 100 / 10
    received.wait()
    assert clock.now() - begun == 100 / 10 + 5
    assert ends[0].sent == {"forward": 100}
    assert [row[2] for row in ends[0].trace.rows] == ["send", "wait_room"]
    assert [row[2] for row in ends[1].trace.rows] == ["wait_input"]


def test_without_a_link_nothing_waits_longer_than_the_message(tmp_path: Path, clock: HandClock) -> None:
    shared_file(tmp_path / "shared", 2)
    ends = [Traffic(rank, 2, None, tmp_path / "shared", Trace()) for rank in range(2)]
    (sent,) = ends[0]._post([op(dist.isend, 1, 10**9, "backward")], lambda: [Arrived()])
    (received,) = ends[1]._post([op(dist.irecv, 0, 10**9, "backward")], lambda: [Arrived()])
    begun = clock.now()
    sent.wait()
    received.wait()
    assert clock.now() == begun
