"""Averages that grow by a layer at a time are those that `derive_sublayer` makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from surgeon.analysis.engine.machine import PlanMachine
from surgeon.language.sublayer import ATTENTION, FEED_FORWARD, Sublayer
from surgeon.models.weights import ModelWeights, stored_tensors
from tests.tiny_models import tiny_model

ASKED = [(1, 2), (1, 2, 3), (1, 2, 3, 4, 5), (2, 3), (2, 3), (2, 4), (2,), (3, 2, 1)]


def layers_of(model: Any) -> Any:
    return PlanMachine(model, torch.zeros(1, 1, dtype=torch.long)).layers


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_averages_are_the_same_to_the_last_bit(family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family, 6).to(dtype)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    averages = layers_of(model)
    for layers in ASKED:
        for kind in (ATTENTION, FEED_FORWARD):
            found = averages.average(Sublayer(kind, layers))
            expected = stored_tensors(Sublayer(kind, layers), averages.weights())
            assert found.keys() == expected.keys()
            for path, tensor in expected.items():
                assert found[path].dtype == tensor.dtype
                assert torch.equal(found[path], tensor), (layers, path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_layer_is_read_once_while_averages_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    averages = layers_of(tiny_model("llama", 6))
    read: list[str] = []
    tensor = ModelWeights.tensor

    def noted(self: ModelWeights, path: str, *where: Any) -> Any:
        read.append(path)
        return tensor(self, path, *where)

    monkeypatch.setattr(ModelWeights, "tensor", noted)
    for last in range(2, 6):
        averages.average(Sublayer(FEED_FORWARD, tuple(range(last + 1))))
    downs = [path.split(".")[2] for path in read if path.endswith("down_proj.weight")]
    assert downs == ["1", "2", "3", "4", "5"]  # the sum begins with a copy of layer 0


def test_layers_that_differ_in_width_are_refused() -> None:
    model = tiny_model("llama", 3)
    mlp = model.model.layers[1].mlp
    mlp.gate_proj.weight = torch.nn.Parameter(mlp.gate_proj.weight[:-8])
    mlp.up_proj.weight = torch.nn.Parameter(mlp.up_proj.weight[:-8])
    mlp.down_proj.weight = torch.nn.Parameter(mlp.down_proj.weight[:, :-8])
    with pytest.raises(ValueError, match="differ in width"):
        layers_of(model).average(Sublayer(FEED_FORWARD, (0, 1)))
