"""recipes/train/: every configuration parses, and describes a model that can be built, as large as the plain one."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import surgeon
from scripts.training.sweep import configurations
from surgeon.language.program import Program
from surgeon.training.scratch.build import Blueprint, blueprint
from surgeon.training.scratch.config import parse_config, read_config_file
from tests.tiny_models import sizes_of

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "train"
SYNCS = {
    "dense": 16,
    "attention-mlp": 8,
    "ladder": 16,
    "desync": 8,
    "tracks-2": 2,
    "tracks-4": 2,
    "racks-2": 16,
}  # on two ranks


@cache
def plan_of(name: str) -> Blueprint:
    return blueprint(read_config_file(FOLDER / f"{name}.yaml"))


def test_all_are_known() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == {*SYNCS, "mixture", "dense-16"}
    assert plan_of("mixture").program.sync_points(2) == 16
    assert sizes_of(plan_of("mixture").architecture)[0] == pytest.approx(5.0e6, rel=0.1)
    assert plan_of("dense-16").program == Program.dense(16)
    assert sizes_of(plan_of("dense-16").architecture)[0] == pytest.approx(3.2e6, rel=0.1)


@pytest.mark.parametrize("name", SYNCS)
def test_it_describes_a_model(name: str) -> None:
    plain, found = map(plan_of, ("dense", name))
    assert found.program.sync_points(2) == SYNCS[name]
    assert found.config.settings == plain.config.settings
    assert found.config.data == plain.config.data
    sizes = [sizes_of(each.architecture)[0] for each in (plain, found)]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.01)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(found.architecture)
    assert surgeon.program_of(surgeon.edit(model, found.program)) == found.program


def test_programs_of_the_sweep_are_of_one_size() -> None:
    models = list(configurations(FOLDER / "sweeps" / "architectures.yaml"))
    assert len(models) == 36
    for program, _, _, keys in models[::9]:
        found = blueprint(parse_config(json.dumps(keys)))
        assert sizes_of(found.architecture)[0] == pytest.approx(221_952, rel=0.01), program
