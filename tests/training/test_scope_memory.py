"""How much memory training takes, held against what the optimiser has after a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from surgeon.models.edit import edit
from surgeon.training.scope import choose_parameters, training_bytes


def test_it_is_what_weights_gradients_and_moments_take(tiny_model: Callable[..., Any]) -> None:
    model = edit(tiny_model("llama"), "A0 F0 [A1 A2] [F1 F2] A3 F3")
    choose_parameters(model, "edited", model.model.layers.program)
    optimiser = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
    model(input_ids=torch.arange(8)[None]).logits.sum().backward()
    optimiser.step()
    held = [*model.parameters(), *(one.grad for one in model.parameters() if one.grad is not None)]
    held += [
        each for state in optimiser.state.values() for name, each in state.items() if name != "step"
    ]
    assert training_bytes(model) == sum(one.nbytes for one in held)
