"""Healed drafts without training: of norms and adapters that random numbers have changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from surgeon.exports.drafts import export_draft
from surgeon.language.program import Program
from surgeon.models.edit import edit
from surgeon.opened import EditedModel, open_model
from surgeon.training.scope import add_adapters, choose_parameters


def healed_draft(base: Path, program: str, folder: Path, lora: int | None = None, scope: str = "edited") -> Any:
    """Write one of a model's folder, of adapters or of norms; returns the model as it would have been trained."""
    parsed, opened = Program.parse(program), open_model(base)
    edited = EditedModel(str(base), opened, parsed)
    model: Any = edit(EditedModel(str(base), opened).load("cpu").float(), parsed)
    torch.manual_seed(5)
    if lora is None:
        choose_parameters(model, scope, parsed)
    else:
        model = add_adapters(model, scope, parsed, lora)
    with torch.no_grad():
        for parameter in (one for one in model.parameters() if one.requires_grad):
            parameter.add_(0.2 * torch.randn_like(parameter))
    export_draft(model.eval(), edited, folder, "a card", {"steps": 0})
    return model
