"""The table of a model's LP pairs against plain computations, and that it ends the same whatever happens on the way."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor
from torch.nn import functional

import surgeon
from surgeon.analysis import sensitivity as sensitivity_module
from surgeon.analysis.engine.machine import Walk
from surgeon.analysis.sensitivity import (
    JOURNAL,
    Lanczos,
    SensitivityJournal,
    differentiable,
    pair_terms,
    sensitivity,
    spread,
)
from surgeon.analysis.similarity import rank_correlation
from surgeon.findings.sensitivity import Sensitivity
from surgeon.quality.data import Windows
from tests.analysis.subjects import subject_of
from tests.analysis.test_jacobian import dense_jacobian
from tests.analysis.texts import random_windows
from tests.reference import Reference
from tests.selection import one_in
from tests.tiny_models import tiny_model

LAYERS, WINDOWS, TOKENS = 4, 5, 6
CLOSE = Lanczos(iterations=200, tolerance=2e-3, seed=2)
QUICK = Lanczos(iterations=300, tolerance=0.2)


class Stopped(Exception):
    pass


@pytest.fixture
def windows() -> Windows:
    return random_windows(WINDOWS, TOKENS)


def run(folder: Path, windows: Windows, model: Any = None, **options: Any) -> Sensitivity:
    options = {"lanczos": QUICK, "jacobian_windows": 2} | options
    about = {name: options.pop(name) for name in ("model_hash", "memory") if name in options}
    return sensitivity(
        subject_of(model or tiny_model("llama", LAYERS), windows, **about), folder, **options
    )


def largest(matrix: Tensor) -> float:
    return float(torch.linalg.svdvals(matrix.double())[0])


def test_windows_are_spread_over_the_text() -> None:
    assert spread(16, 4) == [0, 5, 10, 15]
    assert spread(3, 8) == [0, 1, 2]
    assert spread(9, 1) == [0]


def test_terms_are_means_over_windows(windows: Windows, tmp_path: Path) -> None:
    table = run(tmp_path, windows).pairs
    assert list(zip(table["first"], table["last"], strict=True)) == [(0, 1), (1, 2), (2, 3)]
    model = tiny_model("llama", LAYERS)
    each = []
    for window in (0, 4):
        with differentiable(model):
            walk = Walk(model, windows.ids[window : window + 1])
            stream = walk.layer(0, walk.start).after
            each.append(pair_terms(walk, walk.layer(1, stream), QUICK)[0])
    row = table.loc[1]
    for name in (
        "stream_norm",
        "update_norm",
        "mlp_jacobian",
        "attention_shift",
        "bound",
        "first_order",
        "error",
    ):
        assert row[name] == pytest.approx((each[0][name] + each[1][name]) / 2)
    for name in ("bound", "first_order", "error"):
        relative = [one[name] / one["stream_norm"] for one in each]
        assert row[f"relative_{name}"] == pytest.approx(sum(relative) / 2)
    assert table["converged"].all()


def test_the_amplification_is_equation_13(windows: Windows, tmp_path: Path) -> None:
    table = run(tmp_path, windows, jacobian_windows=1, lanczos=CLOSE).pairs
    plain = Reference(tiny_model("llama", LAYERS))

    def layer(k: int, x: Tensor) -> Tensor:
        middle = x + plain.attention(k, x)
        return middle + plain.feed_forward(k, middle)

    streams = [plain.embed(windows.ids[:1])]
    for k in range(LAYERS):
        streams.append(layer(k, streams[-1]))
    gains = {k: largest(dense_jacobian(lambda x, k=k: layer(k, x), streams[k])) for k in (2, 3)}  # type: ignore[misc]
    expected = [math.log10(gains[2] * gains[3]), math.log10(gains[3]), 0]
    assert table["log10_amplification"].tolist() == pytest.approx(expected, abs=2e-3)
    outputs = [math.log10(bound) + gain for bound, gain in zip(table["bound"], expected, strict=True)]
    assert table["log10_output_bound"].tolist() == pytest.approx(outputs, abs=2e-3)


@pytest.mark.parametrize(
    ("family", "programs"),
    [
        (
            "llama",
            [
                "[A0 A1] [F0 F1] A2 F2 A3 F3",
                "A0 F0 [A1 A2] [F1 F2] A3 F3",
                "A0 F0 A1 F1 [A2 A3] [F2 F3]",
            ],
        ),
        ("gpt_neox", ["[A0 F0 A1 F1] [A2 F2] [A3 F3]", "[A0 F0] [A1 F1 A2 F2] [A3 F3]"]),
    ],
)
def test_damage_is_that_of_the_edited_model(
    family: str, programs: list[str], windows: Windows, tmp_path: Path
) -> None:
    found = run(tmp_path, windows, tiny_model(family, LAYERS), jacobian_windows=1, lanczos=QUICK)
    model = tiny_model(family, LAYERS)
    targets = windows.ids[:, 1:].flatten()
    with torch.no_grad():
        original = model(input_ids=windows.ids, use_cache=False).logits[:, :-1].flatten(0, 1)
        base = functional.cross_entropy(original, targets)
        for first, program in enumerate(programs):
            surgeon.edit(model, program)
            changed = model(input_ids=windows.ids, use_cache=False).logits[:, :-1].flatten(0, 1)
            surgeon.restore(model)
            nll = functional.cross_entropy(changed, targets)
            divergence = functional.kl_div(
                changed.log_softmax(-1), original.log_softmax(-1), log_target=True, reduction="batchmean"
            )
            row = found.pairs.loc[first]
            assert row["perplexity"] == pytest.approx(float(nll.exp()), rel=1e-4)
            assert row["log_perplexity_ratio"] == pytest.approx(float(nll - base), abs=1e-4)
            assert row["divergence"] == pytest.approx(float(divergence), rel=1e-3)
            assert row["divergence_low"] < row["divergence"] < row["divergence_high"]
    assert found.record["base_perplexity"] == pytest.approx(float(base.exp()), rel=1e-4)


def test_files_and_correlations(windows: Windows, tmp_path: Path) -> None:
    found = run(tmp_path, windows)
    assert {path.name for path in tmp_path.iterdir()} == {"sensitivity.csv", "sensitivity.json", JOURNAL}
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "sensitivity.csv"), found.pairs, rtol=1e-8)
    record = json.loads((tmp_path / "sensitivity.json").read_text())
    assert (record["model"], record["jacobian_windows"], record["errors"]) == ("tiny", [0, 4], 6)
    assert record["errors_within_bound"] == 6
    by_name = {(one["predictor"], one["damage"]): one for one in record["correlations"]}
    expected = rank_correlation(found.pairs["bound"], found.pairs["divergence"])
    one = by_name["bound", "divergence"]
    assert (one["rho"], one["n"]) == (pytest.approx(expected.rho), 3)
    assert ("error", "error") not in by_name


@pytest.mark.parametrize("after", one_in(3, [1, 6, 9], 1))
def test_stopped_and_started_again(
    after: int, windows: Windows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "whole", windows, lanczos=QUICK)
    append, left = SensitivityJournal.append, [after + 1]  # the first line says whose the file is

    def stop(self: SensitivityJournal, line: dict[str, Any]) -> None:
        if not left[0]:
            raise Stopped
        left[0] -= 1
        append(self, line)

    with monkeypatch.context() as context:
        context.setattr(SensitivityJournal, "append", stop)
        with pytest.raises(Stopped):
            run(tmp_path / "stopped", windows, lanczos=QUICK)
    journal = tmp_path / "stopped" / JOURNAL
    journal.write_bytes(journal.read_bytes() + b'{"window":0,"la')
    assert not (tmp_path / "stopped" / "sensitivity.csv").exists()
    run(tmp_path / "stopped", windows, lanczos=QUICK)
    for name in ("sensitivity.csv", "sensitivity.json"):
        assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_what_is_finished_runs_nothing_again(
    windows: Windows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, windows, lanczos=QUICK)
    before = (tmp_path / "sensitivity.csv").read_bytes()
    monkeypatch.setattr(sensitivity_module, "Walk", lambda *_: pytest.fail("a window was run"))
    model = tiny_model("llama", LAYERS)
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda *_: pytest.fail("a layer ran"))
    run(tmp_path, windows, model, lanczos=QUICK)
    assert (tmp_path / "sensitivity.csv").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_hash": "other"},
            "another model .hash of its configuration and weights.: weights, now other",
        ),
        ({"lanczos": Lanczos(iterations=7)}, "another number of iterations: 300, now 7"),
        ({"jacobian_windows": 3}, r"choice of windows for Jacobians: \[0, 4\], now \[0, 2, 4\]"),
    ],
)
def test_a_folder_of_something_else_is_refused(
    change: dict[str, Any], message: str, windows: Windows, tmp_path: Path
) -> None:
    run(tmp_path, windows, lanczos=QUICK)
    with pytest.raises(ValueError, match=message):
        run(tmp_path, windows, **({"lanczos": QUICK} | change))


def test_models_that_cannot_be_measured(windows: Windows, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="1 layer; a pair in parallel needs at least 2"):
        run(tmp_path, windows, tiny_model("llama", 1))
    with pytest.raises(ValueError, match="edited program"):
        run(tmp_path, windows, surgeon.edit(tiny_model("llama", 2), "A0 F0"))
    with pytest.raises(ValueError, match="at least 1, not 0"):
        run(tmp_path, windows, jacobian_windows=0)
    model = tiny_model("llama", LAYERS)
    model.model.layers[2].mlp.down_proj.weight.data[3, 4] = math.nan
    with pytest.raises(ValueError, match="first in F2"):
        run(tmp_path, windows, model)
