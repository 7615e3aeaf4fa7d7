"""Windows shared out to threads: the same numbers, whoever computes them, and no thread left when one fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from surgeon.analysis.engine import machine
from surgeon.analysis.engine.machine import lanes_for
from surgeon.analysis.engine.measure import GoOn, MeasureOptions, measure, parts_of, side_by_side
from surgeon.analysis.engine.prefixes import StateCache
from surgeon.analysis.engine.sharing import share
from surgeon.language.program import Program
from surgeon.quality.head import OutputHead
from tests.analysis.scanning import scan_cells
from tests.tiny_models import VOCABULARY, tiny_model

LAYERS = 4
A, B = Program.parse("A0 F0"), Program.parse("A1 F1")


@pytest.fixture
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(machine, "LEAST_TOKENS", 16)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    assert torch.get_num_threads() == 3
    torch.set_num_threads(before)


def test_windows_are_shared_out_where_they_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    cpu = torch.device("cpu")
    assert [lanes_for(cpu, 256, windows) for windows in (1, 2, 3, 4, 8)] == [1, 2, 3, 4, 4]
    assert [lanes_for(cpu, 128, windows) for windows in (1, 2, 4, 16)] == [1, 1, 2, 4]
    assert lanes_for(torch.device("cuda"), 256, 8) == 1
    assert parts_of(range(3, 10), 3) == [range(3, 5), range(5, 7), range(7, 10)]


@pytest.mark.usefixtures("three_threads")
def test_results_come_when_all_lanes_have_them_in_their_order() -> None:
    threads: list[int] = []

    def lane(number: int, programs: list[Program]) -> Any:
        def run(_: GoOn) -> Iterator[tuple[Program, int]]:
            threads.append(torch.get_num_threads())
            for program in programs:
                yield program, number

        return run

    assert dict(side_by_side([lane(0, [A, B]), lane(1, [B, A]), lane(2, [A, B])])) == {
        A: [0, 1, 2],
        B: [0, 1, 2],
    }
    assert threads == [1, 1, 1]


@pytest.mark.usefixtures("three_threads")
def test_the_other_lanes_end_where_one_fails_or_nobody_wants_more() -> None:
    def endless(go_on: GoOn) -> Iterator[tuple[Program, int]]:
        while True:
            go_on()
            yield A, 1

    def fails(_: GoOn) -> Iterator[tuple[Program, int]]:
        yield A, 2
        raise MemoryError("no room")

    before = threading.active_count()
    with pytest.raises(MemoryError, match="no room"):
        list(side_by_side([endless, fails]))
    found = side_by_side([endless, endless])
    assert next(found) == (A, [1, 1])
    found.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize("keeps", [False, True])
def test_numbers_are_those_of_one_thread(family: str, keeps: bool) -> None:
    model = tiny_model(family, LAYERS)
    ids = torch.randint(VOCABULARY, (7, 16), generator=torch.Generator().manual_seed(0))
    dense = Program.dense(LAYERS, 1 if family == "gpt_neox" else 2)
    operations = ["shuffle", "prune", "merge", "parallel"]
    cells = scan_cells(operations, LAYERS, 0, 1 if family == "gpt_neox" else 2)
    plan = share([dense, *(cell.program for cell in cells)])
    told: list[float] = []
    kept = StateCache(1 << 20) if keeps else None
    found = list(measure(model, ids, plan, MeasureOptions(5, ran=told.append, cache=kept, blocks=2)))
    torch.set_num_threads(1)
    alone = list(measure(model, ids, plan, MeasureOptions(5, blocks=2)))
    torch.set_num_threads(3)
    by_place = {(one.program, one.start): one.quality for one in found}
    assert by_place.keys() == {(one.program, one.start) for one in alone}
    assert found[0].program == dense
    for one in alone:
        quality = by_place[one.program, one.start]
        torch.testing.assert_close(quality["nll"], one.quality["nll"])
        torch.testing.assert_close(
            quality["divergence"], one.quality["divergence"], rtol=1e-4, atol=1e-6
        )
        torch.testing.assert_close(quality["blocks"], one.quality["blocks"], rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("three_threads")
def test_out_of_memory_in_one_lane_halves_the_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    model, dense = tiny_model("llama", LAYERS), Program.dense(LAYERS)
    ids = torch.randint(VOCABULARY, (6, 16))
    compare = OutputHead.compare

    def small(self: OutputHead, stream: torch.Tensor, *rest: Any) -> Any:
        if len(stream) > 1:
            raise MemoryError
        return compare(self, stream, *rest)

    monkeypatch.setattr(OutputHead, "compare", small)
    with pytest.warns(UserWarning, match="out of memory with 6 windows together; going on with 3"):
        found = list(measure(model, ids, share([dense, A, B]), MeasureOptions(6)))
    for program in (dense, A, B):
        starts = [
            one.start + i
            for one in found
            if one.program == program
            for i in range(len(one.quality["nll"]))
        ]
        assert starts == list(range(6))
