"""Sums over ranks, and what all of them have, in passes that are recorded (kernels/recording.py).

A replay makes them without Python in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import Structure, addressof, c_int64, c_void_p

import torch
from torch import Tensor

from surgeon.runtime.comm.collectives import Collectives
from surgeon.runtime.kernels.recording import Recording
from surgeon.runtime.plan.placement import Group


class Exchanges(Structure):
    """What recorded sums know of a rank's view of a region (kernels/exchange.h, where fields are explained)."""

    _fields_ = (
        ("started", c_int64),
        ("failed", c_int64),
        ("words", c_void_p),
        ("room", c_void_p),
        *((name, c_int64) for name in ("slots", "room_bytes", "line", "ranks", "members", "member")),
        *((f"{name}_microseconds", c_int64) for name in ("spin", "fewest", "most")),
        ("timeout_seconds", c_int64),
    )


class RecordedExchanges(Collectives):
    """A group's collectives while a pass is recorded; what they send is sent, and noted."""

    def __init__(
        self, collectives: Collectives, exchanges: Exchanges, in_flight: Sequence[object], recording: Recording
    ) -> None:
        """Wrap the collectives.

        Args:
            exchanges: as a replay will know them.
            in_flight: what is, by slot; None for nothing.
        """
        super().__init__(collectives.rank, collectives.group)
        self._collectives = collectives
        self._exchanges = exchanges
        self._in_flight = in_flight
        self._recording = recording

    def _connect(self, group: Group) -> Collectives:
        raise AssertionError(f"groups such as {group} are connected before anything is recorded")

    def _all_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        shape = (len(self.group), *tensor.shape)
        return self._exchanged(tensor, self._collectives._all_gather, "finish_gather", shape)

    def _all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        return self._exchanged(tensor, self._collectives._all_reduce, "finish_sum", tensor.shape)

    def _exchanged(
        self,
        tensor: Tensor,
        exchange: Callable[[Tensor], Callable[[], Tensor]],
        finishing: str,
        shape: Sequence[int],
    ) -> Callable[[], Tensor]:
        """Start an exchange, and note it.

        Args:
            finishing: the kernel that does what waiting for it does.
            shape: of the result.
        """
        recording, exchanges = self._recording, self._exchanges
        count = tensor.numel()
        if tensor.dtype != torch.float32 or tensor.nbytes > exchanges.room_bytes or not tensor.is_contiguous():
            recording.fail(f"an exchange of {tensor.nbytes} bytes of {tensor.dtype}")
        if self._in_flight[exchanges.started % exchanges.slots] is not None:
            recording.fail(f"more than {exchanges.slots} exchanges in flight")
        recording.note("start_exchange", addressof(exchanges), tensor.data_ptr(), count)
        number = exchanges.started
        with recording.paused():
            wait = exchange(tensor)
        results: list[Tensor] = []

        def finish() -> Tensor:
            if not results:
                results.append(recording.empty(shape))
                back = exchanges.started - number
                with recording.paused():
                    results[0].copy_(wait())
                recording.note(finishing, addressof(exchanges), back, count, results[0].data_ptr())
            return results[0]

        return finish
