"""Screening: which windows come when, what settles a cell, and that screened numbers agree with full ones."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from surgeon.analysis.engine import measure as workers
from surgeon.analysis.scan import (
    HOPELESS,
    JOURNAL,
    LARGEST_ERROR,
    SHARE_OF_DAMAGE,
    is_settled,
    rounds,
    scan,
    select,
    spread,
)
from surgeon.findings.scan import Scan
from surgeon.language.program import Program
from surgeon.quality.data import Windows
from tests.analysis.scanning import Stopped, plain_nll, scan_cells, stopping
from tests.analysis.subjects import subject_of
from tests.selection import one_in
from tests.tiny_models import VOCABULARY, tiny_model

LAYERS, WINDOWS, TOKENS = 4, 20, 64
OPERATIONS = ["shuffle", "prune", "parallel", "lp", "prune-mlp"]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 16, 20, 33, 512, 1000])
def test_rounds_take_every_window_once(count: int) -> None:
    parts = rounds(count)
    assert sorted(window for part in parts for window in part) == list(range(count))
    assert [window for part in parts for window in part] == spread(count)
    assert len(parts[0]) >= min(count, 4)
    if len(parts) > 1:
        assert len(parts[0]) <= max(4, count / 16)
        taken = np.cumsum([len(part) for part in parts])
        assert all(1.4 <= after / before <= 3 for before, after in pairwise(taken))


@pytest.mark.parametrize("count", [16, 20, 100])
def test_the_first_windows_are_spread_over_the_text(count: int) -> None:
    for taken in (4, 8):
        gaps = np.diff([0, *sorted(spread(count)[:taken]), count])
        assert gaps.max() <= 2 * count / taken


def damage(mean: float, half_width: float, count: int = 8) -> np.ndarray:
    """Values with this mean, and a 95% interval that reaches this far to either side."""
    values = np.linspace(-1, 1, count)
    scale = half_width / (stats.t.ppf(0.975, count - 1) * stats.sem(values))
    return mean + scale * values


@pytest.mark.parametrize(
    ("mean", "half_width", "settled"),
    [
        (math.log(HOPELESS) + 1.0, 0.9, True),
        (math.log(HOPELESS) + 1.0, 1.1, False),
        (0.01, 0.01 * SHARE_OF_DAMAGE * 0.9, True),
        (0.01, 0.01 * SHARE_OF_DAMAGE * 1.1, False),
        (-0.01, 0.01 * SHARE_OF_DAMAGE * 0.9, True),
        (1.5, LARGEST_ERROR * 0.9, True),
        (1.5, LARGEST_ERROR * 1.1, False),
    ],
)
def test_what_settles_a_cell(mean: float, half_width: float, settled: bool) -> None:
    assert is_settled(damage(mean, half_width)) is settled


def test_what_settles_a_cell_at_once() -> None:
    assert is_settled(np.array([0.3, math.inf]))
    assert is_settled(np.array([0.3, math.nan]))
    assert is_settled(np.zeros(4)), "a change that changes nothing"
    assert not is_settled(np.array([9.0])), "one window says nothing"


@pytest.fixture(scope="module")
def model() -> Any:
    """A model with something to lose: without its first layer it is hopeless, other cells settle sooner or later."""
    model = tiny_model("llama", LAYERS)
    with torch.no_grad():
        for layer, scale in enumerate((4.0, 1.0, 1.0, 1.0)):
            for weight in (
                model.model.layers[layer].self_attn.o_proj,
                model.model.layers[layer].mlp.down_proj,
            ):
                weight.weight.mul_(scale)
        model.lm_head.weight.mul_(3.0)
    return model


@pytest.fixture(scope="module")
def windows(model: Any) -> Windows:
    """Text that the model itself has written, so that a change of the model does harm."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(VOCABULARY, (WINDOWS, 1), generator=generator)
    with torch.no_grad():
        for _ in range(TOKENS - 1):
            p = model(input_ids=ids, use_cache=False).logits[:, -1].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(p, 1, generator=generator)], dim=1)
    return Windows(ids, "its own", "digest")


def run(folder: Path, windows: Windows, model: Any, screened: bool = True, **options: Any) -> Scan:
    operations = options.pop("operations", OPERATIONS)
    selection = select(operations, LAYERS, permutations=options.pop("permutations", 1))
    return scan(subject_of(model, windows), folder, selection, screened=screened, **options)


def expected_windows(nll: np.ndarray, base: np.ndarray) -> list[int]:
    """The rule once more, by the textbook, on everything known at once."""
    taken: list[int] = []
    for part in rounds(WINDOWS):
        taken += part
        here = (nll - base)[taken]
        half = stats.t.ppf(0.975, len(here) - 1) * np.std(here, ddof=1) / len(here) ** 0.5
        if here.mean() - half > math.log(10) or half <= min(0.2, 0.4 * abs(here.mean())):
            break
    return taken


def test_a_screened_scan_against_a_plain_loop(windows: Windows, model: Any, tmp_path: Path) -> None:
    result = run(tmp_path, windows, model)
    base = np.array(plain_nll(model, windows.ids, Program.dense(LAYERS)))
    assert result.base_perplexity == pytest.approx(math.exp(base.mean()), rel=1e-5)
    counts = set()
    cells = [cell for cell in scan_cells(OPERATIONS, LAYERS, 0) if cell.program.nodes]
    table = result.cells.set_index(["operation", "first", "last"])
    for cell in cells:
        row = table.loc[(cell.operation, cell.first, cell.last)]
        nll = np.array(plain_nll(model, windows.ids, cell.program))
        taken = expected_windows(nll, base) if (nll != base).any() else list(range(WINDOWS))
        assert row["tokens"] == len(taken) * (TOKENS - 1), cell
        expected = math.exp(base.mean() + (nll - base)[taken].mean())
        assert row["perplexity"] == pytest.approx(expected, rel=1e-4), cell
        counts.add(len(taken))
    assert counts == {4, 8, 20}, "some cells settle in every round"
    hopeless = table.loc[("prune", 0, 0)]
    assert hopeless["perplexity"] > 10 * result.base_perplexity
    assert hopeless["tokens"] < WINDOWS * (TOKENS - 1)


def test_less_is_run_and_counted(windows: Windows, model: Any, tmp_path: Path) -> None:
    full = run(tmp_path / "full", windows, model, False)
    ran: list[int] = []
    modules = [module for layer in model.model.layers for module in (layer.self_attn, layer.mlp)]

    def count(_: Any, __: Any, output: Any) -> None:
        ran.append(len(output[0] if isinstance(output, tuple) else output))

    hooks = [module.register_forward_hook(count) for module in modules]
    screened = run(tmp_path / "screened", windows, model)
    for hook in hooks:
        hook.remove()
    total = screened.cells["sublayers_run"].sum() + screened.record["sublayers_run"]["base"]
    assert total == pytest.approx(sum(ran) / WINDOWS)
    assert (
        screened.record["sublayers_run"]["total"]
        == round(total)
        < 0.8 * full.record["sublayers_run"]["total"]
    )
    assert screened.record["sublayers_of_a_loop"] == full.record["sublayers_of_a_loop"]
    assert screened.record["screen"]["hopeless_beyond"] == 10
    assert full.record["screen"] is None


def test_screened_numbers_keep_the_order_of_full_ones(
    windows: Windows, model: Any, tmp_path: Path
) -> None:
    full = run(tmp_path / "full", windows, model, False)
    screened = run(tmp_path / "screened", windows, model)
    good = full.cells["perplexity"] < 10 * full.base_perplexity
    rank = stats.spearmanr(full.cells["perplexity"][good], screened.cells["perplexity"][good]).statistic
    assert good.sum() > 20
    assert rank > 0.98
    whole = screened.cells["tokens"] == WINDOWS * (TOKENS - 1)
    numbers = [name for name in full.cells.columns if name != "sublayers_run"]
    pd.testing.assert_frame_equal(
        full.cells[whole][numbers], screened.cells[whole][numbers], rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("stops", one_in(3, [[0], [30], [70], [20, 60, 1, 40]]))
def test_interrupted_and_resumed(
    stops: list[int], windows: Windows, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"batch": 3, "permutations": 2}
    run(tmp_path / "at-once", windows, model, **options)
    for after in stops:
        monkeypatch.setattr(workers, "measure", stopping(after))
        with pytest.raises(Stopped):
            run(tmp_path / "stopped", windows, model, **options)
        monkeypatch.undo()
        with (tmp_path / "stopped" / JOURNAL).open("a") as journal:
            journal.write('{"program":"A0 F0","wind')
    run(tmp_path / "stopped", windows, model, **options)
    for name in ("cells.csv", "permutations.csv", "scan.json"):
        assert (tmp_path / "at-once" / name).read_bytes() == (tmp_path / "stopped" / name).read_bytes()


def programs_and_windows(lines: list[str]) -> set[tuple[str, int]]:
    """What was measured on which window, from lines of a journal."""
    parsed = [json.loads(line) for line in lines]
    return {
        (line["program"], window) for line in parsed if "program" in line for window in line["windows"]
    }


def test_a_full_scan_goes_on_from_a_screened_one(windows: Windows, model: Any, tmp_path: Path) -> None:
    full = run(tmp_path / "full", windows, model, False)
    run(tmp_path / "both", windows, model)
    lines = (tmp_path / "both" / JOURNAL).read_text().splitlines()
    both = run(tmp_path / "both", windows, model, False)
    pd.testing.assert_frame_equal(full.cells, both.cells, rtol=1e-6, atol=1e-6)
    whole = (tmp_path / "both" / JOURNAL).read_text().splitlines()
    seen, again = programs_and_windows(lines), programs_and_windows(whole[len(lines) :])
    assert again
    assert seen.isdisjoint(again), "nothing is measured twice"


def test_what_is_known_in_full_stays_so(windows: Windows, model: Any, tmp_path: Path) -> None:
    full = run(tmp_path, windows, model, False, operations=["prune"])
    both = run(tmp_path, windows, model, operations=["lp"]).cells
    assert (both[both["operation"] == "prune"]["tokens"] == WINDOWS * (TOKENS - 1)).all()
    assert both[both["operation"] == "prune"]["perplexity"].tolist() == full.cells["perplexity"].tolist()
