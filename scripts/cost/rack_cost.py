"""Training over racks on paper: a pipeline through all of them, or every rack with a loss of its own.

A model is cut by depth into racks. A pipeline sends every microbatch forward through all racks and its gradients back:
between two updates of the weights the racks fill and drain, so that of m + p - 1 turns (p racks, m microbatches) each
works in m. Block-wise local training gives each rack a few private layers (a coda) and a copy of the head, and its own
loss: no gradient crosses a rack, so nothing waits for the end of the pipeline, and a rack is idle only until the first
microbatch has come to it. What that costs is the computation of codas and heads.

Sizes are in bytes, powers of ten; times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from surgeon.cost.hardware import Hardware
from surgeon.language.program import Program
from surgeon.models.shapes import ModelShapes

BACKWARD = 2  # a backward pass computes twice what a forward pass does


@dataclass(frozen=True)
class RackTraining:
    """A model cut by depth, and what trains it.

    Attributes:
        layers: of the model, shared out evenly; the racks have to divide them.
        layer_parameters: of one layer.
        hidden: how wide the stream is.
        vocabulary: rows of the head.
        racks: how many.
        microbatches: between two updates of the weights.
        tokens: of one microbatch.
        flops: FLOP/s that a rack reaches.
        link: bytes/s between two racks, each way.
        latency: seconds of a message between two racks.
        coda: private layers of each rack, for local training.
        number_bytes: of an activation, a gradient and a weight that is sent.
    """

    layers: int
    layer_parameters: int
    hidden: int
    vocabulary: int
    racks: int
    microbatches: int
    tokens: int
    flops: float
    link: float
    latency: float = 0.0
    coda: int = 0
    number_bytes: int = 2

    def __post_init__(self) -> None:
        for name in ("layers", "layer_parameters", "hidden", "vocabulary", "racks", "microbatches", "tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.flops <= 0 or self.link <= 0 or self.latency < 0 or self.coda < 0:
            raise ValueError("flops and link must be above 0, latency and coda at least 0")
        if self.layers % self.racks:
            raise ValueError(f"{self.layers} layers do not divide into {self.racks} racks")

    @classmethod
    def of(
        cls, shapes: ModelShapes, hardware: Hardware, racks: int, microbatches: int, tokens: int, coda: int
    ) -> RackTraining:
        """A model in bfloat16 whose racks are nodes of the hardware, tensor-parallel, every device with its port.

        What a node's own collectives take is left out.

        Raises:
            ValueError: if the layers do not divide into the racks, or nodes have no network.
        """
        device, network = hardware.device, hardware.link(between_nodes=True)
        reached = device.shares.flops.at(max(1.0, tokens / hardware.devices))
        way = max(network.algorithms, key=lambda one: one.share.at(2))
        return cls(
            layers=shapes.layers,
            layer_parameters=Program.dense(1, shapes.family.steps_per_layer).parameters(shapes.layer_shapes),
            hidden=shapes.hidden,
            vocabulary=shapes.vocabulary,
            racks=racks,
            microbatches=microbatches,
            tokens=tokens,
            flops=hardware.devices * device.peak("bfloat16") * reached,
            link=hardware.devices * network.bandwidth * way.share.at(2),
            latency=way.hop.at(2),
            coda=coda,
        )

    @property
    def message(self) -> int:
        """Bytes of a microbatch's stream, or of its gradient, between two racks."""
        return self.tokens * self.hidden * self.number_bytes

    @property
    def send(self) -> float:
        """Seconds of such a message."""
        return self.latency + self.message / self.link

    def forward(self, layers: int, head: bool) -> float:
        """Seconds in which a rack computes so many layers, and the head or not, for one microbatch."""
        parameters = layers * self.layer_parameters + (self.vocabulary * self.hidden if head else 0)
        return 2 * parameters * self.tokens / self.flops


@dataclass(frozen=True)
class Update:
    """What one update of the weights takes.

    Attributes:
        seconds: from one update to the next.
        idle: the part of it in which a rack that has no head does nothing.
        forward_bytes, backward_bytes: what crosses one boundary between racks, each way.
        in_flight: microbatches whose activations a rack holds at most.
    """

    seconds: float
    idle: float
    forward_bytes: int
    backward_bytes: int
    in_flight: int


def pipelined(training: RackTraining) -> Update:
    """One forward, one backward in turn (1F1B): p - 1 turns in which racks fill and drain, and gradients both ways.

    A turn is what the slowest rack computes, the last one with its head, or what the link takes where that is more;
    filling and draining wait for every message on the way.
    """
    layers = training.layers // training.racks
    plain = (1 + BACKWARD) * training.forward(layers, head=False)
    last = (1 + BACKWARD) * training.forward(layers, head=True)
    turn = max(last, training.send if training.racks > 1 else 0.0)
    filling = (training.racks - 1) * (plain + 2 * training.send)
    seconds = training.microbatches * turn + filling
    crossing = training.microbatches * training.message if training.racks > 1 else 0
    in_flight = min(training.racks, training.microbatches)
    return Update(seconds, 1 - training.microbatches * plain / seconds, crossing, crossing, in_flight)


def local(training: RackTraining) -> Update:
    """Every rack by itself, with its coda and its head: turns follow each other without a gap, update after update.

    The first microbatch takes p - 1 turns to the last rack, once in a training; that is not counted.
    """
    layers = training.layers // training.racks + training.coda
    computed = (1 + BACKWARD) * training.forward(layers, head=True)
    turn = max(computed, training.send if training.racks > 1 else 0.0)
    seconds = training.microbatches * turn
    crossing = training.microbatches * training.message if training.racks > 1 else 0
    return Update(seconds, 1 - computed / turn, crossing, 0, 1)
