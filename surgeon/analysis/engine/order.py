"""The order of a plan's tasks when only some weights fit into memory: everything that needs a layer runs together.

Depth first, as `share` writes a plan, holds few states and comes back to every layer again and again. Here the layers
are swept in order, and each task runs as soon as its turn in a sweep comes: weights are read once in a sweep, and the
states that wait for them are many (`States` keeps them on disk if need be).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable

from surgeon.analysis.engine.sharing import Extend, Reach, RunStep, SharedPlan, Task, reads
from surgeon.language.program import FEED_FORWARD, Program, Sublayer, steps_of


def by_layer(plan: SharedPlan, first: Program | None = None) -> SharedPlan:
    """The same tasks in sweeps over the layers.

    Args:
        first: a program that has to be reached before every other one.
    """
    waiting = _Waiting(plan.tasks)
    held: list[Task] = []  # programs that are reached too early
    sweep = _Sweep()
    for task in waiting.ready_after(0):
        sweep.push(task)
    tasks: list[Task] = []
    while sweep:
        task = sweep.pop()
        if isinstance(task, Reach) and first is not None and task.program != first:
            held.append(task)
            continue
        tasks.append(task)
        if isinstance(task, Reach):
            first = None
            tasks += held
            held = []
        else:
            for follower in waiting.ready_after(task.target):
                sweep.push(follower)
    tasks += held
    return SharedPlan.of(tasks)


def place(sublayers: Iterable[Sublayer]) -> int:
    """Where in a sweep the first of these sublayers has its turn."""
    return min(2 * min(sublayer.layers) + (sublayer.kind == FEED_FORWARD) for sublayer in sublayers)


class _Waiting:
    """Tasks by the registers that they still wait for."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self.followers: dict[int, list[Task]] = defaultdict(list)
        self.missing: dict[int, int] = {}
        for task in tasks:
            registers = reads(task)
            self.missing[id(task)] = len(registers)
            for register in registers:
                self.followers[register].append(task)

    def ready_after(self, register: int) -> list[Task]:
        """The tasks that waited for nothing but this register."""
        ready = []
        for task in self.followers[register]:
            self.missing[id(task)] -= 1
            if self.missing[id(task)] == 0:
                ready.append(task)
        return ready


class _Sweep:
    """Tasks that are ready, handed out by where in a sweep over the layers they have their turn."""

    def __init__(self) -> None:
        self.this: list[tuple[int, int, Task]] = []
        self.next: list[tuple[int, int, Task]] = []
        self.at = -1
        self.count = 0  # of equal places the task that came first goes first

    def __bool__(self) -> bool:
        return bool(self.this or self.next)

    def push(self, task: Task) -> None:
        self.count += 1
        turn = _turn(task)
        if turn is None:
            heapq.heappush(self.this, (-1, self.count, task))
        else:
            heapq.heappush(self.this if turn >= self.at else self.next, (turn, self.count, task))

    def pop(self) -> Task:
        if not self.this:
            self.this, self.next = self.next, []
        turn, _, task = heapq.heappop(self.this)
        if turn >= 0:
            self.at = turn
        return task


def _turn(task: Task) -> int | None:
    """Where in a sweep a task has its turn; None if it needs no weights."""
    if isinstance(task, RunStep):
        return place(task.step.sublayers)
    if isinstance(task, Extend):
        return place(sublayer for step in steps_of(task.branch) for sublayer in step.sublayers)
    return None
