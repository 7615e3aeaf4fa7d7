"""The kernels for GPUs against PyTorch in float64, of drawn sizes and dtypes; where there is no GPU, interpreted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.activations import ACT2FN

from surgeon.runtime.kernels.functions import FEW
from surgeon.runtime.kernels.triton import Placing, TextBlocks
from surgeon.runtime.kernels.triton.functions import ACTIVATIONS, TritonKernels
from surgeon.runtime.model.attending import rotate_

pytest.importorskip("triton", reason="triton is not installed")
# Numpy's, where it is infinite.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 4
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
ROUNDED = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # relative errors of results
few = settings(max_examples=8)


def kernels(programs: int = 1) -> TritonKernels:
    made = TritonKernels()
    made.programs = programs
    return made


def close(found: Tensor, expected: Tensor) -> bool:
    """Whether numbers differ by no more than their dtype does."""
    assert found.shape == expected.shape
    return bool((found.double() - expected).norm() <= ROUNDED[found.dtype] * expected.norm() + 1e-30)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


@few
@given(
    starts=st.lists(st.integers(0, 150), min_size=1, max_size=3),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 5),
    dim=st.sampled_from([8, 20, 64]),
    dtype=DTYPES,
    window=st.sampled_from(
        [None, None, *((size, chunked) for size in (1, 5, 33, 400) for chunked in (False, True))]
    ),
    cap=st.sampled_from([None, 2.0]),
    scale=st.sampled_from([None, 0.3]),
    sunk=st.booleans(),
    programs=st.sampled_from([1, 8, 24]),
)
def test_attend(
    starts: list[int],
    kv_heads: int,
    group: int,
    dim: int,
    dtype: torch.dtype,
    window: tuple[int, bool] | None,
    cap: float | None,
    scale: float | None,
    sunk: bool,
    programs: int,
) -> None:
    """Texts of any lengths in any blocks; of places that no text has nothing is seen, and no part is left counted."""
    lengths = [start + 1 for start in starts]
    width = max(-(-length // BLOCK) for length in lengths) + 2
    order = torch.randperm(len(starts) * width, device=DEVICE)
    tables = order.view(len(starts), width)
    written = drawn(2 * kv_heads, len(starts) * width * BLOCK, dim, dtype=dtype)
    pair, queries = (
        torch.full_like(written, torch.nan),
        drawn(len(starts), kv_heads * group, dim, dtype=dtype),
    )
    sinks, expected = drawn(kv_heads * group, dtype=torch.float32), []
    for table, length, query in zip(tables, lengths, queries, strict=True):
        at = torch.arange(length, device=DEVICE)
        places = table[at // BLOCK] * BLOCK + at % BLOCK
        pair[:, places] = written[:, places]
        keys, values = written[:, places].double().chunk(2)
        scores = (
            query.double().view(kv_heads, group, dim) @ keys.mT * (dim**-0.5 if scale is None else scale)
        )
        if cap is not None:
            scores = cap * (scores / cap).tanh()
        if window is not None:
            size, chunked = window
            scores[..., : (length - 1) // size * size if chunked else max(0, length - size)] = -torch.inf
        if sunk:
            scores = torch.cat([scores, sinks.double().view(kv_heads, group, 1)], -1)
        expected.append((scores.softmax(-1)[..., :length] @ values).flatten())
    arrived = torch.zeros(len(starts) * kv_heads, dtype=torch.int32, device=DEVICE)
    texts = TextBlocks(tables, torch.tensor(starts, device=DEVICE), arrived)
    found = kernels(programs).attend(
        queries, pair, texts, BLOCK, scale, window, cap, sinks if sunk else None
    )
    assert found.dtype == dtype
    assert close(found, torch.stack(expected))
    assert not arrived.any()


@few
@given(
    tokens=st.integers(1, 4),
    heads=st.integers(1, 4),
    kv_heads=st.integers(1, 2),
    half=st.integers(1, 20),
    turned=st.sampled_from([None, 0.0, 0.5, 1.0]),
    normed=st.sampled_from([None, "by head", "together"]),
    dtype=DTYPES,
    programs=st.sampled_from([0, 100]),
)
def test_place(
    tokens: int,
    heads: int,
    kv_heads: int,
    half: int,
    turned: float | None,
    normed: str | None,
    dtype: torch.dtype,
    programs: int,
) -> None:
    """Queries and keys are normed and turned, as far as wanted; other places of the cache, and what is given, stay.

    Heads are computed one by one, or many by one program where all have enough to do.
    """
    dim, count = 2 * half, heads + 2 * kv_heads
    wide = drawn(tokens, count * dim + 3, dtype=dtype)
    qkv, before = wide[:, : count * dim].unflatten(1, (count, dim)), wide.clone()
    gain = drawn(heads + kv_heads, dim, dtype=dtype) if normed else None
    angles = None
    if turned is not None:
        width = 2 * max(1, int(half * turned))
        angles = drawn(tokens, 1, width, dtype=dtype), drawn(tokens, 1, width, dtype=dtype)
    pair = drawn(2 * kv_heads, 11, dim, dtype=dtype)
    places, kept = torch.randperm(11, device=DEVICE)[:tokens], pair.clone()
    squares = (
        kernels(programs).mean_squares(wide, heads * dim, kv_heads * dim)
        if normed == "together"
        else None
    )
    turned_there = wide.clone()[:, : count * dim].unflatten(1, (count, dim))
    queries = kernels(programs).place(qkv, heads, Placing(gain, 1e-6, angles, squares), places, pair)
    expected = qkv.double()
    compared = expected[:, : heads + kv_heads]
    for some in (compared,) if normed == "by head" else compared.split([heads, kv_heads], 1):
        if gain is not None:
            mean = some.square().mean(-1 if normed == "by head" else (-2, -1), keepdim=True)
            some.div_((mean + 1e-6).sqrt())
    if gain is not None:
        compared.mul_(gain.double())
    if angles is not None:
        rotate_(compared, angles[0].double(), angles[1].double())
    assert close(queries, expected[:, :heads])
    assert close(pair[:, places], expected[:, heads:].transpose(0, 1))
    others = torch.tensor([place for place in range(11) if place not in places.tolist()], device=DEVICE)
    assert torch.equal(pair[:, others], kept[:, others])
    assert torch.equal(wide, before)
    kernels(programs).place_(
        turned_there[:, : heads + kv_heads], Placing(gain, 1e-6, angles, squares), heads
    )
    assert close(turned_there, expected)
    kernels(programs).keep(turned_there[:, heads:], places, kept)
    assert torch.equal(kept, pair)


@few
@given(
    tokens=st.integers(1, 4),
    width=st.integers(1, 200),
    centred=st.booleans(),
    shifted=st.booleans(),
    adds=st.booleans(),
    dtype=DTYPES,
    wider=st.booleans(),
)
def test_norm(
    tokens: int, width: int, centred: bool, shifted: bool, adds: bool, dtype: torch.dtype, wider: bool
) -> None:
    """Of a stream or a sum, which is rounded first; gains may have more digits (Gemma's 1 + w)."""
    x, added = drawn(tokens, width + 5, dtype=dtype)[:, :width], drawn(tokens, width, dtype=dtype)
    gain, shift = (drawn(width, dtype=torch.float32 if wider else dtype) for _ in range(2))
    total, normed = kernels().norm(
        x, gain, shift if shifted else None, 1e-5, centred, added if adds else None
    )
    assert close(total, x.double() + added.double() if adds else x.double())
    value = total.double()
    if centred:
        value = value - value.mean(-1, keepdim=True)
    expected = value * (value.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * gain.double()
    assert normed.dtype == dtype
    assert close(normed, expected + shift.double() if shifted else expected)


@pytest.mark.parametrize("name", ACTIVATIONS)
@few
@given(
    tokens=st.integers(1, 3),
    width=st.integers(1, 1500),
    scale=st.sampled_from([1.0, 40.0]),
    dtype=DTYPES,
)
def test_gate(name: str, tokens: int, width: int, scale: float, dtype: torch.dtype) -> None:
    """Far from 0 too, where exp would be infinite or nothing."""
    wide = drawn(tokens, 2 * width, dtype=dtype)
    wide[:, :width] *= scale
    made = kernels().gate_of(name)
    assert made is not None
    assert close(made(wide), ACT2FN[name](wide[:, :width].double()) * wide[:, width:].double())


@few
@given(
    tokens=st.integers(1, FEW),
    inputs=st.sampled_from([1, 16, 300, 1024, 1500, 2500]),
    outputs=st.integers(1, 700),
    biased=st.booleans(),
    given_room=st.booleans(),
    dtype=DTYPES,
)
def test_product(
    tokens: int, inputs: int, outputs: int, biased: bool, given_room: bool, dtype: torch.dtype
) -> None:
    """Inputs may lie apart, and outputs may be written to memory that lies apart, of which nothing else is touched."""
    x, weight = drawn(tokens, inputs + 7, dtype=dtype)[:, :inputs], drawn(outputs, inputs, dtype=dtype)
    bias = drawn(outputs, dtype=dtype) if biased else None
    room = torch.full((tokens, outputs + 3), 7.0, dtype=dtype, device=DEVICE)
    y = kernels().product(x, weight, bias, room[:, :outputs] if given_room else None)
    expected = x.double() @ weight.double().mT
    assert close(y, expected if bias is None else expected + bias.double())
    assert not given_room or (torch.equal(y, room[:, :outputs]) and bool((room[:, outputs:] == 7).all()))


@few
@given(rows=st.integers(1, 3), width=st.sampled_from([1, 5, 2047, 2048, 2049, 9000]), dtype=DTYPES)
def test_highest(rows: int, width: int, dtype: torch.dtype) -> None:
    """The first of equal ones, which there are many of in 16 bits; no number is higher than any."""
    x = drawn(rows, width + 1, dtype=dtype)[:, :width]
    best, places = kernels().highest(x)
    assert torch.equal(best, x.amax(-1))
    assert places.tolist() == [
        row.tolist().index(high) for row, high in zip(x, best.tolist(), strict=True)
    ]
    x[-1, width // 2] = torch.nan
    assert kernels().highest(x)[0].isfinite().tolist() == [True] * (rows - 1) + [False]
    x[:] = -torch.inf
    assert kernels().highest(x)[0].tolist() == [-torch.inf] * rows


def test_other_activations_are_left_to_pytorch() -> None:
    assert kernels().gate_of("laplace") is None
