"""Sums over ranks in passes that are recorded (kernels/recording.py): a replay makes them without Python in between."""

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


class RecordedSums(Collectives):
    """A group's collectives while a pass is recorded; what they send is sent, and noted if it is a sum."""

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
        self._recording.fail("gathered tensors")
        return self._collectives._all_gather(tensor)

    def _all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        recording, exchanges = self._recording, self._exchanges
        count, shape = tensor.numel(), tensor.shape
        if tensor.dtype != torch.float32 or tensor.nbytes > exchanges.room_bytes or not tensor.is_contiguous():
            recording.fail(f"the sum of {tensor.nbytes} bytes of {tensor.dtype}")
        if self._in_flight[exchanges.started % exchanges.slots] is not None:
            recording.fail(f"more than {exchanges.slots} sums in flight")
        recording.note("start_exchange", addressof(exchanges), tensor.data_ptr(), count)
        number = exchanges.started
        with recording.paused():
            wait = self._collectives._all_reduce(tensor)
        totals: list[Tensor] = []

        def finish() -> Tensor:
            if not totals:
                totals.append(recording.empty(shape))
                back = exchanges.started - number
                with recording.paused():
                    totals[0].copy_(wait())
                recording.note("finish_exchange", addressof(exchanges), back, count, totals[0].data_ptr())
            return totals[0]

        return finish
