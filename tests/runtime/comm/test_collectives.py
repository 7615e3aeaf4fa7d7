"""What every kind of collectives keeps: exact sums, the same on all ranks, of any size and dtype, several in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from surgeon.benchmarks.timing import PassRecorder, TimedCollectives
from surgeon.processes.torchrun import RankLocation, TorchrunEnvironment
from surgeon.runtime.comm.collectives import (
    Alone,
    Compressed,
    Counts,
    EmulatedLink,
    Link,
    TorchCollectives,
    Unconnected,
    Wait,
)
from surgeon.runtime.comm.shared_memory import SLOT_BYTES, SLOTS
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.worker.rank import (
    NCCL_SHARES,
    RankOptions,
    RankSettings,
    choose_collectives,
    choose_device,
    gpu_room,
    rank_device,
)
from surgeon.runtime.worker.ranks import Ranks
from tests.runtime import on_ranks
from tests.runtime.comm import on_collectives


@pytest.fixture(
    scope="module", params=[("gloo", 2), ("shm", 2), ("shm", 5)], ids=lambda pair: f"{pair[0]}{pair[1]}"
)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    kind, number = request.param
    with Ranks(RankOptions(number, collectives=kind)) as started:
        yield started


def expected_sum(number: int, size: int, dtype: torch.dtype) -> Tensor:
    return (
        torch.stack([on_ranks.part(rank, size, torch.float64) for rank in range(number)])
        .sum(0)
        .to(dtype)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_sums_of_any_size(ranks: Ranks, dtype: torch.dtype) -> None:
    number = len(ranks.pids)
    sizes = [1, 7, 4096, SLOT_BYTES // 4, SLOT_BYTES // 2 + 3, 3]
    for sums in ranks.call(on_ranks.sums_in_flight, sizes, dtype, 2):
        for size, found in zip(sizes, sums, strict=True):
            assert found.dtype == dtype
            assert torch.equal(found, expected_sum(number, size, dtype))


@pytest.mark.parametrize("depth", [1, 2, SLOTS, 2 * SLOTS + 1])
def test_many_in_flight(ranks: Ranks, depth: int) -> None:
    sizes = [1 + number % 5 for number in range(6 * SLOTS + 1)]
    for sums in ranks.call(on_ranks.sums_in_flight, sizes, torch.float32, depth):
        for size, found in zip(sizes, sums, strict=True):
            assert torch.equal(found, expected_sum(len(ranks.pids), size, torch.float32))


@pytest.mark.parametrize("size", [1, 300, SLOT_BYTES // 4 + 5])
def test_gathered_in_the_order_of_ranks(ranks: Ranks, size: int) -> None:
    number = len(ranks.pids)
    expected = torch.stack([on_ranks.part(rank, size, torch.float32) for rank in range(number)])
    assert all(
        torch.equal(found, expected) for found in ranks.call(on_ranks.gathered, size, torch.float32)
    )


def test_ranks_that_come_late(ranks: Ranks) -> None:
    number, rounds = len(ranks.pids), 12
    assert ranks.call(on_ranks.staggered_sums, rounds) == [float(number * sum(range(rounds)))] * number


def test_subgroups_reduce_among_themselves(ranks: Ranks) -> None:
    number = len(ranks.pids)
    groups = [(0, 1)] if number == 2 else [(0, 1), (2, 3, 4), (1, 2)]  # a subgroup may be everybody
    for rank, found in enumerate(ranks.call(on_ranks.group_sums, groups, 5)):
        own = [float(sum(group)) for group in groups if rank in group]
        assert [float(value) for value in found] == [*own, float(number)] * 5


def test_one_rank_sends_and_counts_nothing() -> None:
    counts = Counts()
    tensor = torch.arange(3.0)
    assert torch.equal(Alone().all_reduce(tensor, counts)(), tensor)
    assert torch.equal(Alone().all_gather(tensor, counts), tensor[None])
    assert counts == Counts()


@pytest.mark.parametrize("ranks", [("gloo", 2)], indirect=True, ids=["gloo2"])
def test_only_what_is_to_be_overlapped_is_asynchronous(
    ranks: Ranks, tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    """A sum that is waited for at once needs no object to wait for; the embedding's is always one."""
    tiny_model("llama", 2).save_pretrained(tmp_path)
    expected = {
        "A0 F0 A1 F1": (5, 0),
        "A0 F0 >A1 >F1": (2, 3),
        "[A0 A1] >[F0 F1]": (1, 2),
        "{A0/2:0 >F0/2:0 | A0/2:1 >F0/2:1} A1 F1": (4, 0),
        "{A0/2:0 F0/2:0 | A0/2:1 F0/2:1} >A1 F1": (2, 2),
    }
    plans = [make_plan(tmp_path, 2, 8, program) for program in expected]
    for found in ranks.call(on_collectives.waited_for_at_once, plans):
        assert found == list(expected.values())


def test_nccl_connects_at_once_and_by_streams_of_high_priority(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[dict[str, Any]] = []
    nccl = SimpleNamespace(Options=lambda **options: options)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda *_, **options: asked.append(options)
    )
    monkeypatch.setattr(torch.distributed, "new_group", lambda _, **options: asked.append(options))
    device = torch.device("cuda", 1)
    TorchCollectives.connect("nccl", 1, 3, tmp_path / "meeting", device).subgroup((0, 1))
    for options in asked:
        assert options["device_id"] == device
        assert options["pg_options"] == {"is_high_priority_stream": True}
    asked.clear()
    TorchCollectives.connect("gloo", 1, 3, tmp_path / "meeting", device).subgroup((0, 1))
    assert len(asked) == 2
    assert not any("device_id" in options for options in asked)


def test_ranks_that_are_not_connected_add_nothing_up(
    tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    plan = make_plan(tmp_path, 2, 8)
    with Ranks(RankOptions(2, collectives="none")) as unconnected:
        for rank, (total, gathered, counts) in enumerate(unconnected.call(on_collectives.unconnected)):
            assert torch.equal(total, torch.tensor([float(rank)]))
            assert torch.equal(gathered, torch.full((2, 1), float(rank)))
            assert counts == Counts()
        # A whole model runs all the same, and says nothing of worth: a service refuses it.
        (first, _, vocabulary), (second, _, _) = unconnected.call(
            on_ranks.logits_in_chunks, plan, [torch.ones(1, 4).long()]
        )
        assert first.shape == second.shape == (1, 4, 97)
        assert not torch.equal(first, second)
        assert vocabulary == Counts()


def test_choosing_collectives_and_devices() -> None:
    assert choose_collectives("auto", "cpu") == "shm"
    assert choose_collectives("auto", "cuda") == "nccl"
    assert RankOptions(2).collectives == "shm"
    assert choose_collectives("gloo", "cpu") == "gloo"
    assert choose_collectives("none", "cpu") == choose_collectives("none", "cuda") == "none"
    with pytest.raises(ValueError, match="nccl does not connect ranks on a cpu device; use shm or gloo"):
        choose_collectives("nccl", "cpu")
    with pytest.raises(ValueError, match="'glo'.*did you mean 'gloo'"):
        choose_collectives("glo", "cpu")
    assert choose_device("auto", 10_000) == choose_device("cpu", 2) == "cpu"
    with pytest.raises(ValueError, match="10000 ranks need a GPU each"):
        choose_device("cuda", 10_000)
    with pytest.raises(ValueError, match="no device 'gpu'"):
        choose_device("gpu", 1)


@pytest.mark.parametrize(
    "name", ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "NCCL_MULTI_RANK_GPU_ENABLE"]
)
def test_ranks_share_a_gpu_where_that_is_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="2 ranks need a GPU each, and there are 1"):
        choose_device("cuda", 2)
    monkeypatch.setenv(name, "1")
    assert choose_device("cuda", 2) == "cuda"
    assert choose_device("auto", 2) == "cpu"  # not unless GPUs are asked for


@pytest.mark.parametrize(
    ("kind", "gpus", "number"), [("gloo", 1, 0), ("gloo", 2, 1), ("gloo", 4, 3), ("nccl", 4, 3)]
)
def test_the_gpu_of_a_rank(kind: str, gpus: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    settings = RankSettings(3, RankLocation(3, 4), RankOptions(4, "cuda", kind), Path("unused"))
    assert rank_device(settings) == torch.device("cuda", number)


def test_processes_that_see_one_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """As batch systems start them; where one GPU is all there is, nothing says that it is one process's own."""
    variables = TorchrunEnvironment(3, 4, 1, 2, "10.0.0.1", 4000).variables() | {
        "CUDA_VISIBLE_DEVICES": "5"
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 2000))
    assert RankOptions(4, "auto") == RankOptions(4, "cuda", "nccl")
    settings = RankSettings(3, RankLocation(1, 2), RankOptions(4, "cuda"), Path("unused"))
    rank = SimpleNamespace(settings=settings, device=rank_device(settings))
    assert (rank.device, gpu_room(rank)) == (torch.device("cuda", 0), 800)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert gpu_room(rank) == 400  # both have this one
    assert RankOptions(4, "auto").device == "cpu"
    with pytest.raises(ValueError, match="there is no GPU 1 for rank 3, only 1"):
        rank_device(settings)


def test_ranks_that_nccl_lets_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NCCL_SHARES, "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 2000))
    settings = RankSettings(1, RankLocation(1, 2), RankOptions(2, "cuda", "nccl"), Path("unused"))
    rank = SimpleNamespace(settings=settings, device=rank_device(settings))
    assert (rank.device, gpu_room(rank)) == (torch.device("cuda", 0), 400)


@pytest.mark.parametrize(("kind", "gpus"), [("nccl", 3), ("gloo", 0)])
def test_a_rank_without_a_gpu(kind: str, gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ValueError, match=f"there is no GPU 3 for rank 3, only {gpus}"):
        rank_device(RankSettings(3, RankLocation(3, 4), RankOptions(4, "cuda", kind), Path("unused")))


def test_what_a_cuda_graph_can_hold() -> None:
    nccl = TorchCollectives(0, (0, 1), device=torch.device("cuda", 0))
    timed = TimedCollectives(nccl, PassRecorder())
    assert all(
        one.capturable
        for one in (Alone(), Unconnected(0, (0, 1)), nccl, Compressed(nccl, "int8"), timed)
    )
    # The process waits, where the device would go on.
    assert not EmulatedLink(nccl, Link(0.001)).capturable
    gloo = TorchCollectives(0, (0, 1))
    assert not any(one.capturable for one in (gloo, Compressed(gloo, "int8")))


@pytest.mark.parametrize(("marking", "seen"), [(True, [False, False]), (False, [True, True])])
def test_timing_leaves_sums_on_the_streams_that_they_have(marking: bool, seen: list[bool]) -> None:
    """On CPUs waiting is apart, so that it can be timed; a GPU's current stream has what is awaited at once."""
    asked = list[bool]()

    class Noted(Unconnected):
        def all_reduce(self, tensor: Tensor, counts: Counts, at_once: bool = False) -> Wait:
            asked.append(at_once)
            return super().all_reduce(tensor, counts, at_once)

        def start_all_gather(self, tensor: Tensor, counts: Counts, at_once: bool = False) -> Wait:
            asked.append(at_once)
            return super().start_all_gather(tensor, counts, at_once)

    timed = TimedCollectives(Noted(0, (0, 1)), PassRecorder(marking=marking))
    timed.all_reduce(torch.ones(1), Counts(), at_once=True)()
    timed.all_gather(torch.ones(1), Counts())
    assert asked == seen
