"""Block-wise local training as the peer runs: in the same processes, through the same messages and links.

What is compared with the schedules of `torch.distributed.pipelining` is then the schedule alone. A rank receives a
micro-batch's stream, runs its layers, hands the stream on without a gradient, and trains itself and its coda; it waits
for nobody but the rank before it, and for the next one to have taken what was sent, up to a number of micro-batches.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import schedules

from scripts.bench.pipelined_p2p import Message, Pace, Traffic, named
from scripts.bench.rack_model import Optimisation, Rack, next_token_loss

ASKED = 2  # streams that a rank receives beforehand: one that it works on, one that is under way


class LocalSchedule:
    """One rank's micro-batches.

    Args:
        ahead: messages that may be under way, or wait to be taken, before the rank waits.
    """

    def __init__(self, rack: Rack, traffic: Traffic, pace: Pace, optimisation: Optimisation, ahead: int) -> None:
        self.rack, self.traffic, self.pace, self.optimisation, self.ahead = rack, traffic, pace, optimisation, ahead
        self.left = optimisation.steps * optimisation.micro_batches  # streams that are not asked for yet
        self.asked: deque[tuple[Tensor, Message]] = deque()
        self.sent: deque[Message] = deque()

    def step(self, batch: Tensor) -> list[Tensor]:
        """Add the gradients of one step's windows, (windows, tokens); returns the loss of each micro-batch."""
        parts = batch.split(self.optimisation.micro_batch)
        losses = [self._train_on(part, number, len(parts)) for number, part in enumerate(parts)]
        if not self.left:
            while self.sent:
                self.sent.popleft().wait()
        return losses

    def _train_on(self, ids: Tensor, number: int, of: int) -> Tensor:
        stretch = self.rack.stretch
        stream = ids if self.traffic.rank == 0 else self._receive(tuple(ids.shape), number)
        begun = time.perf_counter()
        passed = stretch.run(stream)
        own, coda = float(len(stretch.span)), self.rack.coda_units
        self.pace.keep(begun, own)
        self.traffic.trace.add(begun, time.perf_counter(), "compute", "forward", number)
        if not self.rack.is_last:
            self._send(passed.detach(), number)
        begun = time.perf_counter()
        loss = next_token_loss(self.rack.predict(passed), ids)
        (loss / of).backward()
        self.pace.keep(begun, coda + 2 * (own + coda))
        self.traffic.trace.add(begun, time.perf_counter(), "compute", "backward", number)
        if self.traffic.rank == 0:
            self.left -= 1
        return loss.detach()

    def _send(self, stream: Tensor, number: int) -> None:
        self.sent.append(_post(dist.isend, stream, self.traffic.rank + 1, number))
        while len(self.sent) > self.ahead:
            self.sent.popleft().wait()

    def _receive(self, shape: tuple[int, ...], number: int) -> Tensor:
        while self.left and len(self.asked) < ASKED:
            room = torch.empty(*shape, self.rack.stretch.config.hidden_size)
            self.asked.append((room, _post(dist.irecv, room, self.traffic.rank - 1, number)))
            self.left -= 1
        stream, message = self.asked.popleft()
        message.wait()
        return stream


def _post(kind: Any, tensor: Tensor, peer: int, number: int) -> Message:
    """A message of its own, posted as the schedules post theirs."""
    (message,) = schedules._batch_p2p(named([dist.P2POp(kind, tensor, peer)], "forward", number))
    assert isinstance(message, Message)
    return message
