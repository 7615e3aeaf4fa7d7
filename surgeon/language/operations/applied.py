"""An operation with its stretches and parameters, as an entry of a recipe.

In a model that runs a program of its own (native tracks, or a checkpoint's program) a stretch may lie in a branch: the
operation then changes that branch's nodes. An `Edit` is how searches note one change of some layers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from surgeon.language.operations.base import OPERATIONS, show_range
from surgeon.language.program import Fork, Node, Program, layer_nodes, steps_of
from surgeon.language.sublayer import LayerShapes
from surgeon.words import show_value

Change = Callable[[Program], Program]


def changed_within(
    program: Program, layers: range, steps_per_layer: int, change: Change
) -> Program | None:
    """The program with a change of one list of its nodes, its own or a branch's, that runs a stretch of layers.

    A branch of which nothing is left is gone, and so is a fork without branches.

    Args:
        change: given the whole list as a program.

    Returns:
        None where no list of nodes has these layers whole, in order, and one after the other.
    """
    wanted = tuple(node for layer in layers for node in layer_nodes(layer, steps_per_layer))
    nodes = _change(program.nodes, wanted, change)
    if nodes is None:
        return None
    return Program(nodes)


def _change(
    nodes: tuple[Node, ...], wanted: tuple[Node, ...], change: Change
) -> tuple[Node, ...] | None:
    if any(
        nodes[start : start + len(wanted)] == wanted for start in range(len(nodes) - len(wanted) + 1)
    ):
        return change(Program(nodes)).nodes
    for place, fork in enumerate(nodes):
        for number, branch in enumerate(fork.branches if isinstance(fork, Fork) else ()):
            found = _change(branch, wanted, change)
            if found is not None:
                assert isinstance(fork, Fork)
                return _with_branch(nodes, place, fork, number, found)
    return None


def applied_within(
    program: Program, own: Program, layers: range, change: Callable[[Program, range], Program]
) -> Program:
    """A program after a change of a stretch of layers, in each of the model's own lists of nodes that have some of it.

    Args:
        program: what earlier changes have made of the model's own.
        own: the model's own, which says which layers lie in one branch.
        change: given the list that has a part of the stretch, as a program, and that part.

    Raises:
        ValueError: if the model's own program does not run one of the layers whole, if an earlier change has left out
            a whole branch, and whatever `change` raises.
    """
    for part, depth in _parts(own, layers):
        program = Program(_at_depth(program.nodes, part, depth, change))
    return program


def require_whole_layers(own: Program, num_layers: int) -> None:
    """Refuse a program of a model's own that is not its layers, each whole and once, in tracks or in order.

    Raises:
        ValueError: naming what else it is.
    """
    parts = [layer for part, _ in _parts(own, range(num_layers)) for layer in part]
    steps = len(list(steps_of(own.nodes)))
    if len(parts) * _steps_per_layer(own) != steps:
        raise ValueError(
            f"it runs more than each of its {num_layers} layers once: its program is {show_value(str(own), 200)}"
        )


def runs_whole_layers(own: Program, num_layers: int) -> bool:
    """True if `require_whole_layers` accepts the program."""
    try:
        require_whole_layers(own, num_layers)
    except ValueError:
        return False
    return True


def _parts(own: Program, layers: range) -> list[tuple[range, int]]:
    """A stretch in parts that one list of nodes each runs whole and in order, and how many forks that list lies in."""
    runs = list(whole_runs(own.nodes, _steps_per_layer(own)))
    found: list[tuple[range, int]] = []
    layer = layers.start
    while layer < layers.stop:
        here = [(run, depth) for run, depth in runs if layer in run]
        if len(here) != 1:
            raise ValueError(
                f"layers {show_range(layers)}: the model does not run layer {layer} whole and once, so that nothing "
                f"can be done to it: its program is {show_value(str(own), 200)}"
            )
        ((run, depth),) = here
        found.append((range(layer, min(run.stop, layers.stop)), depth))
        layer = run.stop
    return found


def whole_runs(
    nodes: tuple[Node, ...], steps_per_layer: int, depth: int = 0
) -> Iterator[tuple[range, int]]:
    """The runs of neighbouring whole layers, each with the number of forks that it lies in."""
    for part in parts_of(nodes, steps_per_layer):
        if isinstance(part, range):
            yield part, depth
        elif isinstance(part, Fork):
            for branch in part.branches:
                yield from whole_runs(branch, steps_per_layer, depth + 1)


def parts_of(nodes: tuple[Node, ...], steps_per_layer: int) -> Iterator[range | Node]:
    """The nodes, with runs of neighbouring layers that are whole and in order in one."""
    place = 0
    while place < len(nodes):
        node = nodes[place]
        first = stop = 0
        if not isinstance(node, Fork):
            first = stop = node.sublayers[0].layers[0]
            while nodes[place : place + steps_per_layer] == layer_nodes(stop, steps_per_layer):
                place += steps_per_layer
                stop += 1
        if stop > first:
            yield range(first, stop)
        else:
            yield node
            place += 1


def _steps_per_layer(own: Program) -> int:
    """Number of steps of a layer: 1 where some step is a whole layer, both of whose halves read the same stream."""
    whole = (layer_nodes(step.sublayers[0].layers[0], 1)[0] for step in steps_of(own.nodes))
    if any(step == one for step, one in zip(steps_of(own.nodes), whole, strict=True)):
        return 1
    return 2


def _at_depth(
    nodes: tuple[Node, ...], part: range, depth: int, change: Callable[[Program, range], Program]
) -> tuple[Node, ...]:
    if depth == 0:
        return change(Program(nodes), part).nodes
    for place, fork in enumerate(nodes):
        for number, branch in enumerate(fork.branches if isinstance(fork, Fork) else ()):
            if any(
                not set(part).isdisjoint(sublayer.layers) for sublayer in Program(branch).sublayers()
            ):
                assert isinstance(fork, Fork)
                return _with_branch(
                    nodes, place, fork, number, _at_depth(branch, part, depth - 1, change)
                )
    raise ValueError(f"layers {show_range(part)} overlap with what an earlier operation removed")


def _with_branch(
    nodes: tuple[Node, ...], place: int, fork: Fork, number: int, branch: tuple[Node, ...]
) -> tuple[Node, ...]:
    """The nodes with another branch in the place of one; an empty one is gone, and so is a fork without branches."""
    branches = (*fork.branches[:number], *((branch,) if branch else ()), *fork.branches[number + 1 :])
    return (*nodes[:place], *((Fork(branches),) if branches else ()), *nodes[place + 1 :])


@dataclass(frozen=True)
class AppliedOperation:
    """An entry of `operations`: the operation, its stretches and parameters, and its line."""

    name: str
    layers: tuple[range, ...]
    parameters: dict[str, Any] = field(default_factory=dict)
    line: int = 0

    def apply(
        self, program: Program, shapes: LayerShapes | None = None, own: Program | None = None
    ) -> Program:
        """The program after the operation, on each stretch in turn; `shapes` as `Operation.apply` takes them.

        Args:
            own: of a model that runs a program of its own, that program: stretches may lie in its branches.

        Raises:
            ValueError: as the operation does, and as `Program.require_steps`.
        """
        operation = OPERATIONS[self.name]

        def change(nodes: Program, layers: range) -> Program:
            return operation.apply(nodes, layers, shapes, **self.parameters)

        for stretch in self.layers:
            if own is None or operation.anywhere:
                program = change(program, stretch)
            else:
                program = applied_within(program, own, stretch, change)
        program.require_steps()
        return program

    @property
    def layers_text(self) -> str:
        """The stretches as a reader knows them: 4:10, 12:14."""
        return ", ".join(map(show_range, self.layers))

    def to_yaml(self) -> str:
        """Write it as a recipe does, on one line."""
        ranges = [show_range(stretch) for stretch in self.layers]
        given = {"layers": ranges[0] if len(ranges) == 1 else ranges, **self.parameters}
        return f"{self.name}: {in_braces(given)}"


def in_braces(mapping: Mapping[str, Any]) -> str:
    """A mapping on one line of YAML, of which JSON values are values."""
    return "{" + ", ".join(f"{key}: {json.dumps(value)}" for key, value in mapping.items()) + "}"


_TEXT = re.compile(r"(?P<space>[a-z-]+) (?P<first>\d+):(?P<stop>\d+)(?: (?P<option>\S+))?")


@dataclass(frozen=True, order=True)
class Edit:
    """One change of some layers that a space knows, such as "pair 4:6 lp".

    Attributes:
        first, stop: the layers, as Python slices them.
        option: in the space's own words; empty where there is one way.
    """

    first: int
    stop: int
    space: str
    option: str = ""

    def __str__(self) -> str:
        return f"{self.space} {show_range(self.layers)} {self.option}".rstrip()

    @classmethod
    def parse(cls, text: str) -> Edit:
        """The inverse of `str`; a ValueError shows text that is no edit."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{text!r} is no edit; it should be a space, its layers and an option: pair 4:6 lp"
            )
        return cls(int(match["first"]), int(match["stop"]), match["space"], match["option"] or "")

    @property
    def layers(self) -> range:
        return range(self.first, self.stop)


Choice = tuple[Edit, ...]  # in ascending order, each once: a point of a search


def as_choice(edits: Iterable[Edit]) -> Choice:
    """Sort edits into a choice."""
    return tuple(sorted(set(edits)))
