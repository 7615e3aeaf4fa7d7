"""The compiler from a program and a number of ranks to each rank's work.

Every system, whatever its name, is placed by two rules (`placed_parts`, `assigned_branches`). A rank's part of a step
is again a tuple of sublayers, only thinner ones (rank 0 of 2 computes `A4/2:0` of `A4`), so that reading weights,
caches and arithmetic know slices of sublayers and nothing else. This module knows neither tensors nor processes.

Checks of what ranks have to share, and of the slices that a program names, come last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from surgeon.language.program import Fork, Node, Program, Step, ranks_of_branches
from surgeon.language.sublayer import ATTENTION, WRITING, Sublayer
from surgeon.models.families.specs import Latent, Units
from surgeon.runtime.plan.specification import NO_MIXTURES, Balance, Mixtures, Plan, cut_neurons

Group = tuple[int, ...]  # ranks that share a piece of work, in ascending order


@dataclass(frozen=True)
class Part:
    """A rank's part of one sublayer.

    Attributes:
        sublayer: the slice of it that this rank computes.
        index: of the sublayer in the step.
        slot: of an attention in the rank's cache (one that occurs twice has two).
        sharers: the ranks that compute slices of the same sublayer of the step, this one among them.
    """

    sublayer: Sublayer
    index: int
    slot: int | None = None
    sharers: Group = ()


@dataclass(frozen=True)
class Work:
    """One rank's part of one step of the program."""

    step: Step
    parts: tuple[Part, ...]

    @cached_property
    def whole(self) -> bool:
        """True if its parts are whole sublayers of the step; otherwise all of them are slices."""
        return all(part.sublayer == self.step.sublayers[part.index] for part in self.parts)


def rank_work(
    program: Program, rank: int, ranks: int, sliced: bool = False, balance: Balance | None = None
) -> tuple[Work, ...]:
    """A rank's work, in the order in which the executor comes to it."""
    work: list[Work] = []
    slots = 0
    for step, group, before in _visits(program.nodes, rank, tuple(range(ranks))):
        if not isinstance(step, Step):
            continue
        parts = []
        placed, sharing = placed_parts(step, group.index(rank), len(group), sliced, balance, before)
        sharers = tuple(group[other] for other in sharing)
        for index, sublayer in placed:
            attends = sublayer.kind == ATTENTION
            parts.append(Part(sublayer, index, slots if attends else None, sharers))
            slots += attends
        work.append(Work(step, tuple(parts)))
    return tuple(work)


def work_of(plan: Plan, rank: int) -> tuple[Work, ...]:
    """A rank's work on a plan's program."""
    return rank_work(Program.parse(plan.program), rank, plan.ranks, plan.sliced, plan.balance)


def computed_of(plan: Plan, work: Work, part: Part) -> Sublayer:
    """The sublayer that a rank computes for a part: its slice, or in the paper's Base some rank columns of the whole.

    Base is for sublayers of which every matrix is two factors; others, and mixtures, are shared as in every other way.
    """
    whole = work.step.sublayers[part.index]
    roles = {projection.role for projection in plan.family.spec(whole.kind, whole.layers[0]).projections}
    as_base = (
        plan.low_rank == "base" and len(part.sharers) > 1 and {role for role, _ in whole.ranks} == roles
    )
    if as_base and plan.mixtures.size(whole) is None:
        return whole
    return part.sublayer


def norm_sums(plan: Plan) -> int:
    """Count the sums of queries' and keys' sizes in a pass, on the rank with most.

    Ranks sum them where queries and keys are normed together, in each attention of which they have some heads.
    """
    if not plan.family.attention.joins_heads:
        return 0
    works = (work_of(plan, rank) for rank in range(plan.ranks))
    return max(
        sum(
            part.slot is not None
            and len(part.sharers) > 1
            and computed_of(plan, work, part) == part.sublayer
            for work in own
            for part in work.parts
        )
        for own in works
    )


def placed_parts(
    step: Step,
    member: int,
    members: int,
    sliced: bool = False,
    balance: Balance | None = None,
    before: Node | None = None,
) -> tuple[tuple[tuple[int, Sublayer], ...], range]:
    """A member's part of a step, with the numbers of the sublayers in it, and the members that share these.

    Sublayers of one kind are placed whole: on groups of members, one sublayer each, where there are fewer of them (an
    LP pair on two ranks: one layer per rank; on four: two ranks per layer), or several per member. Where neither
    divides, where the kinds differ (attention || MLP, whose costs differ), and if `sliced`, every member takes a slice
    of each. Neurons are cut as `balance` says beside whole attentions, which are in the step or, of a late one, as many
    in the node `before` it, whose sums are on their way meanwhile.
    """
    sublayers = step.sublayers
    count = len(sublayers)
    alike = len({sublayer.kind for sublayer in sublayers}) == 1 and not sliced
    if alike and members % count == 0:
        each = members // count
        index = member // each
        part = _slice(sublayers[index], member % each, each)
        beside = isinstance(before, Step) and _whole_attentions(before) == len(before.sublayers) == count
        if balance is not None and step.late and beside:
            part = _balance_neurons(part, cut_neurons(balance, 1, 1, each), member % each)
        return ((index, part),), range(index * each, (index + 1) * each)
    if alike and count % members == 0:
        each = count // members
        own = range(member * each, (member + 1) * each)
        return tuple((index, sublayers[index]) for index in own), range(member, member + 1)
    ends = None
    if balance is not None:
        attentions = _whole_attentions(step)
        if 0 < attentions < count:
            ends = cut_neurons(balance, attentions, count - attentions, members)
    parts = (_balance_neurons(_slice(one, member, members), ends, member) for one in sublayers)
    return tuple(enumerate(parts)), range(members)


def _whole_attentions(step: Step) -> int:
    """Count the attentions of a step; 0 where one has fewer heads or two factors, which neurons cannot make up for."""
    found = [one for one in step.sublayers if one.kind == ATTENTION]
    return len(found) if all(one.width is None and not one.ranks for one in found) else 0


def assigned_branches(fork: Fork, rank: int, group: Group) -> tuple[tuple[tuple[Node, ...], ...], Group]:
    """The branches of a fork that this rank computes or helps compute, and the group of ranks that computes each."""
    member = group.index(rank)
    shared = ranks_of_branches(fork, len(group))
    own = [number for number, members in enumerate(shared) if member in members]
    members = shared[own[0]]
    return tuple(fork.branches[number] for number in own), group[members.start : members.stop]


def groups_within(
    program: Program,
    ranks: int,
    exchanges: Callable[[Sublayer], bool] | None = None,
    sliced: bool = False,
) -> list[Group]:
    """Every group of two ranks or more, but not all of them, that exchanges something; the same list on every rank.

    Those that run steps and forks reduce among themselves; those that share a sublayer may send each other something
    inside of it (`exchanges`).
    """
    everybody = tuple(range(ranks))
    found = {group for rank in everybody for _, group, _ in _visits(program.nodes, rank, everybody)}
    if exchanges is not None and any(map(exchanges, program.sublayers())):
        work = (work for rank in everybody for work in rank_work(program, rank, ranks, sliced))
        found |= {part.sharers for one in work for part in one.parts if exchanges(part.sublayer)}
    return sorted(group for group in found if 1 < len(group) < ranks)


def _slice(sublayer: Sublayer, index: int, count: int) -> Sublayer:
    """Slice `index` of `count` of a sublayer that may be a slice itself."""
    outer_index, outer_count = sublayer.piece or (0, 1)
    if count == 1:
        return sublayer
    return replace(sublayer, piece=(outer_index * count + index, outer_count * count))


def _balance_neurons(part: Sublayer, ends: tuple[int, ...] | None, member: int) -> Sublayer:
    """Return a member's neurons of a whole feed-forward in place of an equal part."""
    if ends is None or part.kind == ATTENTION or part.piece != (member, len(ends)):
        return part
    if part.width is not None or part.ranks or part.experts is not None:
        return part
    first = ends[member - 1] if member else 0
    return replace(part, piece=(first, ends[-1]), span=ends[member] - first)


def _visits(
    nodes: tuple[Node, ...], rank: int, group: Group
) -> Iterator[tuple[Node, Group, Node | None]]:
    """The nodes that a rank comes to, the group of each, and what is before it; all end in a reduction, forks too."""
    for before, node in zip((None, *nodes), nodes, strict=False):
        yield node, group, before
        if not isinstance(node, Step):
            branches, subgroup = assigned_branches(node, rank, group)
            for branch in branches:
                yield from _visits(branch, rank, subgroup)


UnitsOf = Callable[[Sublayer], Units]  # how many heads and KV heads, or neurons, a sublayer has


def shared_units(units_of: UnitsOf, latent: Latent | None) -> UnitsOf:
    """Units that ranks share of sublayers: of latent attentions, heads."""

    def units(sublayer: Sublayer) -> Units:
        found = units_of(sublayer)
        if latent is None or sublayer.kind != ATTENTION:
            return found
        return {"heads": latent.heads}

    return units


def cached_latent(latent: Latent | None) -> Latent | None:
    """Refuse latent attentions whose values are wider than their keys."""
    if latent is not None and latent.value > latent.width:
        raise ValueError(
            f"v_head_dim {latent.value} in config.json is above the {latent.width} features of a key, which ranks cache"
        )
    return latent


def check_slices(program: Program, units_of: UnitsOf) -> None:
    """Refuse slices that a program names and that would not be equal."""
    from surgeon.models.weights import indivisible  # with torch, which plans do without

    for sublayer in dict.fromkeys(program.sublayers()):
        if reason := indivisible(sublayer, units_of(sublayer)):
            raise ValueError(reason)


def check_division(program: Program, units_of: UnitsOf, ranks: int, mixtures: Mixtures) -> None:
    """Refuse slices that would not be equal, and more ranks than a program has heads and neurons."""
    check_slices(program, units_of)
    heads = 0
    neurons = 0
    for sublayer in dict.fromkeys(program.sublayers()):
        units = units_of(sublayer)
        if sublayer.kind == ATTENTION:
            heads = max(heads, units.get("heads", 0))
        else:
            mixture = mixtures.size(sublayer)
            neurons = max(neurons, units["neurons"] * (1 if mixture is None else mixture.experts))
    check_ranks(ranks, heads, neurons)


def check_ranks(ranks: int, heads: int, neurons: int) -> None:
    """Refuse more ranks than heads and neurons of a layer together."""
    if ranks > heads + neurons:
        raise ValueError(
            f"{ranks} ranks cannot share this model, whose layers have {heads} heads and {neurons} neurons to share; "
            f"use at most {heads + neurons}"
        )


def require_equal_heads(plan: Plan, units_of: UnitsOf) -> None:
    """Refuse ranks that would have unequal parts of an attention; vLLM's ranks have caches of one shape."""
    for part in (
        part for rank in range(plan.ranks) for work in work_of(plan, rank) for part in work.parts
    ):
        if part.slot is None:
            continue
        units = units_of(part.sublayer)
        heads = units["heads"]
        kv_heads = units.get("kv_heads", heads)
        _, count = part.sublayer.piece or (0, 1)
        if heads % count or (kv_heads % count and count % kv_heads):
            raise ValueError(
                f"vLLM has equal parts of an attention on its ranks, and {heads} heads over {kv_heads} KV heads "
                f"({replace(part.sublayer, piece=None, ranks=())}) do not divide into {count}; set another "
                "--tensor-parallel-size, or let surgeon serve run it"
            )


def summed_in_rank_space(
    step: Step, hidden: int, normed: bool, mixtures: Mixtures = NO_MIXTURES
) -> frozenset[int]:
    """The sublayers of a step, by their numbers in it, whose parts are summed before their second factor.

    Args:
        hidden: the stream's width.
        normed: whether they are summed apart in any case.
        mixtures: whose experts have a second factor each, so that they are summed behind it.
    """
    ranks = [
        next((rank for role, rank in one.ranks if role in WRITING and mixtures.size(one) is None), None)
        for one in step.sublayers
    ]
    if normed:
        return frozenset(index for index, rank in enumerate(ranks) if rank is not None and rank < hidden)
    # Together in the stream's space they take its width, however many they are.
    given_ranks = [rank for rank in ranks if rank is not None]
    if len(given_ranks) == len(ranks) and sum(given_ranks) < hidden:
        return frozenset(range(len(ranks)))
    return frozenset()


def in_rank_space(plan: Plan, step: Step) -> frozenset[int]:
    """The sublayers of a step, by their numbers in it, that a plan's ranks sum before their second factor."""
    if plan.low_rank == "base":
        return frozenset()
    return summed_in_rank_space(step, plan.hidden, has_norms_behind(plan, step), plan.mixtures)


def summed_apart(plan: Plan, step: Step) -> dict[int, int]:
    """Sublayers of a step that are summed by themselves, and how many values of a token; none for one sum of all."""
    ranks = {
        index: next(rank for role, rank in step.sublayers[index].ranks if role in WRITING)
        for index in in_rank_space(plan, step)
    }
    apart = has_norms_behind(plan, step)
    return {
        index: ranks.get(index, plan.hidden)
        for index in range(len(step.sublayers))
        if apart or index in ranks
    }


def has_norms_behind(plan: Plan, step: Step) -> bool:
    """Tell whether a norm stands behind some sublayer of a step, so that all of them are summed apart."""
    return any(plan.family.spec(one.kind, one.layers[0]).norms_output for one in step.sublayers)
