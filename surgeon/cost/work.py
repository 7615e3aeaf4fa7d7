"""Computation and exchanges of a rank for each step, as kernels and bytes, by the rules of `runtime/model`.

`runtime.plan.placement` gives a rank's slices and the sums in rank space, and the plan the cache.

Shapes: T tokens of a pass, h the stream's width, n ranks that share a sublayer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import comb
from typing import NamedTuple

from surgeon.cost.kernels import Kernel, Operation
from surgeon.language.program import Fork, Step
from surgeon.language.sublayer import ATTENTION, Sublayer
from surgeon.models.shapes import ModelShapes
from surgeon.runtime.plan.placement import (
    Group,
    Part,
    Work,
    computed_of,
    in_rank_space,
    summed_apart,
)
from surgeon.runtime.plan.specification import Plan


class ExpertLoad(NamedTuple):
    """The work of a rank's experts in a pass.

    Attributes:
        hit: experts that some token goes to, the mean.
        pairs: tokens of all of them together, the mean.
    """

    hit: float
    pairs: float


def sliced_load(experts: int, chosen: int, tokens: int) -> ExpertLoad:
    """Estimate the load of a rank that has every expert, or some neurons of each."""
    missed = (1 - min(chosen, experts) / experts) ** tokens
    return ExpertLoad(experts * (1 - missed), float(tokens * min(chosen, experts)))


@lru_cache(maxsize=4096)
def divided_load(experts: int, chosen: int, tokens: int, ranks: int) -> ExpertLoad:
    """Estimate the load of the rank that most experts are hit on, where ranks have whole ones, about equally many."""
    whole = sliced_load(experts, chosen, tokens)
    own = -(-experts // ranks)
    chosen = min(chosen, experts)
    most = 0.0
    if tokens == 1:  # by the ways that keep all ranks below a limit
        sizes = [experts * (rank + 1) // ranks - experts * rank // ranks for rank in range(ranks)]
        for limit in range(chosen):
            ways = [1] + [0] * chosen  # of choosing so many on the ranks so far, at most `limit` on each
            for size in sizes:
                ways = [
                    sum(
                        ways[count - here] * comb(size, here)
                        for here in range(min(limit, size, count) + 1)
                    )
                    for count in range(chosen + 1)
                ]
            most += 1 - ways[chosen] / comb(experts, chosen)
    else:
        hit = whole.hit / experts
        below = 0.0
        chances = [comb(own, n) * hit**n * (1 - hit) ** (own - n) for n in range(own + 1)]
        # The mean of the highest of some is the sum of the chances that it is above n.
        for chance in chances[:-1]:
            below += chance
            most += 1 - below**ranks
    most = max(most, whole.hit / ranks)
    return ExpertLoad(most, whole.pairs * most / whole.hit)


OF_EXPERTS = " of experts"  # of their products' names
SQUARES_BYTES = 8  # of a token: how large its queries and its keys are, in float32


@dataclass(frozen=True)
class Forward:
    """A forward pass: texts, each with new tokens behind others that are in the cache.

    Attributes:
        texts: computed together.
        new: tokens of each.
        before: tokens of each that came before.
        asked: of the last ones of each text's new tokens, the number that outputs are needed of; of others nothing is
            computed behind the last attention. None for all of them.
    """

    texts: int
    new: int
    before: int = 0
    asked: int | None = None

    @property
    def tokens(self) -> int:
        return self.texts * self.new

    @property
    def tail(self) -> Forward:
        """The part of it behind the last attention."""
        asked = self.new if self.asked is None else self.asked
        return Forward(self.texts, asked, self.before + self.new - asked)

    def in_halves(self, least: int) -> tuple[Forward, Forward] | None:
        """Split it: some texts each, or where these are odd, the first and the last tokens of all.

        Args:
            least: new tokens of a text on either side, where texts are cut; None is returned where they are too few.
        """
        texts = self.texts // 2
        new = self.new // 2
        if self.texts % 2 and new >= least:
            asked = None if self.asked is None else 1  # of as good as none
            last = None if self.asked is None else min(self.asked, self.new - new)
            return (
                Forward(self.texts, new, self.before, asked),
                Forward(self.texts, self.new - new, self.before + new, last),
            )
        if texts:
            return (replace(self, texts=texts), replace(self, texts=self.texts - texts))
        return None

    def keys(self, window: int | None, chunked: bool = False) -> int:
        """Count the tokens of each text whose keys and values are read.

        Args:
            window, chunked: as of `Window`.
        """
        seen = self.before + self.new
        if window is not None and chunked:
            return seen - self.before // window * window
        if window is None:
            return seen
        return min(seen, window + self.new - 1)

    def pairs(self, window: int | None, chunked: bool = False) -> float:
        """Count the tokens that a text's new tokens look at, all together."""
        if window is None:
            return self.new * self.before + self.new * (self.new + 1) / 2
        if chunked:
            ends = (divmod(end, window) for end in (self.before, self.before + self.new))
            before, up_to = (
                whole * window * (window + 1) / 2 + rest * (rest + 1) / 2 for whole, rest in ends
            )
            return up_to - before
        growing = min(self.new, max(0, window - self.before))  # tokens that look at all there are
        return growing * self.before + growing * (growing + 1) / 2 + (self.new - growing) * window


@dataclass(frozen=True)
class Sent:
    """A collective inside a sublayer.

    Attributes:
        width: values of each token, of one rank's operand.
        exact: whether nothing of it is ever compressed.
    """

    operation: Operation
    width: int
    group: Group
    exact: bool = False


Item = Kernel | Sent
GathersFirst = Callable[[Part], bool]  # whether ranks share out a part's first factors (Plan.low_rank)


@dataclass(frozen=True)
class RankWork:
    """Computation of ranks for a plan's steps.

    Attributes:
        gathers: as `Plan.low_rank` decides.
        static: whether passes that add one token to each text have fixed shapes (on GPUs): then one kernel attends for
            all texts, otherwise each text has its own.
        adding: whether a step's first norm adds the sum before it in the same launch, as kernels for GPUs do
            (`runtime/kernels/triton`).
    """

    plan: Plan
    shapes: ModelShapes
    gathers: GathersFirst
    static: bool = True
    adding: bool = True

    def product(self, name: str, rows: int, outputs: int, inputs: int) -> Kernel:
        """A matrix (outputs, inputs) times `rows` tokens; matrix, input and output are moved once."""
        moved = self.plan.dtype_bytes * (outputs * inputs + rows * (inputs + outputs))
        return Kernel(name, "product", 2.0 * rows * outputs * inputs, float(moved), rows)

    def copy(self, name: str, numbers: float) -> Kernel:
        """A kernel that reads and writes so many numbers, together."""
        return Kernel(name, "copy", 0.0, self.plan.dtype_bytes * numbers)

    def items(self, work: Work, forward: Forward) -> list[Item]:
        items: list[Item] = []
        stream = forward.tokens * self.plan.hidden
        for part in work.parts:
            sublayer = computed_of(self.plan, work, part)
            maps = _Maps(self, part, sublayer, work, forward.tokens)
            spec = self.plan.family.spec(sublayer.kind, sublayer.layers[0])
            normed = "norm" in spec.stream_norms
            # Adding to the stream reads and writes it, too.
            adds = self.adding and normed and part is work.parts[0]
            if normed:
                items.append(self.copy("norm", (4 if adds else 2) * stream))
            if sublayer.kind == ATTENTION:
                items += self._attention(maps, forward)
            elif self.plan.mixtures.size(sublayer) is not None:
                items += self._mixture(maps, forward)
            else:
                roles = [one.role for one in spec.projections if one.reads_stream]
                items += self._gated_work(maps, roles, "down")
            if work.whole and spec.norms_output:
                items.append(self.copy("norm", 2 * stream))
            if not adds:
                items.append(self.copy("add", 3 * stream))
        return items

    def _attention(self, maps: _Maps, forward: Forward) -> Iterable[Item]:
        sublayer = maps.sublayer
        plan = self.plan
        if plan.latent is None:
            heads, kv_heads = (
                self.shapes.matrix(sublayer, role).shape[0] // plan.head_dim for role in "qk"
            )
            kept = plan.kept_factors(sublayer, kv_heads)
            yield from maps.in_projections(
                ["q", "k", "v"], frozenset() if kept is None else frozenset("kv")
            )
        else:
            # As `runtime/model/layers.py` makes queries, keys and values.
            latent = plan.latent
            own = latent.share(sublayer.piece)
            kept = None
            heads = kv_heads = own.stop - own.start
            products = latent.products(plan.hidden, heads)
            made = forward.tokens * heads * latent.width
            yield maps.product("latents", *products["latents"])
            if latent.query_rank is not None:
                yield self.copy("norm", 2 * forward.tokens * latent.query_rank)
                yield maps.product("q", *products["q"])
            yield self.copy("norm", 2 * forward.tokens * latent.rank)
            yield maps.product("k v", *products["k v"])
            yield self.copy("keys", 2 * made)
            yield self.copy("values", made + forward.tokens * heads * latent.value)  # filled up
            yield self.copy("join", 2 * 3 * made)
        if plan.family.attention.joins_heads:
            yield self.copy("squares", forward.tokens * (heads + kv_heads) * plan.head_dim)
            if len(maps.of.sharers) > 1 and not maps.is_base:
                yield Sent(
                    "all-reduce", SQUARES_BYTES // self.plan.dtype_bytes, maps.of.sharers, exact=True
                )
        yield self.copy("place", 2 * forward.tokens * (heads + 2 * kv_heads) * plan.head_dim)
        seen = plan.window(sublayer), plan.family.window.chunked
        keys = forward.texts * forward.keys(*seen)
        if kept is not None:
            for role, rank in zip("kv", kept, strict=True):
                yield self.product(f"{role} second", keys, kv_heads * plan.head_dim, rank)
        read = 2 * keys * kv_heads * plan.head_dim + 2 * forward.tokens * heads * plan.head_dim
        flops = 4.0 * forward.texts * forward.pairs(*seen) * heads * plan.head_dim
        launches = 1 if self.static and forward.new == 1 else forward.texts
        yield Kernel(
            "attention", "attention", flops, float(self.plan.dtype_bytes * read), forward.new, launches
        )
        if plan.latent is None:
            yield from maps.out_projection("o")
        else:
            yield maps.product("o", *plan.latent.products(plan.hidden, heads)["o"])

    def _gated_work(self, maps: _Maps, roles: list[str], writing: str) -> Iterable[Item]:
        width = self.shapes.matrix(maps.sublayer, roles[0]).shape[0]
        yield from maps.in_projections(roles, frozenset())
        yield self.copy("activation", maps.tokens * width * (len(roles) + 1))
        yield from maps.out_projection(writing)

    def _mixture(self, maps: _Maps, forward: Forward) -> Iterable[Item]:
        """The router, the experts that tokens go to, and the shared ones, which are a feed-forward of slices."""
        plan = self.plan
        part = maps.of
        size = self.plan.mixtures.size(maps.sublayer)
        mixture = self.shapes.layer_shapes.layer_of(part.sublayer).mixture
        whole = plan.mixtures.whole_experts(part.sublayer, len(part.sharers))
        assert size is not None
        assert mixture is not None
        chosen = min(mixture.top_k, size.experts)
        yield maps.product("router", size.experts, plan.hidden)
        yield self.copy("route", maps.tokens * (size.experts + 2 * chosen))
        # The mixture, or the slice of one, whose experts they are, and how many of these are here.
        of = part.sublayer
        here = size.experts
        load = sliced_load(size.experts, chosen, maps.tokens)
        if whole is not None:
            of = whole.of
            here = len(whole.own)
            load = divided_load(size.experts, chosen, maps.tokens, len(part.sharers))
        pairs = maps.tokens * chosen  # of a token and an expert, wherever that is
        copied = self.static and forward.new == 1 and pairs < here
        # Where shapes are fixed, what is computed may not depend on what the router says.
        if copied:
            load = ExpertLoad(pairs, pairs)
        elif self.static and forward.new == 1:
            load = ExpertLoad(here, here * maps.tokens)
        matrices = {role: self.shapes.matrix(of, role).shape for role in ("gate", "up", "down")}
        for role, (outputs, inputs) in matrices.items():
            rank = of.rank(role)
            shapes = [(outputs, inputs)]
            if rank is not None:
                shapes = [(rank, inputs), (outputs, rank)]
            for width, depth in shapes:
                if copied:
                    yield self.copy("copies", 2 * load.hit * width * depth)
                moved = load.hit * width * depth + load.pairs * (width + depth)
                flops = 2 * load.pairs * width * depth
                rows = load.pairs / load.hit
                yield Kernel(f"{role}{OF_EXPERTS}", "product", flops, plan.dtype_bytes * moved, rows)
        yield self.copy("activation", 3 * load.pairs * matrices["up"][0])
        yield self.copy("mix", (load.pairs + maps.tokens) * plan.hidden)
        if "shared_gate" in self.shapes.layer_shapes.layer_of(part.sublayer).matrices:
            yield from self._gated_work(maps, ["shared_gate", "shared_up"], "shared_down")
            yield self.copy("add", 3 * maps.tokens * plan.hidden)

    # What ranks sum of a step, and what becomes of the sum.

    def count_reduced(self, node: Step | Fork, whole: bool) -> int:
        """Count the values of each token that ranks reduce of a node.

        Args:
            whole: whether each of them computes whole sublayers of it.
        """
        if isinstance(node, Fork) or whole:
            return self.plan.hidden
        return sum(summed_apart(self.plan, node).values()) or self.plan.hidden

    def finish(self, step: Step, forward: Forward) -> list[Kernel]:
        """Kernels on the sum of a step that ranks have slices of."""
        found = []
        before_second = in_rank_space(self.plan, step)
        for index, width in summed_apart(self.plan, step).items():
            sublayer = step.sublayers[index]
            if index in before_second:
                found.append(self.product("second", forward.tokens, self.plan.hidden, width))
            if self.plan.family.spec(sublayer.kind, sublayer.layers[0]).norms_output:
                found.append(self.copy("norm", 2 * forward.tokens * self.plan.hidden))
        return found


@dataclass(frozen=True)
class _Maps:
    """The linear maps of a part, as the runtime's `Maps`."""

    rank_work: RankWork
    of: Part
    sublayer: Sublayer
    work: Work
    tokens: int

    @property
    def is_base(self) -> bool:
        return self.sublayer != self.of.sublayer

    def in_projections(self, roles: list[str], later: frozenset[str]) -> Iterable[Item]:
        """Projections of the normed stream; the second factors of `later` are left out."""
        factored = [role for role in roles if self.sublayer.rank(role) is not None]
        if self.is_base:
            for role in roles:
                if role in later:
                    yield from self._gathered_work([role], later)
                else:  # both factors shared out by rank columns, their product summed
                    outputs, inputs = self._shape(role)
                    share = self._share(role)
                    yield self.product(f"{role} first", share, inputs)
                    yield self.product(f"{role} second", outputs, share)
                    yield Sent("all-reduce", outputs, self.of.sharers)
        elif factored and len(self.of.sharers) > 1 and self.rank_work.gathers(self.of):
            yield from self._gathered_work(roles, later)
        else:
            widths = [self.sublayer.rank(role) or self._shape(role)[0] for role in roles]
            yield self.product(" ".join(roles), sum(widths), self._shape(roles[0])[1])
            yield from self._seconds(factored, later)
            if factored:
                yield self._joint_kernel(roles)

    def _gathered_work(self, roles: list[str], later: frozenset[str]) -> Iterable[Item]:
        """Yield first factors shared out, their outputs gathered."""
        ranks = {role: rank for role in roles if (rank := self.sublayer.rank(role)) is not None}
        width = -(-sum(ranks.values()) // len(self.of.sharers))
        whole = sum(self._shape(role)[0] for role in roles if role not in ranks)
        yield self.product(" ".join(roles), width + whole, self._shape(roles[0])[1])
        yield Sent("all-gather", width, self.of.sharers)
        yield self.rank_work.copy("gathered", 2 * self.tokens * len(self.of.sharers) * width)
        yield from self._seconds(list(ranks), later)
        if len(roles) > 1:
            yield self._joint_kernel(roles)

    def _joint_kernel(self, roles: list[str]) -> Kernel:
        outputs = sum(self._shape(role)[0] for role in roles)
        return self.rank_work.copy("join", 2 * self.tokens * outputs)

    def _seconds(self, roles: list[str], later: frozenset[str]) -> Iterable[Item]:
        for role in roles:
            if role not in later:
                yield self.product(f"{role} second", self._shape(role)[0], self.sublayer.rank(role) or 0)

    def out_projection(self, role: str) -> Iterable[Item]:
        outputs, inputs = self._shape(role)
        rank = self.sublayer.rank(role)
        if rank is None:
            yield self.product(role, outputs, inputs)
            return
        first = self._share(role) if self.is_base else rank
        yield self.product(f"{role} first", first, inputs)
        summed_first = not self.work.whole and len(self.of.sharers) > 1
        if self.is_base or not (
            summed_first and self.of.index in in_rank_space(self.rank_work.plan, self.work.step)
        ):
            yield self.product(f"{role} second", outputs, first)

    def _share(self, role: str) -> int:
        """Count the columns of a role's factors on the rank that has most."""
        return -(-(self.sublayer.rank(role) or 0) // len(self.of.sharers))

    def _shape(self, role: str) -> tuple[int, int]:
        return self.rank_work.shapes.matrix(self.sublayer, role).shape

    def product(self, name: str, outputs: int, inputs: int) -> Kernel:
        return self.rank_work.product(name, self.tokens, outputs, inputs)
