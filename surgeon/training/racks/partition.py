"""Racks: a program cut by depth into stretches, each of which is trained by itself.

All nodes before a rack have layers below its first one, and all nodes from there on have layers from that on, so that a
range of layers names a stretch of the program. No node is cut: no step, fork or average with layers of two racks. A
rack does not begin with a late step, which reads the stream before the last step of the rack before, while the stream
from there has that step in it.

Every rack but the last has a coda of its own, made like the program's last layers, which are the last rack's coda.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from surgeon.language.operations.base import parse_range
from surgeon.language.program import Node, Program, Step, steps_of
from surgeon.words import plural

_CUTS_SHOWN = 24


@dataclass(frozen=True)
class RackRange:
    """One rack.

    Attributes:
        index: from 0, in program order.
        layers: in the numbers of the unedited model.
        nodes: of the program.
    """

    index: int
    layers: range
    nodes: range

    def __str__(self) -> str:
        return f"{self.layers.start}:{self.layers.stop}"


@dataclass(frozen=True)
class Racks:
    """A program cut into racks.

    Attributes:
        program: the whole.
        ranges: the racks, in order.
        depth: layers of a coda; with 0 it is a norm and a head only.
        coda: nodes of the program that codas are made like, those of the last rack.
    """

    program: Program
    ranges: tuple[RackRange, ...]
    depth: int
    coda: range

    @classmethod
    def parse(cls, texts: str | Sequence[str], program: Program, depth: int = 1) -> Racks:
        """Parse racks from ranges of layers.

        Args:
            texts: "0:8,8:16" or ["0:8", "8:16"]; layers count from 0, and 0:8 are layers 0 to 7.
            program: in the numbers of the unedited model's layers.
            depth: layers of a coda.

        Raises:
            ValueError: if the ranges do not cover the program one after the other, one of them holds nothing, a node is
                cut, a rack would begin with a late step, or the coda is deeper than the last rack.
        """
        ranges = [
            parse_range(text.strip()) for text in (texts.split(",") if isinstance(texts, str) else texts)
        ]
        end = _end(program)
        expected = 0
        for layers in ranges:
            if layers.start != expected:
                what = "overlap" if layers.start < expected else "leave a gap"
                raise ValueError(
                    f"racks {what}: {layers.start}:{layers.stop} begins at layer {layers.start}, and should at "
                    f"{expected}; racks follow each other from layer 0 to the end, as in 0:8,8:16"
                )
            expected = layers.stop
        if expected < end:
            raise ValueError(
                f"the racks end before layer {expected}, and the program has layers up to {end - 1}; let the last one "
                f"end at {end}"
            )
        if ranges[-1].start >= end:
            raise ValueError(
                f"rack {ranges[-1].start}:{expected} is empty: the program's layers are 0 to {end - 1}; leave it out"
            )
        starts = [
            _node_at(program, layers.start, f"rack {layers.start}:{layers.stop}") for layers in ranges
        ]
        found = [
            RackRange(index, layers, range(start, stop))
            for index, (layers, start, stop) in enumerate(
                zip(ranges, starts, [*starts[1:], len(program)], strict=True)
            )
        ]
        for rack in found:
            if not rack.nodes:
                raise ValueError(
                    f"rack {rack} is empty: the program runs none of its layers; merge it with another"
                )
        if depth < 0:
            raise ValueError(f"a coda has at least 0 layers, not {depth}")
        what = f"a coda of {plural(depth, 'layer')}"
        if depth > end:
            raise ValueError(f"{what} is deeper than the model, which has {end}; use fewer")
        first = ranges[-1].start
        if depth > end - first:
            raise ValueError(
                f"{what} is deeper than the last rack, {found[-1]}, of whose last layers it is made; use at most "
                f"{end - first}, or a longer last rack"
            )
        coda = range(_node_at(program, end - depth, what), len(program))
        return cls(program, tuple(found), depth, coda)

    def __len__(self) -> int:
        return len(self.ranges)

    @property
    def texts(self) -> list[str]:
        return list(map(str, self.ranges))

    @property
    def ends(self) -> list[int]:
        """Number of nodes of the program at the end of each rack."""
        return [rack.nodes.stop for rack in self.ranges]

    @property
    def last(self) -> int:
        return len(self.ranges) - 1


def allowed_cuts(program: Program) -> list[int]:
    """Layers, above 0, at which a rack may begin."""
    return [layer for layer in range(1, _end(program)) if _begins(program, layer) is not None]


def _end(program: Program) -> int:
    return 1 + max(layers_in(program.nodes), default=-1)


def _begins(program: Program, layer: int) -> int | None:
    """Number of nodes before a rack that begins at this layer; None if none may."""
    nodes = program.nodes
    start = next((i for i, node in enumerate(nodes) if layers_in([node])[-1] >= layer), len(nodes))
    first = nodes[start] if 0 < start < len(nodes) else None
    is_late = isinstance(first, Step) and first.late
    if is_late or min(layers_in(nodes[start:]), default=layer) < layer:
        return None
    return start


def _node_at(program: Program, layer: int, what: str) -> int:
    """Number of nodes before a rack, or a coda, that begins at this layer."""
    start = _begins(program, layer)
    if start is not None:
        return start
    nodes = program.nodes
    start = next(i for i, node in enumerate(nodes) if layers_in([node])[-1] >= layer)
    cut = next((node for node in nodes[start:] if layers_in([node])[0] < layer), None)
    if cut is None:
        reason = f"begin with the late step {nodes[start]}, which reads the stream before the last step ahead of it"
    elif layers_in([cut])[-1] >= layer:
        reason = f"cut through {cut}"
    else:
        reason = f"begin before {cut} has run, which comes after {nodes[start]}"
    cuts = allowed_cuts(program)
    shown = ", ".join(map(str, cuts[:_CUTS_SHOWN])) + (", ..." if len(cuts) > _CUTS_SHOWN else "")
    raise ValueError(
        f"{what} would {reason}; in this program "
        + (
            f"racks and codas may begin at layer {shown}"
            if cuts
            else "no rack may begin anywhere but at layer 0"
        )
    )


def layers_in(nodes: Iterable[Node]) -> list[int]:
    """Layers of nodes, in order."""
    return sorted(
        {layer for step in steps_of(tuple(nodes)) for one in step.sublayers for layer in one.layers}
    )
