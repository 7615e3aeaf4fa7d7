"""`surgeon similarity` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import torch

from surgeon.analysis import subject
from tests.commands.conftest import Run
from tests.tiny_models import save_checkpoint


@pytest.fixture
def run(on_tiny_text: Run) -> Run:
    """Runs a command, into a folder, with more arguments."""
    sizes = ("--window", "16", "--tokens", "64")
    return lambda name, folder, *arguments, **more: on_tiny_text(
        name, *sizes, *arguments, folder=folder, **more
    )


def test_tables_and_pictures(run: Run, tmp_path: Path) -> None:
    code, out, err = run("similarity", "out")
    assert code == 0, err
    names = {"similarity.csv", "distances.csv", "similarity.json", "similarity.png", "distances.png"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    assert len(pd.read_csv(tmp_path / "out" / "similarity.csv")) == 4
    assert len(pd.read_csv(tmp_path / "out" / "distances.csv")) == 10
    record = json.loads((tmp_path / "out" / "similarity.json").read_text())
    assert (record["window"], record["samples"], "scan" in record) == (16, 64, False)
    assert "similarity: done" in err
    assert "distances.png" in out


@pytest.mark.thorough
def test_what_predicts_a_scan(run: Run, tmp_path: Path) -> None:
    operations = ("prune", "2-parallel", "merge")
    assert run("scan", "scan", *[f"--operation={name}" for name in operations])[0] == 0
    assert run("sensitivity", "pairs", "--windows-for-jacobians", "1", "--iterations", "4")[0] == 0
    inputs = ("--scan", str(tmp_path / "scan"), "--sensitivity", str(tmp_path / "pairs"))
    code, out, err = run("similarity", "out", *inputs)
    assert code == 0, err
    table = pd.read_csv(tmp_path / "out" / "proxies.csv")
    assert set(table["operation"]) == set(operations)
    assert {"length", "cka_mlp_debiased", "angular_distance", "relative_bound"} <= set(table["proxy"])
    shown = table[
        (table["operation"] == "merge")
        & (table["damage"] == "divergence")
        & ~table["proxy"].str.contains("debiased")
    ]
    assert "What predicts the divergence of a stretch best\n" in out
    (merge,) = [line.split() for line in out.splitlines() if line.startswith("merge")]
    assert f"{shown['rho'].max():.3f}" in merge
    assert f"{shown['rho_at_equal_length'].max():.3f}" == merge[-1]
    printed = [line for line in out.splitlines() if str(tmp_path) not in line]
    assert max(map(len, printed)) <= 80
    record = json.loads((tmp_path / "out" / "similarity.json").read_text())
    assert record["scan"]["folder"] == str(tmp_path / "scan")
    assert record["sensitivity"] == str(tmp_path / "pairs")


def test_a_scan_of_another_model_is_refused_before_any_work(run: Run, tmp_path: Path) -> None:
    assert run("scan", "scan", "--operation", "prune")[0] == 0
    other = save_checkpoint(tmp_path / "other", num_layers=3)
    code, out, err = run("similarity", "out", "--scan", str(tmp_path / "scan"), model=str(other))
    assert (code, out) == (1, "")
    assert "holds a scan of another model" in err
    assert not (tmp_path / "out").exists()


def test_bad_input(run: Run, tmp_path: Path) -> None:
    for arguments, message in (
        (("--sensitivity", "x"), "sensitivity is used with scan only"),
        (
            ("--scan", str(tmp_path / "nothing")),
            "has no scan.json; give the output folder of a finished surgeon scan",
        ),
        (("--window", "1"), "at least 2 tokens"),
    ):
        code, out, err = run("similarity", "out", *arguments)
        assert (code, out) == (1, "")
        assert message in err
        assert "Traceback" not in err


@pytest.mark.parametrize(
    ("command", "tables", "more"),
    [
        ("similarity", ("similarity.csv", "distances.csv"), ()),
        ("sensitivity", ("sensitivity.csv",), ("--windows-for-jacobians", "1", "--iterations", "4")),
    ],
)
def test_weights_read_layer_by_layer_give_the_same_tables(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    tables: tuple[str, ...],
    more: tuple[str],
) -> None:
    assert run(command, "whole", *more)[0] == 0
    monkeypatch.setattr(subject, "available_bytes", lambda *_: 0)
    code, _, err = run(command, "streamed", "--memory", "100GB", *more)
    assert code == 0, err
    assert "they are read layer by layer" in err
    for name in tables:
        whole, streamed = (pd.read_csv(tmp_path / folder / name) for folder in ("whole", "streamed"))
        pd.testing.assert_frame_equal(whole, streamed, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("command", ["similarity", "sensitivity"])
def test_too_small_a_limit_of_memory(run: Run, tmp_path: Path, command: str) -> None:
    for limit, message in (("lots", "write e.g. 512MB or 2GB"), ("1MB", "set memory to")):
        code, out, err = run(command, "out", "--memory", limit)
        assert (code, out) == (1, "")
        assert message in err
        assert not list((tmp_path / "out").glob("*.csv"))


def test_a_layer_that_is_not_finite_is_named(run: Run, tiny_checkpoint: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = tiny_checkpoint / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.2.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(weights, path, metadata={"format": "pt"})
    for command in ("similarity", "sensitivity"):
        code, _, err = run(command, command)
        assert code == 1
        assert "first in F2" in err
