"""How much memory training takes, before it begins."""

from __future__ import annotations

from torch import nn

TRAINED = 4  # numbers for each parameter that is trained: itself, its gradient, and AdamW's two moments
BYTES = 4  # of each: weights are trained in 32 bits


def training_bytes(model: nn.Module) -> int:
    """What a process holds of a model while it trains what of it requires gradients; activations come on top.

    Args:
        model: whose parameters have been chosen (see scope.py); its weights need not be there.
    """
    return BYTES * sum(one.numel() * (TRAINED if one.requires_grad else 1) for one in model.parameters())
