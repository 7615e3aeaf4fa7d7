"""Costs of programs by themselves, fast enough for thousands of them.

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

from surgeon.cost.deployment import Deployment, Workload
from surgeon.cost.drafts import DraftPrices
from surgeon.cost.hardware import Hardware
from surgeon.cost.plans import plan_on_paper
from surgeon.cost.predict import Prediction, predict
from surgeon.cost.work import Forward, RankWork, Sent
from surgeon.language.program import Fork, Node, Program, Step
from surgeon.language.sublayer import FEED_FORWARD, Sublayer
from surgeon.machine import show_size
from surgeon.models.shapes import ModelShapes
from surgeon.opened import Model
from surgeon.runtime.batching.blocks import BLOCK_TOKENS
from surgeon.runtime.plan.memory import footprint
from surgeon.runtime.plan.placement import Group, Work, assigned_branches, work_of
from surgeon.runtime.plan.specification import Plan
from surgeon.searches.mixture import Trial
from surgeon.searches.quantities import Aspect, Limit, priced

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
            for limit in priced(limits)
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
            self.price(aspect, program) if aspect.is_priced else aspect.measured(trial.measured)
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
        shapes = self.model.shapes.layer_shapes

        def counts(program: Program) -> list[int]:
            mixtures = (one for one in program.sublayers() if shapes.of(one).mixture is not None)
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
            sizes[sublayer] = sublayer.parameters(self.model.shapes.layer_shapes)
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

        def added(part: Program) -> float:
            return seconds(_ONE + part) - one

        return (
            one
            - self._sum(f"latency@{what}", _ONE, added)
            + self._sum(f"latency@{what}", program, added)
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
        others = self.model.shapes.layer_shapes.others
        firsts = self._firsts

        def twin(sublayer: Sublayer) -> Sublayer:
            layer = sublayer.layers[0]
            alike = windows[layer] if windows else None, layer if layer in others else None
            return replace(sublayer, layers=(firsts.setdefault(alike, layer),))

        for node in program.nodes:
            if node not in self._twins:
                (self._twins[node],) = Program((node,)).renamed(twin).nodes
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
        total += ranks.reduced(node, whole) if len(group) > 1 else 0
    return total
