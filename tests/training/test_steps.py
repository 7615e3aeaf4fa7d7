"""Steps with numbers that are not finite, and steps that run out of memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surgeon.training.checkpoints import checkpoints_of
from surgeon.training.texts import RunOrder
from tests.training.runs import in_training, run, same, student, tables, weights


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    whole = weights(run(tmp_path / "whole"))
    model = student()
    in_training(model, lambda number, _, logits: logits * torch.nan if number == 3 else logits)
    windows = ", ".join(map(str, list(RunOrder(10, 4, 4, 0))[8:12]))
    folder = tmp_path / "run"
    with pytest.raises(
        ValueError, match=rf"loss is nan at step 3, made on windows {windows} of the .* not taken"
    ) as told:
        run(folder, model)
    assert (
        f"weights after step 2 are in {folder / 'checkpoint-2'}; use a lower learning rate than 0.01"
        in str(told.value)
    )
    assert list(checkpoints_of(folder)) == [1, 2]
    assert tables(folder)["training"]["step"].tolist() == [1, 2]
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert same(weights(run(folder)), whole)  # the checkpoints are good ones


@pytest.mark.parametrize("clipped", [1.0, 0.0])
def test_a_gradient_that_is_not_finite_ends_the_run(tmp_path: Path, clipped: float) -> None:
    model = student()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.get_submodule("lm_head").weight.register_hook(lambda gradient: gradient / 0)
    with pytest.raises(
        ValueError, match=r"the gradient's norm is (inf|nan) at step 1, .* no weights were kept; use a"
    ):
        run(tmp_path, model, arguments={"max_grad_norm": clipped})
    assert same(dict(model.state_dict()), before)


def test_held_out_text_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    model = student()
    weight = model.get_submodule("lm_head").weight
    calls = 0

    def damage(module: nn.Module, *_: Any) -> None:
        nonlocal calls
        calls += module.training
        if calls == 2 and not module.training:
            weight.data.fill_(torch.nan)

    model.register_forward_pre_hook(damage)
    with pytest.raises(
        ValueError, match=r"held-out text after step 2: the model's predictions are not finite .* step 1"
    ):
        run(tmp_path, model)
    assert list(checkpoints_of(tmp_path)) == [1]


@pytest.mark.parametrize("backwards", [False, True])
def test_memory_that_is_too_little_is_said(tmp_path: Path, backwards: bool) -> None:
    model = student()

    def full(*_: Any) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def fail(number: int, _: int, logits: Tensor) -> Tensor:
        if number == 3 and backwards:
            logits.register_hook(full)
        elif number == 3:
            full()
        return logits

    in_training(model, fail)
    advice = r"at step 2 with 2 windows at a time \(CUDA out of memory.*\); use a smaller micro-batch .* or window"
    with pytest.raises(ValueError, match=advice):
        run(tmp_path, model, batch=4, micro_batch=2)


def test_micro_batches_change_nothing(tmp_path: Path) -> None:
    whole, parts = (run(tmp_path / str(size), micro_batch=size, batch=6) for size in (6, 2))
    assert all(
        torch.allclose(one, weights(parts)[name], atol=2e-5) for name, one in weights(whole).items()
    )
    for name, table in tables(tmp_path / "6").items():
        assert table.to_numpy() == pytest.approx(
            tables(tmp_path / "2")[name].to_numpy(), rel=1e-4, nan_ok=True
        )
