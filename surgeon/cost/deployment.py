"""A load whose speed is predicted or measured, and the deployment of a model over hardware: plans and memory.

Plans are of models known by their shapes, and like those that `runtime.plan.checks.make_plan` makes of files. Memory is
that of each rank: weights and cache by the runtime's own count, and a pass's on top.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

import torch

from surgeon.cost.hardware import Hardware
from surgeon.language.program import Program
from surgeon.language.sublayer import FEED_FORWARD, KINDS, Sublayer
from surgeon.models.families.specs import Units, unit_bounds
from surgeon.models.shapes import ModelShapes, check_layers
from surgeon.models.weights import require_sliceable
from surgeon.runtime.batching.blocks import blocks_for
from surgeon.runtime.batching.request import Request, Sampling
from surgeon.runtime.comm.collectives import Link
from surgeon.runtime.comm.wires import WIRES
from surgeon.runtime.plan.memory import footprint
from surgeon.runtime.plan.placement import cached_latent, check_ranks, check_slices, shared_units
from surgeon.runtime.plan.specification import (
    HalvesMode,
    KvMode,
    LowRankMode,
    Mixtures,
    MixtureSize,
    Plan,
    balance_of,
)
from surgeon.words import did_you_mean


@dataclass(frozen=True)
class Workload:
    """Texts that are continued together: their prompts in one pass, then one token of each at a time.

    Attributes:
        batch: how many texts.
        prompt: tokens of each prompt.
        new: tokens to add to each.
        seed: of random token ids.
    """

    batch: int = 1
    prompt: int = 1024
    new: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "prompt", "new"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    @classmethod
    def within(
        cls, positions: int, batch: int = 1, prompt: int | None = None, new: int | None = None
    ) -> Workload:
        """A load with default lengths that fit a model of so many positions."""
        usual = min(cls.prompt, positions // 2), max(2, min(cls.new, positions // 4))
        return cls(batch, prompt or usual[0], new or usual[1])

    @property
    def length(self) -> int:
        return self.prompt + self.new

    def requests(self, vocabulary: int) -> list[Request]:
        """Make the texts, of random tokens; end tokens do not end them."""
        generator = torch.Generator().manual_seed(self.seed)
        texts = torch.randint(vocabulary, (self.batch, self.prompt), generator=generator).tolist()
        sampling = Sampling(max_new_tokens=self.new, ignore_end=True)
        return [Request(number, tuple(text), sampling) for number, text in enumerate(texts)]


DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Deployment:
    """A model's spread over hardware.

    Attributes:
        dtype: to compute in; None for that of the weights, but float32 where kernels are launched one by one.
        link, network: within a node and between nodes, by name; by default the hardware's first.
        node: ranks of a node; by default as many as it has devices.
        graphs: whether decoding passes are captured graphs; by default where the host is asynchronous.
        adding: whether GPUs add and norm in one launch, as our kernels do.
        compress: what reductions are sent as, if not as they are.
        low_rank: how ranks share factors; `auto` is gather or replicate, whichever is faster for one token.
        kv: what attentions with factors of k and v keep.
        halves: whether passes are computed in two halves.
        emulated: a link as `surgeon bench` emulates it, on top.
        connected: whether ranks wait for each other at all (`upper-bound`).
    """

    ranks: int = 1
    dtype: str | None = None
    link: str | None = None
    network: str | None = None
    node: int | None = None
    graphs: bool | None = None
    adding: bool = True
    compress: str | None = None
    low_rank: LowRankMode = "auto"
    kv: KvMode = "full"
    halves: HalvesMode = "off"
    emulated: Link | None = None
    connected: bool = True

    def __post_init__(self) -> None:
        for what, word, choices in (
            ("dtype {!r}", self.dtype, DTYPES),
            ("compression {!r}", self.compress, tuple(WIRES)),
            ("way {!r} of sharing factors among ranks", self.low_rank, get_args(LowRankMode)),
            ("kv {!r}", self.kv, ("full", "lowrank")),
            ("mode {!r} of computing passes in halves", self.halves, get_args(HalvesMode)),
        ):
            if word is not None and word not in choices:
                raise ValueError(f"there is no {what.format(word)}; {did_you_mean(word, choices)}")
        if self.ranks < 1:
            raise ValueError(f"the number of ranks must be at least 1, not {self.ranks}")
        if self.node is not None and self.node < 1:
            raise ValueError(f"a node has at least 1 rank, not {self.node}")


PLANS = 16  # plans of which it is remembered what is the same for all batches
# Usable share of a device's memory, an estimate; driver, libraries and gaps between tensors take the rest.
USABLE = 0.92
_footprint = lru_cache(maxsize=PLANS)(footprint)


def plan_on_paper(
    shapes: ModelShapes,
    program: Program,
    ranks: int,
    max_tokens: int,
    dtype: str,
    low_rank: Any,
    kv: Any,
    sliced: bool = False,
) -> Plan:
    """Plan ranks of a model; what decides about numbers and not about costs is left out.

    Raises:
        ValueError: if the program names what the model does not have, ranks are more than heads and neurons, or texts
            are longer than the model's positions.
    """
    check_layers(program, shapes.layers)
    shapes.family.require_ranked(program)
    for sublayer in set(program.sublayers()):
        spec = shapes.family.spec(sublayer.kind, sublayer.layers[0])
        if sublayer.piece is not None:
            require_sliceable(spec, shapes.family)
        for role, _ in sublayer.ranks:
            spec.projection(role)  # a gate that the model lacks, say
        # Refuses ranks above those of the matrices.
        replace(sublayer, piece=None).parameters(shapes.layer_shapes)
    # Layers that are mixtures of experts, by the configuration alone; ranks share them as is cheaper.
    by_layer = list[MixtureSize | None]()
    for layer in range(shapes.layers):
        own = shapes.layer_shapes.layer_of(Sublayer(FEED_FORWARD, (layer,)))
        size = None
        if own.mixture is not None:
            size = MixtureSize(own.mixture.experts, own.units[FEED_FORWARD])
        by_layer.append(size)
    mixtures = Mixtures.of(by_layer.__getitem__, shapes.layers)
    check_slices(program, shared_units(shapes.units, shapes.latent))
    # Not of the program: it may be a part of one, of attentions alone.
    mixture = shapes.layer_shapes.mixture
    check_ranks(ranks, shapes.heads, shapes.neurons * (1 if mixture is None else mixture.experts))
    balance = None
    if shapes.latent is None and not mixtures.sizes and not shapes.layer_shapes.others:
        sizes = (shapes.units(Sublayer(kind, (0,))) for kind in KINDS)
        balance = balance_of(shapes.family, shapes.hidden, shapes.head_dim, *sizes)
    if max_tokens > shapes.positions:
        raise ValueError(
            f"prompt and output together are {max_tokens} tokens, and {shapes.name} has {shapes.positions} positions; "
            "shorten the prompt or ask for fewer tokens"
        )
    return Plan(
        folder=Path(),
        family=shapes.family,
        program=str(program),
        ranks=ranks,
        head_dim=shapes.head_dim,
        hidden=shapes.hidden,
        vocabulary=shapes.vocabulary,
        layers=shapes.layers,
        max_tokens=max_tokens,
        tied=shapes.tied,
        dtype=dtype,
        windows=shapes.windows,
        low_rank=low_rank,
        kv=kv,
        mixtures=mixtures,
        latent=cached_latent(shapes.latent),
        sliced=sliced,
        balance=balance,
    )


@dataclass(frozen=True)
class Room:
    """Bytes on the rank that needs most.

    Attributes:
        weights: matrices, embedding and head.
        cache: of all texts, in blocks.
        activations: of the pass with most tokens.
        there: bytes that can be used.
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
    """Count a rank's memory for continuing so many texts of the plan's length."""
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
    """Count a rank's bytes for a pass of so many tokens besides weights and cache.

    The stream, its normed copy, what is pending, the widest sublayer's own; and the logits of the texts' last tokens.
    """
    mixture = shapes.layer_shapes.mixture
    neurons = -(-shapes.neurons // plan.ranks) * (1 if mixture is None else mixture.top_k)
    units: Units = {"heads": shapes.heads, "kv_heads": shapes.kv_heads}
    last = plan.ranks - 1, plan.ranks  # none has more
    heads = sum(end - first for first, end in (unit_bounds(units, unit, last) for unit in units))
    own = 2 * neurons + 2 * heads * shapes.head_dim
    logits = 4 * texts * -(-shapes.vocabulary // plan.ranks)
    return plan.dtype_bytes * tokens * (4 * shapes.hidden + own) + logits


def most_texts(shapes: ModelShapes, plan: Plan, hardware: Hardware, prompt: int, limit: int) -> int:
    """The largest batch with room, below a limit; 0 if there is none."""
    return bisect_left(
        range(1, limit), True, key=lambda texts: not room(shapes, plan, hardware, texts, prompt).fits
    )
