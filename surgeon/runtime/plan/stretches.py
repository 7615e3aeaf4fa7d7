"""The plan of a model whose layers lie on ranks one behind the other: a pipeline.

Each rank has a stretch of the program's nodes, as even as they can be by the numbers of its weights, the head and the
coda of the first one among them. A program can be cut before any node but a late step. Where codas draft, the first
stretch is the checkpoint's first rack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from surgeon.checkpoint.codas import read_codas
from surgeon.checkpoint.random_weights import open_weights
from surgeon.checkpoint.tensor_file import TensorFiles
from surgeon.language.program import Program, Step
from surgeon.models.weights import ModelWeights
from surgeon.runtime.plan.drafts import first_rack
from surgeon.runtime.plan.memory import Sizes, numbers_of
from surgeon.runtime.plan.specification import Plan
from surgeon.words import plural


def with_stretches(plan: Plan, ranks: int, drafts: bool) -> Plan:
    """Divide a plan of one rank into stretches for so many; the coda of the first rack may draft, if it has one."""
    if ranks == 1:
        return plan
    if plan.decoding == "static":
        raise ValueError(
            "ranks with stretches of the program compute passes as they come, which decoding static cannot; use "
            "decoding auto or dynamic"
        )
    if ranks > plan.layers:
        raise ValueError(
            f"{ranks} ranks would have a stretch of layers each, and the model has {plan.layers}; use at most as many "
            "ranks as layers"
        )
    program = Program.parse(plan.program)
    weights = open_weights(plan.folder, plan.family, plan.head_dim)
    head = plan.vocabulary * plan.hidden
    first = 0
    if drafts and read_codas(plan.folder, check_weights=False) is not None:
        first, coda = first_rack(plan)
        arithmetic = replace(plan.arithmetic, rotaries=coda.plan.arithmetic.rotaries)
        plan = replace(plan, arithmetic=arithmetic, coda=coda)
    late = [place for place, node in enumerate(program.nodes) if isinstance(node, Step) and node.late]
    cuts = [place for place in range(max(1, first), len(program)) if place not in late]
    if len(cuts) < ranks - 1:
        where = ""
        if first:
            where = f" behind the first {first}, which the coda is for"
        why = ""
        if late:
            why = "; a late step reads the stream as it was within the stretch before it"
        raise ValueError(
            f"the program's {plural(len(program), 'node')} split into stretches for {plural(len(cuts) + 1, 'rank')} at "
            f"most{where}, not for {ranks}{why}; use fewer ranks, or the model's own program"
        )
    # How many numbers the weights of each node have: the head's with the first, the coda's with its rack's last.
    costs = [_numbers(plan, weights, Program((node,))) for node in program.nodes]
    costs[0] += head
    if plan.coda is not None:
        own = ModelWeights(TensorFiles(plan.coda.file), plan.coda.plan.family, plan.head_dim)
        costs[first - 1] += head + _numbers(plan.coda.plan, own, Program.parse(plan.coda.plan.program))
    return replace(plan, ranks=ranks, stretches=even_stretches(costs, cuts, ranks, first))


def even_stretches(
    costs: Sequence[int], cuts: Sequence[int], ranks: int, first: int = 0
) -> tuple[int, ...]:
    """The node after which each stretch ends, so that the most costly one costs least.

    Args:
        costs: of each node.
        cuts: after how many nodes there can be an end; of all nodes besides. There are enough of them.
        first: where the first stretch ends; 0 for wherever is best.
    """
    until = [0, *accumulate(costs)]
    places = [*cuts, len(costs)]
    # By where a number of stretches ends: the cost of the most costly of them, and where each ends.
    best: dict[int, tuple[int, tuple[int, ...]]] = {
        place: (until[place], (place,)) for place in places if place == (first or place)
    }
    for _ in range(ranks - 1):
        longer = dict[int, tuple[int, tuple[int, ...]]]()
        for place in places:
            for before, (most, ends) in best.items():
                if before < place:
                    found = max(most, until[place] - until[before]), (*ends, place)
                    longer[place] = min(found, longer.get(place, found))
        best = longer
    return best[len(costs)][1]


def _numbers(plan: Plan, weights: Sizes, program: Program) -> int:
    return sum(numbers_of(plan, weights, (sublayer, 1)) for sublayer in program.sublayers())
