"""What is measured of a machine before anything is fitted: passes taken apart, and collectives, in rounds.

All ranks compute at the same time, because ranks of one machine share its memory and, where there are more of them than
cores, these as well. Every round does everything once, so that whatever else the machine does disturbs all alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from surgeon.cost.dissect import PassParts, load_dissected, run_dissected
from surgeon.cost.probes import ExchangeTimes, LaunchTimes, time_exchanges, time_launches
from surgeon.cost.workload import Workload
from surgeon.language.program import Program
from surgeon.runtime.plan.specification import Plan
from surgeon.runtime.worker.options import RankOptions
from surgeon.runtime.worker.ranks import Ranks

WHOLE, SHORT = "whole", "short"  # the model's program, and its first layers
SHORT_LAYERS = 2
NEW = 10  # tokens added to each text: passes of which the typical one counts
PROMPT = 16
MORE_PROMPTS = 2  # times that prompts alone are computed, which a text has only one pass of
LONG = 384  # tokens of a long prompt, as far as the model takes it
BATCHES = (1, 2, 4, 8, 16, 32)
SHORT_BATCHES = (1, 8, 32)
SIZES = (256, 4096, 65536, 1 << 20)  # bytes of each rank's operand
EXCHANGES = 30  # of each size
LAUNCHES = 20

Typical = Callable[[Sequence[float]], float]  # of several times of the same


@dataclass(frozen=True)
class PassSample:
    """A pass of some texts on rank 0, the typical one of those alike.

    Attributes:
        layers: WHOLE or SHORT.
        texts: how many.
        new: tokens of each.
        cached: tokens of each before them.
        seconds: of the whole pass.
        parts: seconds of one occurrence, by what took them.
        counts: how often it occurs.
    """

    layers: str
    texts: int
    new: int
    cached: float
    seconds: float
    parts: Mapping[str, float]
    counts: Mapping[str, int]

    @property
    def decode(self) -> bool:
        """Whether it added one token to each text."""
        return self.new == 1


@dataclass
class Round:
    """What one round has measured of one number of ranks.

    Attributes:
        launches: seconds of what computes next to nothing, by fields of `LaunchTimes`; "graph" where there are such.
        starting, waiting: seconds of a collective, by the way ranks are connected and the size of an operand.
    """

    passes: list[PassSample] = field(default_factory=list)
    launches: dict[str, float] = field(default_factory=dict)
    starting: dict[tuple[str, int], float] = field(default_factory=dict)
    waiting: dict[tuple[str, int], float] = field(default_factory=dict)


def loads(max_tokens: int) -> list[tuple[str, Workload]]:
    """What is computed in a round, by the layers that it goes through."""
    long = min(LONG, max_tokens - NEW)
    found = [(WHOLE, Workload(batch, PROMPT, NEW)) for batch in BATCHES]
    found.append((WHOLE, Workload(1, long, NEW)))
    return found + [(SHORT, Workload(batch, PROMPT, NEW)) for batch in SHORT_BATCHES]


def steps_of_measuring(ranks: int, ways: Sequence[str], rounds: int, max_tokens: int) -> int:
    """How often `measure_ranks` calls `advance`."""
    return rounds * (len(loads(max_tokens)) + (len(ways) if ranks > 1 else 0))


def measure_ranks(
    plan: Plan, device: str, ways: Sequence[str], rounds: int, typical: Typical, advance: Callable[[float], None]
) -> list[Round]:
    """Everything of one number of ranks, round by round.

    Args:
        plan: of the unedited model, for so many ranks.
        ways: in which ranks can be connected; the first one is used for the passes.
        advance: called with 1 after each piece of work.
    """
    found = [Round() for _ in range(rounds)]
    with Ranks(RankOptions(plan.ranks, device, ways[0])) as ranks:
        load_sampled(ranks, plan)
        for one in found:
            sample_passes(ranks, plan, one, typical, advance)
    if plan.ranks > 1:
        for way in ways:
            with Ranks(RankOptions(plan.ranks, device, way)) as ranks:
                for one in found:
                    sample_exchanges(ranks, way, one, typical)
                    advance(1)
    return found


def load_sampled(ranks: Ranks, plan: Plan) -> None:
    """Load what `sample_passes` runs, and let caches, allocators and clocks get used to it."""
    for layers, program in ((WHOLE, plan.program), (SHORT, _first_layers(plan))):
        ranks.call(load_dissected, replace(plan, program=program), layers)
    for layers, texts in loads(plan.max_tokens):
        ranks.call(run_dissected, layers, replace(texts, new=2))


def sample_passes(ranks: Ranks, plan: Plan, one: Round, typical: Typical, advance: Callable[[float], None]) -> None:
    """Note every kind of pass in a round, and what launches take."""
    for layers, texts in loads(plan.max_tokens):
        found: list[PassParts] = []
        for each in (texts, *[replace(texts, new=1)] * MORE_PROMPTS):
            by_rank: list[list[PassParts]] = ranks.call(run_dissected, layers, each)
            found += by_rank[0]
        one.passes += _typical_passes(layers, texts, found, typical)
        advance(1)
    by_name: list[LaunchTimes] = ranks.call(time_launches, LAUNCHES)
    times = {name: getattr(by_name[0], name) for name in ("product", "join", "gathered", "operation", "graph")}
    one.launches = {name: typical(each) for name, each in times.items() if each}


def sample_exchanges(ranks: Ranks, way: str, one: Round, typical: Typical) -> None:
    """Note collectives in a round, of ranks that are connected in this way."""
    by_rank: list[dict[int, ExchangeTimes]] = ranks.call(time_exchanges, list(SIZES), EXCHANGES)
    for size in SIZES:
        one.starting[way, size] = median(typical(each[size].starting) for each in by_rank)
        one.waiting[way, size] = median(typical(each[size].waiting) for each in by_rank)


def merged(rounds: Sequence[Round], typical: Typical) -> Round:
    """One round in place of several: of everything the typical one."""

    def passes(alike: Sequence[PassSample]) -> PassSample:
        first = alike[0]
        parts = {name: typical([one.parts[name] for one in alike]) for name in first.parts}
        return replace(first, seconds=typical([one.seconds for one in alike]), parts=parts)

    first = rounds[0]
    return Round(
        [passes(alike) for alike in zip(*(one.passes for one in rounds), strict=True)],
        {name: typical([one.launches[name] for one in rounds]) for name in first.launches},
        {key: typical([one.starting[key] for one in rounds]) for key in first.starting},
        {key: typical([one.waiting[key] for one in rounds]) for key in first.waiting},
    )


def _first_layers(plan: Plan) -> str:
    nodes = Program.parse(plan.program).nodes
    return str(Program(nodes[: SHORT_LAYERS * plan.family.steps_per_layer]))


def _typical_passes(layers: str, texts: Workload, passes: Sequence[PassParts], typical: Typical) -> list[PassSample]:
    """One sample of the pass with the prompts, and one of those behind it."""
    found = []
    for decode in (False, True):
        alike = [one for one in passes if one.decode == decode]
        if not alike:
            continue
        counts = {name: times for name, (_, times) in alike[0].parts.items()}
        parts = {name: typical([one.parts[name][0] / times for one in alike]) for name, times in counts.items()}
        cached = sum(one.cached for one in alike) / len(alike)
        seconds = typical([one.seconds for one in alike])
        new = 1 if decode else texts.prompt
        found.append(PassSample(layers, texts.batch, new, cached, seconds, parts, counts))
    return found
