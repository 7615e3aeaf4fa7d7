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

FULL = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")


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
    assert f"weights after step 2 are in {folder / 'checkpoint-2'}; use a lower learning rate than 0.01" in str(
        told.value
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
    with pytest.raises(ValueError, match=r"the gradient's norm is (inf|nan) at step 1, .* no weights were kept; use a"):
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


def test_a_step_short_of_memory_is_made_again_with_smaller_micro_batches(tmp_path: Path) -> None:
    """With dropout from the first step; the second micro-batch fails, so that a gradient has to be dropped."""
    expected = run(tmp_path / "expected", student(0.2), micro_batch=2, batch=8)
    model = student(0.2)

    def fail(number: int, windows: int, logits: Tensor) -> Tensor:
        if number == 2 and windows == 4:
            raise FULL
        return logits

    in_training(model, fail)
    with pytest.warns(
        UserWarning, match=r"out of memory at step 1 with 4 windows at a time; .* again with 2 at a time"
    ):
        found = run(tmp_path / "found", model, micro_batch=4, batch=8)
    assert close(weights(expected), weights(found))
    for name, table in tables(tmp_path / "expected").items():
        assert table.to_numpy() == pytest.approx(tables(tmp_path / "found")[name].to_numpy(), rel=1e-4, nan_ok=True)


def test_memory_may_run_short_later_and_backwards(tmp_path: Path) -> None:
    expected = run(tmp_path / "expected", student(), batch=6)
    model = student()
    sizes = []

    def fail(number: int, windows: int, logits: Tensor) -> Tensor:
        def full(gradient: Tensor) -> Tensor:
            if (number == 2 and windows == 6) or windows == 3:
                raise FULL
            return gradient

        sizes.append(windows)
        logits.register_hook(full)
        return logits

    in_training(model, fail)
    with pytest.warns(UserWarning, match="out of memory at step 2"):
        found = run(tmp_path / "found", model, batch=6)
    assert sizes == [6, 6, 3, *[1] * 18]
    assert close(weights(expected), weights(found))


def test_one_window_that_is_too_much_is_said(tmp_path: Path) -> None:
    model = student()

    def fail(*_: Any) -> None:
        raise FULL

    in_training(model, fail)
    advice = r"at step 1 with one window at a time \(CUDA out of memory.*\); use a smaller window, gradient"
    with pytest.warns(UserWarning, match="2 windows at a time"), pytest.raises(ValueError, match=advice):
        run(tmp_path, model, batch=2)


def close(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.allclose(left[name], right[name], atol=2e-5) for name in left)
