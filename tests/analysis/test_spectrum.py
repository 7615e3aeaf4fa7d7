"""A spectrum's numbers against plain computations, and that it ends the same whatever happens on the way."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from torch.nn import functional

import surgeon
from surgeon.analysis.engine import machine
from surgeon.analysis.factors.program_run import ProgramRun
from surgeon.analysis.spectrum import JOURNAL
from surgeon.models.edit import program_of
from surgeon.models.families import family_of
from surgeon.quality.data import Windows
from surgeon.quality.head import OutputHead
from surgeon.training.scratch.tracks import track_program
from tests.analysis.spectra import (
    CALIBRATION,
    LAYERS,
    MEASURED,
    inputs_of,
    logits_of,
    matrix_of,
    overwrite,
    places,
    run,
    text,
    written_out,
)
from tests.tiny_models import tiny_model

FAMILIES = ["llama", "gpt2", "phi3", "gpt_neox", "gemma2"]


@pytest.mark.parametrize("family", FAMILIES)
def test_damage_is_that_of_a_copy_changed_by_hand(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, LAYERS)
    model.save_pretrained(tmp_path / "model")
    copy = surgeon.load(tmp_path / "model")
    result = run(tmp_path / "out", model)
    original, targets = logits_of(copy, MEASURED.ids), MEASURED.ids[:, 1:].flatten()
    table = result.damage.set_index(["layer", "weight", "rank"])
    spectra = result.matrices.set_index(["layer", "weight"])
    checked = 0
    for layer in range(LAYERS):
        found = places(family, copy, layer)
        inputs = inputs_of(copy, [module for module, _, _ in found.values()], CALIBRATION.ids)
        for (role, place), samples in zip(found.items(), inputs, strict=True):
            matrix = matrix_of(place)
            assert (spectra.loc[(layer, role), ["out_features", "in_features"]] == matrix.shape).all()
            for rank in (min(matrix.shape) // 4, min(matrix.shape) // 2):
                undo = overwrite(place, written_out(matrix, samples, rank))
                changed = logits_of(copy, MEASURED.ids)
                undo()
                row = table.loc[(layer, role, rank)]
                nll = functional.nll_loss(changed, targets)
                divergence = functional.kl_div(changed, original, reduction="batchmean", log_target=True)
                assert row["perplexity"] == pytest.approx(math.exp(nll), rel=1e-5), (layer, role, rank)
                assert row["divergence"] == pytest.approx(float(divergence), rel=1e-4, abs=2e-6), (
                    layer,
                    role,
                    rank,
                )
                assert row["kept"] == pytest.approx(sum(matrix.shape) * rank / matrix.size)
                checked += 1
    assert checked == len(table) == LAYERS * len(found) * 2
    nll = functional.nll_loss(original, targets)
    assert result.record["base_perplexity"] == pytest.approx(math.exp(nll), rel=1e-5)
    assert (result.damage["tokens"] == 5 * 11).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_singular_values_are_those_of_numpy(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, LAYERS)
    result = run(tmp_path, model, ranks="")
    values = result.values.set_index(["layer", "weight", "method"])["value"]
    spectra = result.matrices.set_index(["layer", "weight"])
    for layer in range(LAYERS):
        found = places(family, model, layer)
        inputs = inputs_of(model, [module for module, _, _ in found.values()], CALIBRATION.ids)
        for (role, place), samples in zip(found.items(), inputs, strict=True):
            matrix, row = matrix_of(place), spectra.loc[(layer, role)]
            factor = np.linalg.cholesky(samples.T @ samples)
            assert row["factor"] == "cholesky"
            for method, weighed, ending in (
                ("plain", matrix, ""),
                ("whitened", matrix @ factor, "_whitened"),
            ):
                expected = np.linalg.svd(weighed, compute_uv=False)
                np.testing.assert_allclose(values[layer, role, method], expected, rtol=1e-5)
                energy = np.cumsum(expected**2) / (expected**2).sum()
                for percent in (90, 95, 99):
                    rank = int((energy < percent / 100).sum()) + 1
                    assert row[f"rank{percent}{ending}"] == rank
                    assert row[f"kept{percent}{ending}"] == pytest.approx(
                        sum(matrix.shape) * rank / matrix.size
                    )
            # The loss of the outputs on the calibration text is what the values that were left out say.
            for rank in (1, min(matrix.shape) // 2):
                lost = samples @ (matrix - written_out(matrix, samples, rank)).T
                dropped = values[layer, role, "whitened"].to_numpy()[rank:]
                assert np.linalg.norm(lost) == pytest.approx(np.sqrt((dropped**2).sum()), rel=1e-5)
    assert len(result.damage) == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        "journal.jsonl", "spectrum.csv", "singular_values.csv", "spectrum.json"
    }  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("calibration", [CALIBRATION, text(1, 7, 6)], ids=["enough", "too little"])
def test_full_rank_is_the_original(family: str, calibration: Windows, tmp_path: Path) -> None:
    model = tiny_model(family, LAYERS)
    result = run(tmp_path, model, ranks="1/1", calibration=calibration)
    assert (result.damage["rank"] == result.damage["full_rank"]).all()
    assert result.damage["divergence"].max() < 2e-6
    base = result.record["base_perplexity"]
    assert np.abs(result.damage["perplexity"] / base - 1).max() < 2e-6
    expected = {"cholesky"} if calibration is CALIBRATION else {"eigenvalues"}
    assert set(result.matrices["factor"]) == expected
    assert (result.matrices["input_rank"] <= calibration.ids.numel()).all()


def test_plain_truncation(tmp_path: Path) -> None:
    model = tiny_model("llama", LAYERS)
    damage = run(tmp_path, model, method="plain", ranks="8").damage.set_index(["layer", "weight"])
    assert set(damage["method"]) == {"plain"}
    place = places("llama", model, 1)["up"]
    left, values, right = np.linalg.svd(matrix_of(place), full_matrices=False)
    original = logits_of(model, MEASURED.ids)
    overwrite(place, left[:, :8] * values[:8] @ right[:8])
    divergence = functional.kl_div(
        logits_of(model, MEASURED.ids), original, reduction="batchmean", log_target=True
    )
    assert damage.loc[(1, "up"), "divergence"] == pytest.approx(float(divergence), rel=1e-4)


def test_intervals_and_the_record(tmp_path: Path) -> None:
    model = tiny_model("llama", LAYERS)
    result = run(tmp_path, model, layers=range(1, 3), weights=["up", "q"], ranks="0.5,4")
    row = result.damage.iloc[0]
    lines = [json.loads(line) for line in (tmp_path / JOURNAL).read_text().splitlines()]
    measured = next(line for line in lines if "rank" in line)
    assert (row["layer"], row["weight"], row["rank"]) == (1, "q", 16) == (
        measured["layer"], measured["weight"], measured["rank"]
    )  # fmt: skip
    for name, convert in (("nll", math.exp), ("divergence", float)):
        per_window = np.array(measured[name])
        half = 2.7764451 * per_window.std(ddof=1) / 5**0.5  # Student's t, 4 degrees of freedom, 97.5%
        column = "perplexity" if name == "nll" else name
        found = [row[column], row[f"{column}_low"], row[f"{column}_high"]]
        ends = per_window.mean(), per_window.mean() - half, per_window.mean() + half
        assert found == pytest.approx([max(0.0, convert(end)) for end in ends], rel=1e-6)
    record = json.loads((tmp_path / "spectrum.json").read_text())
    assert record["model"] == "tiny"
    assert (record["layers"], record["weights"], record["ranks"]) == ("1:3", ["q", "up"], ["1/2", "4"])
    low, high = record["base_interval"]
    assert low < record["base_perplexity"] < high
    pd.testing.assert_frame_equal(
        pd.read_csv(tmp_path / "damage.csv"), result.damage, check_dtype=False, rtol=1e-8
    )
    assert result.damage["rank"].tolist() == [16, 4] * 4


def test_layers_before_the_changed_one_run_once(tmp_path: Path) -> None:
    model = tiny_model("llama", LAYERS)
    calls = []
    for layer in model.model.layers:
        for module in (layer.self_attn, layer.mlp):
            module.register_forward_hook(lambda *_: calls.append(1))
    run(tmp_path, model)
    nodes = 2 * LAYERS
    truncations = sum(
        2 * (4 * (nodes - 2 * layer) + 3 * (nodes - 2 * layer - 1)) for layer in range(LAYERS)
    )
    passes = 3 * nodes  # what is predicted, the walk on the same text, and that on the calibration text
    assert len(calls) == truncations + passes


def test_windows_in_parts_give_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("gemma2", LAYERS)
    whole = run(tmp_path / "whole", model)
    monkeypatch.setattr(machine, "TOKENS_AT_ONCE", {"cpu": 24})
    parts = run(tmp_path / "parts", model)
    assert len(ProgramRun(model, program_of(model), MEASURED.ids).parts) == 3
    pd.testing.assert_frame_equal(whole.matrices, parts.matrices, rtol=1e-5)
    pd.testing.assert_frame_equal(whole.damage, parts.damage, rtol=1e-4, atol=2e-6)


def state(model: Any) -> dict[str, tuple[int, Tensor]]:
    return {
        name: (id(parameter), parameter.detach().clone()) for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fails_after", [None, 0, 9])
def test_the_model_is_left_as_it_was(
    family: str, fails_after: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family, LAYERS)
    before = state(model)
    count = 0
    compare = OutputHead.compare

    def stop(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if fails_after is not None and count > fails_after:
            raise KeyboardInterrupt
        return compare(*arguments)

    monkeypatch.setattr(OutputHead, "compare", stop)
    if fails_after is None:
        run(tmp_path, model)
    else:
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, model)
        done = [line for line in (tmp_path / JOURNAL).read_text().splitlines() if "divergence" in line]
        assert len(done) == fails_after, "what was measured before is kept"
    after = state(model)
    assert list(before) == list(after)
    for name, (identity, values) in before.items():
        assert after[name][0] == identity
        assert torch.equal(after[name][1], values)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_native_tracks_have_the_spectrum_of_their_own_program(family: str, tmp_path: Path) -> None:
    """Inputs, and damage, are those of tracks that meet after one layer: against a copy that is changed by hand."""
    model = tiny_model(family, 4)
    own, _ = track_program(2, count=2, depth=1, steps_per_layer=family_of(model.config).steps_per_layer)
    surgeon.edit(model, own)
    result = run(tmp_path, model, ranks="1/4")
    assert program_of(model) == own
    assert result.record["program"] == str(own)
    original, targets = logits_of(model, MEASURED.ids), MEASURED.ids[:, 1:].flatten()
    nll = functional.nll_loss(original, targets)
    assert result.record["base_perplexity"] == pytest.approx(math.exp(nll), rel=1e-5)
    table = result.damage.set_index(["layer", "weight"])
    assert len(table) == 4 * len(places(family, surgeon.restore(model), 0))
    for layer in (1, 2):  # the second track of the first block, the first of the second
        base = surgeon.restore(model)
        found = places(family, base, layer)
        modules = [module for module, _, _ in found.values()]
        inputs = inputs_of(surgeon.edit(base, own), modules, CALIBRATION.ids)
        for (role, place), samples in zip(found.items(), inputs, strict=True):
            matrix = matrix_of(place)
            undo = overwrite(place, written_out(matrix, samples, min(matrix.shape) // 4))
            changed = logits_of(model, MEASURED.ids)
            undo()
            divergence = functional.kl_div(changed, original, reduction="batchmean", log_target=True)
            row = table.loc[(layer, role)]
            assert row["perplexity"] == pytest.approx(
                math.exp(functional.nll_loss(changed, targets)), rel=1e-5
            )
            assert row["divergence"] == pytest.approx(float(divergence), rel=1e-4, abs=2e-6), (
                layer,
                role,
            )


def test_late_steps_stay_late_behind_the_changed_layer(tmp_path: Path) -> None:
    """A matrix of full rank changes nothing, wherever in the program it lies."""
    model = surgeon.edit(tiny_model("llama", LAYERS), "A0 F0 >A1 >F1 A2 F2")
    assert (
        run(tmp_path, model, ranks="1.0", weights=["q", "down"]).damage["divergence"].abs().max() < 1e-6
    )
    journal = tmp_path / "journal.jsonl"
    journal.write_text(journal.read_text().replace(',"late_steps":"late"', ""))
    with pytest.raises(
        ValueError, match="of an earlier version, which does not say its order of late steps"
    ):
        run(tmp_path, model)


def test_layers_that_a_program_leaves_out_have_no_spectrum(tmp_path: Path) -> None:
    model = surgeon.edit(tiny_model("llama", LAYERS), "A0 F0 F1 {A2 | F2}")
    with pytest.raises(
        ValueError, match="does not run A1 as it is stored, so that q of layer 1 has no inputs"
    ):
        run(tmp_path, model)
    assert {row.weight for row in run(tmp_path, model, weights=["up"]).matrices.itertuples()} == {"up"}
