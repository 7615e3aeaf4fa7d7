"""What only collectives through shared memory have: tensors of any kind, ranks that outnumber cores, waiting."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
from torch import Tensor

from surgeon.runtime.comm import shared_memory
from surgeon.runtime.comm.collectives import Counts
from surgeon.runtime.comm.shared_memory import (
    FEWEST_SPINS,
    SLOT_BYTES,
    SPINS,
    SharedMemoryCollectives,
    create_memory,
)
from surgeon.runtime.worker.rank import RankOptions
from surgeon.runtime.worker.ranks import Ranks
from tests.runtime import on_ranks
from tests.runtime.comm import on_collectives
from tests.waiting import takes_less_than


@pytest.fixture
def members() -> Iterator[list[SharedMemoryCollectives]]:
    """Three ranks in one process, of which none ever waits if all of them start before any asks."""
    descriptor = create_memory(3)
    yield [SharedMemoryCollectives(rank, (0, 1, 2), descriptor, 3) for rank in range(3)]
    os.close(descriptor)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int32, torch.int64]
)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 0, 4), (2, 3, 7)])
def test_any_dtype_and_shape(
    members: list[SharedMemoryCollectives], dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    parts = [
        torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)
        for rank in range(3)
    ]
    sums = [member.all_reduce(part, Counts()) for member, part in zip(members, parts, strict=True)]
    gathered = [
        member.start_all_gather(part, Counts()) for member, part in zip(members, parts, strict=True)
    ]
    for total, together in zip(sums, gathered, strict=True):
        assert torch.equal(total(), parts[0] + parts[1] + parts[2])
        assert torch.equal(together(), torch.stack(parts))


def test_tensors_that_are_views(members: list[SharedMemoryCollectives]) -> None:
    whole = torch.arange(24.0).view(4, 6)
    views = [whole.T, whole[:, ::2].T.repeat(2, 1), whole.flip(0).T]
    sums = [member.all_reduce(view, Counts()) for member, view in zip(members, views, strict=True)]
    assert all(torch.equal(total(), views[0] + views[1] + views[2]) for total in sums)


def test_a_rank_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "TIMEOUT", timedelta(seconds=0.2))
    descriptor = create_memory(3)
    collectives = SharedMemoryCollectives(0, (0, 2), descriptor, 3)
    wait = collectives.all_reduce(torch.ones(2), Counts())
    used = time.thread_time()
    with pytest.raises(TimeoutError, match=r"rank 0 has waited \d+ s for rank 2, in vain"):
        wait()
    assert time.thread_time() - used < 0.1
    os.close(descriptor)


def test_more_ranks_than_cores() -> None:
    number = 4 * (os.cpu_count() or 1) if (os.cpu_count() or 1) <= 3 else 12
    groups = [tuple(range(first, first + 2)) for first in range(0, number, 2)]
    with Ranks(RankOptions(number, collectives="shm")) as ranks:
        sizes = [1, 4096, SLOT_BYTES // 4 + 1]
        for sums in ranks.call(on_ranks.sums_in_flight, sizes, torch.float32, 2):
            for size, found in zip(sizes, sums, strict=True):
                assert torch.equal(
                    found, sum(on_ranks.part(rank, size, torch.float32) for rank in range(number))
                )
        for rank, found in enumerate(ranks.call(on_ranks.group_sums, groups, 20)):
            own = float(sum(next(group for group in groups if rank in group)))
            assert [float(value) for value in found] == [own, float(number)] * 20


def test_idle_ranks_leave_the_processor_alone() -> None:
    with Ranks(RankOptions(3, collectives="shm")) as ranks:
        ranks.call(on_ranks.staggered_sums, 3)

        def idle() -> float:
            before = ranks.call(on_collectives.processor_seconds)
            time.sleep(1.0)
            after = ranks.call(on_collectives.processor_seconds)
            return max(then - first for then, first in zip(after, before, strict=True))

        assert takes_less_than(0.02, idle)
        # Of a second in which ranks 1 and 2 wait for rank 0.
        assert takes_less_than(0.1, lambda: max(ranks.call(on_collectives.wait_for_a_late_rank, 1.0)))


def test_looking_lasts_as_long_as_it_has_paid_lately(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that waits for one without a core gives up its own sooner, and looks for longer when that one is back."""
    descriptor = create_memory(2)
    own, other = (SharedMemoryCollectives(rank, (0, 1), descriptor, 2) for rank in range(2))
    own.spins = own.most_spins = 3000
    now = arrival = 0.0
    arrived: list[Callable[[], Tensor]] = []

    def sleep(seconds: float) -> None:
        """Let time pass; the other rank comes when it is due."""
        nonlocal now
        now += seconds
        if now >= arrival:
            arrived.append(other.all_reduce(torch.ones(1), Counts()))

    def wait_for(seconds: float) -> int:
        """Wait for a rank that is so late; how often it is looked for next time."""
        nonlocal arrival
        arrival = now + seconds
        total = own.all_reduce(torch.ones(1), Counts())
        assert total() == 2
        assert arrived.pop()() == 2
        return own.spins

    monkeypatch.setattr(shared_memory.time, "sleep", sleep)
    monkeypatch.setattr(shared_memory.time, "monotonic", lambda: now)
    assert [wait_for(0.01) for _ in range(5)] == [1500, 750, 375, 200, 200]
    assert [wait_for(0.0005) for _ in range(5)] == [400, 800, 1600, 3000, 3000]
    os.close(descriptor)


@pytest.mark.parametrize("crowded", [False, True])
def test_groups_look_as_long_as_all_ranks_do(crowded: bool) -> None:
    """Though a rank that is bound to its own cores sees fewer of them by then."""
    descriptor = create_memory(3)
    ranks = SharedMemoryCollectives(0, (0, 1, 2), descriptor, 3, crowded=crowded)
    group = ranks.subgroup((0, 1))
    assert isinstance(group, SharedMemoryCollectives)
    assert group.most_spins == ranks.most_spins == (FEWEST_SPINS if crowded else SPINS)
    os.close(descriptor)
