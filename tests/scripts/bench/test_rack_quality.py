"""scripts/bench/rack_quality.py: racks, averaging, and an end of the run in which the path is trained end to end."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from scripts.bench import rack_quality
from scripts.bench.rack_model import Optimisation
from scripts.bench.rack_quality import LAYERS, WINDOW, Run, Training
from surgeon.processes.files import write_json


def training(run: Run, steps: int = 10) -> Training:
    return Training(run, Optimisation(steps, 2, 2, 1e-2, warmup=0, seed=run.seed))


def ids(seed: int = 0) -> Tensor:
    return torch.randint(256, (2, WINDOW), generator=torch.Generator().manual_seed(seed))


def test_one_rack_is_the_model_end_to_end() -> None:
    whole, racks = training(Run("small", racks=1)), training(Run("small", racks=4))
    assert len(whole.racks) == 1
    assert whole.measure(ids())[-1] == pytest.approx(racks.measure(ids())[-1])  # the path is the same model


def test_no_gradient_crosses_a_rack_until_the_end_of_the_run() -> None:
    trained = training(Run("small", racks=2, joint=0.3))
    stream = trained.racks[0].stretch.run(ids())
    trained.racks[1].predict(trained.racks[1].stretch.run(stream.detach())).sum().backward()
    assert next(trained.racks[0].stretch.layers.parameters()).grad is None
    coda = trained.racks[0].coda()[0]
    before = coda.detach().clone()
    trained.step(8, ids())  # of 10: the path alone is trained
    assert torch.equal(coda, before)
    trained.step(7, ids())
    assert not torch.equal(coda, before)


def test_averaged_codas_are_the_mean_of_all_of_them() -> None:
    once, never = training(Run("small", racks=4, average=2)), training(Run("small", racks=4))
    for step in (1, 2):
        for each in (once, never):
            each.step(step, ids(step))
    # Until the second step is made, nothing was averaged, so both have come to the same.
    for same in zip(*(rack.coda() for rack in never.racks), *(rack.coda() for rack in once.racks), strict=True):
        mean = torch.stack([one.detach() for one in same[:4]]).mean(0)
        for one in same[4:]:
            torch.testing.assert_close(one.detach(), mean)


def test_a_run_leaves_its_curve_and_is_not_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run, last in ((Run("small", racks=1), 2.0), (Run("small"), 2.5)):
        points = [{"step": 0, "losses": [5.0]}, {"step": 10, "losses": [3.0, last]}]
        values = {"size": "small", "racks": run.racks, "seed": 0, "steps": 10, "tokens_per_step": 100, "body": 50}
        write_json(tmp_path / f"{run.name}.json", values | {"points": points})
    rack_quality.perform(Run("small"), 10, None, tmp_path / "small-racks4-coda1-0.json")  # would fail without texts
    assert rack_quality.gaps(tmp_path) == {"small": [(20.0, 0.5)]}
    rack_quality.show(tmp_path)
    assert "| small-racks4-coda1 | 0 | 20.00 | 2.5000 | +0.5000 | 3.0000 | 2.5000 |" in capsys.readouterr().out


def test_measurements_lie_ever_further_apart_and_end_with_the_run() -> None:
    steps = sorted(rack_quality.measured(1000))
    apart = [after - before for before, after in pairwise(steps)]
    assert apart == sorted(apart)
    assert steps[-1] == 1000
    assert len({run.name for run in rack_quality.planned()}) == len(rack_quality.planned())
    assert LAYERS % 4 == 0
