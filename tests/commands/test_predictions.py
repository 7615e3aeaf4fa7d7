"""What a notebook calls to predict and to measure speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import surgeon
from surgeon.cost.deployment import Deployment
from surgeon.opened import open_model
from tests.cost.examples import SIZES, hardware


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"model_type": "llama", **SIZES}))
    return path


def test_predictions_of_a_configuration(config: Path, tmp_path: Path) -> None:
    load = {"batch": (1, 2), "prompt": 20, "new": 8, "layers": "0:4"}
    found = surgeon.predict(config, hardware(), compare=["lp"], ranks=2, output=tmp_path / "out", **load)  # type: ignore[arg-type]
    assert found.heading == "small on round: 2 ranks, wire, float32, prompt 20, 8 new"
    assert list(found.table()["program"]) == 2 * ["small", "lp"]
    assert [path.name for path in found.files] == ["predict.csv", "predict.json", "predict.png"]
    assert all(path.is_file() for path in found.files)
    again = surgeon.predict(
        open_model(config, weights=False), hardware(), ranks=Deployment(2), batch=2, prompt=20, new=8
    )
    assert again.cells[0].prediction == found.cells[2].prediction
    assert str(again).startswith(again.heading)


def test_a_sweep_has_values_by_axis_too(config: Path) -> None:
    one = surgeon.predict(config, hardware(), sweep={"ranks": [1, 2]}, prompt=20, new=8)
    other = surgeon.predict(config, hardware(), sweep="ranks=1..2", prompt=20, new=8)
    assert [cell.prediction for cell in one.cells] == [cell.prediction for cell in other.cells]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "bf16"}, "there is no dtype 'bf16'; did you mean 'bfloat16'"),
        ({"low_rank": "all"}, "there is no way 'all' of sharing factors among ranks"),
        ({"compress": "int7"}, "there is no compression 'int7'"),
        ({"kv": "auto"}, "there is no kv 'auto'"),
    ],
)
def test_a_deployment_checks_itself(options: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Deployment(**options)  # type: ignore[arg-type]


def test_a_bench_of_programs(tiny_checkpoint: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    found = surgeon.bench(
        surgeon.open(tiny_checkpoint),
        compare=["A0 F0"],
        prompt=4,
        new=3,
        rounds=1,
        ranks=1,
        trace=trace,
        output=tmp_path,
    )
    assert found.heading == "1 rank (cpu, shm), prompt 4, 3 new, 1 round"
    assert list(found.table()["program"]) == [tiny_checkpoint.name, "A0 F0"]
    assert [path.name for path in found.files] == [
        "trace.rank0.json",
        "bench.csv",
        "bench.json",
        "bench.png",
    ]
    assert json.loads((tmp_path / "bench.json").read_text())["model"] == str(tiny_checkpoint)
    assert str(found).startswith(f"{found.heading}\nkernels: {found.record['kernels']}\n\n")
    with pytest.raises(ValueError, match="must be a file in a folder that exists"):
        surgeon.bench(tiny_checkpoint, ranks=1, trace=tmp_path)


def test_a_calibration_is_hardware_that_predictions_take(tiny_checkpoint: Path, tmp_path: Path) -> None:
    model, path = surgeon.open(tiny_checkpoint), tmp_path / "here.yaml"
    found = surgeon.calibrate(model, path, ranks=[1], rounds=1)
    assert (found.name, found.note) == ("here", f"measured at the shapes of {tiny_checkpoint.name}")
    assert surgeon.predict(model, path, prompt=8, new=4).cells[0].prediction is not None
    with pytest.raises(FileExistsError, match="is there already"):
        surgeon.calibrate(model, path)
