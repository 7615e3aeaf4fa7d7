"""One kernel on one device: a roofline, how long it takes by what it computes and what it moves.

A kernel takes as long as the larger of its arithmetic, at the share of the device's FLOP/s that products of so many
rows reach, and of what it moves, at the share of the memory's bandwidth that so many bytes reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from surgeon.cost.clocks import Burst
from surgeon.cost.hardware import Hardware, Host, Shares

Nature = Literal["product", "attention", "copy"]


@dataclass(frozen=True)
class Kernel:
    """What is launched at once.

    Attributes:
        name: of what it computes; a host may say what launching it takes.
        nature: a matrix product, an attention over its cache, or what only reads and writes.
        flops: floating-point operations, two for each multiplication with its sum.
        moved: bytes that are read and written.
        rows: tokens of a product; of an attention, the new ones of a text.
        launches: how many kernels it takes.
    """

    name: str
    nature: Nature
    flops: float
    moved: float
    rows: float = 1
    launches: int = 1


@dataclass(frozen=True)
class Numbers:
    """How matrices and activations are counted in bytes.

    Attributes:
        size: bytes of one number.
    """

    size: int

    def product(self, name: str, rows: int, outputs: int, inputs: int) -> Kernel:
        """A matrix (outputs, inputs) times `rows` tokens; matrix, input and output are moved once."""
        moved = outputs * inputs + rows * (inputs + outputs)
        return Kernel(name, "product", 2.0 * rows * outputs * inputs, float(self.size * moved), rows)

    def copy(self, name: str, numbers: float, launches: int = 1) -> Kernel:
        """A kernel that reads and writes so many numbers, together."""
        return Kernel(name, "copy", 0.0, self.size * numbers, launches=launches)


@dataclass(frozen=True)
class RankSpeed:
    """What one rank gets of a device, in one dtype.

    Attributes:
        flops: FLOP/s at the device's peak.
        bandwidth: bytes/s at the device's peak.
        shares: of these, what this rank's kernels reach.
        host: that launches them.
    """

    flops: float
    bandwidth: float
    shares: Shares
    host: Host

    @classmethod
    def of(cls, hardware: Hardware, dtype: str, ranks: int) -> RankSpeed:
        """Of one of so many ranks on a node.

        Raises:
            ValueError: if the hardware says nothing of the dtype, or a device is none to be shared.
        """
        if ranks > hardware.devices and not hardware.sharing:
            raise ValueError(f"{hardware.name} has {hardware.devices} devices in a node, not {ranks}")
        own = hardware.rank(-(-ranks // hardware.devices))
        return cls(hardware.device.peak(dtype), hardware.device.bandwidth, own.shares, own.host)

    def seconds(self, kernel: Kernel) -> float:
        """Seconds that a kernel runs, without its launch."""
        flops = self.shares.flops
        bandwidth = self.shares.bandwidth
        if kernel.nature == "attention":
            flops = self.shares.attention or flops
            bandwidth = self.shares.cache or bandwidth
        elif kernel.nature == "copy":
            bandwidth = self.shares.copies or bandwidth
        moving = kernel.moved / (self.bandwidth * bandwidth.at(max(kernel.moved, 1.0)))
        return max(moving, kernel.flops / (self.flops * flops.at(kernel.rows)) if kernel.flops else 0.0)


def burst(kernels: Sequence[Kernel], speed: RankSpeed, graphs: bool) -> Burst:
    """Kernels that run one after the other.

    Args:
        graphs: whether they are part of a captured graph.
    """
    times = [speed.seconds(kernel) for kernel in kernels]
    host = speed.host
    if graphs:
        return Burst(sum(times), gaps=host.graph * sum(kernel.launches for kernel in kernels))
    launching = [kernel.launches * host.launching(kernel.name, kernel.nature, kernel.rows) for kernel in kernels]
    if not host.asynchronous:
        return Burst(sum(times), gaps=sum(launching))
    lag = 0.0
    launched = 0.0
    left = sum(times)
    for own, seconds in zip(launching, times, strict=True):
        launched += own
        lag = max(lag, launched + left)
        left -= seconds
    return Burst(sum(times), host=launched, lag=lag)
