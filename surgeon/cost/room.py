"""Memory of each rank: weights and cache by the runtime's own count, and what a pass needs on top."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache

from surgeon.cost.hardware import Hardware
from surgeon.models.shapes import ModelShapes
from surgeon.runtime.batching.windows import blocks_for
from surgeon.runtime.plan.memory import footprint
from surgeon.runtime.plan.specification import Plan

PLANS = 16  # plans of which it is remembered what is the same for all batches
USABLE = 0.92  # of a device's memory, an estimate; the rest is the driver's, the libraries' and lost between tensors
_footprint = lru_cache(maxsize=PLANS)(footprint)


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
        return self.weights + self.cache + self.activations

    @property
    def fits(self) -> bool:
        return self.needed <= self.there


def room(shapes: ModelShapes, plan: Plan, hardware: Hardware, texts: int, prompt: int) -> Room:
    """What a rank needs to continue so many texts of the plan's length, and has.

    Args:
        prompt: tokens of each text that are computed together at first.
    """
    sizes = _footprint(plan, shapes)
    tokens = texts * prompt
    ranks = plan.ranks
    blocks = sizes.blocks(texts, plan.max_tokens, tokens)
    weights = max(range(ranks), key=lambda rank: sizes.weights[rank] + blocks * sizes.block[rank])
    together = -(-ranks // hardware.devices) if hardware.sharing else 1  # ranks that share one device
    return Room(
        weights=sizes.weights[weights],
        cache=blocks * sizes.block[weights] + sizes.buffers[weights] * blocks_for(plan.max_tokens),
        activations=activation_bytes(shapes, plan, texts, tokens),
        there=int(USABLE * hardware.device.memory / together),
    )


def activation_bytes(shapes: ModelShapes, plan: Plan, texts: int, tokens: int) -> int:
    """What a pass of so many tokens needs on a rank besides weights and cache.

    The stream, its normed copy, what is pending, the widest sublayer's own; and the logits of the texts' last tokens.
    """
    mixture = shapes.layer_shapes.mixture
    neurons = shapes.neurons * (1 if mixture is None else mixture.top_k)
    own = 2 * neurons // plan.ranks + 2 * (shapes.heads + shapes.kv_heads) * shapes.head_dim // plan.ranks
    logits = 4 * texts * -(-shapes.vocabulary // plan.ranks)
    return plan.dtype_bytes * tokens * (4 * shapes.hidden + own) + logits


def most_texts(shapes: ModelShapes, plan: Plan, hardware: Hardware, prompt: int, limit: int) -> int:
    """The largest batch, below a limit, that there is room for; 0 if for none."""
    return bisect_left(range(1, limit), True, key=lambda texts: not room(shapes, plan, hardware, texts, prompt).fits)
