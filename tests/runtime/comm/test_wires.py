"""Reductions by wires: how far off they may be, what they keep exactly, what they send, what they cost a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from surgeon.benchmarks.measure import divergence_of_compressed, windows_to_compare
from surgeon.cost.deployment import Deployment
from surgeon.language.program import Program
from surgeon.runtime.comm.collectives import Alone, Compressed, Counts, Unconnected
from surgeon.runtime.comm.wires import WIRES, Wire
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.worker.rank import RankOptions
from surgeon.runtime.worker.ranks import Ranks
from surgeon.runtime.worker.worker import load
from tests.runtime import on_ranks
from tests.runtime.comm import on_collectives
from tests.selection import case
from tests.tiny_models import VOCABULARY, damage, save_checkpoint, tiny_model

LARGEST = {"int8": 127, "int4": 7}
KINDS = list(LARGEST)  # of integers


def there_and_back(tensor: Tensor, kind: str) -> Tensor:
    wire = WIRES[kind]
    return wire.unpack(wire.pack(tensor)[None], tensor.shape, tensor.dtype)[0]


def scales(tensor: Tensor, kind: str) -> np.ndarray:
    """By row: the largest magnitude after the 64th of the features that are kept, as so many steps."""
    rows = np.sort(np.abs(tensor.double().numpy().reshape(-1, tensor.shape[-1])), axis=1)[:, ::-1]
    kept = int(np.ceil(tensor.shape[-1] / 64))
    largest = rows[:, kept] if kept < tensor.shape[-1] else np.zeros(len(rows))
    return largest / LARGEST[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1, 128), (2, 3, 97), (5, 64), (7, 1), (3, 2), (1, 700)])
def test_values_are_off_by_half_a_step_at_most(
    kind: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    found = there_and_back(tensor, kind)
    error = (found.double() - tensor.double()).abs().view(-1, shape[-1]).numpy()
    step = scales(tensor, kind)[:, None]
    assert (error <= step / 2 * 1.0001).all()
    kept = -(-shape[-1] // 64)
    magnitudes = tensor.double().abs().view(-1, shape[-1])
    for row, places in enumerate(magnitudes.topk(kept).indices):
        assert (error[row, places] == 0).all()
    if shape[-1] > 90:  # not everything can be right, or nothing has been made smaller
        assert error.max() > step.max() / 4


@pytest.mark.parametrize("kind", KINDS)
def test_what_integers_can_say_is_exact(kind: str) -> None:
    top = LARGEST[kind]
    tensor = torch.randint(
        -top, top + 1, (4, 3, 130), generator=torch.Generator().manual_seed(2)
    ).float()
    tensor[..., 5], tensor[..., 6] = top, -top  # a scale of 1 in every row
    # 3 of 130 features are kept.
    tensor[..., [0, 77, 129]] = torch.tensor([1e4 + 0.123, -3e5 + 0.7, 9.9e3])
    assert torch.equal(there_and_back(tensor, kind), tensor)
    assert torch.equal(there_and_back(tensor * 0.25, kind), tensor * 0.25)
    assert torch.equal(there_and_back(torch.zeros(2, 9), kind), torch.zeros(2, 9))


@pytest.mark.parametrize(
    ("kind", "dtype", "width", "size"),
    [
        ("int8", torch.float32, 4096, 64 * (4 + 2) + 4 + 4096),
        ("int4", torch.float32, 4096, 64 * (4 + 2) + 4 + 2048),
        ("int4", torch.bfloat16, 4096, 64 * (2 + 2) + 4 + 2048),  # 4.5 bits a value
        ("int4", torch.float32, 65, 2 * (4 + 2) + 4 + 33),
        ("int8", torch.float32, 1 << 16, 1024 * (4 + 4) + 4 + (1 << 16)),
    ],
)
def test_bytes(kind: str, dtype: torch.dtype, width: int, size: int) -> None:
    tensor = torch.randn(2, 3, width).to(dtype)
    packed = WIRES[kind].pack(tensor)
    assert (packed.dtype, packed.shape) == (torch.uint8, (6 * size,))
    assert WIRES[kind].count_bytes(tensor.shape, dtype) == 6 * size


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_stays_none(kind: str, bad: float) -> None:
    tensor = torch.randn(3, 40)
    tensor[1, 7] = bad
    assert str(float(there_and_back(tensor, kind)[1, 7])) == str(bad)
    tensor[1, 8:20] = bad  # more than are kept
    found = there_and_back(tensor, kind)
    assert not found[1].isfinite().all()
    assert found[[0, 2]].isfinite().all()


class Halves(Wire):
    """Numbers of 16 bits: all that one more wire has to say."""

    name = "float16"

    def parts(self, width: int, dtype: torch.dtype) -> list[tuple[int, torch.dtype]]:  # noqa: ARG002
        return [(width, torch.float16)]

    def encode(self, rows: Tensor) -> list[Tensor]:
        return [rows.half()]

    def decode(self, parts: Sequence[Tensor], width: int, dtype: torch.dtype) -> Tensor:  # noqa: ARG002
        return parts[0].float()


def test_one_more_wire_is_known_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no compression 'float16'"):
        RankOptions(2, compression="float16")
    monkeypatch.setitem(WIRES, "float16", Halves())
    assert str(RankOptions(2, compression="float16")).endswith(", float16")
    assert Deployment(2, compress="float16").compress == "float16"
    tensor = torch.randn(4, 3, 70).half().float()
    assert torch.equal(there_and_back(tensor, "float16"), tensor)
    assert WIRES["float16"].count_bytes(tensor.shape, tensor.dtype) == tensor.nbytes // 2
    counts = Counts()
    sums = Compressed(Unconnected(0, (0, 1)), "float16").all_reduce(tensor, counts)()
    assert torch.equal(sums, 2 * tensor)


@pytest.fixture(scope="module", params=[("gloo", 2), ("shm", 4)], ids=lambda pair: f"{pair[0]}{pair[1]}")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    kind, number = request.param
    with Ranks(RankOptions(number, collectives=kind)) as started:
        yield started


@pytest.mark.parametrize("kind", KINDS)
def test_sums_over_ranks(kind: str, ranks: Ranks) -> None:
    number, shape = len(ranks.pids), (2, 5, 130)
    parts = [on_collectives.noise(rank, shape) for rank in range(number)]
    expected = torch.stack([there_and_back(part, kind) for part in parts]).sum(0)
    answers = ranks.call(on_collectives.compressed_sums, kind, shape)
    for sums, counts in answers:
        assert torch.equal(sums[0], expected)
        assert torch.equal(sums[0], answers[0][0][0])  # the same bits on every rank
        # Whole numbers are not touched.
        assert torch.equal(sums[1], torch.full((3,), number * (number - 1) // 2))
        assert torch.equal(sums[2], expected)
        # 3 exact values with their places, a scale, and the integers, for each of 10 rows; 24 bytes of whole numbers.
        row = 3 * 6 + 4 + (130 if kind == "int8" else 65)
        assert counts == Counts(all_reduces=1, all_gathers=2, bytes=2 * 10 * row + 24)
    true = torch.stack(parts).double().sum(0)
    bound = sum(scales(part, kind) for part in parts) / 2
    assert ((expected.double() - true).abs().view(10, -1).numpy() <= bound[:, None] * 1.001).all()


def test_one_rank_compresses_nothing() -> None:
    tensor, counts = torch.randn(3, 70), Counts()
    assert torch.equal(Compressed(Alone(), "int4").all_reduce(tensor, counts)(), tensor)
    assert counts == Counts()


PROGRAM = "A0 F0 >[A1 A2] >[F1 F2] {A3/2:0 F3/2:0 | A3/2:1 F3/2:1}"
IDS = torch.randint(2, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough for integers to make things smaller."""
    folder = tmp_path_factory.mktemp("compress")
    tiny_model("llama", hidden_size=128).save_pretrained(folder)
    return folder


def divergence(exact: Tensor, changed: Tensor) -> float:
    p = exact.double().softmax(-1)
    return float((p * (p.log() - changed.double().softmax(-1).log())).sum(-1).mean())


def test_ranks_started_with_a_compression(wide: Path) -> None:
    """The layers' reductions are compressed, and counted as sent; the embedding's and the head's are as ever."""
    plan = make_plan(wide, 2, 11, PROGRAM)
    logits: dict[str | None, Tensor] = {}
    sent: dict[str | None, int] = {}
    options: list[str | None] = [None, "int8", "int4"]
    for compression in options:
        with Ranks(RankOptions(2, collectives="shm", compression=compression)) as ranks:
            (logits[compression], (counts,), vocabulary), other = ranks.call(
                on_ranks.logits_in_chunks, plan, [IDS]
            )
        assert torch.equal(logits[compression], other[0])
        assert counts.all_reduces + counts.all_gathers == Program.parse(PROGRAM).sync_points(2)
        assert (counts.all_gathers == 0) == (compression is None)
        assert vocabulary == Counts(1, 1, IDS.numel() * (128 + 49) * 4)
        sent[compression] = counts.bytes
    rows = 5 * IDS.numel()
    assert sent == {None: rows * 512, "int8": rows * (2 * 6 + 4 + 128), "int4": rows * (2 * 6 + 4 + 64)}
    assert 0 < divergence(logits[None], logits["int8"]) < 1e-3
    assert divergence(logits[None], logits["int8"]) < divergence(logits[None], logits["int4"]) / 10


@pytest.mark.parametrize(
    "ranks", [case(("gloo", 2), default=True), case(("shm", 4), default=False)], indirect=True
)
def test_the_cost_for_a_model(ranks: Ranks, wide: Path) -> None:
    """Against logits of ranks that were started with the compression, compared by hand."""
    number = len(ranks.pids)
    plan = make_plan(wide, number, 16, PROGRAM)
    windows = [IDS[0].tolist(), IDS[1, :7].tolist()]
    ranks.call(load, plan, "compared")
    found = divergence_of_compressed(ranks, windows, "int4", "compared")
    with Ranks(RankOptions(number, collectives="shm", compression="int4")) as started:
        for index, window in enumerate(windows):
            chunk = torch.tensor([window])
            exact, changed = (
                r.call(on_ranks.logits_in_chunks, plan, [chunk])[0][0][0] for r in (ranks, started)
            )
            assert found[index] == pytest.approx(divergence(exact[:-1], changed[:-1]), rel=1e-3)


def test_a_model_that_computes_no_numbers_has_no_cost(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "broken")
    damage(folder, 9)
    plan = make_plan(folder, 2, 16)
    with Ranks(RankOptions(2)) as ranks:
        ranks.call(load, plan, "broken")
        with pytest.raises(ValueError, match="not finite"):
            divergence_of_compressed(ranks, [[5, 6, 7], [5, 9, 7]], "int8", "broken")


def test_random_windows(wide: Path) -> None:
    plan = make_plan(wide, 2, 16)
    windows = windows_to_compare(plan, None, 10, 1000, seed=1)
    assert (len(windows), {len(window) for window in windows}) == (100, {10})
    assert {token for window in windows for token in window} == set(range(VOCABULARY))
    assert windows != windows_to_compare(plan, None, 10, 1000, seed=2)
    assert len(windows_to_compare(plan, None, 500, 100, seed=1)) == 8
