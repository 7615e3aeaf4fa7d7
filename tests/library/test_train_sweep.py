"""Sweeps of models from scratch: each is what it is alone, what is there stays, and statistics by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import surgeon
from surgeon.cli.app import main
from surgeon.library.train_sweep import summarised
from surgeon.results.training_sweep import TrainingSweep
from surgeon.training import run

LADDER = {"operations": [{"ladder": {"layers": "0:2"}}]}


@pytest.fixture
def keys(tiny_checkpoint: Path, tmp_path: Path) -> dict[str, Any]:
    """A configuration of two programs and two seeds."""
    text = tmp_path / "long.txt"
    text.write_text(" ".join(f"{number} sheep and {number * 7 % 31} dogs" for number in range(150)))
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    return {
        "surgeon": 1,
        "model": {"model_type": "llama", **shape},
        "tokenizer": str(tiny_checkpoint),
        "data": str(text),
        "eval_tokens": 64,
        "window": 16,
        "training": {"steps": 3, "batch": 2, "evaluate_every": 2, "save_every": 1, "learning_rate": 0.01},
        "sweep": {"programs": {"dense": {}, "ladder": LADDER}, "seeds": [0, 1]},
    }


def names(*seeds: int) -> list[str]:
    return [f"{program}-lr0.01-seed{seed}" for program in ("dense", "ladder") for seed in seeds]


def test_programs_by_seeds(keys: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second call trains nothing, and other settings are refused."""
    folder, config = tmp_path / "sweep", tmp_path / "config.yaml"
    config.write_text(json.dumps(keys))
    assert main(["train", str(config), "--sweep", "-o", str(folder)]) == 0
    out, _ = capsys.readouterr()
    assert out.splitlines()[0].split()[:3] == ["program", "rate", "seeds"]
    assert [Path(line).name for line in out.splitlines()[3:]] == [
        *("summary.csv", "sweep.csv", "curves.csv", "sweep.json", "curves.png")
    ]
    found = TrainingSweep.read(folder)
    assert list(found.runs["run"]) == names(0, 1)
    trained = json.loads((folder / f"{names(1)[1]}.run" / "run.json").read_text())["trained"]
    row = found.runs.iloc[3]
    assert row["nll"] == pytest.approx(math.log(trained["perplexity"]))
    assert row["perplexity_low"] == pytest.approx(trained["perplexity_interval"][0])

    curve = found.curves[found.curves["program"] == "ladder"]
    assert (list(curve["step"]), list(curve["tokens"])) == ([0, 2, 3], [0, 64, 96])
    seeds = found.runs["nll"][2:]
    assert list(curve.iloc[-1][["perplexity", "least", "highest"]]) == pytest.approx(
        [math.exp(seeds.mean()), math.exp(seeds.min()), math.exp(seeds.max())]
    )

    times = [path.stat().st_mtime_ns for path in sorted(folder.glob("*/model.safetensors"))]
    again = surgeon.train_sweep(keys, folder)
    assert again is not None
    pd.testing.assert_frame_equal(again.table(), found.table(), check_exact=False)
    assert [path.stat().st_mtime_ns for path in sorted(folder.glob("*/model.safetensors"))] == times
    assert "4 of 4: ladder-lr0.01-seed1, which is there" in capsys.readouterr().err
    with pytest.raises(ValueError, match="its window .*|its data was .* choose another output"):
        surgeon.train_sweep({**keys, "window": 8}, folder)
    with pytest.raises(ValueError, match="its steps was 3, and now it is 4; choose another output"):
        surgeon.train_sweep(keys, folder, steps=4)
    assert [path.stat().st_mtime_ns for path in sorted(folder.glob("*/model.safetensors"))] == times
    assert TrainingSweep.read(folder).record["configurations"].keys() == set(names(0, 1))


@pytest.mark.thorough
def test_a_model_is_the_same_as_alone(keys: dict[str, Any], tmp_path: Path) -> None:
    sweep = keys.pop("sweep")
    assert surgeon.train(keys | LADDER, tmp_path / "alone", seed=1) is not None
    assert surgeon.train_sweep(keys | {"sweep": sweep}, tmp_path / "sweep") is not None
    written = [path / "model.safetensors" for path in (tmp_path / "sweep" / names(1)[1], tmp_path / "alone")]
    assert written[0].read_bytes() == written[1].read_bytes()


@pytest.mark.thorough
def test_a_killed_sweep_goes_on(keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = surgeon.train_sweep(keys, tmp_path / "whole")
    in_full, steps = run.ModelTrainer.training_step, list[int]()

    def interrupted(self: Any, *arguments: Any, **options: Any) -> Any:
        steps.append(self.state.global_step)
        if len(steps) == 6:  # in the second model, which has a checkpoint
            raise KeyboardInterrupt
        return in_full(self, *arguments, **options)

    monkeypatch.setattr(run.ModelTrainer, "training_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        surgeon.train_sweep(keys, tmp_path / "cut")
    assert not (tmp_path / "cut" / "sweep.json").exists()
    assert (tmp_path / "cut" / f"{names(1)[0]}.run" / "checkpoint-2").is_dir()
    del steps[:]
    steps.extend([0] * 10)  # it is not interrupted again
    found = surgeon.train_sweep(keys, tmp_path / "cut")
    assert whole is not None
    assert found is not None
    assert steps[10:] == [2, 0, 1, 2, 0, 1, 2]
    same = [one.runs.drop(columns="seconds") for one in (whole, found)]
    pd.testing.assert_frame_equal(*same)


@pytest.mark.thorough
def test_more_seeds_and_rates_go_on_in_the_folder(keys: dict[str, Any], tmp_path: Path) -> None:
    keys["sweep"] = {"programs": {"dense": {}, "racks": {"racks": {"ranges": ["0:1", "1:2"], "coda": 1}}}}
    assert surgeon.train_sweep(keys, tmp_path / "sweep") is not None
    keys["sweep"] |= {"seeds": [0, 1], "learning_rates": [0.01, 0.03]}
    found = surgeon.train_sweep(keys, tmp_path / "sweep")
    assert found is not None
    assert list(found.summary["seeds"]) == [2] * 4
    assert found.pictures().keys() == {"curves", "rates"}
    keys["sweep"]["programs"]["racks"]["racks"]["coda"] = 0
    with pytest.raises(ValueError, match="its coda was 1, and now it is 0; choose another output"):
        surgeon.train_sweep(keys, tmp_path / "sweep")


def test_a_rate_that_diverges_does_not_end_the_sweep(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its row says so, its program's best rate is another one, and the same command does not train it again."""
    in_full, steps = run.ModelTrainer.compute_loss, list[float]()

    def exploding(self: Any, *arguments: Any, **options: Any) -> Any:
        steps.append(self.args.learning_rate)
        return in_full(self, *arguments, **options) * (math.nan if self.args.learning_rate > 1 else 1)

    monkeypatch.setattr(run.ModelTrainer, "compute_loss", exploding)
    keys["sweep"] = {"programs": {"dense": {}}, "learning_rates": [2.0, 0.01]}
    found = surgeon.train_sweep(keys, tmp_path / "sweep")
    assert found is not None
    assert steps == [2.0, 0.01, 0.01, 0.01]
    assert "dense-lr2-seed0 has diverged: the loss is nan at step 1, made on windows" in capsys.readouterr().err
    lost, kept = (row for _, row in found.runs.iterrows())
    assert (lost["diverged"], kept["diverged"]) == ("the loss is nan at step 1", "")
    assert math.isinf(lost["nll"])
    assert list(found.best["learning_rate"]) == [0.01]
    assert str(found).splitlines()[1].split()[:4] == ["dense", "2", "1", "diverged"]
    assert surgeon.train_sweep(keys, tmp_path / "sweep") is not None
    assert len(steps) == 4
    read = TrainingSweep.read(tmp_path / "sweep")
    assert str(read) == str(found)
    assert read.pictures().keys() == {"curves", "rates"}


def test_statistics_by_hand() -> None:
    losses = {"dense": [3.0, 3.2, 3.1], "ladder": [2.9, 3.3, 2.95], "tracks": [3.5]}
    rows = [
        {"program": program, "learning_rate": 0.01, "seed": seed, "nll": loss}
        for program, values in losses.items()
        for seed, loss in enumerate(values)
    ]
    dense, ladder, tracks = (row for _, row in summarised(pd.DataFrame(rows)).iterrows())
    assert (dense["nll"], dense["perplexity"]) == pytest.approx((3.1, math.exp(3.1)))
    expected = stats.t.interval(0.95, 2, loc=3.1, scale=stats.sem(losses["dense"]))
    assert (dense["nll_low"], dense["nll_high"]) == pytest.approx(expected)
    assert np.isnan(dense["difference"])
    paired = stats.ttest_rel(losses["ladder"], losses["dense"]).confidence_interval(0.95)
    assert ladder["difference"] == pytest.approx((-0.1 + 0.1 - 0.15) / 3)
    assert (ladder["difference_low"], ladder["difference_high"]) == pytest.approx((paired.low, paired.high))
    assert (tracks["seeds"], tracks["difference"]) == (1, pytest.approx(0.5))
    assert np.isnan([tracks["nll_low"], tracks["difference_low"]]).all()
    rows[0]["nll"] = math.inf  # dense has diverged with seed 0
    dense, ladder, tracks = (row for _, row in summarised(pd.DataFrame(rows)).iterrows())
    assert (dense["nll"], dense["diverged"], ladder["nll"]) == (math.inf, 1, pytest.approx(9.15 / 3))
    assert np.isnan([dense["nll_low"], ladder["difference"], tracks["difference"]]).all()


@pytest.mark.parametrize("option", [("--seed", "1"), ("--overwrite",)])
def test_options_of_one_model_are_refused(option: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "x.yaml", "--sweep", "-o", "y", *option]) == 1
    assert f"error: {option[0]} is of one model" in capsys.readouterr().err
