"""Units that a recipe chooses by a text: which they are, what runs, what is written, and what factors of them see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import surgeon
from surgeon.analysis.factors.factor_plan import plan_factors
from surgeon.analysis.factors.make_factors import with_factors
from surgeon.analysis.importance import unit_importance
from surgeon.language.recipe import parse_recipe
from surgeon.models.edit import edit
from surgeon.models.weights import ScoredUnits, UnitsByLayer
from surgeon.opened import EditedModel, Model, load, open_model
from surgeon.quality.data import load_windows
from tests.analysis.spectra import inputs_of, written_out
from tests.tiny_models import tiny_model

RECIPE = """\
surgeon: 1
model: demo
operations:
  - width: {{layers: "0:2", heads: 1, by: wanda, calibration: {text}}}
  - width: {{layers: "1:3", neurons: 0.5, by: activation, calibration: {text}}}
  - width: {{layers: "3:4", neurons: 30, by: random, seed: 3}}
  - width: {{layers: "3:4", heads: [1]}}
  - width: {{layers: "0:1", neurons: 40}}
"""
NARROWED = "A0#1 F0#40 A1#1 F1#24 A2 F2#24 A3#1 F3#30"


def recipe_of(text: Path, more: str = "") -> Any:
    return parse_recipe(RECIPE.format(text=f"{{data: {text}, tokens: 256, window: 32}}") + more)


@pytest.fixture
def narrowed(tiny_checkpoint: Path, tiny_text: Path) -> EditedModel:
    return surgeon.edit(open_model(tiny_checkpoint), recipe_of(tiny_text))


def test_what_a_recipe_says_of_units() -> None:
    model = Model.of_config(tiny_model("llama", 4).config, "tiny")
    with pytest.warns(
        UserWarning, match="width: nothing says which neurons are kept, so that these are any"
    ):
        plan = plan_factors(recipe_of(Path("a.txt")), model)
    assert str(plan.program) == NARROWED
    assert plan.importance == {
        ("A", 0): "wanda",
        ("A", 1): "wanda",
        ("F", 1): "activation",
        ("F", 2): "activation",
    }
    assert sorted(plan.units) == [("A", 3), ("F", 3)]  # those of F0 are not told
    assert plan.is_calibrated
    assert not plan.has_calibrated_factors
    assert plan.to_json()["units"]["F1"] == "activation"
    other = '  - lowrank: {layers: "0:1", keep: 0.5, weights: [q], method: whitened, calibration: {data: b.txt}}\n'
    with pytest.raises(
        ValueError, match="recipe:9: lowrank: calibration is another than that of an earlier entry"
    ):
        plan_factors(recipe_of(Path("a.txt"), other), model)


def test_units_are_those_of_most_importance_on_the_recipes_text(
    narrowed: EditedModel, tiny_text: Path, tmp_path: Path
) -> None:
    assert narrowed.factors is None
    made = with_factors(narrowed, tmp_path / "out")
    windows = load_windows(narrowed.model.tokenizer, str(tiny_text), 32, 256)
    loaded = load(narrowed.model)
    scores = unit_importance(loaded, {("A", 1): "wanda", ("F", 2): "activation"}, windows)
    running: Any = made.load("cpu").model.layers
    best = sorted(scores["F", 2].argsort(descending=True)[:24].tolist())
    up = loaded.get_parameter("model.layers.2.mlp.up_proj.weight")
    assert torch.equal(running.get_parameter("F2#24.mlp.up_proj.weight"), up[best])
    group = int(scores["A", 1].argmax())
    keys = loaded.get_parameter("model.layers.1.self_attn.k_proj.weight")
    assert torch.equal(
        running.get_parameter("A1#1.self_attn.k_proj.weight"), keys[8 * group : 8 * (group + 1)]
    )
    values = loaded.get_parameter("model.layers.3.self_attn.v_proj.weight")
    # That of the list.
    assert torch.equal(running.get_parameter("A3#1.self_attn.v_proj.weight"), values[8:16])
    assert made.recipe is not None
    first, *_, listed, _ = made.recipe.operations
    assert first.parameters["calibration"]["data"] == tiny_text.name
    assert first.parameters["calibration"]["hash"].startswith("sha256:")
    assert "calibration" not in listed.parameters
    again = with_factors(narrowed, tmp_path / "out")
    assert again.factors_identity == made.factors_identity
    assert (tmp_path / "out" / "importance.jsonl").exists()


def test_what_is_exported_and_evaluated_is_what_ran(
    narrowed: EditedModel, tiny_text: Path, tmp_path: Path
) -> None:
    made = with_factors(narrowed, tmp_path / "made")
    ids = torch.arange(2, 20)[None]
    with torch.no_grad():
        expected = made.load("cpu")(ids).logits
        surgeon.export(narrowed, tmp_path / "out")
        torch.testing.assert_close(surgeon.load(tmp_path / "out")(ids).logits, expected)
    sizes = {"tokens": 256, "window": 32}
    ours, stored = (
        surgeon.evaluate(one, tiny_text, **sizes).text for one in (narrowed, tmp_path / "out")
    )
    assert ours is not None
    assert stored is not None
    assert ours.perplexity == pytest.approx(stored.perplexity, rel=1e-5)
    by_weights = surgeon.evaluate(narrowed.model, tiny_text, program=NARROWED, **sizes).text
    assert by_weights is not None
    assert ours.perplexity != pytest.approx(by_weights.perplexity, rel=1e-5)


def test_factors_are_calibrated_on_what_is_left(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path
) -> None:
    text = f"{{data: {tiny_text}, tokens: 512, window: 32}}"
    more = f'  - lowrank: {{layers: "1:2", ranks: {{up: 5}}, method: whitened, calibration: {text}}}\n'
    recipe = parse_recipe(RECIPE.format(text=text) + more)
    made = with_factors(surgeon.edit(open_model(tiny_checkpoint), recipe), tmp_path / "out")
    windows = load_windows(made.model.tokenizer, str(tiny_text), 32, 512)
    scores = unit_importance(load(made.model), plan_factors(recipe, made.model).importance, windows)
    units = {part: ScoredUnits(values, "any") for part, values in scores.items()}
    running = edit(load(made.model), "A0#1 F0#40 A1#1 F1#24 A2 F2", factors=UnitsByLayer(units))
    module = running.get_submodule("model.layers.F1#24.mlp.up_proj")
    (seen,) = inputs_of(running, [module], windows.ids)
    found = made.load("cpu").get_submodule("model.layers.F1#24@up5.mlp.up_proj")
    expected = written_out(module.get_parameter("weight").detach().double().numpy(), seen, 5)
    np.testing.assert_allclose(found.weight.detach().numpy(), expected, rtol=1e-3, atol=1e-4)
