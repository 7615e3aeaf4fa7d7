"""Training on paper: what a step of the optimiser takes on data-parallel devices, and what each of them holds.

Every device computes its share of the batch, in bfloat16, micro-batch by micro-batch, forward and twice that backward.
It holds all of the model (DDP: gradients are summed once a step, behind the last backward pass) or its share of it
(FSDP: layers are gathered for each forward and each backward pass, gradients summed and shared out after it, behind
computing); weights, gradients and AdamW's two moments in 32 bits. Where the activations do not fit, each layer's are
computed again in the backward pass. A program's width, its late steps and its tracks change nothing but the number of
matrices and features here: no device waits for another inside a layer.

Sizes are in bytes, powers of ten; times in seconds. Left out are what narrow matrices reach less than wide ones, and
what is not hidden of launching kernels: it is the best that there can be with the hardware's shares.
"""

from __future__ import annotations

from dataclasses import dataclass

from scripts.cost.rack_cost import BACKWARD
from surgeon.cost.collectives import Wiring
from surgeon.cost.hardware import Hardware
from surgeon.cost.plans import USABLE
from surgeon.language.program import Program
from surgeon.language.sublayer import ATTENTION
from surgeon.models.shapes import ModelShapes

STATES = 16  # bytes of a parameter with its gradient and AdamW's two moments
UPDATE = 28  # bytes that AdamW reads and writes of them
WORKING, GRADIENT, NUMBER = 2, 4, 4  # bytes of a weight in bfloat16, of a gradient, of the stream
MOVED = 3  # times: what waits for the backward pass is written, read by what comes next, and read once more there
LOGITS = 10  # bytes that are written of a logit with its gradient: in bfloat16 and 32 bits
CHUNK, LEAST_ROWS, BLOCK = 512 << 20, 256, 256 << 20  # of logits on a GPU: training/head_loss.py, quality/head.py
DAY = 86400


@dataclass(frozen=True)
class TrainingLoad:
    """What is trained, and how much of the text at a time.

    Attributes:
        program: that every device computes; of racks, that of one.
        batch: windows of a step, over all devices.
        micro_batch: windows of a device at a time, at most.
        window: tokens.
    """

    shapes: ModelShapes
    program: Program
    batch: int
    micro_batch: int
    window: int

    @property
    def head(self) -> int:
        """Numbers of the output head."""
        return self.shapes.vocabulary * self.shapes.hidden

    @property
    def ends(self) -> int:
        """Numbers of embedding and head."""
        return self.head * (1 if self.shapes.tied else 2)

    @property
    def layer(self) -> int:
        """Numbers of one layer."""
        return self.program.parameters(self.shapes.layer_shapes) // len(self.program.layers)

    @property
    def parameters(self) -> int:
        """All of them; norms are left out."""
        return self.program.parameters(self.shapes.layer_shapes) + self.ends

    @property
    def forward_flops(self) -> int:
        """Of a token: two for each number of a matrix, and attention to half a window on average."""
        shapes = self.shapes
        attentions = sum(sublayer.kind == ATTENTION for sublayer in self.program.sublayers())
        looked_at = 2 * attentions * shapes.heads * shapes.head_dim * self.window
        return 2 * (self.program.active_parameters(shapes.layer_shapes) + self.head) + looked_at

    @property
    def activations(self) -> int:
        """Bytes of a token that wait for the backward pass, by layer.

        Of each sublayer the stream and its norm in 32 bits, and in bfloat16 what its matrices read, each a copy of its
        own, and give, with what comes between them.
        """
        shapes = self.shapes
        heads = 2 * (shapes.heads + shapes.kv_heads) * shapes.head_dim
        attention = 2 * NUMBER * shapes.hidden + WORKING * (3 * shapes.hidden + heads)
        feed_forward = 2 * NUMBER * shapes.hidden + WORKING * (2 * shapes.hidden + 4 * shapes.neurons)
        return attention + feed_forward

    @property
    def num_layers(self) -> float:
        """Layers that run."""
        return len(list(self.program.sublayers())) / 2

    def logits(self, tokens: int) -> int:
        """Bytes of logits, which are made of some of these tokens at a time.

        In bfloat16, beside a product for the gradient of the head's matrix, or a block of them twice in 32 bits.
        """
        vocabulary = self.shapes.vocabulary
        rows = min(tokens, max(LEAST_ROWS, CHUNK // (WORKING * vocabulary)))
        block = min(rows, max(1, BLOCK // (NUMBER * vocabulary)))
        return WORKING * rows * vocabulary + max(WORKING * self.head, 2 * NUMBER * block * vocabulary)

    def held(self, tokens: int, recomputed: bool) -> int:
        """Bytes of activations and logits of so many tokens, where they are most.

        At the head, which has the stream, its norm and its gradient in 32 bits; recomputed layers keep the stream
        alone, and are most there or where one of them is computed again.
        """
        stream = NUMBER * self.shapes.hidden * tokens
        layer, logits = self.activations * tokens, self.logits(tokens)
        most = self.num_layers * stream + max(layer, logits) if recomputed else self.num_layers * layer + logits
        return int(3 * stream + most)


@dataclass(frozen=True)
class TrainingStep:
    """What one step takes.

    Attributes:
        how: "ddp" or "fsdp", with "recomputed" behind it where activations are.
        seconds: of the whole step; of it `computing` and, not hidden, `waiting` for collectives, and `updating`.
        memory: bytes on a device.
        fits: whether a device has as much.
        tokens: of the step, over all devices.
    """

    how: str
    seconds: float
    computing: float
    waiting: float
    updating: float
    memory: int
    fits: bool
    tokens: int

    @property
    def tokens_per_day(self) -> float:
        """Over all devices."""
        return self.tokens / self.seconds * DAY


def training_step(load: TrainingLoad, hardware: Hardware, devices: int) -> TrainingStep:
    """The fastest way that fits: all of the model on every device, shares of it, recomputed activations.

    Raises:
        ValueError: if the batch has fewer windows than there are devices, or the hardware lacks a link or a figure.
    """
    if not 0 < devices <= load.batch:
        raise ValueError(
            f"a batch of {load.batch} windows is not shared out to {devices} devices; take 1 to {load.batch}"
        )
    ways = [
        _step(load, hardware, devices, *way) for way in ((False, False), (True, False), (False, True), (True, True))
    ]
    return min((way for way in ways if way.fits), key=lambda way: way.seconds, default=ways[-1])


def _step(load: TrainingLoad, hardware: Hardware, devices: int, sharded: bool, recomputed: bool) -> TrainingStep:
    device, own = hardware.device, -(-load.batch // devices)
    micro = min(load.micro_batch, own)
    passes, tokens = -(-own // micro), micro * load.window
    flops = device.peak("bfloat16") * device.shares.flops.at(tokens)
    forward = load.forward_flops * tokens / flops
    backward = (BACKWARD + recomputed) * forward
    moved = (MOVED + recomputed) * load.num_layers * load.activations * tokens
    moved += MOVED * LOGITS * load.shapes.vocabulary * tokens
    moving = moved / (device.bandwidth * device.shares.bandwidth.at(moved))
    held = load.parameters / devices if sharded else load.parameters
    if sharded:
        gathered, summed = _gathering(load, hardware, devices, WORKING), _gathering(load, hardware, devices, GRADIENT)
        waiting = passes * (max(0.0, gathered - forward) + max(0.0, gathered + summed - backward))
        working = (WORKING + GRADIENT) * (2 * load.layer + load.ends)  # two layers and the ends at a time
    else:
        waiting = max(0.0, _summing(load, hardware, devices) - backward)
        # In bfloat16 all layers, or the one that is computed again; the head, and its gradient until it is added.
        layers = load.layer if recomputed else load.parameters - load.ends
        working = WORKING * (layers + load.head) + GRADIENT * load.head
        working += GRADIENT * load.parameters if devices > 1 else 0  # what DDP sums, beside the gradients
    updating = UPDATE * held / (device.bandwidth * device.shares.bandwidth.at(UPDATE * held))
    computing = passes * (forward + backward + moving)
    memory = int(STATES * held + working + load.held(tokens, recomputed))
    how = ("fsdp" if sharded else "ddp") + (", recomputed" if recomputed else "")
    seconds, fits = computing + waiting + updating, memory <= USABLE * device.memory
    return TrainingStep(how, seconds, computing, waiting, updating, memory, fits, load.batch * load.window)


def _wiring(hardware: Hardware, devices: int) -> Wiring:
    several = devices > hardware.devices
    return Wiring(hardware.link(), hardware.network() if several else None, hardware.devices, hardware.host)


def _gathering(load: TrainingLoad, hardware: Hardware, devices: int, number: int) -> float:
    """Seconds of gathering all layers one by one and the head, or, as long, of summing and sharing them out."""
    if devices == 1:
        return 0.0
    wiring, group = _wiring(hardware, devices), tuple(range(devices))
    parts = [(len(load.program.layers), load.layer), (1, load.ends)]
    return sum(
        times * wiring.transfer("all-gather", -(-number * size // devices), group).shared for times, size in parts
    )


def _summing(load: TrainingLoad, hardware: Hardware, devices: int) -> float:
    if devices == 1:
        return 0.0
    wiring = _wiring(hardware, devices)
    return wiring.transfer("all-reduce", GRADIENT * load.parameters, tuple(range(devices))).shared
