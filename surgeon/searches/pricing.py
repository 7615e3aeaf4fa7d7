"""Costs of programs by themselves, fast enough for thousands of them, and how near edits come to limits on them.

All layers of a model are alike, and a pass is at rest between its stretches: wherever a step that is not late begins,
every rank has landed all that was in flight. So bytes and times of ranks add up over stretches, and each kind of
stretch is priced once. Time adds up only where the host does not run ahead of the device (in captured graphs, or where
kernels are launched one by one), and on an emulated link only where all ranks do the same; elsewhere whole programs are
predicted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix

from surgeon.cost.deployment import Deployment, Workload, plan_on_paper
from surgeon.cost.hardware import Hardware
from surgeon.cost.predict import DraftPrices, Prediction, predict
from surgeon.cost.work import Forward, RankWork, Sent
from surgeon.language.operations.applied import Choice, as_choice
from surgeon.language.program import Fork, Node, Program, Step
from surgeon.language.sublayer import FEED_FORWARD, Sublayer
from surgeon.machine import show_size
from surgeon.models.shapes import ModelShapes
from surgeon.opened import Model
from surgeon.runtime.batching.blocks import BLOCK_TOKENS
from surgeon.runtime.plan.memory import footprint
from surgeon.runtime.plan.placement import Group, Work, assigned_branches, work_of
from surgeon.runtime.plan.specification import Plan
from surgeon.searches.mixture import Mixture, Trial
from surgeon.searches.optimise import Numbers
from surgeon.searches.quantities import DEPTH, DRAFT_PASS, NEAR, Aspect, Limit, select_priced
from surgeon.words import plural

_ONE = Program.parse("A0")  # what stretches are put behind, to see what they add


@dataclass(frozen=True)
class Pricing:
    """The costs of a model's programs.

    Attributes:
        aspects: the quantities to price.
        deployment: the ranks; `low_rank` "auto" counts bytes as "gather" does, since ranks measure which way to take.
        workload: of latency and speedup.
        hardware: by the name that aspects have for it.

    Raises:
        ValueError: if the ranks cannot run the unedited model, texts are longer than its positions, no token follows
            the first, or a hardware lacks a figure.
    """

    model: Model
    aspects: tuple[Aspect, ...]
    deployment: Deployment = field(default_factory=lambda: Deployment(2))
    workload: Workload = field(default_factory=Workload)
    hardware: Mapping[str, Hardware] = field(default_factory=dict)
    # Known so far: matrices' sizes, programs' stretches, costs of these, nodes of the first layers alike.
    _sizes: dict[Sublayer, int] = field(default_factory=dict, init=False, repr=False)
    _stretches: dict[Program, list[tuple[Program, int]]] = field(
        default_factory=dict, init=False, repr=False
    )
    _known: dict[tuple[str, Program], float] = field(default_factory=dict, init=False, repr=False)
    _twins: dict[Node, Node] = field(default_factory=dict, init=False, repr=False)
    _firsts: dict[tuple[Any, int | None], int] = field(default_factory=dict, init=False, repr=False)
    _drafting: dict[str, DraftPrices] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for aspect in self.aspects:
            assert aspect.is_priced, f"{aspect} does not follow from a program"
            if aspect.quantity.timed and self.workload.new < 2:
                raise ValueError(
                    f"a {aspect.name} is per token after the first one; ask for at least 2 new tokens"
                )
        _ = self.dense

    @cached_property
    def dense(self) -> dict[Aspect, float]:
        return {aspect: self._cost(aspect, self.model.program) for aspect in self.aspects}

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on hardware whose memory is too small for the unedited model."""
        found = []
        for name, hardware in self.hardware.items():
            room = self._predict(self.model.program, hardware).memory
            if not room.fits:
                ranks = self.deployment.ranks
                each = "one rank" if ranks == 1 else f"each of {ranks} ranks"
                found.append(
                    f"the unedited model needs {show_size(room.needed)} on {each}, and {name} has "
                    f"{show_size(room.there)}: its time there is one that it would take if it did fit"
                )
        return tuple(found)

    def shortfalls(self, limits: Iterable[Limit], program: Program) -> tuple[float, ...]:
        """The program's shortfall from each priced limit."""
        return tuple(
            limit.shortfall(self.price(limit.aspect, program), self.dense[limit.aspect])
            for limit in select_priced(limits)
        )

    def price(self, aspect: Aspect, program: Program) -> float:
        try:
            return self._cost(aspect, program)
        except ValueError:
            return math.inf

    def costs(self, aspects: Sequence[Aspect], trial: Trial) -> tuple[float, ...]:
        """A trial's costs, priced or measured; infinite where one is not known."""
        program = trial.program
        return tuple(
            self.price(aspect, program) if aspect.is_priced else aspect.read_cost(trial.measured)
            for aspect in aspects
        )

    def _cost(self, aspect: Aspect, program: Program) -> float:
        price = aspect.quantity.price
        assert price is not None
        return price(self, program, aspect.on or "")

    def depth(self, program: Program) -> float:
        return program.effective_depth(self.model.family.steps_per_layer)

    def experts(self, program: Program) -> float:
        """Count a mixture's experts, in the mean over the unedited model's mixtures."""
        shapes = self.model.layer_shapes

        def counts(program: Program) -> list[int]:
            mixtures = (one for one in program.sublayers() if shapes.layer_of(one).mixture is not None)
            return [shapes.experts(one) for one in mixtures if one.kind == FEED_FORWARD]

        return sum(counts(program)) / max(1, len(counts(self.model.program)))

    def kept_bytes(self, program: Program) -> float:
        """Count the bytes of one token in the caches of all ranks, as they do when they choose a cache's size."""
        shapes = self.model.shapes
        return self._sum(
            "kv_bytes",
            program,
            lambda part: sum(map(sum, footprint(self._plan(part), shapes).kept)) / BLOCK_TOKENS,
        )

    def sent_bytes(self, program: Program) -> float:
        return self._sum(
            "wire_bytes", program, lambda part: _sent_bytes(self.model.shapes, self._plan(part))
        )

    def drafting(self, on: str) -> DraftPrices:
        if on not in self._drafting:
            self._drafting[on] = DraftPrices(self._predict(self.model.program, self.hardware[on]))
        return self._drafting[on]

    def parameters(self, program: Program) -> int:
        found = set(program.sublayers())
        sizes = self._sizes
        for sublayer in found - sizes.keys():
            sizes[sublayer] = sublayer.parameters(self.model.layer_shapes)
        return sum(sizes[sublayer] for sublayer in found)

    def seconds(self, program: Program, on: str, draft: Plan | None = None) -> float:
        """Predict seconds per token, or with its plan as a draft, of a pass."""
        hardware = self.hardware[on]
        sliced = draft is not None and draft.sliced
        what = on if draft is None else f"{on}, {'sliced' if sliced else 'not sliced'} as a draft"

        def seconds(part: Program) -> float:
            if draft is None:
                return self._predict(part, hardware).per_token
            paper = self._plan(part, draft.dtype, self.workload.length, sliced)
            return self.drafting(on).seconds(replace(paper, mixtures=draft.mixtures))

        def whole(program: Program) -> float:
            return self._remember(f"whole program@{what}", Program(self._alike(program)), seconds)

        if not self._adds_up(program, hardware, sliced):
            return whole(program)
        one = whole(_ONE)

        def added_seconds(part: Program) -> float:
            return seconds(_ONE + part) - one

        return (
            one
            - self._sum(f"latency@{what}", _ONE, added_seconds)
            + self._sum(f"latency@{what}", program, added_seconds)
        )

    def _adds_up(self, program: Program, hardware: Hardware, sliced: bool) -> bool:
        """Tell whether a program's time is the sum of its stretches'.

        On an emulated link each rank has a line of its own, and one that is early stays early: all have to do the same.
        """
        if (
            hardware.host.asynchronous and self.deployment.graphs is False
        ) or not self.deployment.connected:
            return False
        if self.deployment.emulated is None:
            return True

        def uneven(part: Program) -> float:
            plan = self._plan(part, sliced=sliced)
            forward = Forward(1, 1, self.model.shapes.positions)
            items = RankWork(plan, self.model.shapes, lambda _: plan.low_rank != "replicate").items
            done = [
                [
                    (item.operation, item.width, len(item.group)) if isinstance(item, Sent) else item
                    for work in work_of(plan, rank)
                    for item in items(work, forward)
                ]
                for rank in range(plan.ranks)
            ]
            return float(any(each != done[0] for each in done))

        return self._sum(f"uneven, sliced {sliced}", program, uneven) == 0

    def _predict(self, program: Program, hardware: Hardware) -> Prediction:
        return predict(self.model.shapes, program, hardware, self.workload, self.deployment)

    def _sum(self, what: str, program: Program, cost: Callable[[Program], float]) -> float:
        """Add a cost up over a program's stretches."""
        if program not in self._stretches:
            stretches = map(Program, _stretches(self._alike(program)))
            self._stretches[program] = [*Counter(stretches).items()]
        return math.fsum(
            count * self._remember(what, part, cost) for part, count in self._stretches[program]
        )

    def _remember(self, what: str, program: Program, cost: Callable[[Program], float]) -> float:
        if (what, program) not in self._known:
            self._known[what, program] = cost(program)
        return self._known[what, program]

    def _alike(self, program: Program) -> tuple[Node, ...]:
        """The nodes with one layer in place of all with the same window; those of other shapes stay."""
        windows = self.model.shapes.windows
        others = self.model.layer_shapes.others
        firsts = self._firsts

        def twin(sublayer: Sublayer) -> Sublayer:
            layer = sublayer.layers[0]
            alike = windows[layer] if windows else None, layer if layer in others else None
            return replace(sublayer, layers=(firsts.setdefault(alike, layer),))

        for node in program.nodes:
            if node not in self._twins:
                (self._twins[node],) = Program((node,)).map_sublayers(twin).nodes
        return tuple(self._twins[node] for node in program.nodes)

    def _plan(
        self, program: Program, dtype: str | None = None, tokens: int = 1, sliced: bool = False
    ) -> Plan:
        deployment = self.deployment
        dtype = dtype or self.deployment.dtype or self.model.shapes.dtype
        ways = deployment.low_rank, deployment.kv, sliced
        return plan_on_paper(self.model.shapes, program, deployment.ranks, tokens, dtype, *ways)

    @cached_property
    def stored_bytes(self) -> int:
        return self._plan(_ONE, self.model.shapes.dtype).dtype_bytes


def _stretches(nodes: tuple[Node, ...]) -> Iterator[tuple[Node, ...]]:
    """Split nodes into stretches: each begins with a step or fork that waits for what came before."""
    found: list[Node] = []
    for node in nodes:
        if isinstance(node, Step) and node.late:
            # For the first step of all nothing is in flight that it could be late for.
            found.append(node if found else replace(node, late=False))
            continue
        if found:
            yield tuple(found)
        found = [node]
    if found:
        yield tuple(found)


def _sent_bytes(shapes: ModelShapes, plan: Plan) -> float:
    """Count the bytes that rank 0 gives to collectives for one token, without those of embedding and head."""
    ranks = RankWork(plan, shapes, lambda _: plan.low_rank != "replicate")
    nodes = Program.parse(plan.program).nodes
    return plan.dtype_bytes * _count_sent(ranks, nodes, tuple(range(plan.ranks)), iter(work_of(plan, 0)))


def _count_sent(ranks: RankWork, nodes: tuple[Node, ...], group: Group, work: Iterator[Work]) -> int:
    """Numbers that rank 0 gives to collectives of a group that runs some nodes."""
    total = 0
    for node in nodes:
        whole = True
        if isinstance(node, Fork):
            branches, inner = assigned_branches(node, 0, group)
            total += sum(_count_sent(ranks, branch, inner, work) for branch in branches)
        else:
            mine = next(work)
            whole = mine.whole
            total += sum(
                item.width for item in ranks.items(mine, Forward(1, 1)) if isinstance(item, Sent)
            )
        total += ranks.count_reduced(node, whole) if len(group) > 1 else 0
    return total


_SECONDS = 20.0  # that an integer program may take; what it has found by then is used
_FEW = 1e-6  # what an edit costs in an integer program, so that none is chosen for nothing


def require_work(limits: Sequence[Limit], pricing: Pricing) -> list[str]:
    """Refuse limits that ask for nothing.

    Returns:
        Notes on limits that only keep programs from getting worse.
    """
    said = []
    more = []
    notes = []
    for limit in select_priced(limits):
        dense = pricing.dense[limit.aspect]
        if dense == 0:
            on = plural(pricing.deployment.ranks, "rank")
            raise ValueError(f"budget {limit}: the unedited model has {limit.aspect} 0 on {on}")
        if limit.shortfall(dense, dense):
            continue
        words = f"the unedited model has {limit.aspect.show(dense)} already"
        said.append(words)
        kept = "needing more"
        if limit.aspect.deep:
            kept = "being shallower"
            more.append("more")
        elif limit.aspect.name == "depth" and not limit.relative:
            more.append(f"less, or for a deeper model by depth>={limit.amount:g}")
        else:
            more.append("less")
        notes.append(f"{limit}: {words}; it only keeps programs from {kept}")
    if said and len(said) == len(select_priced(limits)):
        raise ValueError(
            f"budget {','.join(map(str, limits))}: {' and '.join(said)}; ask for {' and '.join(more)}"
        )
    return notes


def reach(limits: Sequence[Limit], pricing: Pricing, mixture: Mixture) -> Choice:
    """Find the choice that comes nearest to limits on programs, by the sum of shortfalls.

    From that of an integer program, in which what edits save adds up, the best single edit more or less is taken as
    long as it helps.
    """
    limits = select_priced(limits)
    if not limits:
        return ()
    found = _by_integers(limits, pricing, mixture)
    if not mixture.allows(found):  # edits that do not go together after all are left out
        together: Choice = ()
        for edit in found:
            if mixture.allows((*together, edit)):
                together = as_choice((*together, edit))
        found = together
    least = sum(pricing.shortfalls(limits, mixture.program(found)))
    while least:
        changed = [tuple(edit for edit in found if edit != out) for out in found]
        changed += [as_choice((*found, edit)) for edit in mixture.edits if mixture.is_free(found, edit)]
        better = None
        least *= 1 - 1e-9
        for choice in changed:
            if mixture.allows(choice):
                short = sum(pricing.shortfalls(limits, mixture.program(choice)))
                if short < least and not math.isinf(short):
                    better = choice
                    least = short
        if better is None:
            break
        found = better
    return found


def require_reachable(limits: Sequence[Limit], pricing: Pricing, mixture: Mixture) -> Choice:
    """Find a choice within limits on programs."""
    choice = reach(limits, pricing, mixture)
    program = mixture.program(choice)
    shortfalls = pricing.shortfalls(limits, program)
    if not any(shortfalls):
        return choice
    hopeless = []
    for limit, short in zip(select_priced(limits), shortfalls, strict=True):
        if short:
            nearest = reach([limit], pricing, mixture)
            after = mixture.program(nearest)
            if not any(pricing.shortfalls([limit], after)):
                continue
            last = sum(mixture.attentions_lost[edit] for edit in nearest) == mixture.most_lost > 0
            spaces = ", ".join(space.name for space in mixture.spaces)
            before = limit.aspect.show(pricing.dense[limit.aspect])
            least = limit.aspect.show(pricing.price(limit.aspect, after))
            upward = limit.aspect.quantity.upward
            verb = "bring" if "," in spaces else "brings"
            said = f"{spaces} {verb} the model from {before} to {least} at the {'most' if upward else 'least'}"
            if before == least:
                said = f"no edit of {spaces} {'raises' if upward else 'lowers'} the model's {before}"
            elif last:
                said += ", as a program has to keep one attention"
            hopeless.append(f"{limit} is out of reach: {said}")
    if hopeless:
        raise ValueError(f"budget {'; '.join(hopeless)}")
    had = ", ".join(
        limit.aspect.show(pricing.price(limit.aspect, program)) for limit in select_priced(limits)
    )
    raise ValueError(
        f"budget {','.join(map(str, limits))}: each of its limits can be met, but not all at once was found how; the "
        f"nearest has {had}"
    )


def _by_integers(limits: Sequence[Limit], pricing: Pricing, mixture: Mixture) -> Choice:
    """The choice of least shortfall if what edits save added up."""
    dense = np.array([pricing.dense[limit.aspect] for limit in limits])
    most = np.array([limit.most(pricing.dense[limit.aspect]) for limit in limits])
    scale = np.where(dense > most, dense - most, np.abs(most))
    edits = []
    saved = []
    for edit, program in zip(mixture.edits, mixture.single_edits, strict=True):
        costs = np.array([pricing.price(limit.aspect, program) for limit in limits])
        if np.isfinite(costs).all() and (costs < dense).any():
            edits.append(edit)
            saved.append((dense - costs) / scale)
    if not edits:
        return ()
    count = len(edits)
    rows: dict[object, list[int]] = {}
    for number, edit in enumerate(edits):
        for claim in mixture.claims(edit):
            rows.setdefault(claim, []).append(number)
    claims = lil_matrix((len(rows), count + len(limits)))
    for row, numbers in enumerate(rows.values()):
        claims[row, numbers] = 1.0
    lost = [mixture.attentions_lost[edit] for edit in edits]
    none = np.zeros(len(limits))
    enough = np.hstack([np.array(saved).T, np.eye(len(limits))])
    found = milp(
        np.concatenate([np.full(count, _FEW), none + 1]),
        integrality=np.concatenate([np.ones(count), none]),
        bounds=Bounds(0.0, np.concatenate([np.ones(count), none + np.inf])),
        constraints=[
            LinearConstraint(claims.tocsr(), ub=1.0),
            LinearConstraint(enough, lb=(dense - most) / scale),
            LinearConstraint(np.concatenate([lost, none])[None], ub=mixture.most_lost),
        ],
        options={"time_limit": _SECONDS},
    )
    if found.x is None:
        return ()
    return as_choice(edit for edit, amount in zip(edits, found.x, strict=False) if amount > 0.5)


LEVELS = 10  # of a cost that is no depth, between the unedited model's and the least that can be reached
# Longest pass of a draft, as a share of the model's, if other drafts are faster.
_SLOWEST_DRAFT = 0.8
_TO_LIMIT = 4  # of them, where the cost is limited: as far as the limit


def levels_of(
    cost: Aspect, limits: Sequence[Limit], pricing: Pricing, mixture: Mixture
) -> tuple[float, ...]:
    """Levels of a cost between the unedited model's and the least that edits reach, the dearest first.

    A limit of the cost is one of them. There are none where edits do not lessen it, as late steps keep the depth.
    """
    dense = pricing.dense[cost]
    least = least_cost(cost, pricing, mixture)
    most = [limit.most(dense) for limit in limits if limit.aspect == cost and limit.most(dense) < dense]
    if cost == DEPTH:
        whole = map(float, range(math.ceil(dense) - 1, math.ceil(least) - 1, -1))
        return tuple(sorted({*whole, *most}, reverse=True))
    if least >= dense:
        return ()
    if cost.name == DRAFT_PASS:  # one that takes nearly as long as the model never pays
        slowest = min(dense, max(_SLOWEST_DRAFT * dense, (dense + least) / 2))
        found = [slowest - (slowest - least) * number / (LEVELS - 1) for number in range(LEVELS)]
    elif most:
        step = (dense - most[0]) / _TO_LIMIT
        found = [
            most[0] if number == _TO_LIMIT else dense - step * number for number in range(1, LEVELS + 1)
        ]
    else:  # the nearer to the model, the closer: half of them save a quarter of what can be saved
        found = [dense - (dense - least) * (number / LEVELS) ** 2 for number in range(1, LEVELS + 1)]
    return tuple(level for level in found if level >= least - NEAR * abs(least))


def least_cost(cost: Aspect, pricing: Pricing, mixture: Mixture) -> float:
    """Find the lowest cost that edits reach."""
    nothing = Limit(cost, 0.0, relative=False, text=f"{cost}=0")
    return pricing.price(cost, mixture.program(reach([nothing], pricing, mixture)))


def non_dominated(costs: Numbers) -> NDArray[np.int64]:
    """Find rows that no other row dominates: nowhere more, and somewhere less. Of equal rows the first one.

    Args:
        costs: (points, objectives), less is better; rows that are not finite are left out.
    """
    kept: list[int] = []
    for row in np.lexsort(costs.T[::-1]):  # a row can be dominated only by those before it
        if np.isfinite(costs[row]).all() and not any(
            (costs[other] <= costs[row]).all() for other in kept
        ):
            kept.append(int(row))
    return np.array(kept, dtype=np.int64)


def pareto_front(trials: Sequence[Trial], objectives: Sequence[Aspect], pricing: Pricing) -> list[Trial]:
    """Non-dominated trials, measured on all of the text; by the first objective, least first."""
    whole = [trial for trial in trials if trial.measured.whole]
    costs = np.array([pricing.costs(objectives, trial) for trial in whole]).reshape(-1, len(objectives))
    return [whole[row] for row in non_dominated(costs)]
