"""Memory of each rank: weights and cache by the runtime's own count, and what a pass needs on top."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from surgeon.cost.hardware import Hardware
from surgeon.models.shapes import ModelShapes
from surgeon.runtime.batching.windows import blocks_for
from surgeon.runtime.plan.memory import Footprint, footprint
from surgeon.runtime.plan.specification import Plan

KEPT = 16  # plans of which it is remembered what is the same for all batches
USABLE = 0.92  # of a device's memory, an estimate; the rest is the driver's, the libraries' and lost between tensors


@dataclass(frozen=True)
class Room:
    """Bytes on the rank that needs most, and bytes that there are.

    Attributes:
        weights: matrices, embedding and head.
        cache: of all texts, in blocks.
        activations: of the pass with most tokens.
        there: that can be used.
    """

    weights: int
    cache: int
    activations: int
    there: int

    @property
    def needed(self) -> int:
        """All of it."""
        return self.weights + self.cache + self.activations

    @property
    def fits(self) -> bool:
        """Whether there is as much."""
        return self.needed <= self.there


def room(shapes: ModelShapes, plan: Plan, hardware: Hardware, texts: int, prompt: int) -> Room:
    """What a rank needs to continue so many texts of the plan's length, and has.

    Args:
        prompt: tokens of each text that are computed together at first.
    """
    sizes = _footprint(plan, shapes)
    blocks = sizes.blocks(texts, plan.max_tokens, texts * prompt)
    weights = max(range(plan.ranks), key=lambda rank: sizes.weights[rank] + blocks * sizes.block[rank])
    return Room(
        weights=sizes.weights[weights],
        cache=blocks * sizes.block[weights] + sizes.buffers[weights] * blocks_for(plan.max_tokens),
        activations=_activations(shapes, plan, texts, texts * prompt),
        there=int(USABLE * hardware.device.memory / _together(hardware, plan.ranks)),
    )


def most_texts(shapes: ModelShapes, plan: Plan, hardware: Hardware, prompt: int, limit: int) -> int:
    """The largest batch, below a limit, that there is room for; 0 if for none."""
    low, high = 0, limit
    while low < high - 1:
        middle = (low + high) // 2
        if room(shapes, plan, hardware, middle, prompt).fits:
            low = middle
        else:
            high = middle
    return low


@lru_cache(maxsize=KEPT)
def _footprint(plan: Plan, shapes: ModelShapes) -> Footprint:
    return footprint(plan, shapes)


def _together(hardware: Hardware, ranks: int) -> int:
    """How many ranks share one device."""
    return 1 if not hardware.sharing else -(-ranks // hardware.devices)


def _activations(shapes: ModelShapes, plan: Plan, texts: int, tokens: int) -> int:
    """The stream, its normed copy, what is pending, the widest sublayer's own; and the logits of the last tokens."""
    ways = 2 * shapes.neurons // plan.ranks + 2 * (shapes.heads + shapes.kv_heads) * shapes.head_dim // plan.ranks
    return plan.dtype_bytes * tokens * (4 * shapes.hidden + ways) + 4 * texts * -(-shapes.vocabulary // plan.ranks)
