"""How many windows run together under a limit of memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from surgeon.analysis.engine import machine
from surgeon.analysis.engine.machine import streaming_room, windows_at_once, working_bytes
from surgeon.analysis.engine.measure import MeasureOptions, measure
from surgeon.analysis.engine.sharing import SharedPlan, share
from surgeon.language.program import Program
from surgeon.machine import FREE_SHARE
from surgeon.opened import load_streamed
from surgeon.quality.head import ByWindow, OutputHead
from tests.analysis.scanning import scan_cells
from tests.pretended import pretended_gpus
from tests.tiny_models import VOCABULARY, tiny_model

LAYERS = 4
HELD = 100 << 20


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(machine, "resident_bytes", lambda: HELD)
    return tiny_model("llama", LAYERS)


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(VOCABULARY, (6, 16))


@pytest.fixture
def plan() -> SharedPlan:
    return share(
        [Program.dense(LAYERS), *(cell.program for cell in scan_cells(["prune", "merge"], LAYERS, 0))]
    )


def test_a_limit_makes_batches_smaller(model: Any, plan: SharedPlan, ids: torch.Tensor) -> None:
    assert windows_at_once(model, plan, ids) == 6
    assert windows_at_once(model, plan, ids, batch=4) == 4
    for windows in (1, 3, 6):
        exactly = HELD + working_bytes(model, plan, windows * 16)
        assert windows_at_once(model, plan, ids, memory=exactly) == windows
        assert windows_at_once(model, plan, ids, memory=exactly, batch=1) == 1


def test_too_small_a_limit_says_what_would_do(model: Any, plan: SharedPlan, ids: torch.Tensor) -> None:
    with pytest.raises(
        ValueError, match=r"limit of 50 MB .* libraries hold 105 MB, .* set memory to \d+MB or more"
    ) as caught:
        windows_at_once(model, plan, ids, memory=50_000_000)
    enough = int(str(caught.value).split("set memory to ")[1].split("MB")[0])
    assert windows_at_once(model, plan, ids, memory=enough * 1_000_000) >= 1


def test_long_windows_go_one_by_one(model: Any, plan: SharedPlan) -> None:
    assert windows_at_once(model, plan, torch.zeros(3, 4096, dtype=torch.long)) == 1


def test_the_estimate_grows_with_what_is_held(model: Any) -> None:
    short, long = (share([Program.parse(text)]) for text in ("A0 F0", "A0 F0 >A1 F1"))
    assert long.peak_tensors > short.peak_tensors
    assert working_bytes(model, long, 1000) > working_bytes(model, short, 1000)
    merged = share([Program.parse("A0~A1 F0")])
    assert working_bytes(model, merged, 10) > working_bytes(model, short, 10)


def test_the_estimate_covers_what_torch_allocates(ids: torch.Tensor) -> None:
    """The states alone: a plan that holds many of them, counted as they are made."""
    model = tiny_model("llama", LAYERS)
    programs = [cell.program for cell in scan_cells(["shuffle", "parallel"], LAYERS, 0)]
    plan = share([Program.dense(LAYERS), *programs])
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        list(measure(model, ids, plan, MeasureOptions(len(ids))))
    held = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    assert 0 < most <= working_bytes(model, plan, ids.numel())


def test_references_are_not_made_twice(model: Any, ids: torch.Tensor) -> None:
    dense, program = Program.dense(LAYERS), Program.parse("A0 F0 A1 F1")
    plan, ran = share([dense, program]), list[float]()
    options = MeasureOptions(4, references={}, ran=ran.append)
    first = list(measure(model, ids, plan, options))
    again = list(measure(model, ids, plan, options))
    # The original once, whose beginning the program is, and then that alone.
    assert sum(ran) == pytest.approx(2 * LAYERS + 4)
    for one, other in zip(first, again, strict=True):
        assert (one.program, one.start) == (other.program, other.start)
        assert torch.equal(one.quality["nll"], other.quality["nll"])
        assert torch.equal(one.quality["divergence"], other.quality["divergence"])


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_out_of_memory_halves_the_windows_and_goes_on(
    model: Any, ids: torch.Tensor, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = Program.dense(LAYERS)
    programs = [Program.parse(text) for text in ("A0 F0 A1 F1", "A0 F0 A2 F2", "A3 F3")]
    plan = share([dense, *programs])
    expected = [list(measure(model, chunk, plan, MeasureOptions(1))) for chunk in ids.split(1)]
    compare = OutputHead.compare

    def small(self: OutputHead, stream: torch.Tensor, reference: Any, _: int = 0) -> ByWindow:
        """More than two windows fit for the first program only."""
        if len(stream) > 2 and seen:
            raise error
        seen.append(len(stream))
        return compare(self, stream, reference)

    seen: list[int] = []
    monkeypatch.setattr(OutputHead, "compare", small)
    with pytest.warns(UserWarning, match="out of memory with 6 windows together; going on with 3"):
        got = list(measure(model, ids, plan, MeasureOptions(6)))
    for program in (dense, *programs):
        parts = [part for part in got if part.program == program]
        starts = [part.start + i for part in parts for i in range(len(part.quality["nll"]))]
        assert starts == list(range(6))  # each window once
        nll = torch.cat([part.quality["nll"] for part in parts])
        alone = torch.stack(
            [p.quality["nll"][0] for window in expected for p in window if p.program == program]
        )
        torch.testing.assert_close(nll, alone)


def test_one_window_that_does_not_fit_is_an_error(
    model: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OutputHead, "compare", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
    with pytest.raises(MemoryError, match="no room"), pytest.warns(UserWarning, match="going on with 1"):
        list(
            measure(
                model, ids, share([Program.dense(LAYERS), Program.parse("A0 F0")]), MeasureOptions(2)
            )
        )


def test_where_numbers_stop_being_finite_is_said(ids: torch.Tensor) -> None:
    broken = tiny_model("llama", LAYERS)
    broken.model.layers[2].mlp.down_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="not finite: NaN or infinity appears first in F2"):
        list(measure(broken, ids, share([Program.dense(LAYERS)]), MeasureOptions(2)))


def test_options_are_checked_as_they_are_made() -> None:
    with pytest.raises(ValueError, match="at_once must be at least 1, not 0"):
        MeasureOptions(0)
    with pytest.raises(ValueError, match="memory must be at least 1, not 0"):
        MeasureOptions(2, memory=0)


def test_layers_that_are_read_one_by_one_go_by_the_room_of_their_gpu(
    plan: SharedPlan, tmp_path: Path
) -> None:
    """Whatever main memory there is, and whatever it is limited to."""
    tiny_model("llama", LAYERS).save_pretrained(tmp_path)
    ids = torch.randint(VOCABULARY, (6, 16))
    with pretended_gpus(1):
        model = load_streamed(tmp_path, "cuda:0")
        for windows in (1, 3, 6):
            tokens = 16 * windows
            needed = working_bytes(model, plan, tokens)
            torch.cuda.mem_get_info = lambda _, needed=needed: (needed / FREE_SHARE + 2, 80 << 30)
            assert windows_at_once(model, plan, ids, memory=1) == windows
            assert sum(streaming_room(model, plan, tokens, memory=1)) in range(needed)
        torch.cuda.mem_get_info = lambda _: (1 << 20, 80 << 30)
        with pytest.raises(
            ValueError, match=r"^cuda:0 has 839 KB left, and one window of 16 tokens needs .* use short"
        ):
            windows_at_once(model, plan, ids)
