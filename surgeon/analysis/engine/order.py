"""The order of a plan's tasks when only some weights fit into memory: everything that needs a layer runs together.

Depth first, as `share` writes a plan, holds few states and comes back to every layer again and again. Here the layers
are swept in order, and each task runs as soon as its turn in a sweep comes: weights are read once in a sweep, and the
states that wait for them are many (`States` keeps them on disk if need be).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable
from itertools import count

from surgeon.analysis.engine.sharing import Extend, Reach, RunStep, SharedPlan, Task, reads
from surgeon.language.program import Program, steps_of
from surgeon.language.sublayer import FEED_FORWARD, Sublayer

_AT_ONCE = -1  # the turn of a task that needs no weights


def by_layer(plan: SharedPlan, first: Program | None = None) -> SharedPlan:
    """The same tasks in sweeps over the layers.

    Args:
        first: a program that has to be reached before every other one.
    """
    followers: dict[int, list[int]] = defaultdict(list)  # by register, the tasks that read it
    missing = [len(reads(task)) for task in plan.tasks]  # registers that a task still waits for
    for index, task in enumerate(plan.tasks):
        for register in reads(task):
            followers[register].append(index)
    tasks: list[Task] = []
    early: list[Task] = []  # programs that are reached before the first one
    # Tasks that are ready, by their turns in this sweep and in the next one; of equal turns the oldest goes first.
    sweep = list[tuple[int, int, int]]()
    following = list[tuple[int, int, int]]()
    here = 0
    age = count()
    written = [0]
    while written or sweep or following:
        for index in (index for register in written for index in followers[register]):
            missing[index] -= 1
            if not missing[index]:
                turn = _turn(plan.tasks[index])
                in_this_one = turn == _AT_ONCE or turn >= here
                heapq.heappush(sweep if in_this_one else following, (turn, next(age), index))
        if not sweep:
            sweep = following
            following = []
        turn, _, index = heapq.heappop(sweep)
        here = here if turn == _AT_ONCE else turn
        task = plan.tasks[index]
        written = []
        if not isinstance(task, Reach):
            written = [task.target]
        elif first is not None and task.program != first:
            early.append(task)
            continue
        tasks.append(task)
        if isinstance(task, Reach):
            tasks += early
            early = []
            first = None
    return SharedPlan.of([*tasks, *early])


def place(sublayers: Iterable[Sublayer]) -> int:
    """Where in a sweep the first of these sublayers has its turn."""
    return min(2 * min(sublayer.layers) + (sublayer.kind == FEED_FORWARD) for sublayer in sublayers)


def _turn(task: Task) -> int:
    if isinstance(task, RunStep):
        return place(task.step.sublayers)
    if isinstance(task, Extend):
        return place(sublayer for step in steps_of(task.branch) for sublayer in step.sublayers)
    return _AT_ONCE
