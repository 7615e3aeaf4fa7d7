"""Evaluating many programs together: what they begin with in common runs once.

Programs are joined into a tree by their leading nodes. Forks that start from the same state are joined further, by
their leading branches: {A1 F1 | A2 F2 | A3 F3} goes on from the sum of what the branches of {A1 F1 | A2 F2} add.
The tree is then written out as a flat list of tasks on numbered registers, depth first, so that few states are alive
at a time. The list says everything there is to know before anything runs: how many sublayers will run, how many
states are held at most, and what each program costs beyond what others share with it. Nothing here knows tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from surgeon.language.program import Fork, Node, Program, Step, steps_of

Branch = tuple[Node, ...]


@dataclass(frozen=True)
class RunStep:
    """Advance the state in a register by one step.

    Attributes:
        land: whether to add its output to the stream at once, because no late step follows.
    """

    step: Step
    source: int
    target: int
    land: bool


@dataclass(frozen=True)
class Extend:
    """Run one branch from the state in a register, and add what it adds to a running sum (None: it is the first)."""

    branch: Branch
    source: int
    total: int | None
    target: int


@dataclass(frozen=True)
class Join:
    """End a fork: the state it started from, with the running sum of its branches as its output."""

    source: int
    total: int
    target: int
    land: bool


@dataclass(frozen=True)
class Take:
    """Take a state that an earlier plan left (see `surgeon.analysis.engine.prefixes`).

    Attributes:
        prefix: the number of what led to it.
        land: as of the task that it stands for.
    """

    prefix: int
    target: int
    land: bool


@dataclass(frozen=True)
class Reach:
    """The state in a register is that after a whole program."""

    program: Program
    source: int


Written = RunStep | Extend | Join | Reach  # what a plan of programs alone consists of
Task = Written | Take


@dataclass(frozen=True)
class SharedPlan:
    """Tasks in the order to run them; register 0 holds the embedded tokens.

    Attributes:
        frees: for each task, the registers that no later task reads.
        sublayers: for each program, how many sublayers run for it and were not already run for one before it.
        peak_tensors: the most tensors of the stream's size that registers hold at one time.
    """

    tasks: tuple[Task, ...]
    frees: tuple[tuple[int, ...], ...]
    sublayers: dict[Program, int]
    peak_tensors: int

    @property
    def total_sublayers(self) -> int:
        """How many sublayers run in all."""
        return sum(self.sublayers.values())


def share(programs: Iterable[Program]) -> SharedPlan:
    """Plan the evaluation of these programs, equal ones once.

    The first program is reached first, unless it contains a fork and another one branches off before that fork.
    """
    root = _Tree()
    for program in dict.fromkeys(programs):
        root.add(program)
    tasks = list(_Writer(root).tasks())
    return plan_of(tasks)


def share_after(first: Program, programs: Iterable[Program]) -> SharedPlan:
    """What it takes to run a program before others: in one plan, or by itself if others could come before it.

    In the latter case its work is counted, and the tasks are those of the others.
    """
    others = [program for program in dict.fromkeys(programs) if program != first]
    if not has_forks(first):
        return share([first, *others])
    alone, together = share([first]), share(others)
    peak = max(alone.peak_tensors, together.peak_tensors)
    return replace(together, sublayers=alone.sublayers | together.sublayers, peak_tensors=peak)


def has_forks(program: Program) -> bool:
    """Whether some of a program's nodes have branches."""
    return any(isinstance(node, Fork) for node in program.nodes)


def plan_of(tasks: list[Task]) -> SharedPlan:
    """The plan of these tasks, in this order."""
    frees = last_uses(tasks)
    return SharedPlan(tuple(tasks), frees, new_sublayers(tasks), peak_tensors(tasks, frees))


def simplify(program: Program) -> Program:
    """The program with every fork of a single branch written as that branch: the same function, by other rounding."""
    nodes: list[Node] = []
    for node in program.nodes:
        nodes += node.branches[0] if isinstance(node, Fork) and len(node.branches) == 1 else [node]
    return Program(tuple(nodes))


def plain_sublayers(programs: Iterable[Program]) -> int:
    """How many sublayers a loop runs that evaluates the programs one by one."""
    return sum(1 for program in programs for _ in program.sublayers())


def sublayers_in(task: Task) -> int:
    """How many sublayers one task runs."""
    if isinstance(task, RunStep):
        return len(task.step.sublayers)
    if isinstance(task, Extend):
        return sum(len(step.sublayers) for step in steps_of(task.branch))
    return 0


@dataclass
class _Tree:
    """A state that programs pass through."""

    program: Program | None = None  # the one that ends here
    steps: dict[Step, _Tree] = field(default_factory=dict)
    sums: dict[Branch, _Sum] = field(default_factory=dict)  # forks from here, by their first branch

    def add(self, program: Program) -> None:
        place = self
        for node in program.nodes:
            place = place.fork(node) if isinstance(node, Fork) else place.steps.setdefault(node, _Tree())
        place.program = program

    def fork(self, fork: Fork) -> _Tree:
        sums = self.sums
        for branch in fork.branches:
            total = sums.setdefault(branch, _Sum())
            sums = total.sums
        total.after = total.after or _Tree()
        return total.after

    @property
    def lands(self) -> bool:
        """Whether everything that goes on from here reads the stream with all outputs added."""
        return not any(step.late for step in self.steps)


@dataclass
class _Sum:
    """A running sum of what the first branches of forks add."""

    after: _Tree | None = None  # the forks that end with this branch
    sums: dict[Branch, _Sum] = field(default_factory=dict)


class _Writer:
    """Writes a tree out as tasks. A stack of its own: programs are deeper than Python likes to recurse."""

    def __init__(self, root: _Tree) -> None:
        self.registers = 0
        # Tasks that wait, the next one last, each with what follows it; targets are numbered when their turn comes.
        self.waiting: list[tuple[Written, _Tree | _Sum | None]] = []
        self.arrive(root, 0)

    def tasks(self) -> Iterator[Task]:
        while self.waiting:
            task, place = self.waiting.pop()
            if isinstance(task, Reach):
                yield task
                continue
            self.registers += 1
            task = replace(task, target=self.registers)
            yield task
            if isinstance(place, _Tree):
                self.arrive(place, task.target)
            elif isinstance(place, _Sum):
                self.summed(place, task.source, task.target)

    def arrive(self, tree: _Tree, register: int) -> None:
        """Push what goes on from a state; a program that ends here comes last, so that the first one given is first."""
        if tree.program is not None:
            self.waiting.append((Reach(tree.program, register), None))
        for branch, total in reversed(tree.sums.items()):
            self.waiting.append((Extend(branch, register, None, -1), total))
        for step, after in reversed(tree.steps.items()):
            self.waiting.append((RunStep(step, register, -1, after.lands), after))

    def summed(self, place: _Sum, source: int, total: int) -> None:
        """Push what goes on from a running sum: first the forks that end with it, so that fewer sums live at a time."""
        for branch, longer in reversed(place.sums.items()):
            self.waiting.append((Extend(branch, source, total, -1), longer))
        if place.after is not None:
            self.waiting.append((Join(source, total, -1, place.after.lands), place.after))


def reads(task: Task) -> list[int]:
    """The registers a task reads."""
    if isinstance(task, Take):
        return []
    total = task.total if isinstance(task, Extend | Join) else None
    return [task.source] if total is None else [task.source, total]


def last_uses(tasks: list[Task]) -> tuple[tuple[int, ...], ...]:
    """For each task, the registers that no later one reads."""
    seen: set[int] = set()
    frees = []
    for task in reversed(tasks):
        fresh = [register for register in reads(task) if register not in seen]
        seen.update(fresh)
        frees.append(tuple(fresh))
    return tuple(reversed(frees))


def new_sublayers(tasks: list[Task]) -> dict[Program, int]:
    """How many sublayers run between one program's end and the next one's."""
    counts: dict[Program, int] = {}
    since = 0
    for task in tasks:
        since += sublayers_in(task)
        if isinstance(task, Reach):
            counts[task.program], since = since, 0
    return counts


def peak_tensors(tasks: list[Task], frees: tuple[tuple[int, ...], ...]) -> int:
    """The most tensors of the stream's size that are held at one time."""
    held = {0: 1}
    peak = 1
    for task, freed in zip(tasks, frees, strict=True):
        if not isinstance(task, Reach):
            waits = isinstance(task, RunStep | Join | Take) and not task.land
            held[task.target] = 2 if waits else 1  # the stream, and an output that is not yet added to it
        peak = max(peak, sum(held.values()))
        for register in freed:
            del held[register]
    return peak
