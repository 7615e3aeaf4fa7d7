"""Factors in a folder against least squares written out on the inputs that hooks see."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from surgeon.analysis.factors import make_factors as making_module
from surgeon.analysis.factors.factor_plan import FactorPlan, Making, plan_factors
from surgeon.analysis.factors.make_factors import make_factors
from surgeon.analysis.factors.matrices import Matrix
from surgeon.checkpoint.factor_cache import FactorCache
from surgeon.language.operations.lowrank import Calibration
from surgeon.language.program import Program
from surgeon.language.recipe import parse_recipe
from surgeon.models.edit import edit, restore
from surgeon.opened import Model, load_streamed
from surgeon.quality.data import Windows
from tests.analysis.spectra import inputs_of, matrix_of, overwrite, places, text, written_out
from tests.tiny_models import tiny_model

Array = NDArray[np.float64]
TEXT = text(12, 12, 6)
RANKS = {"q": 5, "k": 3, "o": 6, "up": 7, "down": 8}
AT = "@q5,k3,o6", "@up7,down8"


def plan_of(program: str, method: Any = "whitened", **calibration: Any) -> FactorPlan:
    parsed = Program.parse(program)
    targets = [(replace(s, piece=None), role) for s in parsed.sublayers() for role, _ in s.ranks]
    return FactorPlan(
        parsed, {Matrix(*target): Making(method) for target in targets}, Calibration(**calibration)
    )  # type: ignore[typeddict-item]


def made(
    folder: Path, model: Any, plan: FactorPlan, windows: Windows = TEXT, **more: Any
) -> FactorCache:
    return make_factors(model, plan, windows, folder, model_hash="weights", **more)[0]


def facts_in(folder: Path) -> dict[str, Any]:
    """By the matrices' names."""
    found: dict[str, Any] = json.loads((folder / "factors.json").read_text())["matrices"]
    return found


def product(found: FactorCache, target: Matrix) -> Array:
    nothing: Any = None
    factors = found.factors(target.sublayer, target.role, nothing)
    assert factors.first.shape[0] == target.sublayer.rank(target.role)
    return (factors.second.double() @ factors.first.double()).numpy()


def target_named(plan: FactorPlan, name: str) -> Matrix:
    return next(target for target in plan.makings if str(target) == name)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "phi3"])
def test_whitened_factors_of_inputs_of_the_unedited_model(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, 2)
    one = (
        "[A0@q5,k3,o6 F0@up7,down8] [A1 F1]"
        if family == "gpt_neox"
        else "A0@q5,k3,o6 F0@up7,down8 A1 F1@down8"
    )
    plan = plan_of(one)
    found = made(tmp_path / "out", model, plan)
    facts = facts_in(tmp_path / "out")
    assert set(facts) == set(map(str, plan.makings))
    for target in plan.makings:
        place = places(family, model, target.sublayer.layers[0])[target.role]
        (seen,) = inputs_of(model, [place[0]], TEXT.ids)
        rank = target.sublayer.rank(target.role)
        assert rank is not None
        matrix = matrix_of(place)
        expected = written_out(matrix, seen, rank)
        np.testing.assert_allclose(product(found, target), expected, rtol=1e-4, atol=1e-5)
        lost = np.linalg.norm(seen @ (matrix - expected).T) / np.linalg.norm(seen @ matrix.T)
        assert facts[str(target)]["loss"] == pytest.approx(lost, rel=1e-3)
        assert facts[str(target)]["samples"] == TEXT.ids.numel()


def regression(target: Array, inputs: Array) -> Array:
    """B that minimises |target - inputs B'|."""
    solved: Array = np.linalg.lstsq(inputs, target, rcond=None)[0].T
    return solved


@pytest.mark.parametrize("update", [False, True])
def test_sequential_factors_see_what_earlier_ones_did(update: bool, tmp_path: Path) -> None:
    model = tiny_model("llama", 2)
    plan = plan_of(f"A0{AT[0]} F0{AT[1]} A1{AT[0]} F1{AT[1]}", sequential=True, update=update)
    found = made(tmp_path / "out", model, plan)
    again = tiny_model("llama", 2)
    for layer in range(2):
        own, original = places("llama", again, layer), places("llama", model, layer)
        for roles in (("q", "k"), ("o",), ("up",), ("down",)):
            seen = dict(
                zip(roles, inputs_of(again, [own[role][0] for role in roles], TEXT.ids), strict=True)
            )
            given = dict(
                zip(
                    roles, inputs_of(model, [original[role][0] for role in roles], TEXT.ids), strict=True
                )
            )
            for role in roles:
                matrix = matrix_of(original[role])
                expected = written_out(matrix, seen[role], RANKS[role])
                if update:
                    first = np.linalg.svd(expected)[2][: RANKS[role]]
                    expected = regression(given[role] @ matrix.T, seen[role] @ first.T) @ first
                kind = "A" if role in "qkvo" else "F"
                target = target_named(plan, f"{role} of {kind}{layer}{AT[kind == 'F']}")
                np.testing.assert_allclose(product(found, target), expected, rtol=1e-3, atol=1e-4)
                overwrite(own[role], expected)


@pytest.mark.parametrize("windows", [TEXT, text(1, 5, 6)], ids=["few directions", "few tokens"])
def test_an_update_leaves_alone_what_inputs_do_not_reach(windows: Windows, tmp_path: Path) -> None:
    """With v of rank 1, what o gets spans a direction for each of the four heads; it has rank 6."""
    model = tiny_model("llama", 2)
    o = places("llama", model, 0)["o"]
    exact = tiny_model("llama", 2).double()
    (original,) = inputs_of(exact, [places("llama", exact, 0)["o"][0]], windows.ids)
    errors = {}
    for update in (False, True):
        plan = plan_of("A0@v1,o6 F0 A1 F1", sequential=True, update=update)
        found = made(tmp_path / str(update), model, plan, windows)
        v, target = target_named(plan, "v of A0@v1,o6"), target_named(plan, "o of A0@v1,o6")
        exact.model.layers[0].self_attn.v_proj.weight.data = torch.from_numpy(product(found, v))
        (seen,) = inputs_of(exact, [places("llama", exact, 0)["o"][0]], windows.ids)
        wanted = original @ matrix_of(o).T
        errors[update] = np.linalg.norm(wanted - seen @ product(found, target).T) / np.linalg.norm(
            wanted
        )
        if update:
            best = np.linalg.lstsq(seen, wanted, rcond=1e-9)[0]
            least = np.linalg.norm(wanted - seen @ best) / np.linalg.norm(wanted)
            factors: Any = found.factors(target.sublayer, "o", None)  # type: ignore[arg-type]
            assert factors.second.abs().max() < 10
    assert errors[True] <= errors[False]
    assert errors[True] == pytest.approx(least, rel=1e-3, abs=1e-5)


def test_activation_weighs_inputs(tmp_path: Path) -> None:
    model = tiny_model("llama", 2)
    plan = plan_of("A0@q5 F0 A1 F1")
    (q,) = plan.makings
    found = made(tmp_path / "out", model, replace(plan, makings={q: Making("activation", 0.7)}))
    place = places("llama", model, 0)["q"]
    (seen,) = inputs_of(model, [place[0]], TEXT.ids)
    weighing = np.abs(seen).mean(0) ** 0.7
    np.testing.assert_allclose(
        product(found, q), weighed(matrix_of(place), weighing, 5), rtol=1e-4, atol=1e-5
    )


def weighed(matrix: Array, weighing: Array, rank: int) -> Array:
    left, values, right = np.linalg.svd(matrix * weighing, full_matrices=False)
    truncated: Array = left[:, :rank] * values[:rank] @ right[:rank] / weighing
    return truncated


def gram_of(model: Any, program: str, pick: Callable[[Any], list[nn.Module]]) -> Array:
    """The second moment of what some modules of an edited model get."""
    edited = edit(model, program)
    seen: list[Array] = []
    hooks = [
        module.register_forward_pre_hook(
            lambda _, given: seen.append(given[0].double().flatten(0, 1).numpy())
        )
        for module in pick(edited.model.layers)
    ]
    with torch.no_grad():
        edited(input_ids=TEXT.ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    restore(edited)
    stacked = np.concatenate(seen)
    gram: Array = stacked.T @ stacked
    return gram


@pytest.mark.parametrize(
    ("program", "whole", "name", "owners"),
    [
        ("A0 F0 [A1 A2@q5] [F1 F2]", "A0 F0 [A1 A2] [F1 F2]", "q of A2@q5", ["2"]),
        ("A0 F0 >A1@q5 >F1", "A0 F0 >A1 >F1", "q of A1@q5", ["1"]),
        ("A0 F0 A1~A2@q5 F1", "A0 F0 A1~A2 F1", "q of A1~A2@q5", ["A1~A2"]),
        (
            "A0 F0 {A1/2:0@q5 F1/2:0 | F2/2:1 A1/2:1@q5}",
            "A0 F0 {A1/2:0 F1/2:0 | F2/2:1 A1/2:1}",
            "q of A1@q5",
            ["A1/2:0", "A1/2:1"],
        ),
    ],
)
def test_inputs_are_those_in_the_program(
    program: str, whole: str, name: str, owners: list[str], tmp_path: Path
) -> None:
    model = tiny_model("llama", 3)
    plan = plan_of(program)
    found = made(tmp_path / "out", model, plan)
    target = target_named(plan, name)
    gram = gram_of(
        model, whole, lambda layers: [layers.get_submodule(f"{o}.self_attn.q_proj") for o in owners]
    )
    matrices = [matrix_of(places("llama", model, layer)["q"]) for layer in target.sublayer.layers]
    matrix = np.mean(matrices, axis=0)
    left = np.linalg.svd(matrix @ np.linalg.cholesky(gram))[0][:, :5]
    np.testing.assert_allclose(product(found, target), left @ left.T @ matrix, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sequential", [False, True])
def test_what_was_killed_goes_on_with_equal_results(
    sequential: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama", 2)
    program = f"A0{AT[0]} F0{AT[1]} A1{AT[0]} F1{AT[1]}"
    plan = replace(plan_of(program, sequential=sequential))
    plan = replace(
        plan, makings=plan.makings | {target_named(plan, f"k of A1{AT[0]}"): Making("activation")}
    )
    made(tmp_path / "whole", model, plan)
    write, written = making_module.write_factors, 0

    def killed(path: Path, factors: Any) -> None:
        nonlocal written
        written += 1
        if written > 3:
            raise KeyboardInterrupt
        write(path, factors)

    monkeypatch.setattr(making_module, "write_factors", killed)
    for _ in range(3):
        written = 0
        with pytest.raises(KeyboardInterrupt):
            made(tmp_path / "out", model, plan)
    monkeypatch.setattr(making_module, "write_factors", write)
    made(tmp_path / "out", model, plan)
    assert facts_in(tmp_path / "out") == facts_in(tmp_path / "whole")
    files = sorted(path.name for path in (tmp_path / "whole").glob("*[0-9].safetensors"))
    assert len(files) == len(plan.makings) == 10
    for name in files:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    with pytest.raises(ValueError, match="holds a factors of another calibration text"):
        made(tmp_path / "out", model, plan, text(9, 12, 7))
    with pytest.raises(ValueError, match="holds a factors of another methods"):
        made(tmp_path / "out", model, plan_of(program, "activation", sequential=sequential))


def test_a_streamed_model_gets_the_same_factors(tiny_checkpoint: Path, tmp_path: Path) -> None:
    from surgeon.opened import load

    plan = plan_of(f"A0{AT[0]} F0{AT[1]} [A1{AT[0]} A2] F1", sequential=True)
    whole = made(tmp_path / "whole", load(tiny_checkpoint), plan)
    streamed = made(tmp_path / "streamed", load_streamed(tiny_checkpoint), plan, memory=4 << 30)
    for target in plan.makings:
        np.testing.assert_allclose(
            product(streamed, target), product(whole, target), rtol=1e-6, atol=1e-7
        )


def test_short_texts_are_said(tmp_path: Path) -> None:
    model = tiny_model("llama", 2)
    plan = plan_of("A0 F0@down8 A1 F1")
    _, (short, singular) = make_factors(
        model, plan, text(1, 12, 8), tmp_path / "out", model_hash="weights"
    )
    assert not make_factors(model, plan, TEXT, tmp_path / "enough", model_hash="weights")[1]
    assert short.startswith(
        "the calibration text has 12 tokens, fewer than the 48 inputs of down of F0@down8: it says "
    )
    assert singular.startswith(
        "the inputs of down of F0@down8 reach 12 of 32 directions of its outputs: beyond these "
    )


def test_numbers_that_are_not_finite_are_named(tmp_path: Path) -> None:
    model = tiny_model("llama", 2)
    plan = plan_of("A0 F0 A1@q5 F1@up7")
    weight = model.model.layers[1].mlp.up_proj.weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight[3, 2] = torch.nan
    with pytest.raises(ValueError, match="up of F1@up7 holds NaN or infinity"):
        made(tmp_path / "weight", model, plan)
    with torch.no_grad():
        weight.copy_(before)
        model.model.layers[1].input_layernorm.weight[2] = torch.inf
    with pytest.raises(ValueError, match="the inputs of q of A1@q5 hold NaN or infinity"):
        made(tmp_path / "inputs", model, plan)


def test_files_that_do_not_fit_are_refused_and_missing_ones_made_again(tmp_path: Path) -> None:
    model = tiny_model("llama", 2)
    plan = plan_of("A0@q5 F0 A1 F1@up7")
    source = made(tmp_path, model, plan)
    file = tmp_path / "A0.q5.safetensors"
    before = file.read_bytes()
    file.write_bytes(before[:-7])
    with pytest.raises(ValueError, match=r"A0\.q5\.safetensors"):
        edit(model, plan.program, factors=source)
    (tmp_path / "F1.up7.safetensors").replace(file)
    with pytest.raises(
        ValueError,
        match=r"the factors of q of A0@q5 have the shapes \(7, 32\) and \(48, 7\), and should",
    ):
        edit(model, plan.program, factors=source)
    file.unlink()
    with pytest.raises(
        ValueError, match="there are no factors of q of A0@q5 in the folder; make them again"
    ):
        edit(model, plan.program, factors=source)
    with pytest.warns(UserWarning, match=r"A0\.q5\.safetensors is gone; it is made again"):
        made(tmp_path, model, plan)
    assert file.read_bytes() == before
    assert (tmp_path / "F1.up7.safetensors").exists()
    file.write_bytes(before[:-7])
    with pytest.warns(UserWarning, match=r"A0\.q5\.safetensors is damaged; it is made again"):
        made(tmp_path, model, plan)
    assert file.read_bytes() == before


RECIPE = """\
surgeon: 1
model: demo
operations:
  - lowrank: {layers: "0:1", keep: 0.5, weights: [q], method: whitened, calibration: {data: a.txt}}
  - pair: {layers: "2:4"}
  - lowrank: {layers: "0:3", ranks: {up: [null, 3, 4]}, method: activation, alpha: 0.3, calibration: {data: a.txt}}
  - lowrank: {layers: "3:4", ranks: {o: 5}}
"""


def test_a_recipe_says_how_each_matrix_is_made() -> None:
    model = Model.of_config(tiny_model("llama", 4).config, "tiny")
    plan = plan_factors(parse_recipe(RECIPE), model)
    assert plan.program == model.program_of(parse_recipe(RECIPE))
    assert {str(target): making for target, making in plan.makings.items()} == {
        "q of A0@q8": Making("whitened"),
        "up of F1@up3": Making("activation", 0.3),
        "up of F2@up4": Making("activation", 0.3),
        "o of A3@o5": Making("plain"),
    }
    assert plan.is_calibrated
    assert plan.calibration == {"data": "a.txt"}
    with pytest.raises(
        ValueError, match="recipe:6: lowrank: calibration is another than that of an earlier entry"
    ):
        plan_factors(parse_recipe(RECIPE.replace("0.3, calibration: {data: a.txt}", "0.3")), model)
