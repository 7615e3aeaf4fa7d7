"""An emulated link between ranks: the cost of slower wires, measured where there are none.

Only waiting is emulated. A transfer takes its time from when it is started, so that what a rank computes meanwhile
hides it, as on a real link.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from surgeon.machine import parse_size, show_size
from surgeon.runtime.comm.collectives import Around, Collectives

SPIN_SECONDS = 0.0002  # a sleep may end this much late


@dataclass(frozen=True)
class Link:
    """A rank's link.

    Attributes:
        delay: seconds from a transfer's last byte being sent to its end, whatever its size.
        bandwidth: bytes per second that a rank can send.
    """

    delay: float = 0.0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        if not 0 <= self.delay < math.inf:
            raise ValueError(f"the delay of a link must be at least 0 seconds, not {self.delay:g}")
        if not self.bandwidth > 0:
            raise ValueError(
                f"the bandwidth of a link must be above 0 bytes per second, not {self.bandwidth:g}"
            )

    def __str__(self) -> str:
        if self.delay >= 1e-3:
            delay = f"{1e3 * self.delay:g}ms"
        else:
            delay = f"{1e6 * self.delay:g}us"
        parts = [f"link of {delay}"] if self.delay else []
        if self.bandwidth < math.inf:
            parts += [f"{show_size(self.bandwidth)}/s"]
        return ", ".join(parts) or "link"


def parse_link(delay: str | None, bandwidth: str | None) -> Link | None:
    """Read a link such as "1ms" and "1GB" (or "1GB/s"); None if by nothing."""
    if delay is None and bandwidth is None:
        return None
    seconds = 0.0
    if delay is not None:
        seconds = parse_seconds(delay)
    return Link(seconds, math.inf if bandwidth is None else parse_size(bandwidth.removesuffix("/s")))


def parse_seconds(text: str) -> float:
    """Read a duration such as 1ms, 200us or 0.5s."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|ms|us)\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is no delay; write e.g. 1ms, 200us or 0.5s")
    return float(match[1]) / {"s": 1, "ms": 1_000, "us": 1_000_000}[match[2]]


class SystemClock:
    """The machine's clock."""

    def now(self) -> float:
        return time.perf_counter()

    def wait_until(self, when: float) -> None:
        """Sleep for most of the time; the rest is too short for that."""
        asleep = when - self.now() - SPIN_SECONDS
        if asleep > 0:
            time.sleep(asleep)
        while self.now() < when:
            pass


class Line:
    """One rank's link in use: transfers in flight share the bandwidth, one after the other."""

    def __init__(self, link: Link, clock: SystemClock) -> None:
        self.link = link
        self.clock = clock
        self.free_from = -math.inf

    def send(self, size: float) -> float:
        """Start a transfer of so many bytes now; returns when it ends."""
        self.free_from = max(self.clock.now(), self.free_from) + size / self.link.bandwidth
        return self.free_from + self.link.delay


class EmulatedLink(Around):
    """Other collectives, as if there were a link of a certain delay and bandwidth between the ranks.

    A rank of n sends 2 (n - 1) / n of its bytes in an all-reduce and n - 1 times its bytes in an all-gather, as around
    a ring. It waits in Python.
    """

    def __init__(self, inner: Collectives, link: Link, clock: SystemClock | None = None) -> None:
        super().__init__(inner)
        self.capturable = False
        self.recordable = False
        self.line = Line(link, clock or SystemClock())  # that other groups of the rank send through, too

    def _all_reduce(self, tensor: Tensor, _: bool) -> Callable[[], Tensor]:
        others = len(self.group) - 1
        end = self.line.send(2 * others / len(self.group) * tensor.nbytes)
        return self._ending_at(end, self.inner._all_reduce(tensor, False))

    def _all_gather(self, tensor: Tensor, _: bool) -> Callable[[], Tensor]:
        end = self.line.send((len(self.group) - 1) * tensor.nbytes)
        return self._ending_at(end, self.inner._all_gather(tensor, False))

    def _ending_at(self, end: float, wait: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def wait_longer() -> Tensor:
            result = wait()
            self.line.clock.wait_until(end)
            return result

        return wait_longer
