"""The one executor: runs a program, given something that computes its steps and something that reduces.

The rule is one sentence: a node leaves its output pending; a plain step first lands what is pending, then reads the
stream and computes; a late step reads and computes, then lands it. Under tensor parallelism what is pending is an
all-reduce in flight, so that a late step computes while its predecessor's output travels (Ladder Residual,
algorithm 1). Parts of a batch may take turns, a node of each before the next node of any: then one part's output
travels while another part computes, and no program need be edited for that. On one device nothing travels, and the same
code gives the same numbers. Analysis, generation, export and the tensor-parallel runtime all run programs through this
module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from surgeon.language.program import Fork, Node, Program, Step

Pending = Callable[[], Tensor]  # waits for a reduction that was started, and returns its result
Branch = tuple[Node, ...]


class Partial(NamedTuple):
    """A machine's contribution to a node's output.

    Attributes:
        part: to be summed over the ranks; on one device the sum is this itself.
        finish: makes the output, (batch, tokens, hidden), of the sum, as a norm behind a sublayer has to; None where
            the sum is the output.
    """

    part: Tensor
    finish: Callable[[Tensor], Tensor] | None = None


class Machine(Protocol):
    """A device that runs a program: alone, or as one rank of several."""

    def compute(self, step: Step, stream: Tensor) -> Partial:
        """The sum of the outputs of the step's sublayers: on a rank, only this rank's part of it."""

    def reduce(self, partial: Partial) -> Pending:
        """Start summing the ranks' parts; waiting on the result gives the output."""

    def add(self, stream: Tensor, output: Tensor) -> Tensor:
        """The stream with a node's output added to it."""
        return stream + output

    def assign(self, fork: Fork) -> Iterable[tuple[Branch, Machine]]:
        """The branches this rank computes or helps compute, each with the machine (the group of ranks) that runs it."""

    def join(self, fork: Fork, added: Tensor) -> Partial:  # noqa: ARG002 - a group of ranks asks who else has it
        """Turn the sum of a fork's branches, (batch, tokens, hidden), into this rank's part of the fork's output."""
        return Partial(added)


@dataclass(frozen=True)
class State:
    """The state of a run between two nodes.

    Attributes:
        stream: the residual stream, without what is pending.
        pending: the previous node's output, perhaps still on its way; None at the start.
        added: the sum of what has landed, kept inside forks only (subtracting streams at the end would lose digits).
    """

    stream: Tensor
    pending: Pending | None = None
    added: Tensor | None = None


def run(program: Program, stream: Tensor, machine: Machine) -> Tensor:
    """The stream after the whole program, (batch, tokens, hidden)."""
    (state,) = in_turn(program.nodes, [State(stream)], [machine])
    return land(state).stream


def in_turn(
    nodes: Iterable[Node], states: Sequence[State], machines: Sequence[Machine]
) -> Sequence[State]:
    """The states of parts of a batch after some nodes, each part on a machine of its own.

    What a node reads of an earlier part, such as its keys and values, is there when a later part comes to it.
    """
    for node in nodes:
        states = [advance(state, node, machine) for state, machine in zip(states, machines, strict=True)]
    return states


def advance(state: State, node: Node, machine: Machine) -> State:
    """The state after one more node; the given state stays valid, so that several programs can go on from it."""
    if isinstance(node, Step) and node.late:
        # Started before the previous one has landed, so that two reductions can be in flight at once.
        pending = machine.reduce(partial_output(node, state.stream, machine))
        landed = land(state, machine.add)
    else:
        landed = land(state, machine.add)
        pending = machine.reduce(partial_output(node, landed.stream, machine))
    return State(landed.stream, pending, landed.added)


def land(state: State, add: Callable[[Tensor, Tensor], Tensor] = torch.add) -> State:
    """Wait for what is pending and add it to the stream, as `Machine.add` does."""
    if state.pending is None:
        return state
    output = state.pending()
    return State(add(state.stream, output), None, None if state.added is None else state.added + output)


def partial_output(node: Node, stream: Tensor, machine: Machine) -> Partial:
    """Compute this machine's part of a node's output."""
    if isinstance(node, Step):
        return machine.compute(node, stream)
    return machine.join(node, fork_output(node, stream, machine))


def fork_output(fork: Fork, stream: Tensor, machine: Machine) -> Tensor:
    """The sum of what the branches assigned to this machine add, each started from the given stream."""
    outputs = [branch_output(branch, stream, part) for branch, part in machine.assign(fork)]
    if outputs:
        return reduce(torch.add, outputs)
    return torch.zeros_like(stream)


def branch_output(branch: Branch, stream: Tensor, machine: Machine) -> Tensor:
    """Compute the sum that one branch adds to the stream it starts from."""
    (state,) = in_turn(branch, [State(stream, added=torch.zeros_like(stream))], [machine])
    added = land(state).added
    assert added is not None
    return added
