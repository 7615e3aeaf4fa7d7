"""The part of a program that one rank computes, and how the executor runs it.

What surrounds the program (embedding, cache, batches, output head) is not in it: this package's engine has its own,
and so has vLLM (vllm_plugin).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from itertools import zip_longest

import torch
from torch import Tensor

from surgeon.language.execute import Branch, Machine, Partial, Pending, State, in_turn, land
from surgeon.language.program import Fork, Node, Program, Step
from surgeon.language.sublayer import Sublayer
from surgeon.runtime.comm.collectives import Collectives
from surgeon.runtime.model.attending import Pass
from surgeon.runtime.model.layers import Attention, Rebuild
from surgeon.runtime.model.mixture import MixtureOfExperts
from surgeon.runtime.model.parts import RankParts
from surgeon.runtime.plan.placement import Group, Part, Work, assigned_branches, rank_work
from surgeon.runtime.plan.specification import Plan


class RankProgram(RankParts):
    """What one rank computes of the plan's program.

    Every rank builds one from the same plan, and all of them then call the same methods in the same order.

    Attributes:
        passes: how many there have been; of the one being computed, the share of its steps that is done.
        slots: the attentions among the parts of its work, by their slots of the cache.
        travelling: nodes whose sums are on their way while something else is computed.
    """

    def __init__(self, plan: Plan, collectives: Collectives, device: torch.device) -> None:
        super().__init__(plan, collectives, device)
        self.passes = 0.0
        self.travelling = frozenset(travelling(self.program.nodes))
        parts = (part for work in self.work for part in work.parts if part.slot is not None)
        self.slots = sorted(parts, key=lambda part: part.slot or 0)
        self._works = {0: 0}
        self._attended = self.program.attended

    def attentions(self) -> list[Sublayer]:
        """The attentions of this rank's work, by cache slot."""
        return [part.sublayer for part in self.slots]

    def kv_heads(self) -> list[int]:
        """How many KV heads this rank has of each, once they are loaded."""
        return [made.kv_heads for made in self._attentions()]

    def sinks(self) -> list[Tensor]:
        """Those of each attention's heads, once they are loaded; none where they have no such."""
        return [made.weighting.sinks for made in self._attentions() if made.weighting.sinks is not None]

    def rebuilds(self) -> dict[int, Rebuild]:
        """What makes keys and values of what is cached, by slot, where that is in rank space."""
        return {slot: made.rebuild for slot, made in enumerate(self._attentions()) if made.rebuild is not None}

    def _attentions(self) -> list[Attention]:
        found = [self.sublayers[self.key(part)] for part in self.slots]
        return [made for made in found if isinstance(made, Attention)]

    def run(self, state: State, shared: Pass, first: int = 0, end: int | None = None) -> State:
        """The state after the program; what its last node left pending may be on its way still.

        Args:
            first, end: of the nodes that are run, all by default; the first may be late if something is pending.
        """
        return self.run_in_turn([state], [shared], first, end)[0]

    def run_in_turn(
        self, states: Sequence[State], passes: Sequence[Pass], first: int = 0, end: int | None = None
    ) -> Sequence[State]:
        """The same of parts of a batch that take turns."""
        work = self.work[self._work_before(first) :]
        group = self.collectives.group
        machines = [self.machine(shared, group, WorkAhead(work)) for shared in passes]
        return in_turn(self.program.nodes[first:end], states, machines)

    def _work_before(self, node: int) -> int:
        """How much of this rank's work comes before a node of the program."""
        if node not in self._works:
            self._works[node] = len(
                rank_work(Program(self.program.nodes[:node]), self.rank, self.plan.ranks, self.plan.sliced)
            )
        return self._works[node]

    def stream_after(
        self,
        stream: Tensor,
        shared: Pass,
        first: int = 0,
        end: int | None = None,
        places: list[int] | None = None,
    ) -> Tensor:
        """The stream after the program, or some of its nodes, (tokens, hidden).

        Args:
            places: of the tokens whose stream is wanted, all by default; of others, nothing is computed behind the last
                attention, where nobody looks at them any more.
        """
        return self.streams_after([stream], [shared], first, end, None if places is None else [places])[0]

    def streams_after(
        self,
        streams: Sequence[Tensor],
        passes: Sequence[Pass],
        first: int = 0,
        end: int | None = None,
        places: Sequence[list[int]] | None = None,
    ) -> list[Tensor]:
        """The same of parts of a batch that take turns."""
        states: Sequence[State] = [State(stream) for stream in streams]
        if places is None or all(few == list(range(len(one))) for few, one in zip(places, streams, strict=True)):
            return [land(state).stream for state in self.run_in_turn(states, passes, first, end)]
        behind = max(first, self._attended)
        states = self.run_in_turn(states, passes, first, behind)
        # One place at least: who times steps counts on all in every pass.
        states = [_of_places(state, few or [0]) for state, few in zip(states, places, strict=True)]
        states = self.run_in_turn(states, passes, behind, end)
        return [land(state).stream[: len(few)] for state, few in zip(states, places, strict=True)]

    def machine(self, shared: Pass, group: Group, work: WorkAhead) -> RankMachine:
        """What runs steps on a group of ranks."""
        return RankMachine(self, shared, group, work)


def _of_places(state: State, places: list[int]) -> State:
    """Some tokens' state between two nodes of a program."""
    chosen = torch.tensor(places, device=state.stream.device)
    pending = state.pending
    return replace(state, stream=state.stream[chosen], pending=None if pending is None else lambda: pending()[chosen])


def travelling(nodes: Branch) -> Iterator[Node]:
    """Late steps, and what comes before one: their sums are under way when something else is computed or sent."""
    for node, following in zip_longest(nodes, nodes[1:]):
        if any(isinstance(one, Step) and one.late for one in (node, following)):
            yield node
        if isinstance(node, Fork):
            for branch in node.branches:
                yield from travelling(branch)


class WorkAhead(Iterator[Work]):
    """A rank's work in the order in which the executor comes to it.

    Attributes:
        next: what will come, if anything.
    """

    def __init__(self, work: Sequence[Work]) -> None:
        self._work = iter(work)
        self.next = next(self._work, None)

    def __next__(self) -> Work:
        if self.next is None:
            raise StopIteration
        work = self.next
        self.next = next(self._work, None)
        return work


class RankMachine(Machine):
    """One forward pass on one rank, seen from a group of ranks it belongs to.

    Where the rank computes whole sublayers, a norm behind one (Gemma2) is applied here, and the step is reduced like
    any other. Where it computes slices, `StepOutputs` says what is reduced.
    """

    def __init__(self, rank_program: RankProgram, shared: Pass, group: Group, work: WorkAhead) -> None:
        self.rank_program = rank_program
        self.shared = shared
        self.group = group
        self.work = work  # shared with the machines of forks: the executor comes to steps in this order
        self._node: Node | None = None  # whose output is reduced next

    def compute(self, step: Step, stream: Tensor) -> Partial:
        self._node = step
        work = next(self.work)
        assert work.step == step, f"the executor is at {step}, the rank's work at {work.step}"
        outputs = [self._output(part, stream) for part in work.parts]
        self.rank_program.passes += 1 / (len(self.rank_program.work) * self.shared.parts)
        if work.whole:
            norms = self.rank_program.norms
            normed = (norms[part.sublayer](out) if part.sublayer in norms else out for part, out in outputs)
            return Partial(reduce(torch.add, normed))
        step_outputs = self.rank_program.outputs[step]
        return step_outputs.partial([(part.index, output) for part, output in outputs])

    def _output(self, part: Part, stream: Tensor) -> tuple[Part, Tensor]:
        made = self.rank_program.sublayers[self.rank_program.key(part)]
        if isinstance(made, Attention):
            assert part.slot is not None
            return part, made(stream, part.slot, self.shared)
        return part, made(stream, self.shared.waits) if isinstance(made, MixtureOfExperts) else made(stream)

    def add(self, stream: Tensor, output: Tensor) -> Tensor:
        """The sum, normed in the same launch for the part that comes next, if kernels can."""
        parts = self.work.next.parts if self.work.next is not None else ()
        program = self.rank_program
        if parts:
            return program.sublayers[program.key(parts[0])].norm.added(stream, output)
        return stream + output

    def reduce(self, partial: Partial) -> Pending:
        part, finish = partial
        if len(self.group) == 1:
            return lambda: part if finish is None else finish(part)
        program = self.rank_program
        at_once = self.shared.parts == 1 and self._node not in program.travelling
        wait = program.groups[self.group].all_reduce(part, program.counts.layers, at_once)
        if finish is None:
            return wait
        return lambda: finish(wait())

    def assign(self, fork: Fork) -> Iterable[tuple[Branch, Machine]]:
        branches, group = self._assigned(fork)
        machine = self.rank_program.machine(self.shared, group, self.work)
        return [(branch, machine) for branch in branches]

    def join(self, fork: Fork, added: Tensor) -> Partial:
        self._node = fork
        # A group of several ranks has its branch's output on each of them; only the first adds it to the fork's sum.
        _, group = self._assigned(fork)
        return Partial(added if group[0] == self.rank_program.rank else torch.zeros_like(added))

    def _assigned(self, fork: Fork) -> tuple[tuple[Branch, ...], Group]:
        return assigned_branches(fork, self.rank_program.rank, self.group)
