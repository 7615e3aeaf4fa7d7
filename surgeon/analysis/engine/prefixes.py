"""States that outlive a plan: common beginnings of programs run once.

A state is known by the windows it was computed on and by the nodes that led to it, which are numbered (a prefix is the
one before it and a node), so that long ones cost no more to look up than short ones. `resume` rewrites a plan to start
from the kept states. A program computes the same from a state wherever it comes from, so keeping and dropping states
changes no number.

Where room runs out, the state goes that has the least of: sublayers saved by it, times its uses, by its bytes, plus the
value that the last dropped one had, which ages those not used any more (Cherkasova 1998, "Improving WWW Proxies
Performance with Greedy-Dual-Size-Frequency Caching Policy"). The states of one plan that do not fit into memory lie on
disk.
"""

from __future__ import annotations

import heapq
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from surgeon.analysis.engine.sharing import Extend, Join, RunStep, SharedPlan, Take, Task, reads
from surgeon.language.execute import State, land
from surgeon.language.program import Fork, Node, steps_of
from surgeon.machine import show_size
from surgeon.models.weights import Tensors

START = 0  # the number of what begins with nothing: the embedded tokens


class Prefixes:
    """Numbers of programs' beginnings, from 1 on.

    Attributes:
        sublayers: how many sublayers a prefix runs, by its number.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, Node], int] = {}
        self.sublayers = [0]

    def number(self, before: int, node: Node) -> int:
        """Number a prefix with one more node."""
        found = self._numbers.setdefault((before, node), len(self.sublayers))
        if found == len(self.sublayers):
            more = sum(len(step.sublayers) for step in steps_of((node,)))
            self.sublayers.append(self.sublayers[before] + more)
        return found

    def registers(self, plan: SharedPlan) -> dict[int, int]:
        """Numbers of the prefixes of a plan's states, by register; running sums of forks have none."""
        numbers = {0: START}
        sums: dict[int, tuple[tuple[Node, ...], ...]] = {}
        for task in plan.tasks:
            if isinstance(task, RunStep):
                numbers[task.target] = self.number(numbers[task.source], task.step)
            elif isinstance(task, Extend):
                sums[task.target] = (*(() if task.total is None else sums[task.total]), task.branch)
            elif isinstance(task, Join):
                numbers[task.target] = self.number(numbers[task.source], Fork(sums[task.total]))
        return numbers


def resume(
    plan: SharedPlan, numbers: Mapping[int, int], is_cached: Callable[[int, bool], bool]
) -> SharedPlan:
    """Put kept states in the place of the tasks that lead to them; `is_cached` takes a prefix, and if it is landed."""

    def take_kept(task: Task) -> Task:
        if isinstance(task, RunStep | Join) and is_cached(numbers[task.target], task.land):
            return Take(numbers[task.target], task.target, task.land)
        return task

    return plan.rewritten(take_kept)


class Place(NamedTuple):
    """The windows that a state was computed on, and its prefix's number."""

    start: int
    stop: int
    prefix: int


@dataclass
class _Entry:
    state: State
    bytes: int
    sublayers: int
    uses: int = 1
    value: float = 0.0  # at its last use


@dataclass
class StateCache:
    """States of programs on windows of text, as many as fit. Several threads may use them.

    Attributes:
        limit: in bytes; see `shrink`.
        bytes: of what is kept now.
        prefixes: the numbers that they are known by.
        lock: held while they are looked at or changed.
    """

    limit: int
    bytes: int = 0
    prefixes: Prefixes = field(default_factory=Prefixes)
    lock: RLock = field(default_factory=RLock, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._entries: dict[Place, _Entry] = {}
        # A heap by value; entries that were used since are stale.
        self._order: list[tuple[float, Place]] = []
        self._dropped = 0.0  # the value of what was dropped last

    def shrink(self, limit: int) -> None:
        """Keep no more than so many bytes from here on."""
        with self.lock:
            self.limit = max(0, limit)
            self._make_room()

    def find(self, place: Place, landed: bool) -> State | None:
        """The state of a place, if it serves where it has to be landed, or must not be."""
        found = self._entries.get(place)
        if found is not None and (landed or found.state.pending is not None):
            return found.state
        return None

    def take(self, place: Place) -> State:
        """The state of a place that has one; it stays, and counts as used once more."""
        with self.lock:
            found = self._entries[place]
            found.uses += 1
            self._rank(place, found)
            return found.state

    def put(self, place: Place, state: State) -> None:
        with self.lock:
            size = _size(_as_tensors(state))
            if size > self.limit or self.find(place, landed=state.pending is None) is not None:
                return
            if place in self._entries:
                self._drop(place)
            self._entries[place] = entry = _Entry(state, size, self.prefixes.sublayers[place.prefix])
            self.bytes += size
            self._rank(place, entry)
            self._make_room()

    def _rank(self, place: Place, entry: _Entry) -> None:
        entry.value = self._dropped + entry.uses * entry.sublayers / entry.bytes
        heapq.heappush(self._order, (entry.value, place))

    def _make_room(self) -> None:
        while self.bytes > self.limit:
            value, place = heapq.heappop(self._order)
            entry = self._entries.get(place)
            if entry is not None and entry.value == value:
                self._dropped = value
                self._drop(place)

    def _drop(self, place: Place) -> None:
        self.bytes -= self._entries.pop(place).bytes


class PlanStates:
    """The kept states of one plan, on its windows.

    Attributes:
        plan: the one that starts from them.
    """

    def __init__(
        self, cache: StateCache, plan: SharedPlan, numbers: Mapping[int, int], windows: range
    ) -> None:
        self.cache = cache
        self.numbers = numbers
        self.windows = windows
        with cache.lock:
            self.plan = resume(
                plan, numbers, lambda prefix, land: cache.find(self._place(prefix), land) is not None
            )
            # They are held here until the plan comes to them, whatever is dropped meanwhile.
            takes = [task.prefix for task in self.plan.tasks if isinstance(task, Take)]
            self._ready = {prefix: cache.take(self._place(prefix)) for prefix in takes}

    def take(self, task: Take) -> State:
        state = self._ready.pop(task.prefix)
        if task.land:
            return land(state)
        return state

    def offer(self, register: int, state: State) -> None:
        self.cache.put(self._place(self.numbers[register]), state)

    def _place(self, prefix: int) -> Place:
        return Place(self.windows.start, self.windows.stop, prefix)


Register = State | Tensor  # a state, or a running sum of what branches add
PREFIX = ".states-"


class States:
    """The registers of a plan while it runs.

    Beyond the limit in bytes, the states that are needed last go to files in a folder of their own, and come back when
    they are read. The folder is removed at the end.

    Raises:
        OSError: when the disk is full.
    """

    def __init__(self, plan: SharedPlan, limit: int | None = None, folder: Path | None = None) -> None:
        self.limit = limit
        self.folder = None if limit is None else Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder))
        self.last_use = {
            register: turn for turn, task in enumerate(plan.tasks) for register in reads(task)
        }
        self.in_memory: dict[int, Tensors] = {}
        self.on_disk: dict[int, torch.device] = {}
        self.bytes = 0  # of what is in memory

    def __enter__(self) -> States:
        return self

    def __exit__(self, *_: object) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __getitem__(self, register: int) -> Register:
        tensors = self.in_memory.get(register)
        if tensors is None:
            tensors = load_file(self._file(register), device=str(self.on_disk[register]))
        if "sum" in tensors:
            return tensors["sum"]
        pending = tensors.get("pending")
        return State(
            tensors["stream"], None if pending is None else lambda: pending, tensors.get("added")
        )

    def __setitem__(self, register: int, value: Register) -> None:
        self.in_memory[register] = _as_tensors(value)
        self.bytes += _size(self.in_memory[register])
        while self.limit is not None and self.bytes > self.limit and self.in_memory:
            self._store(max(self.in_memory, key=lambda one: self.last_use.get(one, -1)))

    def __delitem__(self, register: int) -> None:
        if register in self.in_memory:
            self.bytes -= _size(self.in_memory.pop(register))
        else:
            del self.on_disk[register]
            self._file(register).unlink()

    def _store(self, register: int) -> None:
        tensors = self.in_memory.pop(register)
        size = _size(tensors)
        self.bytes -= size
        try:
            save_file(
                {name: tensor.contiguous() for name, tensor in tensors.items()}, self._file(register)
            )
        except (OSError, SafetensorError) as error:
            raise OSError(
                f"no room for {show_size(size)} of hidden states in {self._file(register).parent} ({error}); free some "
                "space, raise memory, or measure fewer tokens"
            ) from error
        self.on_disk[register] = next(iter(tensors.values())).device

    def _file(self, register: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{register}.safetensors"


def _as_tensors(value: Register) -> Tensors:
    if isinstance(value, Tensor):
        return {"sum": value}
    if value.pending is None:
        pending = None
    else:
        pending = value.pending()
    parts = {"stream": value.stream, "pending": pending, "added": value.added}
    return {name: tensor for name, tensor in parts.items() if tensor is not None}


def _size(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
