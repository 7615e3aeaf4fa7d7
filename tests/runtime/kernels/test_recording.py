"""What is recorded of passes, and what comes out when it is done again with other numbers."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from surgeon.runtime.kernels.functions import Kernels, kernels
from surgeon.runtime.kernels.recording import Arena, Recording
from tests.waiting import PATIENCE

GAIN, EPSILON = torch.linspace(0.5, 1.5, 24), 1e-5

pytestmark = pytest.mark.skipif(kernels() is None, reason="there is no C++ compiler")


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def own() -> Kernels:
    found = kernels()
    assert found is not None
    return found


def computed(x: Tensor) -> Tensor:
    """Norms, sums, views and multiples, of (T, 24)."""
    gate = own().gate_of("silu")
    assert gate is not None
    normed = own().rms_norm(x, GAIN, EPSILON)
    assert normed.unflatten(-1, (2, 12))[:, 1:].chunk(3, -1)[0].shape == (len(x), 1, 4)
    return gate((x + normed).mul_(0.25)) + gate(normed)


def test_done_again_with_other_numbers() -> None:
    arena = Arena()
    recording, x = Recording(own(), arena), torch.randn(3, 24)
    with recording.during():
        found = computed(x)
    assert recording.problem is None
    replay = recording.finish()
    assert replay is not None
    assert torch.equal(found, computed(x))
    for _ in range(3):
        x.copy_(torch.randn(3, 24))
        replay(False)
        assert torch.equal(found, computed(x))


def test_every_number_is_right() -> None:
    """Against PyTorch's operations in float64."""
    recording, x = Recording(own(), Arena()), torch.randn(5, 24)
    with recording.during():
        found = computed(x)
    replay = recording.finish()
    assert replay is not None
    x.copy_(torch.randn(5, 24))
    replay(False)
    wide = x.double()
    normed = torch.nn.functional.rms_norm(wide, (24,), GAIN.double(), EPSILON)

    def gate(both: Tensor) -> Tensor:
        gates, values = both.chunk(2, -1)
        return torch.nn.functional.silu(gates) * values

    expected = gate((wide + normed) * 0.25) + gate(normed)
    assert (found - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize(
    "other",
    [
        lambda x: torch.cat(x.split([7, 1, 16], -1)[::-1], -1),
        lambda x: torch.cat([x], 1),
        lambda x: x[:, 3:9].contiguous(),
        lambda x: x[:, 5:6].contiguous(),
        lambda x: torch.cat([x[:1, 2:5], x[2:, :4]], -1),
        lambda x: x + x.new_zeros(3, 24),
    ],
)
def test_copies(other: Callable[[Tensor], Tensor]) -> None:
    recording, x = Recording(own(), Arena()), torch.randn(3, 24)
    with recording.during():
        found = other(x)
    replay = recording.finish()
    assert replay is not None, recording.problem
    assert torch.equal(found, other(x))
    x.copy_(torch.randn(3, 24))
    replay(False)
    assert torch.equal(found, other(x))


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x.exp(),
        lambda x: x + 1.0,
        lambda x: x + x[:1],
        lambda x: x.T + x.T,
        lambda x: x.add_(1.0),
        lambda x: x * x,
        lambda x: torch.cat([x, x]),
        lambda x: torch.cat([x.unflatten(-1, (2, 12)), x[:, :, None].expand(3, 24, 12)], -2),
        lambda x: torch.cat([x.double(), x.double()], -1),
        lambda x: x.new_empty(2, dtype=torch.int64).zero_(),
        lambda x: x.T.contiguous(),
        lambda x: x.T.reshape(-1),
        lambda x: x.double() + x.double(),
    ],
)
def test_what_cannot_be_recorded_is_computed_all_the_same(other: object) -> None:
    assert callable(other)
    recording, x = Recording(own(), Arena()), torch.randn(3, 24)
    expected = other(x.clone())
    with recording.during():
        found = other(x)
    assert torch.equal(found, expected)
    assert recording.problem is not None
    assert recording.finish() is None


def test_prompts_are_not_recorded() -> None:
    recording = Recording(own(), Arena())
    recording.note("attend_text")
    assert recording.problem == "attend_text"


def test_what_other_threads_compute_is_not_recorded() -> None:
    recording, x = Recording(own(), Arena()), torch.randn(3, 24)
    done = threading.Event()

    def aside() -> None:
        own().rms_norm(torch.randn(3, 24), GAIN, EPSILON)
        (torch.ones(3) + torch.ones(3)).exp()
        done.set()

    with recording.during():
        found = computed(x)
        thread = threading.Thread(target=aside)
        thread.start()
        assert done.wait(PATIENCE)
        thread.join()
    alone = Recording(own(), Arena())
    with alone.during():
        computed(x)
    replay = recording.finish()
    assert replay is not None
    assert recording.problem is None
    assert len(recording.calls) == len(alone.calls)
    replay(False)
    assert torch.equal(found, computed(x))


FIRST_RECORDING = """
import sys, torch
from surgeon.runtime.kernels.functions import kernels
from surgeon.runtime.kernels.recording import Arena, Recording
recording, x = Recording(kernels(), Arena()), torch.ones(2, 8)
with torch.inference_mode(), recording.during():
    x.view(4, 4) + x.view(4, 4)
assert len(recording.calls) == 1
print("torch._dynamo" in sys.modules)
"""


def test_no_compiler_is_imported_for_a_recording() -> None:
    """PyTorch would do so for a mode like this one, which takes half a second or more of a rank's first pass."""
    found = subprocess.run(
        [sys.executable, "-c", FIRST_RECORDING], capture_output=True, text=True, check=True
    )
    assert found.stdout == "False\n"


def test_nothing_is_recorded_while_paused() -> None:
    recording, x = Recording(own(), Arena()), torch.randn(3, 24)
    with recording.during(), recording.pause():
        computed(x).exp()
    assert recording.problem is None
    assert recording.calls == []


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 3)), max_size=30))
def test_memory_is_given_to_nobody_who_shares_it(wanted: list[tuple[int, int]]) -> None:
    """Each tensor lives until so many others have been made; half of them only as views."""
    arena, alive = Arena(), list[tuple[Tensor, int]]()
    with torch.inference_mode():
        for number, (count, life) in enumerate(wanted):
            made = arena.empty((count,)).fill_(number)
            alive.append((made[count // 2 :] if number % 2 else made, number + life))
            del made
            alive = [(tensor, end) for tensor, end in alive if end >= number]
            spans = sorted(
                (one.data_ptr(), one.data_ptr() + one.nbytes) for one, _ in alive if one.nbytes
            )
            assert all(before[1] <= after[0] for before, after in pairwise(spans))
    assert sum(buffer.nbytes for buffer in arena._buffers) <= 6 * 4 * (
        64 + 128 + 256
    )  # of each size as many as live at a time, the new one among them


def test_what_is_empty_is_borrowed_too() -> None:
    """As the logits of a rank that has none of a few tokens."""
    assert Arena.borrow(torch.empty(3, 0)).shape == (3, 0)


def test_memory_is_used_again() -> None:
    arena = Arena()
    for count in range(1, 100):
        first, second = arena.empty((count, 3)), arena.empty((count,))
        borrowed = arena.borrow(first)
        borrowed.fill_(count)
        assert first.eq(count).all()
        assert second.shape == (count,)
        del first, second
    assert borrowed.eq(99).all()
    assert sum(buffer.nbytes for buffer in arena._buffers) <= 4 * 2 * 2 * 512
