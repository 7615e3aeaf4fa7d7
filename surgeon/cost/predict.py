"""What a program costs on described hardware: first token, every further one, memory, and where the time goes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import get_args

from surgeon.cost.clocks import RankClock, pass_seconds
from surgeon.cost.collectives import Wiring
from surgeon.cost.hardware import Hardware
from surgeon.cost.kernels import RankSpeed
from surgeon.cost.passes import PassCosts, Setting, one_token
from surgeon.cost.plans import plan_on_paper
from surgeon.cost.room import KEPT, Room, room
from surgeon.cost.work import Forward, GathersFirst, RankWork
from surgeon.cost.workload import Workload
from surgeon.errors import did_you_mean
from surgeon.language.program import Program, Step
from surgeon.models.shapes import ModelShapes
from surgeon.runtime.comm.collectives import Counts
from surgeon.runtime.comm.link import Link
from surgeon.runtime.comm.quantised import Compression
from surgeon.runtime.plan.placement import Part, Work, rank_work
from surgeon.runtime.plan.specification import KvMode, LowRankMode, Plan

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Deployment:
    """How a model is spread over hardware.

    Attributes:
        ranks: that share the model.
        dtype: to compute in; None for that of the weights, but float32 where kernels are launched one by one.
        link, network: within a node and between nodes, by name; the first that the hardware has by default.
        node: ranks of a node; as many as it has devices by default.
        graphs: whether decoding passes are captured graphs; by default where the host is asynchronous.
        compress: what reductions are sent as, if not as they are.
        low_rank: how ranks share factors; `auto` is gather or replicate, whichever is faster for one token.
        kv: what attentions with factors of k and v keep.
        emulated: a link as `surgeon bench --link-delay` emulates it, on top.
        connected: whether ranks wait for each other at all (`upper-bound`).
    """

    ranks: int = 1
    dtype: str | None = None
    link: str | None = None
    network: str | None = None
    node: int | None = None
    graphs: bool | None = None
    compress: Compression | None = None
    low_rank: LowRankMode = "auto"
    kv: KvMode = "full"
    emulated: Link | None = None
    connected: bool = True

    def __post_init__(self) -> None:
        for what, word, known in (
            ("dtype {!r}", self.dtype, DTYPES),
            ("compression {!r}", self.compress, get_args(Compression)),
            ("way {!r} of sharing factors among ranks", self.low_rank, get_args(LowRankMode)),
            ("kv {!r}", self.kv, ("full", "lowrank")),
        ):
            if word is not None and word not in known:
                raise ValueError(f"there is no {what.format(word)}; {did_you_mean(word, known)}")
        if self.ranks < 1:
            raise ValueError(f"the number of ranks must be at least 1, not {self.ranks}")
        if self.node is not None and self.node < 1:
            raise ValueError(f"a node has at least 1 rank, not {self.node}")


@dataclass(frozen=True)
class PassCost:
    """One forward pass, or the mean of several, as the rank sees it that ends last.

    Attributes:
        seconds: from its beginning to its end.
        compute: in which its device computes.
        launches: in which it waits for the host, or for the next kernel.
        exposed: in which it waits for collectives and other ranks.
        communication: that its collectives take, hidden or not.
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
        """Of its time, the part in which it waits for collectives."""
        return self.exposed / self.seconds


@dataclass(frozen=True)
class Prediction:
    """What a program costs.

    Attributes:
        prefill: the pass over all prompts, which brings the first token.
        decode: the mean pass of one token of each text; None if only one token is asked for.
        memory: of the rank that needs most.
    """

    plan: Plan
    workload: Workload
    prefill: PassCost
    decode: PassCost | None
    memory: Room

    @property
    def first_token(self) -> float:
        """Seconds until every text has its first new token."""
        return self.prefill.seconds

    @property
    def per_token(self) -> float:
        """Seconds of each further token of every text, the mean; NaN if there is none."""
        return self.decode.seconds if self.decode else float("nan")

    @property
    def total(self) -> float:
        """Seconds until all tokens are there."""
        return self.first_token + (self.per_token * (self.workload.new - 1) if self.decode else 0.0)

    @property
    def rate(self) -> float:
        """New tokens per second, of all texts."""
        return self.workload.batch * self.workload.new / self.total

    @property
    def share(self) -> float:
        """Of all the time, the part in which ranks wait for collectives."""
        later = self.decode.exposed * (self.workload.new - 1) if self.decode else 0.0
        return (self.prefill.exposed + later) / self.total


def predict(
    shapes: ModelShapes, program: Program, hardware: Hardware, workload: Workload, deployment: Deployment
) -> Prediction:
    """What a program costs; whether it fits into memory is said, not enforced.

    Raises:
        ValueError: if the program, the ranks or the texts' length do not fit the model, or the hardware lacks a figure,
            a link or a device that is asked for.
    """
    dtype = deployment.dtype or hardware.dtype(shapes.dtype)
    plan = plan_on_paper(shapes, program, deployment.ranks, workload.length, dtype, deployment.low_rank, deployment.kv)
    ranks = PredictedRanks(shapes, plan, hardware, deployment)
    prefill = ranks.forward(Forward(workload.batch, workload.prompt, asked=1), graphs=False)
    decode = _mean_decode(ranks, workload) if workload.new > 1 else None
    memory = room(shapes, plan, hardware, workload.batch, workload.prompt)
    return Prediction(plan, workload, prefill, decode, memory)


def _mean_decode(ranks: PredictedRanks, workload: Workload) -> PassCost:
    """The mean of all decoding passes, by Simpson's rule of the first, the middle and the last one."""
    first, last = workload.prompt, workload.prompt + workload.new - 2
    weights = {first: 1 / 6, (first + last) // 2: 4 / 6, last: 1 / 6}
    if last <= first + 1:
        weights = dict.fromkeys((first, last), 1 / (last - first + 1))
    passes = {before: ranks.forward(Forward(workload.batch, 1, before), ranks.captured) for before in weights}
    means = {
        name: sum(weight * getattr(passes[before], name) for before, weight in weights.items())
        for name in ("seconds", "compute", "launches", "exposed", "communication")
    }
    return replace(passes[first], **means)


@lru_cache(maxsize=KEPT)
def _works(plan: Plan) -> tuple[Program, list[list[tuple[Work, int]]]]:
    """A plan's program, and every rank's work: with a number that is the same of steps that differ in layers only."""
    program = Program.parse(plan.program)
    by_rank = [rank_work(program, rank, plan.ranks) for rank in range(plan.ranks)]
    numbers: dict[object, int] = {}

    def number(work: Work) -> int:
        sublayers = tuple((one.kind, one.piece, one.ranks, plan.window(one)) for one in work.step.sublayers)
        parts = tuple((part.index, part.sublayer.piece, part.sharers) for part in work.parts)
        return numbers.setdefault((sublayers, parts), len(numbers))

    return program, [[(work, number(work)) for work in each] for each in by_rank]


def _never(_: Part) -> bool:
    return False


def _always(_: Part) -> bool:
    return True


class PredictedRanks:
    """Ranks of a plan on hardware, whose passes are predicted.

    Attributes:
        captured: whether decoding passes are captured graphs.
    """

    def __init__(self, shapes: ModelShapes, plan: Plan, hardware: Hardware, deployment: Deployment) -> None:
        self.shapes, self.plan, self.hardware, self.deployment = shapes, plan, hardware, deployment
        self.program, self.work = _works(plan)
        asynchronous = hardware.host.asynchronous
        self.captured = asynchronous if deployment.graphs is None else deployment.graphs
        if self.captured and not asynchronous:
            raise ValueError(f"{hardware.name} launches kernels one by one; captured graphs are for GPUs")
        self.node = deployment.node or (plan.ranks if hardware.sharing else hardware.devices)
        self.speed = RankSpeed.of(hardware, plan.dtype, min(plan.ranks, self.node))
        self._ways: dict[tuple[object, ...], bool] = {}

    def setting(self, graphs: bool, gathers: GathersFirst) -> Setting:
        """What passes have in common.

        Args:
            gathers: whether ranks share out a part's first factors.
        """
        rank_work = RankWork(self.plan, self.shapes, gathers, self.hardware.host.asynchronous)
        wires, deployment = self._wires(graphs), self.deployment
        return Setting(rank_work, self.work, self.speed, wires, deployment.connected, deployment.compress, graphs)

    def _wires(self, graphs: bool) -> Wiring:
        hardware, deployment = self.hardware, self.deployment
        within = hardware.link(deployment.link) if min(self.plan.ranks, self.node) > 1 else None
        across = hardware.network(deployment.network) if self.plan.ranks > self.node else None
        return Wiring(within, across, self.node, self.speed.host, deployment.emulated, graphs)

    def gathers(self, part: Part) -> bool:
        """Whether first factors are shared out: as the deployment says, or as is faster for one token."""
        if self.plan.low_rank != "auto":
            return self.plan.low_rank == "gather"
        key = replace(part.sublayer, layers=(0,)), part.sharers
        if key not in self._ways:
            work = Work(Step((replace(part.sublayer, piece=None),)), (replace(part, index=0),))
            times = []
            for way in (_never, _always):
                setting = self.setting(self.captured, way)
                times.append(one_token(setting, setting.rank_work.items(work, Forward(1, 1))))
            self._ways[key] = times[1] < times[0]
        return self._ways[key]

    def forward(self, forward: Forward, graphs: bool) -> PassCost:
        """One pass.

        Args:
            graphs: whether it is a captured graph.
        """
        costs = PassCosts(self.setting(graphs, self.gathers), forward)
        start = self.speed.host.forward.at(forward.texts)
        clocks = [RankClock(now=start, host=start, launches=start) for _ in range(self.plan.ranks)]
        costs.embed(clocks)
        pass_seconds(self.program, clocks, costs)
        costs.choose(clocks)
        last = max(clocks, key=lambda clock: clock.now)
        times = last.now, last.compute, last.launches, last.exposed, last.communication
        return PassCost(*times, layers=costs.layers, vocabulary=costs.vocabulary)
