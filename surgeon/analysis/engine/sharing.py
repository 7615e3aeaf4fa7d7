"""Evaluating many programs together: what they begin with in common runs once.

Programs are joined into a tree by their leading nodes. Forks that start from the same state are joined further, by
their leading branches: {A1 F1 | A2 F2 | A3 F3} goes on from the sum of what the branches of {A1 F1 | A2 F2} add.
The tree is then written out as a flat list of tasks on numbered registers, depth first, so that few states are alive
at a time, and in the order in which programs came. The list says everything there is to know before anything runs: how
many sublayers will run, how many states are held at most, and what each program costs beyond what others share with it.
Nothing here knows tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
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
        tasks: no task reads a register that none before it writes.
        frees: for each task, the registers that no later task reads.
        sublayers: for each program, in the order in which they are reached, how many sublayers run for it and were not
            already run for one before it.
        peak_tensors: the most tensors of the stream's size that registers hold at one time.
    """

    tasks: tuple[Task, ...]
    frees: tuple[tuple[int, ...], ...]
    sublayers: dict[Program, int]
    peak_tensors: int

    @classmethod
    def of(cls, tasks: Sequence[Task]) -> SharedPlan:
        read_later: set[int] = set()
        frees: list[tuple[int, ...]] = []
        for task in reversed(tasks):
            frees.append(tuple(register for register in reads(task) if register not in read_later))
            read_later.update(frees[-1])
        frees.reverse()
        sublayers = dict[Program, int]()
        since = 0
        held, peak = {0: 1}, 1  # tensors of the stream's size, by register
        for task, freed in zip(tasks, frees, strict=True):
            since += sublayers_in(task)
            if isinstance(task, Reach):
                sublayers[task.program], since = since, 0
            else:
                waits = isinstance(task, RunStep | Join | Take) and not task.land
                # The stream, and an output that is not yet added to it.
                held[task.target] = 2 if waits else 1
            peak = max(peak, sum(held.values()))
            for register in freed:
                del held[register]
        return cls(tuple(tasks), tuple(frees), sublayers, peak)

    @property
    def programs(self) -> list[Program]:
        """In the order in which they are reached."""
        return list(self.sublayers)

    @property
    def total_sublayers(self) -> int:
        return sum(self.sublayers.values())

    def only(self, programs: Collection[Program]) -> SharedPlan:
        """The part of the plan that it takes to reach some of its programs."""
        if all(program in programs for program in self.sublayers):
            return self
        return self.rewritten(
            lambda task: None if isinstance(task, Reach) and task.program not in programs else task
        )

    def rewritten(self, change: Callable[[Task], Task | None]) -> SharedPlan:
        """The plan with other tasks in the place of some, and without those that only led to what has gone.

        Args:
            change: what stands in the place of a task, which may be itself, or nothing.
        """
        tasks: list[Task] = []
        read: set[int] = set()
        for task in reversed(self.tasks):
            if (isinstance(task, Reach) or task.target in read) and (
                changed := change(task)
            ) is not None:
                tasks.append(changed)
                read.update(reads(changed))
        return SharedPlan.of(tasks[::-1])


def share(programs: Iterable[Program]) -> SharedPlan:
    """Plan the evaluation of these programs, equal ones once; the first one is reached first."""
    root = _Place()
    for program in programs:
        place = root
        for node in program.nodes:
            for by in (*node.branches, None) if isinstance(node, Fork) else (node,):
                place = place.after(by)
        place.after(program)
    tasks: list[Task] = []
    # What waits, the next one last, each with what follows it: programs are deeper than Python likes to recurse.
    waiting = root.tasks(0, 0)[::-1]
    while waiting:
        task, place = waiting.pop()
        if not isinstance(task, Reach):
            task = replace(task, target=len(tasks) + 1)  # registers are numbered when their turn comes
            waiting += reversed(
                place.tasks(task.source if isinstance(task, Extend) else task.target, task.target)
            )
        tasks.append(task)
    return SharedPlan.of(tasks)


def simplify(program: Program) -> Program:
    """The program with every fork of a single branch written as that branch: the same function, by other rounding."""
    nodes: list[Node] = []
    for node in program.nodes:
        nodes += node.branches[0] if isinstance(node, Fork) and len(node.branches) == 1 else [node]
    return Program(tuple(nodes))


def plain_sublayers(programs: Iterable[Program]) -> int:
    """Count the sublayers that a loop over single programs runs."""
    return sum(1 for program in programs for _ in program.sublayers())


def sublayers_in(task: Task) -> int:
    """Count the sublayers that one task runs."""
    if isinstance(task, RunStep):
        return len(task.step.sublayers)
    if isinstance(task, Extend):
        return sum(len(step.sublayers) for step in steps_of(task.branch))
    return 0


@dataclass
class _Place:
    """A state that programs pass through, or a running sum of forks' first branches.

    Attributes:
        onward: places behind it in order of appearance, by a program that ends here, a step, one more branch, or None
            for the end of forks.
    """

    onward: dict[Program | Step | Branch | None, _Place] = field(default_factory=dict)

    def after(self, by: Program | Step | Branch | None) -> _Place:
        """Return the place behind it, made if it is new."""
        return self.onward.setdefault(by, _Place())

    def tasks(self, source: int, register: int) -> list[tuple[Written, _Place]]:
        """List the tasks that start here, with their targets, which are not numbered yet.

        Args:
            source: the register of the state; of a running sum, of the one that its forks started from.
            register: of this place itself.
        """
        if register == source:
            total = None
        else:
            total = register
        found: list[tuple[Written, _Place]] = []
        for by, place in self.onward.items():
            # A late step reads the stream without the output before it.
            land = not any(isinstance(next_one, Step) and next_one.late for next_one in place.onward)
            if isinstance(by, Program):
                found.append((Reach(by, source), place))
            elif isinstance(by, Step):
                found.append((RunStep(by, source, -1, land), place))
            elif by is not None:
                found.append((Extend(by, source, total, -1), place))
            else:
                assert total is not None
                found.append((Join(source, total, -1, land), place))
        return found


def reads(task: Task) -> list[int]:
    """List the registers that a task reads."""
    if isinstance(task, Take):
        return []
    if isinstance(task, Extend | Join):
        total = task.total
    else:
        total = None
    if total is None:
        return [task.source]
    return [task.source, total]
