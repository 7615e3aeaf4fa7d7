"""The balance of a mixture's experts, as transformers has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from surgeon.language.program import Program
from surgeon.models.edit import edit, restore
from surgeon.training.settings import TrainSettings
from surgeon.training.trainer import ExpertBalance, ModelTrainer, balance_loss
from tests.tiny_models import tiny_model
from tests.training.runs import run, tables

ASKED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
IDS = torch.randint(3, 60, (4, 8), generator=torch.Generator().manual_seed(0))
DENSE = str(Program.dense(3))


def trainer_of(model: Any, folder: Path) -> ModelTrainer:
    """What a run makes of a model, with no step taken."""
    from surgeon.quality.data import Windows, digest_of
    from surgeon.quality.head import HeldOutQuality
    from surgeon.training.settings import training_arguments
    from surgeon.training.texts import TrainingText

    arguments = training_arguments(TrainSettings(scope="all"), folder, 1, 4)
    windows = Windows(IDS, "", digest_of(IDS))
    return ModelTrainer(
        model, arguments, TrainingText.of(windows), HeldOutQuality(windows, None).measure
    )


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_loss_and_gradient_are_those_of_transformers(
    family: str, checkpointing: bool, tmp_path: Path
) -> None:
    stock = tiny_model(family, 3, dropout=0.0, **ASKED).train()
    stock(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    mine = edit(tiny_model(family, 3, dropout=0.0, **ASKED), DENSE).train()
    if checkpointing:
        mine.gradient_checkpointing_enable()
    trainer = trainer_of(mine, tmp_path)
    loss = trainer.compute_loss(mine, {"input_ids": IDS, "labels": IDS})
    loss.backward()
    stock_loss = stock(input_ids=IDS, labels=IDS, use_cache=False).loss
    assert float(loss) == pytest.approx(float(stock_loss), rel=1e-6)
    assert float(loss) > float(functional.cross_entropy(logits_of(mine), IDS[:, 1:].flatten())) + 0.5
    for (name, one), other in zip(mine.named_parameters(), stock.parameters(), strict=True):
        assert one.grad is not None, name
        assert torch.allclose(one.grad, other.grad, atol=1e-6), name


def test_experts_of_odd_widths_are_trained(tmp_path: Path) -> None:
    """Whose products PyTorch cannot have all at once."""
    stock, mine = (
        tiny_model("qwen3_moe", 3, dropout=0.0, moe_intermediate_size=7).train() for _ in range(2)
    )
    stock.set_experts_implementation("eager")
    loss = trainer_of(edit(mine, DENSE), tmp_path).compute_loss(mine, {"input_ids": IDS, "labels": IDS})
    loss.backward()
    expected = stock(input_ids=IDS, labels=IDS, use_cache=False).loss
    expected.backward()
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    for one, other in zip(mine.parameters(), stock.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-6)


def logits_of(model: Any) -> Tensor:
    found: Tensor = model(input_ids=IDS, use_cache=False).logits[:, :-1].flatten(0, 1)
    return found


def test_layers_with_fewer_experts_are_taken_together() -> None:
    random = torch.Generator().manual_seed(1)
    four, other, two = (torch.randn(5, n, generator=random, requires_grad=True) for n in (4, 4, 2))

    def plain(logits: Tensor, k: int) -> float:
        scores = [[value / sum(row) for value in row] for row in logits.exp().tolist()]
        experts = range(len(scores[0]))
        chosen = [sorted(experts, key=lambda e, row=row: -row[e])[:k] for row in scores]
        sent = [sum(e in each for each in chosen) / len(scores) for e in experts]
        scored = [sum(row[e] for row in scores) / len(scores) for e in experts]
        return len(experts) * sum(s * p for s, p in zip(sent, scored, strict=True))

    expected = (2 * plain(torch.cat([four, other]), 3) + plain(two, 2)) / 3
    assert float(balance_loss([four, two, other], 3)) == pytest.approx(expected, rel=1e-6)
    assert float(balance_loss([torch.zeros(6, 4).fill_diagonal_(1e-6)], 4)) == pytest.approx(4, rel=1e-5)


def test_programs_with_some_experts_are_balanced_and_run(tmp_path: Path) -> None:
    model = edit(tiny_model("mixtral", 3, dropout=0.0, **ASKED), "A0 F0!e0,e3 [A1 A2] [F1!e1,e2,e3 F2]")
    assert not model.config.output_router_logits  # the stock class reckons with 4 everywhere
    assert ExpertBalance(model).weight == 0.5
    found = run(tmp_path / "run", model)
    assert tables(tmp_path / "run")["training"]["balance"].iloc[-1] > 1.5
    assert not found.model.config.output_router_logits
    assert restore(model).config.output_router_logits


def test_nothing_is_added_where_nobody_asks_or_no_router_is_trained() -> None:
    assert ExpertBalance(edit(tiny_model("mixtral", 3), DENSE)).weight == 0
    assert ExpertBalance(edit(tiny_model("llama", 3), DENSE)).weight == 0
    assert (
        ExpertBalance(edit(tiny_model("mixtral", 3, **ASKED), DENSE).requires_grad_(False)).weight == 0
    )


def test_routers_that_were_not_seen_are_said() -> None:
    with pytest.raises(
        ValueError, match="the choices of routers were not seen, .* output_router_logits: false"
    ):
        ExpertBalance(edit(tiny_model("mixtral", 3, **ASKED), DENSE)).loss([])


def test_logits_of_routers_that_give_them_last() -> None:
    """Llama 4's: scores come before them."""
    model = edit(tiny_model("llama4_text", 2, dropout=0.0, **ASKED), "A0 F0 A1 F1")
    balance = ExpertBalance(model)
    with balance.watch() as seen:
        stock = model(input_ids=IDS, output_router_logits=True, use_cache=False).router_logits
    assert len(seen) == len(stock) == 2
    assert all(torch.equal(one, other) for one, other in zip(seen, stock, strict=True))
