"""Which way sums go by their size, on which stream, and that they are the same."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from surgeon.processes.torchrun import RankLocation
from surgeon.runtime.comm import shared_memory as symmetric_memory
from surgeon.runtime.comm.collectives import TorchCollectives
from surgeon.runtime.comm.shared_memory import (
    MOST_BYTES,
    ONE_SHOT_BYTES,
    OPERATIONS,
    SymmetricSum,
    by_bytes,
    is_allowed,
    ways_through_memory,
)
from surgeon.runtime.worker import rank as rank_module
from surgeon.runtime.worker.rank import Rank, RankOptions, RankSettings
from surgeon.runtime.worker.ranks import Ranks
from tests.runtime import on_ranks
from tests.runtime.comm import on_collectives


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(RankOptions(2, collectives="gloo")) as started:
        yield started


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_sums_are_the_same_whichever_way_they_go(ranks: Ranks, dtype: torch.dtype) -> None:
    sizes = [1, 16, 17, 64, 65, 300]
    for sums, (small, middle), asked in ranks.call(on_collectives.sums_by_size, sizes, dtype):
        for size, found in zip(2 * sizes, sums, strict=True):
            expected = torch.stack([on_ranks.part(rank, size, torch.float64) for rank in range(2)]).sum(
                0
            )
            assert torch.equal(found, expected.to(dtype))
        if dtype == torch.int64:  # which neither way takes
            assert (small, middle) == ([], [])
            continue
        assert small == [(4, False), (64, False), (4, True), (64, True)]
        assert middle == [(68, False), (256, False), (68, True), (256, True)]
        aside = ["behind the current one", "begin", "event", "end"]
        assert asked == ["stream of priority -1", *4 * aside, "computed meanwhile", *4 * ["joined"]]


def test_the_way_by_bytes_and_ranks() -> None:
    one, two, cast = (SymmetricSum(name, 2, "", (torch.empty(0), torch.empty(0))) for name in OPERATIONS)
    chosen = [
        [(way.name, way.most) for way in by_bytes(ways, ranks)]
        for ways, ranks in (([one, two, cast], 2), ([one, two], 4), ([one, two, cast], 8))
    ]
    assert chosen[0] == [("one shot", MOST_BYTES)]
    assert chosen[1] == [("one shot", ONE_SHOT_BYTES), ("two shots", MOST_BYTES)]
    assert chosen[2] == [("one shot", ONE_SHOT_BYTES), ("multimem", MOST_BYTES)]


@pytest.mark.parametrize(("ranks", "names"), [(3, ["one shot"]), (4, ["one shot", "two shots"])])
def test_two_shots_are_of_two_four_or_eight_ranks(
    ranks: int, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's kernel is "Not implemented for world_size=3"; larger sums of three go by NCCL."""
    monkeypatch.setattr(symmetric_memory, "_holds_everywhere", lambda *given: given[-1])
    memory = SimpleNamespace(empty=torch.empty, rendezvous=lambda *_: SimpleNamespace(multicast_ptr=0))
    inner = TorchCollectives(0, tuple(range(ranks)), SimpleNamespace(group_name="0"))
    ways = ways_through_memory(inner, torch.device("cpu"), memory)
    assert [way.name for way in ways] == names
    assert [way.name for way in by_bytes(ways, ranks)] == names


def test_what_the_operations_on_symmetric_memory_take() -> None:
    way = SymmetricSum("one shot", 2, "", (torch.empty(0), torch.empty(0)))
    assert way.fits(torch.zeros(16, dtype=torch.bfloat16))
    assert not way.fits(torch.zeros(12, dtype=torch.bfloat16))  # ranks read in pieces of 16 bytes each
    assert not way.fits(torch.zeros(16, dtype=torch.float16))
    assert not way.fits(torch.zeros(MOST_BYTES // 4 + 8))


@pytest.mark.parametrize(
    "name", ["one_shot_all_reduce_out", "two_shot_all_reduce_out", "multimem_all_reduce_"]
)
def test_pytorch_has_the_operations_as_they_are_called(name: str) -> None:
    names = [each.name for each in getattr(torch.ops.symm_mem, name).default._schema.arguments]
    assert names[:3] == ["input", "reduce_op", "group_name"]
    assert names[3:] == {"one_shot_all_reduce_out": ["out"], "two_shot_all_reduce_out": ["output"]}.get(
        name, []
    )


@pytest.mark.parametrize(
    ("fails", "asked"),
    [
        ("empty 1", 1),
        ("empty 2", 2),
        ("rendezvous 1", 3),
        ("rendezvous 2", 4),
        ("multicast", 4),
        ("", 4),
    ],
)
def test_ranks_agree_before_they_wait_for_each_other(ranks: Ranks, fails: str, asked: int) -> None:
    """What fails on one of two has failed on both: they ask for the same, and neither is left in a rendezvous."""
    calls = ["empty", "empty", "rendezvous", "rendezvous"][:asked]
    ways = {"multicast": ["one shot", "two shots"], "": list(OPERATIONS)}.get(fails, [])
    assert ranks.call(on_collectives.ways_agreed_on, fails) == [(ways, calls)] * 2


@pytest.mark.parametrize(
    ("gpus", "shared", "tries"), [(1, False, False), (1, True, True), (2, False, True)]
)
def test_ranks_that_share_a_gpu(ranks: Ranks, gpus: int, shared: bool, tries: bool) -> None:
    assert ranks.call(on_collectives.asked_for_memory, gpus, shared) == [tries] * 2


def test_ranks_that_share_a_gpu_gather_through_its_memory(ranks: Ranks, tmp_path: Path) -> None:
    """Over gloo no pass could be recorded: the host waits in it."""
    for *found, nothing in ranks.call(on_collectives.gathered_through_memory, str(tmp_path)):
        assert [one[:, 1, 2].tolist() for one in found[::3]] == [[k, 10 + k] for k in range(5)]
        assert [one.dtype for one in found[:3]] == [torch.float64, torch.int64, torch.bfloat16]
        assert all(torch.equal(one.float(), found[k - k % 3].float()) for k, one in enumerate(found))
        assert nothing.shape == (2, 0, 3)


def test_ranks_that_are_to_share_a_gpu_say_why_they_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums by other ways would look as if they had gone this one."""

    def refuse(*_: object, **__: object) -> Tensor:
        raise RuntimeError("CUDA driver error: operation not supported")

    monkeypatch.setattr(symmetric_memory, "_holds_everywhere", lambda *given: given[-1])
    monkeypatch.setenv(symmetric_memory.OVERLAPPING, "1")
    inner = TorchCollectives(0, (0, 1), SimpleNamespace(group_name="0"))
    with pytest.raises(RuntimeError, match="CUDA driver error: operation not supported"):
        ways_through_memory(inner, torch.device("cpu"), SimpleNamespace(empty=refuse))


@pytest.mark.parametrize(
    ("device", "collectives", "shared", "tries"),
    [
        ("cuda", "gloo", "1", True),
        ("cuda", "gloo", "0", False),
        ("cuda", "nccl", "0", True),
        ("cpu", "gloo", "1", False),
    ],
)
def test_who_tries_symmetric_memory(
    device: str, collectives: str, shared: str, tries: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(symmetric_memory.OVERLAPPING, shared)
    monkeypatch.setattr(TorchCollectives, "connect", lambda *_, **__: "connected")

    def connect(inner: Any, _: torch.device) -> str:
        print("as rank 0 says", file=sys.stderr)
        return f"{inner} by memory"

    monkeypatch.setattr(rank_module, "with_symmetric_memory", connect)
    said: list[str] = []
    settings = RankSettings(0, RankLocation(0, 2), RankOptions(2, device, collectives), Path("unused"))
    made: Any = SimpleNamespace(
        settings=settings, rank=0, device=torch.device(device), notify=said.append
    )
    assert Rank._connect(made) == ("connected by memory" if tries else "connected")
    assert said == ["as rank 0 says"] * tries


def test_gpus_that_cannot_reach_each_other_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda _, other: other == 0)
    # What other ranks say.
    monkeypatch.setattr(symmetric_memory, "_holds_everywhere", lambda _inner, _device, here: here)
    inner = TorchCollectives(1, (0, 1, 2, 3))
    assert symmetric_memory.with_symmetric_memory(inner, torch.device("cuda", 1)) is inner
    said = "rank 1 sums by NCCL alone: GPU 1 cannot reach the memory of GPU 2 and GPU 3\n"
    assert capsys.readouterr().err == said


def test_memory_of_others_is_left_alone_where_nccl_leaves_it() -> None:
    assert is_allowed({})
    assert is_allowed({"NCCL_P2P_DISABLE": "0", "NCCL_P2P_LEVEL": "NVL"})
    assert not is_allowed({"NCCL_P2P_DISABLE": "1"})
    assert not is_allowed({"NCCL_P2P_LEVEL": "LOC"})
    assert not is_allowed({"SURGEON_SYMMETRIC_MEMORY": "off"})
