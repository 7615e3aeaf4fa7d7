"""The ranks' knowledge of a model and the program it is to run.

Neurons make up for unequal heads (`Balance`), and ranks share mixtures of experts (`Mixtures`). Of a mixture each rank
has some whole experts, or some neurons of every expert. Either way a step is one reduction. The router is whole on
every rank, and shared experts are always sliced. Slices are even whatever the router says; where experts are divided,
the rank with most of a token's experts is waited for, which on two ranks reads 1.4 times as much for two experts of
eight. So they are divided only where slices do not come out even, and where matrices are two factors, of which every
rank would have one whole.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Literal, NamedTuple, TypedDict

from surgeon.language.program import Program
from surgeon.language.sublayer import ATTENTION, FEED_FORWARD, Sublayer
from surgeon.models.families import Family
from surgeon.models.families.specs import Growth, Latent, Units, unit_bounds
from surgeon.models.routing import Routing
from surgeon.runtime.batching.blocks import blocks_for, power_of_two
from surgeon.runtime.batching.request import LongTexts
from surgeon.runtime.kernels.build import used_on


class WholeExperts(NamedTuple):
    """A rank's part of a mixture whose experts are divided.

    Attributes:
        of: the mixture, or the slice of one, that ranks share.
        own: places of its experts in it.
    """

    of: Sublayer
    own: range


class MixtureSize(NamedTuple):
    """A layer's experts, and the neurons of each."""

    experts: int
    neurons: int


@dataclass(frozen=True)
class Mixtures:
    """A model's mixtures, and their division among ranks.

    Attributes:
        sizes: by layer, None where it is no mixture; nothing if none is.
    """

    sizes: tuple[MixtureSize | None, ...] = ()

    @classmethod
    def of(cls, size: Callable[[int], MixtureSize | None], layers: int) -> Mixtures:
        sizes = tuple(map(size, range(layers)))
        return cls(sizes if any(sizes) else ())

    def size(self, sublayer: Sublayer) -> MixtureSize | None:
        """The size of a sublayer before it is sliced; None where it is no mixture."""
        if sublayer.kind != FEED_FORWARD or not self.sizes:
            return None
        size = self.sizes[sublayer.layers[0]]
        if size is None or sublayer.experts is None:
            return size
        return size._replace(experts=len(sublayer.experts))

    def whole_experts(self, part: Sublayer, members: int) -> WholeExperts | None:
        """The experts of one of so many ranks, if they divide a mixture's experts and not its neurons."""
        size = self.size(part)
        if size is None or part.piece is None or members == 1:
            return None
        index, count = part.piece
        member = index % members
        experts = size.experts
        of = replace(part, piece=None if count == members else (index // members, count // members))
        own = range(experts * member // members, experts * (member + 1) // members)
        uneven = size.neurons % part.piece[1] != 0
        if experts >= members and (part.ranks or uneven):
            return WholeExperts(of, own)
        return None


NO_MIXTURES = Mixtures()

GRAIN = 16  # neurons that the kernels multiply side by side at least (`linear.LEAST`)


@dataclass(frozen=True)
class Balance:
    """The sizes of a model's layers, by which ranks that have fewer heads than others get more neurons.

    Only where attention and MLP are one sum, or where nobody waits for a sublayer's own: else equal parts are fastest.

    Attributes:
        heads, kv_heads: of an attention.
        neurons: of a feed-forward.
        head, kv_head, neuron: numbers in the matrices of one of each.
    """

    heads: int
    kv_heads: int
    neurons: int
    head: int
    kv_head: int
    neuron: int


@lru_cache(maxsize=1024)
def cut_neurons(
    balance: Balance, attentions: int, feed_forwards: int, members: int
) -> tuple[int, ...] | None:
    """Cut the neurons of each of some feed-forwards beside some attentions, all shared by as many members.

    Returns:
        Where each member's neurons end; None where equal parts do, or are no worse for the busiest member.
    """
    # Of few, rounding would cost more.
    grain = GRAIN if balance.neurons >= 4 * GRAIN * members else 1
    units: Units = {"heads": balance.heads, "kv_heads": balance.kv_heads}
    busy = []  # numbers of each member's attentions
    for member in range(members):
        first, end = unit_bounds(units, "heads", (member, members))
        first_key, end_key = unit_bounds(units, "kv_heads", (member, members))
        numbers = (end - first) * balance.head + (end_key - first_key) * balance.kv_head
        busy.append(attentions * numbers)
    if len(set(busy)) == 1 or balance.neurons < grain * members:
        return None
    each = feed_forwards * balance.neuron
    level = (sum(busy) + balance.neurons * each) / members
    wanted = [max(0.0, level - own) for own in busy]
    ends = list[int]()
    for member, up_to in enumerate(accumulate(wanted), start=1):
        rounded = round(up_to / sum(wanted) * balance.neurons / grain) * grain
        before = ends[-1] if ends else 0
        # Everybody has some: the first of the slices adds the bias.
        ends.append(min(max(rounded, before + grain), balance.neurons - (members - member) * grain))
    ends[-1] = balance.neurons
    even = [balance.neurons * (member + 1) // members for member in range(members)]
    busiest, least = (
        max(own + each * (end - first) for own, first, end in zip(busy, (0, *cut), cut, strict=False))
        for cut in (ends, even)
    )
    return tuple(ends) if busiest < least else None


def balance_of(
    family: Family, hidden: int, head_dim: int, attention: Units, feed_forward: Units
) -> Balance | None:
    """Return the balance of layers with such sublayers; None where ranks divide them alike or otherwise."""
    heads = attention.get("heads", 0)
    if not heads or "neurons" not in feed_forward:
        return None
    numbers = Counter[str]()
    for spec in (family.attention, family.mlp):
        for projection in spec.projections:
            numbers[projection.unit] += hidden * (1 if spec is family.mlp else head_dim)
    return Balance(
        heads,
        attention.get("kv_heads", heads),
        feed_forward["neurons"],
        numbers["heads"],
        numbers["kv_heads"],
        numbers["neurons"],
    )


# Decode passes are computed like all others (dynamic) or in a few fixed shapes (static); auto is dynamic on CPUs, and
# static on GPUs, where such passes are recorded as CUDA graphs if the collectives can be.
Decoding = Literal["auto", "dynamic", "static"]

# Whether passes are computed in two halves, one while the other's reductions are on their way (model/rank_model.py):
# all that can be (on), or none (off).
HalvesMode = Literal["on", "off"]

# How ranks that share a sublayer with two factors in place of a matrix compute it. First factors of what reads the
# stream are shared out by rank columns, and what they give is gathered (DeInfer), or every rank has them whole
# (replicate); auto measures both where the ranks run. What is added to the stream is summed before the second factor
# where that is less. Base shares out both factors of each matrix by rank columns, and sums after every pair: what
# DeInfer is compared with.
LowRankMode = Literal["auto", "gather", "replicate", "base"]

# What is kept in the cache of attentions whose k and v are two factors each: keys and values of this rank's heads
# (full), or what the first factors give, the same on every rank that shares the sublayer, of which keys and values are
# made again whenever they are read (lowrank). Auto is full as long as the cache that is asked for fits into memory so;
# otherwise, if more tokens fit then, it becomes "fewer": lowrank in those attentions where that is fewer numbers of a
# token.
KvMode = Literal["auto", "full", "lowrank"]


class Ways(TypedDict, total=False):
    """The ways in which ranks compute a program; each is "auto" where it is left out.

    Keys:
        dtype: to compute in, "float32", "bfloat16" or "float16"; auto is that of the stored embedding, but float32 for
            16-bit weights on a CPU.
        decoding: of passes that add one token to each text.
        low_rank: of matrices that are two factors.
        kv: of attentions whose k and v are two factors each.
    """

    dtype: str
    decoding: str
    low_rank: str
    kv: str


# What ranks compute without asking `transformers`, which takes seconds to import (see model/layers.py).
OWN_ACTIVATIONS = ("silu", "swish", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh")


@dataclass(frozen=True)
class Rotary:
    """Rotary positions: an angle per position and pair of features, and a factor on both cosine and sine.

    In a text of n tokens, more than `beyond`, pair k turns by the longer frequency k times
    (1 + stretch * (n / beyond - 1)) ** (-k / (pairs - 1)).

    Attributes:
        inverse_frequencies: how far each pair of features turns per position.
        scale: the factor.
        growth: of the factor, by position.
        beyond: texts of more tokens than these turn otherwise; None where all turn alike.
        longer_frequencies: of such texts.
        stretch: 0 where all longer texts are alike.
    """

    inverse_frequencies: tuple[float, ...]
    scale: float
    growth: Growth | None = None
    beyond: int | None = None
    longer_frequencies: tuple[float, ...] = ()
    stretch: float = 0.0

    @property
    def width(self) -> int:
        """Features of a head that turn."""
        return 2 * len(self.inverse_frequencies)


@dataclass(frozen=True)
class Arithmetic:
    """A model's arithmetic, by its configuration, beside its sizes; None for operations that the model lacks.

    Attributes:
        epsilon: of all norms.
        activation: as `transformers` names it.
        rotaries: different rotary positions.
        rotary_layers: by layer, its place among these, None for no such; empty where all have the first or none.
        query_factor: the place of one that turns nothing: a factor on queries before they are turned.
        attention_scale: of products of queries and keys; None for 1 / sqrt(head_dim).
        attention_softcap: the bound of scores.
        embedding_scale, output_scale, logit_scale: factors on embeddings, on each sublayer's output, on logits.
        logit_softcap: the bound of scaled logits.
        routing: how mixtures choose experts.
        clamped_gate: alpha and limit of experts with clamped gates (gpt-oss), in place of their activation.
    """

    epsilon: float = 0.0
    activation: str = ""
    rotaries: tuple[Rotary, ...] = ()
    rotary_layers: tuple[int | None, ...] = ()
    query_factor: int | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    embedding_scale: float | None = None
    output_scale: float | None = None
    logit_scale: float | None = None
    logit_softcap: float | None = None
    routing: Routing | None = None
    clamped_gate: tuple[float, float] | None = None

    def rotary_of(self, attention: Sublayer) -> int | None:
        """Find an attention's place in `rotaries`; averaged layers have the first one's."""
        if self.rotary_layers:
            return self.rotary_layers[attention.layers[0]]
        if self.rotaries:
            return 0
        return None


@dataclass(frozen=True)
class Plan:
    """A model and a program, ready to be run by a number of ranks; small, so that it can be sent to them.

    Attributes:
        folder: the checkpoint.
        program: as text.
        ranks: how many ranks run it.
        head_dim: the width of one head.
        hidden: the width of the stream.
        vocabulary: rows of the embedding.
        layers: of the checkpoint.
        max_tokens: prompt and output together; caches are allocated for them.
        tied: whether the head's weight is the embedding.
        dtype: to compute in, by its name in torch ("float32").
        ends: token ids that end a text.
        windows: how many tokens each layer's attention looks at, the token's own among them; None for all.
        mixtures: of experts, and how ranks share them.
        latent: the sizes of latent attentions.
        decoding: how passes that add one token to each text are computed.
        halves: which passes are computed in two halves that take turns.
        low_rank: how ranks share matrices that are two factors.
        kv: what is cached of attentions whose k and v are two factors each.
        sliced: whether every rank takes a slice of each sublayer of a step, also where it could have whole ones: as the
            ranks have them of a program that runs beside.
        balance: how neurons make up for unequal heads; None where parts are equal.
        coda: behind this program, a checkpoint's first rack, if it drafts tokens.
        draft: another program over the same weights that drafts tokens.
        stretches: after how many nodes of the program each rank's stretch ends, in a pipeline; empty where every rank
            has a share of all. A coda is rank 0's then.
        stretch: its number, of a plan for one of these (`of_rank`); only the first one embeds and predicts.
    """

    folder: Path
    family: Family
    program: str
    ranks: int
    head_dim: int
    hidden: int
    vocabulary: int
    layers: int
    max_tokens: int
    tied: bool
    dtype: str
    arithmetic: Arithmetic = Arithmetic()
    ends: tuple[int, ...] = ()
    windows: tuple[int | None, ...] = ()
    mixtures: Mixtures = NO_MIXTURES
    latent: Latent | None = None
    decoding: Decoding = "auto"
    halves: HalvesMode = "off"
    low_rank: LowRankMode = "auto"
    kv: KvMode | Literal["fewer"] = "auto"
    sliced: bool = False
    balance: Balance | None = None
    coda: CodaPlan | None = None
    draft: DraftPlan | None = None
    stretches: tuple[int, ...] = ()
    stretch: int | None = None

    def of_rank(self, rank: int) -> tuple[Plan, int]:
        """The plan by which a rank computes, and its rank in that: of a pipeline its stretch, on one rank."""
        if not self.stretches:
            return self, rank
        first, end = (0, *self.stretches)[rank : rank + 2]
        own = replace(
            self,
            program=str(Program(Program.parse(self.program).nodes[first:end])),
            ranks=1,
            stretches=(),
            coda=None if rank else self.coda,
            stretch=rank,
        )
        return own, 0

    @property
    def dtype_bytes(self) -> int:
        bits = re.search(r"\d+", self.dtype)
        assert bits is not None, f"{self.dtype} is no dtype of floating-point numbers"
        return int(bits[0]) // 8

    @property
    def long_texts(self) -> LongTexts | None:
        """Texts that turn otherwise than short ones, if there are such."""
        rotaries = self.arithmetic.rotaries
        beyond = {rotary.beyond for rotary in rotaries if rotary.beyond is not None}
        if not beyond:
            return None
        by_length = len(beyond) > 1 or any(rotary.stretch for rotary in rotaries)
        return LongTexts(min(beyond), by_length, self.family.positions.computes_anew)

    def window(self, attention: Sublayer) -> int | None:
        """Return the window of an attention in tokens, None for all; averaged layers have the first one's."""
        if self.windows:
            return self.windows[attention.layers[0]]
        return None

    def exchanges(self, sublayer: Sublayer) -> bool:
        """Tell whether ranks that share a sublayer send each other something before it is summed."""
        spec = self.family.spec(sublayer.kind, sublayer.layers[0])
        return spec.joins_heads or (bool(sublayer.ranks) and self.mixtures.size(sublayer) is None)

    @property
    def can_be_low_rank(self) -> bool:
        """True if some attention can keep its first factors' output of k and v.

        Of keys that are normed together with those of other ranks these say too little.
        """
        attentions = Program.parse(self.program).sublayers()
        return not self.family.attention.joins_heads and any(map(factor_sizes, attentions))

    def kept_factors(self, attention: Sublayer, kv_heads: int) -> tuple[int, int] | None:
        """Sizes of the first factors' output of k and v where an attention keeps it; None for keys and values."""
        sizes = factor_sizes(attention)
        if sizes is None or self.kv == "full" or self.family.attention.joins_heads:
            return None
        saves = sum(sizes) < 2 * kv_heads * self.head_dim
        if self.kv == "lowrank" or (self.kv == "fewer" and saves):
            return sizes
        return None

    def is_static(self, device: str) -> bool:
        """Tell whether passes that add one token to each text have fixed shapes on such a device, "cpu" or "cuda"."""
        chosen = self.decoding == "auto" and device == "cuda" and not self.coda
        return self.decoding == "static" or chosen

    def gathers(self, device: str) -> bool:
        """Tell whether passes of fixed shapes copy all texts' keys and values: on GPUs without kernels."""
        return self.is_static(device) and not used_on(device)

    def read_at_once(self, device: str, texts: int) -> tuple[int, int]:
        """The texts that an attention reads at a time, and the most blocks of each.

        Passes of fixed shapes read all texts at once, and both numbers are powers of two.
        """
        blocks = blocks_for(self.max_tokens)
        if self.is_static(device):
            return (power_of_two(texts), power_of_two(blocks))
        return (1, blocks)


@dataclass(frozen=True)
class CodaPlan:
    """The coda of a checkpoint's first rack, which drafts tokens.

    Attributes:
        file: the coda's tensors, named as in a model of the same architecture with so many layers.
        plan: the coda's own program, over these layers, with the ends of the checkpoint around it.
    """

    file: Path
    plan: Plan


@dataclass(frozen=True)
class DraftPlan:
    """A program over a model's own weights that drafts tokens for the model's program.

    Attributes:
        plan: the draft's program.
        slots: by rank, the slots of the cache that its attentions use, in their order: the model's, and behind these
            some of the draft's own.
        own: by rank, which of its attentions have the latter.
    """

    plan: Plan
    slots: tuple[tuple[int, ...], ...]
    own: tuple[tuple[int, ...], ...]

    @property
    def keeps_own(self) -> bool:
        """True if there are any, so that the draft has to compute every token itself before it reads on."""
        return any(self.own)


def factor_sizes(sublayer: Sublayer) -> tuple[int, int] | None:
    """The ranks of an attention's k and v where both are two factors."""
    k = sublayer.rank("k")
    v = sublayer.rank("v")
    if sublayer.kind != ATTENTION or k is None or v is None:
        return None
    return (k, v)


def require_low_rank(*plans: Plan) -> None:
    """Refuse `Plan.kv` "lowrank" if none of the plans can be run with it."""
    if any(plan.can_be_low_rank for plan in plans):
        return
    family = plans[0].family
    if family.attention.joins_heads:
        raise ValueError(
            f"kv lowrank makes keys again of what their first factors give, and in "
            f"{family.name} {family.attention.why_whole}; use kv full or auto"
        )
    raise ValueError(
        "kv lowrank keeps what the first factors of k and v give, and no attention here has factors of both, as in "
        "A0@k16,v16; use kv full or auto"
    )
