"""Fewer heads and neurons through the whole of it: edited, evaluated, exported, run on ranks, healed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import surgeon
from surgeon.analysis.factors.factor_plan import plan_factors
from surgeon.language.recipe import Recipe, parse_recipe
from surgeon.models.weights import ListedUnits, RandomUnits
from surgeon.training.model import RackOptions

TEXT: dict[str, Any] = {"tokens": 128, "window": 32}


def recipe_for(model: Path, *operations: str) -> Recipe:
    entries = "".join(f"  - {one}\n" for one in operations)
    return parse_recipe(f"surgeon: 1\nmodel: {model}\noperations:\n{entries}")


def test_a_recipe_says_which_units_are_kept(tiny_checkpoint: Path) -> None:
    model = surgeon.open(tiny_checkpoint)
    recipe = recipe_for(
        tiny_checkpoint,
        'width: {layers: "0:2", heads: [1], neurons: 0.5, by: random, seed: 7}',
        'width: {layers: "2:3", heads: 0.5}',
    )
    plan = plan_factors(recipe, model)
    assert str(plan.program) == "A0#1 F0#24 A1#1 F1#24 A2#1 F2 A3 F3"
    by_layer = {("A", 0): ListedUnits((1,)), ("A", 1): ListedUnits((1,)), ("F", 0): RandomUnits(7)}
    assert plan.units == by_layer | {("F", 1): RandomUnits(7)}
    assert not plan.is_of_weights
    assert plan.to_json()["units"]["A0"] == "ListedUnits(listed=(1,))"
    assert plan_factors(
        recipe_for(tiny_checkpoint, 'width: {layers: "2:3", heads: 0.5}'), model
    ).is_of_weights


def test_loaded_open_and_exported_models_have_the_same_units(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    given = {"layers": "1:3", "heads": [1], "neurons": 10, "by": "random", "seed": 3}
    loaded, ids = surgeon.load(tiny_checkpoint), torch.arange(3, 40)[None]
    weights = loaded.model.layers[1].mlp.up_proj.weight
    edited = surgeon.edit(loaded, width=given)
    narrow = edited.get_parameter("model.layers.F1#10.mlp.up_proj.weight")
    kept = [int(torch.where((weights == row).all(1))[0]) for row in narrow]
    assert kept == sorted(kept)
    assert edited.get_parameter("model.layers.A1#1.self_attn.k_proj.weight").equal(
        loaded.get_parameter("model.layers.1.self_attn.k_proj.weight")[8:]
    )
    with torch.no_grad():
        expected = edited(input_ids=ids).logits
    other = surgeon.edit(surgeon.open(tiny_checkpoint), width=given)
    found = surgeon.export(other, tmp_path / "narrow")
    assert (found.form, str(found.program)) == ("fused", "A0 F0 A1#1 F1#10 A2#1 F2#10 A3 F3")
    with torch.no_grad():
        for model in (other.load("cpu"), surgeon.load(tmp_path / "narrow")):
            torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-5)


def test_it_is_evaluated_with_its_units(tiny_checkpoint: Path, tiny_text: Path) -> None:
    by_weights, one, again, another, untold, by_text, by_wanda = (
        surgeon.evaluate(
            recipe_for(tiny_checkpoint, f'width: {{layers: "0:4", neurons: 0.5, {by}}}'),
            tiny_text,
            **TEXT,
        )
        for by in (
            *("by: magnitude", "by: random", "by: random, seed: 0", "by: random, seed: 1", ""),
            *(
                f"{by} calibration: {{data: {tiny_text}, tokens: 64, window: 32}}"
                for by in ("", "by: wanda,")
            ),
        )
    )
    everything = (by_weights, one, again, another, untold, by_text, by_wanda)
    values = [found.text.divergence for found in everything if found.text]
    assert values[1] == values[2] == values[4]
    assert values[5] == values[6]
    assert len(set(values)) == 4


def test_ranks_run_what_follows_from_the_weights(tiny_checkpoint: Path, tmp_path: Path) -> None:
    model = surgeon.open(tiny_checkpoint)
    edited = surgeon.edit(model, width={"layers": "0:4", "neurons": 0.5, "heads": 1})
    surgeon.export(edited, tmp_path / "narrow")
    there, exported = (
        surgeon.generate(one, "The fox", max_new_tokens=6) for one in (edited, tmp_path / "narrow")
    )
    assert there.texts[0].tokens == exported.texts[0].tokens
    with pytest.raises(
        ValueError, match="heads or neurons that its matrices alone do not tell; export it"
    ):
        surgeon.generate(
            surgeon.edit(model, width={"layers": "0:4", "neurons": 9, "by": "random"}), "The fox"
        )


def test_what_goes_by_weights_alone_is_exported(tiny_checkpoint: Path, tmp_path: Path) -> None:
    recipe = recipe_for(tiny_checkpoint, 'width: {layers: "1:3", neurons: 10, by: magnitude}')
    assert str(surgeon.export(recipe, tmp_path / "narrow").program) == "A0 F0 A1 F1#10 A2 F2#10 A3 F3"
    assert not (tmp_path / "narrow.factors").exists()


@pytest.mark.parametrize("racks", [None, RackOptions(("0:2", "2:4"))])
def test_it_is_healed(tiny_checkpoint: Path, tmp_path: Path, racks: RackOptions | None) -> None:
    text = tmp_path / "long.txt"
    text.write_text(" ".join(f"{number} sheep and {number * 7 % 31} dogs" for number in range(150)))
    recipe = recipe_for(
        tiny_checkpoint, 'width: {layers: "0:4", heads: 0.5, neurons: 0.5, by: random, seed: 5}'
    )
    settings = surgeon.TrainSettings(batch=2, steps=2, scope="edited" if racks is None else "all")
    found = surgeon.heal(
        recipe, text, tmp_path / "healed", settings=settings, window=16, eval_tokens=64, racks=racks
    )
    assert found is not None
    healed = surgeon.open(tmp_path / "healed")
    assert (str(healed.form), healed.family.units(healed.config)) == (
        "plain",
        {"heads": 2, "kv_heads": 1, "neurons": 24},
    )
    before = surgeon.edit(surgeon.load(tiny_checkpoint), recipe)
    after = surgeon.load(healed)
    started = before.get_parameter("model.layers.F0#24.mlp.up_proj.weight")
    trained = after.get_parameter("model.layers.0.mlp.up_proj.weight")
    assert 0 < (started - trained).abs().max() < 0.05  # the same neurons, trained a little
