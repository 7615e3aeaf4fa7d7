"""What the processes of racks, and racks in turn, have to come to: all racks in step, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from surgeon.training.head_loss import text_loss
from surgeon.training.racks.model import RackModel, feed_stream
from surgeon.training.settings import TrainSettings
from surgeon.training.texts import RunOrder


def train_together(
    racks: Sequence[RackModel], windows: Tensor, settings: TrainSettings, average: int | None = None
) -> list[list[float]]:
    """Train racks, micro-batch by micro-batch, each on what the one before computed before its own update.

    Without dropout; the optimiser is AdamW without weight decay, the schedule linear, gradients clipped to 1.

    Args:
        windows: the training text, (windows, tokens).
        average: after every so many steps all codas become their mean, summed in the order of the racks.

    Returns:
        The loss of each rack at each step.
    """
    assert settings.steps is not None
    trained = [list(rack.model.parameters()) for rack in racks]
    optimisers = [
        torch.optim.AdamW(own, lr=settings.rate, weight_decay=0.0, fused=True) for own in trained
    ]
    order = list(RunOrder(len(windows), settings.steps, settings.batch, settings.seed))
    size, losses = settings.micro_batch or settings.batch, []
    for rack in racks:
        rack.model.train()
    for step in range(settings.steps):
        batch = order[step * settings.batch : (step + 1) * settings.batch]
        total = [0.0] * len(racks)
        for first in range(0, settings.batch, size):
            ids, stream = windows[batch[first : first + size]], None
            for index, rack in enumerate(racks):
                with feed_stream(rack.model, stream) as layers:
                    loss = text_loss(rack.model, {"input_ids": ids, "labels": ids})
                    stream = layers.outgoing
                (loss / (settings.batch // size)).backward()
                total[index] += loss.item() / (settings.batch // size)
        for own, optimiser in zip(trained, optimisers, strict=True):
            optimiser.param_groups[0]["lr"] = settings.rate * (1 - step / settings.steps)
            torch.nn.utils.clip_grad_norm_(own, 1.0)
            optimiser.step()
            optimiser.zero_grad()
        if average is not None and (step + 1) % average == 0:
            average_codas(racks)
        losses.append(total)
    return losses


@torch.no_grad()
def average_codas(racks: Sequence[RackModel]) -> None:
    """Give all codas their mean."""
    codas = [rack.coda_parameters() for rack in racks]
    for parameters in zip(*codas, strict=True):
        mean = torch.stack([one.float() for one in parameters]).sum(0) / len(codas)
        for one in parameters:
            one.copy_(mean)


def forward(rack: RackModel, input_ids: Tensor, stream: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The stream that a rack hands on, (batch, tokens, hidden), and its coda's logits."""
    with feed_stream(rack.model, stream) as layers:
        logits: Tensor = rack.model(input_ids=input_ids, use_cache=False).logits
        assert layers.outgoing is not None
        return layers.outgoing, logits
