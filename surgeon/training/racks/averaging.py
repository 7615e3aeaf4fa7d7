"""Codas averaged over the racks (block-wise local training): never, every so many steps, or after each one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerState, TrainingArguments

from surgeon.training.racks.exchange import RackExchange
from surgeon.training.sharding import set_whole, whole_of

NEVER = "never"
ALWAYS = "always"


def parse_averaging(text: str | int) -> int | None:
    """After how many steps codas are averaged, from "never", a number, or "always"; None if they are not.

    Raises:
        ValueError: if it is none of these.
    """
    if text in (NEVER, ALWAYS):
        if text == ALWAYS:
            return 1
        return None
    steps = int(text) if str(text).isdecimal() else 0
    if steps < 1:
        raise ValueError(f"codas are averaged never, always, or every N steps with N from 1, not {text!r}")
    return steps


def mean_of(codas: list[Tensor]) -> Tensor:
    """The mean of the racks' codas, (numbers,) each: summed in the order of the racks, so that all find the same."""
    total = codas[0].clone()
    for coda in codas[1:]:
        total += coda
    return total / len(codas)


class CodaAveraging(TrainerCallback):
    """Sets a rack's coda to the mean of all racks' codas, where it waits for the slowest.

    The last rack's coda, the model's own end, takes part like any other. Each rack's optimiser keeps its own state.

    Args:
        parameters: gives those of this rack's coda, by names that are the same in all racks; where the rack's processes
            share them out, they are others from the first step on.
        every: steps.
        exchange: with the other racks.
    """

    def __init__(
        self, parameters: Callable[[], Mapping[str, nn.Parameter]], every: int, exchange: RackExchange
    ) -> None:
        self.parameters = parameters
        self.every = every
        self.exchange = exchange

    @torch.no_grad()
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Before anything is measured or kept after this step."""
        del args, control, kwargs
        if state.global_step % self.every:
            return
        coda = [one for _, one in sorted(self.parameters().items())]
        own = torch.cat([whole_of(one).flatten().cpu() for one in coda])
        mean = mean_of(self.exchange.gather(state.global_step, own))
        begin = 0
        for one in coda:
            set_whole(one, mean[begin : begin + one.numel()].view(one.shape))
            begin += one.numel()
