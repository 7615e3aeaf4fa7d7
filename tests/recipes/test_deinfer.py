"""recipes/deinfer/: DeInfer's compression ratio of 40%, as a share of parameters and as its table 1 prints ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, PreTrainedConfig

from surgeon.language.program import Program
from surgeon.language.recipe import read_recipe
from surgeon.models.edit import recipe_program
from surgeon.models.families import family_of

ROOT = Path(__file__).resolve().parents[2]
SHAPES = {"llama-3-70b": "llama-70b", "llama-65b": "llama-65b", "opt-30b": "opt-30b"}


def config_of(name: str) -> PreTrainedConfig:
    entries: dict[str, Any] = json.loads((ROOT / "docs" / "shapes" / f"{SHAPES[name]}.json").read_text())
    config: PreTrainedConfig = CONFIG_MAPPING[entries.pop("model_type")](**entries)
    return config


@pytest.mark.parametrize("name", SHAPES)
def test_shares_of_parameters_and_printed_ranks(name: str, recwarn: pytest.WarningsRecorder) -> None:
    """The first keeps 60% of the layers' numbers; the second, whose square matrices stay whole, four fifths or more."""
    config = config_of(name)
    shapes = family_of(config).layer_shapes(config)
    whole = Program.dense(config.num_hidden_layers).parameters(shapes)
    folder = ROOT / "recipes" / "deinfer"
    share, printed = (
        recipe_program(read_recipe(folder / f"{file}.yaml"), config).parameters(shapes) / whole
        for file in (name, f"{name}-printed")
    )
    assert share == pytest.approx(0.6, abs=0.001)
    assert printed == pytest.approx(
        {"llama-3-70b": 0.805, "llama-65b": 0.881, "opt-30b": 0.833}[name], abs=0.001
    )
    assert not [each for each in recwarn if "whole" in str(each.message)]


def test_two_factors_of_a_printed_rank_are_larger_than_a_square_matrix() -> None:
    """Table 1, LLaMA-3-70B: 60% of 8,192 is 4,916 for q and o, 60% of 1,024 is 614 for k and v."""
    size = 4916 * (8192 + 8192)
    assert size == pytest.approx(1.2 * 8192**2, rel=0.001)
    config = config_of("llama-3-70b")
    program = recipe_program(
        read_recipe(ROOT / "recipes" / "deinfer" / "llama-3-70b-printed.yaml"), config
    )
    assert str(program).startswith("A0@k614,v614 F0@gate4916,up4916,down4916 ")
