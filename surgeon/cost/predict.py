"""Predictions of a program on described hardware: first token, every further one, memory, drafting.

An edited program drafts, the unedited one verifies. As in the runtime, a draft's pass adds one token to each text, and
a verifying pass costs as much as one of so many more texts. A draft's steps lie on ranks as the model's keys and values
do; it has a pass over prompts if it keeps keys of its own. `runtime.batching.ahead` finds the best number of tokens
ahead, here the same for all texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import count

import torch
from torch import Tensor

from surgeon.cost.clocks import Burst, Costs, RankClock, Transfer, meet, pass_seconds
from surgeon.cost.deployment import PLANS, Deployment, Room, Workload, plan_on_paper, room
from surgeon.cost.hardware import Hardware
from surgeon.cost.kernels import Kernel, Operation, RankSpeed, Wiring, burst
from surgeon.cost.work import Forward, GathersFirst, RankWork
from surgeon.language.program import Fork, Program, Step
from surgeon.machine import show_size
from surgeon.models.shapes import ModelShapes
from surgeon.runtime.batching.ahead import MOST_AHEAD, best_ahead
from surgeon.runtime.batching.request import LEAST_IN_HALF
from surgeon.runtime.comm.collectives import Counts
from surgeon.runtime.comm.wires import WIRES
from surgeon.runtime.plan.drafts import draft_beside, require_shared
from surgeon.runtime.plan.placement import Group, Part, Work, placed_parts, rank_work
from surgeon.runtime.plan.specification import DraftPlan, Plan

CANDIDATE = 16  # bytes of a rank's best token of a text: its logit and its number


@dataclass(frozen=True)
class PassCost:
    """One forward pass, or the mean of several, as the rank sees it that ends last.

    Attributes:
        seconds: from its beginning to its end.
        compute: in which its device computes.
        launches: of waiting for the host, or for the next kernel.
        exposed: of waiting for collectives and other ranks.
        communication: of its collectives, hidden or not.
        layers, vocabulary: collectives that a rank starts, of the program's nodes and of embedding and head.
    """

    seconds: float
    compute: float
    launches: float
    exposed: float
    communication: float
    layers: Counts
    vocabulary: Counts

    @property
    def share(self) -> float:
        """The part of its time in which it waits for collectives."""
        return self.exposed / self.seconds


@dataclass
class PredictedRanks:
    """Ranks of a plan on hardware, whose passes are predicted.

    Attributes:
        work: by rank, every step's, with a number that is the same of steps that cost the same.
        node: ranks of a node.
        captured: whether decoding passes are captured graphs.
    """

    shapes: ModelShapes
    plan: Plan
    hardware: Hardware
    deployment: Deployment

    def __post_init__(self) -> None:
        plan = self.plan
        hardware = self.hardware
        self.program, self.work = _works(plan)
        asynchronous = hardware.host.asynchronous
        self.captured = asynchronous
        if self.deployment.graphs is not None:
            self.captured = self.deployment.graphs
        if self.captured and not asynchronous:
            raise ValueError(
                f"{hardware.name} launches kernels one by one; captured graphs are for GPUs"
            )
        self.node = self.deployment.node or (plan.ranks if hardware.sharing else hardware.devices)
        self.speed = RankSpeed.of(hardware, plan.dtype, min(plan.ranks, self.node))
        self._ways: dict[tuple[object, ...], bool] = {}

    def gathers(self, part: Part) -> bool:
        """Tell whether first factors are shared out: as deployed, or as is faster for one token."""
        if self.plan.low_rank != "auto":
            return self.plan.low_rank == "gather"
        key = replace(part.sublayer, layers=(0,)), part.sharers
        if key not in self._ways:
            work = Work(Step((replace(part.sublayer, piece=None),)), (replace(part, index=0),))
            ways: tuple[GathersFirst, ...] = (lambda _: True, lambda _: False)
            gathered, replicated = (
                PassCosts(self, Forward(1, 1), self.captured, way).alone(work) for way in ways
            )
            self._ways[key] = gathered < replicated
        return self._ways[key]

    def forward(self, forward: Forward, graphs: bool) -> PassCost:
        """Predict one pass, in halves where they are deployed and possible; halves are no captured graph."""
        parts: Sequence[Forward] = [forward]
        if self.deployment.halves == "on" and self.plan.ranks > 1:
            halves = forward.in_halves(LEAST_IN_HALF)
            if halves is not None:
                parts = halves
                graphs = False
        ends, *costs = (PassCosts(self, one, graphs, self.gathers) for one in (forward, *parts))
        start = self.speed.host.forward.at(forward.texts)
        clocks = [RankClock(now=start, host=start, launches=start) for _ in range(self.plan.ranks)]
        ends.embed(clocks)
        pass_seconds(self.program, clocks, *costs)
        ends.choose(clocks)
        # Of ranks that end together, the one that others waited for.
        last = max(clocks, key=lambda clock: (clock.now, clock.compute))
        times = last.now, last.compute, last.launches, last.exposed, last.communication
        layers = sum((one.layers for one in costs), Counts())
        return PassCost(*times, layers=layers, vocabulary=ends.vocabulary)


@lru_cache(maxsize=PLANS)
def _works(plan: Plan) -> tuple[Program, list[list[tuple[Work, int]]]]:
    """A plan's program, and every rank's work, with one number for steps that differ in layers only."""
    program = Program.parse(plan.program)
    numbers: dict[object, int] = {}
    by_rank: list[list[tuple[Work, int]]] = [[] for _ in range(plan.ranks)]
    for rank, numbered in enumerate(by_rank):
        for work in rank_work(program, rank, plan.ranks, plan.sliced, plan.balance):
            sublayers = tuple(
                (replace(one, layers=(0,)), plan.mixtures.size(one), plan.window(one))
                for one in work.step.sublayers
            )
            parts = tuple(
                (part.index, part.sublayer.piece, part.sublayer.span, part.sharers)
                for part in work.parts
            )
            numbered.append((work, numbers.setdefault((sublayers, parts), len(numbers))))
    return program, by_rank


# A rank's part of a step, and the collectives inside it.
Timed = tuple[list[Burst | Transfer], Counts]


@dataclass(eq=False)
class PassCosts(Costs):
    """The costs of one pass.

    Attributes:
        layers, vocabulary: collectives that rank 0 has started.
    """

    ranks: PredictedRanks
    forward: Forward
    graphs: bool
    gathers: GathersFirst

    def __post_init__(self) -> None:
        ranks = self.ranks
        self.plan = ranks.plan
        static = ranks.hardware.host.asynchronous
        self.rank_work = RankWork(
            ranks.plan, ranks.shapes, self.gathers, static, static and ranks.deployment.adding
        )
        deployment = ranks.deployment
        within = None
        across = None
        if min(ranks.plan.ranks, ranks.node) > 1:
            within = ranks.hardware.link(deployment.link)
        if ranks.plan.ranks > ranks.node:
            across = ranks.hardware.link(deployment.network, between_nodes=True)
        self.wires = Wiring(
            within, across, ranks.node, ranks.speed.host, deployment.emulated, self.graphs
        )
        self.connected = deployment.connected
        self.layers = Counts()
        self.vocabulary = Counts()
        self._next = [count() for _ in ranks.work]
        self._known: dict[object, Timed] = {}
        self._reductions: dict[object, tuple[Transfer, Counts]] = {}

    def leave_attention(self) -> None:
        self.forward = self.forward.tail
        self._known.clear()

    def items(self, rank: int, step: Step) -> Sequence[Burst | Transfer]:
        work, like = self.ranks.work[rank][next(self._next[rank])]
        assert work.step is step, f"the executor is at {step}, the rank's work at {work.step}"
        if like not in self._known:
            self._known[like] = self._time_step(work)
        items, sent = self._known[like]
        if rank == 0:
            self.layers += sent
        return items

    def part(self, node: Step | Fork, group: Group) -> Tensor:
        return self._operand(
            self.rank_work.count_reduced(node, isinstance(node, Fork) or self._whole(node, group))
        )

    def finish(self, step: Step, group: Group) -> Burst | None:
        if self._whole(step, group):
            kernels = []
        else:
            kernels = self.rank_work.finish(step, self.forward)
        if kernels:
            return self._burst(kernels)
        return None

    def transfers(self, part: Tensor, group: Group) -> Sequence[Transfer]:
        if not self.connected:
            return ()
        key = part.shape, group
        if key not in self._reductions:
            sent = Counts()
            self._reductions[key] = self._transfer("all-reduce", part, group, sent), sent
        transfer, sent = self._reductions[key]
        if group[0] == 0:
            self.layers += sent
        return [transfer] * len(group)

    def embed(self, clocks: Sequence[RankClock]) -> None:
        """Look up embeddings, and sum them over the ranks, which have some rows each."""
        values = self.forward.tokens * self.plan.hidden
        kernels = [self.rank_work.copy("embedding", 2 * values)]
        self._end(clocks, kernels, "all-reduce", self.plan.dtype_bytes * values)

    def choose(self, clocks: Sequence[RankClock]) -> None:
        """Take every text's last token through the final norm and the head, and gather the best logits of all ranks."""
        plan = self.plan
        texts = self.forward.texts
        rows = -(-plan.vocabulary // plan.ranks)
        kernels = [
            self.rank_work.copy("norm", 2 * texts * plan.hidden),
            self.rank_work.product("head", texts, rows, plan.hidden),
            self.rank_work.copy("best", texts * rows),
        ]
        self._end(clocks, kernels, "all-gather", CANDIDATE * texts)

    def alone(self, work: Work) -> float:
        """Seconds of a step, among ranks that do the same."""
        clock = RankClock()
        for item in self._time_step(work)[0]:
            if isinstance(item, Burst):
                clock.spend(item)
            else:
                meet([clock], item)
        return max(clock.now, clock.host)

    def _end(
        self, clocks: Sequence[RankClock], kernels: Sequence[Kernel], operation: Operation, size: int
    ) -> None:
        """Spend kernels at an end of the program, and an exact collective of all, hidden by nothing."""
        for clock in clocks:
            clock.spend(self._burst(kernels))
        if self.connected and len(clocks) > 1:
            meet(clocks, self._exact(operation, size, tuple(range(len(clocks))), self.vocabulary))

    def _time_step(self, work: Work) -> Timed:
        """A step's kernels as one burst between every two exchanges."""
        found: list[Burst | Transfer] = []
        sent = Counts()
        kernels = list[Kernel]()
        for item in self.rank_work.items(work, self.forward):
            if isinstance(item, Kernel):
                kernels.append(item)
            elif self.connected:
                part = self._operand(item.width)
                if item.exact:
                    inside = self._exact(item.operation, part.nbytes, item.group, sent)
                else:
                    inside = self._transfer(item.operation, part, item.group, sent)
                found += [self._burst(kernels), replace(inside, group=item.group)]
                kernels = []
        if kernels:
            found.append(self._burst(kernels))
        return found, sent

    def _burst(self, kernels: Sequence[Kernel]) -> Burst:
        return burst(kernels, self.ranks.speed, self.graphs)

    def _operand(self, width: int) -> Tensor:
        return torch.empty(
            self.forward.tokens, width, dtype=getattr(torch, self.plan.dtype), device="meta"
        )

    def _transfer(self, operation: Operation, part: Tensor, group: Group, counts: Counts) -> Transfer:
        compress = self.ranks.deployment.compress
        if compress is None or operation == "all-gather":
            return self._exact(operation, part.nbytes, group, counts)
        wire = WIRES[compress]
        sent = self._exact("all-gather", wire.count_bytes(part.shape, part.dtype), group, counts)
        before, after = (
            self._burst([Kernel("pack", "copy", 0.0, often * moved, launches=launches)])
            for moved, (often, launches) in (
                (part.nbytes, wire.packing),
                (len(group) * part.nbytes, wire.unpacking),
            )
        )
        return replace(sent, before=before, after=after)

    def _exact(self, operation: Operation, size: int, group: Group, counts: Counts) -> Transfer:
        counts.all_reduces += operation == "all-reduce"
        counts.all_gathers += operation == "all-gather"
        counts.bytes += size
        return self.wires.transfer(operation, size, group)

    def _whole(self, step: Step, group: Group) -> bool:
        """Tell whether each rank of a group computes whole sublayers of a step."""
        alone = len(group) == 1 or not self.plan.sliced
        return alone and all(
            part == step.sublayers[index] for index, part in placed_parts(step, 0, len(group))[0]
        )


@dataclass(frozen=True)
class Prediction:
    """Costs of a program.

    Attributes:
        prefill: the pass over all prompts, which brings the first token.
        decode: the mean pass of one token of each text; None if only one token is asked for.
        memory: of the rank that needs most.
    """

    ranks: PredictedRanks
    workload: Workload
    prefill: PassCost
    decode: PassCost | None
    memory: Room

    @property
    def plan(self) -> Plan:
        return self.ranks.plan

    @property
    def first_token(self) -> float:
        """Seconds until every text has its first new token."""
        return self.prefill.seconds

    @property
    def per_token(self) -> float:
        """Seconds of each further token of every text, the mean; NaN if there is none."""
        if self.decode:
            return self.decode.seconds
        return float("nan")

    @property
    def total(self) -> float:
        return self.first_token + (self.per_token * (self.workload.new - 1) if self.decode else 0.0)

    @property
    def rate(self) -> float:
        return self.workload.batch * self.workload.new / self.total

    @property
    def share(self) -> float:
        """The part of all time in which ranks wait for collectives."""
        later = self.decode.exposed * (self.workload.new - 1) if self.decode else 0.0
        return (self.prefill.exposed + later) / self.total


def predict(
    shapes: ModelShapes, program: Program, hardware: Hardware, workload: Workload, deployment: Deployment
) -> Prediction:
    """Predict a program's costs; whether it fits into memory is noted, not enforced.

    Raises:
        ValueError: if the program, the ranks or the texts' length do not fit the model, or the hardware lacks a figure,
            a link or a device that is asked for.
    """
    dtype = deployment.dtype or hardware.dtype(shapes.dtype)
    plan = plan_on_paper(
        shapes, program, deployment.ranks, workload.length, dtype, deployment.low_rank, deployment.kv
    )
    ranks = PredictedRanks(shapes, plan, hardware, deployment)
    prefill = ranks.forward(Forward(workload.batch, workload.prompt, asked=1), graphs=False)
    decode = mean_decode(ranks, workload) if workload.new > 1 else None
    memory = room(shapes, plan, hardware, workload.batch, workload.prompt)
    return Prediction(ranks, workload, prefill, decode, memory)


def mean_decode(ranks: PredictedRanks, workload: Workload) -> PassCost:
    """The mean of all decoding passes, by Simpson's rule of the first, the middle and the last one."""
    first = workload.prompt
    last = workload.prompt + workload.new - 2
    weights = {first: 1 / 6, (first + last) // 2: 4 / 6, last: 1 / 6}
    if last <= first + 1:
        weights = dict.fromkeys((first, last), 1 / (last - first + 1))
    passes = {
        before: ranks.forward(Forward(workload.batch, 1, before), ranks.captured) for before in weights
    }
    means = {
        name: sum(weight * getattr(passes[before], name) for before, weight in weights.items())
        for name in ("seconds", "compute", "launches", "exposed", "communication")
    }
    return replace(passes[first], **means)


@dataclass(frozen=True)
class DraftedPrediction:
    """Drafting for all texts of a load, with the best number of tokens ahead.

    Attributes:
        model: the unedited program without drafts.
        acceptance: the chance of a drafted token to be right, given that those before it are.
        ahead: tokens drafted for each text; 0 where drafts do not pay.
        draft: seconds of one pass of the draft.
        verify: seconds of a pass of the model over ahead + 1 tokens of each text.
        per_token: seconds of each further token of every text, the mean, with the draft's time for prompts.
    """

    model: Prediction
    acceptance: float
    ahead: int
    draft: float
    verify: float
    per_token: float

    @property
    def speedup(self) -> float:
        """Times the tokens per second without drafts, behind the prompts."""
        return self.model.per_token / self.per_token

    @property
    def rate(self) -> float:
        """New tokens per second of all texts, prompts included."""
        load = self.model.workload
        return load.batch * load.new / (self.model.first_token + self.per_token * (load.new - 1))


def predict_drafting(
    model: Prediction, draft: Program, acceptances: Sequence[float]
) -> list[DraftedPrediction]:
    """Predict drafting of a program for a predicted one at each of several acceptances."""
    read_chances(acceptances)
    drafting = DraftPrices(model)
    ranks = model.ranks
    load = model.workload
    beside = _beside(ranks.plan, ranks.shapes, draft)
    needed = room(
        ranks.shapes, replace(ranks.plan, draft=beside), ranks.hardware, load.batch, load.prompt
    )
    if model.memory.fits and not needed.fits:
        raise ValueError(
            f"the model and its draft need {show_size(needed.needed)} on a rank, and {ranks.hardware.name} has "
            f"{show_size(needed.there)} for it; use more ranks, or fewer or shorter texts"
        )
    seconds = drafting.seconds(beside.plan)
    prompts = 0.0
    if beside.keeps_own:  # which it computes of all prompts
        forward = Forward(load.batch, load.prompt, asked=1)
        prompts = replace(ranks, plan=beside.plan).forward(forward, graphs=False).seconds
    return [drafting.at(acceptance, seconds, prompts) for acceptance in acceptances]


@dataclass(frozen=True)
class DraftPrices:
    """A predicted model that verifies drafts of any programs over its weights; checked as it is made."""

    model: Prediction
    _verification_times: dict[int, float] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.model.workload.new < 2:
            raise ValueError(
                "the first new token comes of the prompt's pass; to draft, ask for at least 2"
            )

    def plan(self, draft: Program) -> Plan:
        """Plan a draft that uses the model's keys and values only."""
        return draft_on_paper(self.model.plan, self.model.ranks.shapes, draft)

    def seconds(self, draft: Plan) -> float:
        """Mean seconds of a draft's pass."""
        return mean_decode(replace(self.model.ranks, plan=draft), self.model.workload).seconds

    def verifying_seconds(self, tokens: int) -> float:
        """Seconds of a pass of the model over so many tokens of each text."""
        if tokens not in self._verification_times:
            load = replace(self.model.workload, batch=self.model.workload.batch * tokens)
            self._verification_times[tokens] = mean_decode(self.model.ranks, load).seconds
        return self._verification_times[tokens]

    def at(self, acceptance: float, draft: float, prompts: float = 0.0) -> DraftedPrediction:
        """Price drafting at an acceptance."""
        (ahead,), rate = best_ahead([acceptance], [MOST_AHEAD], lambda _: draft, self.verifying_seconds)
        per_token = 1 / rate + (prompts / (self.model.workload.new - 1) if ahead else 0.0)
        if prompts and per_token > self.verifying_seconds(1):
            ahead = 0
            per_token = self.verifying_seconds(1)
        return DraftedPrediction(
            self.model, acceptance, ahead, draft, self.verifying_seconds(ahead + 1), per_token
        )


def draft_on_paper(plan: Plan, shapes: ModelShapes, draft: Program) -> Plan:
    """Plan a draft beside a model that costs passes only."""
    return require_shared(
        _beside(plan, shapes, draft), "for those it computes prompts, too, which has no price here"
    )


def _beside(plan: Plan, shapes: ModelShapes, draft: Program) -> DraftPlan:
    ways = plan.ranks, plan.max_tokens, plan.dtype, plan.low_rank, plan.kv
    found = draft_beside(plan, shapes, partial(plan_on_paper, shapes, draft, *ways))
    return replace(found, plan=replace(found.plan, mixtures=plan.mixtures))


def read_chances(acceptances: Sequence[str | float]) -> list[float]:
    """Read acceptances as chances."""
    chances = []
    for acceptance in acceptances:
        try:
            chances.append(float(acceptance))
        except ValueError:
            raise ValueError(
                f"{acceptance!r} is no chance; give acceptances from 0 to 1, e.g. 0.6,0.8"
            ) from None
        if not 0 <= chances[-1] <= 1:
            raise ValueError(f"an acceptance is a chance from 0 to 1, not {acceptance}")
    return chances
