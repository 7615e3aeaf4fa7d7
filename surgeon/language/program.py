"""A decoder as a program over its residual stream.

A decoder is a residual stream x and a list of sublayers, attention A_k and feed-forward F_k, that read the stream and
add to it. Everything surgeon does to a model is an edit of that list, written in a small language:

    A4  F4            attention and feed-forward of layer 4 (layers count from 0), each with its own norm inside
    A4~A5             one sublayer with the averaged weights of layers 4 and 5
    A4#3  F4#344      narrowed: 3 of the KV groups (a KV head with the heads that share it), 344 of the neurons
    F4!e0,e3          of a mixture's experts those with these numbers; the router chooses among them
    A4/8:0            slice 0 of 8 of the heads (for F, of the neurons) that there are
    F4@up64,down96    two factors in place of a matrix: up of rank 64, down of rank 96, the others whole
    [A4 A5]           a step whose sublayers read the same x; the sum of their outputs is added
    >A4  >[A4 A5]     a late step: it reads x as it was before the previous step's output was added
    A4 F4 A4 F4       a layer that runs twice, with the same weights, and caches of its own each time
    {A4 F4 | A5 F5}   a fork: each branch starts from x and keeps a stream of its own; what all of them added is added

`Program.parse(text)` and `str(program)` are inverses. Programs are frozen and hashable. This module knows nothing of
tensors, models or files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from html import escape

from surgeon.language.sublayer import ATTENTION, FEED_FORWARD, KINDS, LayerShapes, Sublayer

# What notebooks show: boxes in the order in which they run, those of one step in a column (late ones dashed), and
# branches of a fork in rows.
_COLOURS = {ATTENTION: "#cfe2f3", FEED_FORWARD: "#fce5cd"}
_BOX = (
    "border:1px solid #888;border-radius:3px;padding:1px 5px;margin:1px;color:#000;white-space:nowrap;"
)
_COLUMN = "display:inline-flex;flex-direction:column;vertical-align:middle;margin:2px;"


@dataclass(frozen=True)
class Step:
    """Sublayers that read the same stream and whose outputs are added together: one synchronisation point.

    Attributes:
        late: read the stream as it was before the previous step's output was added (Ladder Residual, equation 2).
    """

    sublayers: tuple[Sublayer, ...]
    late: bool = False

    def __post_init__(self) -> None:
        if not self.sublayers:
            raise ValueError("a step needs at least one sublayer")

    def __str__(self) -> str:
        inside = " ".join(map(str, self.sublayers))
        return (">" if self.late else "") + (inside if len(self.sublayers) == 1 else f"[{inside}]")

    def __repr__(self) -> str:
        return f"Step({str(self)!r})"

    def _repr_html_(self) -> str:
        border = "border-style:dashed;" if self.late else ""
        boxes = (
            f'<span style="{_BOX}{border}background:{_COLOURS[one.kind]}">{escape(str(one))}</span>'
            for one in self.sublayers
        )
        return f'<span style="{_COLUMN}" title="{escape(str(self))}">{"".join(boxes)}</span>'


@dataclass(frozen=True)
class Fork:
    """Branches that start from the same stream, each with a stream of its own; at the end what they added is added."""

    branches: tuple[tuple[Node, ...], ...]

    def __post_init__(self) -> None:
        if not self.branches or not all(self.branches):
            raise ValueError("a fork needs at least one branch, and every branch at least one step")

    def __str__(self) -> str:
        return "{" + " | ".join(" ".join(map(str, branch)) for branch in self.branches) + "}"

    def __repr__(self) -> str:
        return f"Fork({str(self)!r})"

    def _repr_html_(self) -> str:
        rows = ("".join(node._repr_html_() for node in branch) for branch in self.branches)
        lines = "".join(f"<span>{row}</span>" for row in rows)
        return (
            f'<span style="{_COLUMN}border:1px solid #888;border-radius:6px;padding:2px">{lines}</span>'
        )


Node = Step | Fork


@dataclass(frozen=True)
class Program:
    """The steps and forks of a decoder, in order."""

    nodes: tuple[Node, ...]

    def __str__(self) -> str:
        return " ".join(map(str, self.nodes))

    def __repr__(self) -> str:
        return f"Program.parse({str(self)!r})"

    def _repr_html_(self) -> str:
        row = "".join(node._repr_html_() for node in self.nodes)
        steps = f"{len(self.nodes)} steps and forks, {self.effective_depth(1):g} one after the other"
        return f'<div style="font:12px monospace;line-height:1.5">{row}<div>{steps}</div></div>'

    def __len__(self) -> int:
        return len(self.nodes)

    def __add__(self, other: Program) -> Program:
        return Program(self.nodes + other.nodes)

    @classmethod
    def parse(cls, text: str) -> Program:
        """Read a program from its text; the inverse of `str`.

        Raises:
            ValueError: with the place in the text, what was found there and what was expected.
        """
        return _Parser(text).program()

    @classmethod
    def dense(cls, num_layers: int, steps_per_layer: int = 2) -> Program:
        """The unedited model: A0 F0 A1 F1 ..., or [A0 F0] [A1 F1] ... where a layer is one step (GPT-NeoX, Cohere)."""
        return cls(
            tuple(node for layer in range(num_layers) for node in layer_nodes(layer, steps_per_layer))
        )

    def sublayers(self) -> Iterator[Sublayer]:
        """Every sublayer in program order, once per occurrence."""
        return (sublayer for step in steps_of(self.nodes) for sublayer in step.sublayers)

    @property
    def layers(self) -> frozenset[int]:
        """Layers whose weights it has."""
        return frozenset(layer for sublayer in self.sublayers() for layer in sublayer.layers)

    @property
    def attended_nodes(self) -> int:
        """Number of nodes up to the last one that has an attention; behind it no token looks at another."""
        kinds = [
            {one.kind for step in steps_of((node,)) for one in step.sublayers} for node in self.nodes
        ]
        return max((1 + number for number, found in enumerate(kinds) if ATTENTION in found), default=0)

    def require_steps(self) -> None:
        """Refuse a program of which nothing is left.

        Raises:
            ValueError: if it has no step.
        """
        if not self.nodes:
            raise ValueError("the program is empty: it has no steps; keep at least one sublayer")

    def map_sublayers(self, rename: Callable[[Sublayer], Sublayer]) -> Program:
        """Replace sublayers by others."""
        return Program(_rename(self.nodes, rename))

    def whole(self) -> Program:
        """Give all sublayers every expert, KV group and neuron, and a matrix in the place of two factors."""
        return self.map_sublayers(lambda sublayer: replace(sublayer, ranks=(), width=None, experts=None))

    def parameters(self, shapes: LayerShapes) -> int:
        """Count the parameters of its sublayers; a sublayer that occurs several times counts once.

        Raises:
            ValueError: as `Sublayer.parameters`.
        """
        return sum(sublayer.parameters(shapes) for sublayer in set(self.sublayers()))

    def active_parameters(self, shapes: LayerShapes) -> int:
        """Count the parameters that compute one token; errors as `parameters`."""
        return sum(sublayer.active_parameters(shapes) for sublayer in set(self.sublayers()))

    def weight_bytes(self, shapes: LayerShapes, number_bytes: int) -> int:
        """Count the bytes of its parameters; errors as `parameters`."""
        return self.parameters(shapes) * number_bytes

    def effective_depth(self, steps_per_layer: int = 2) -> float:
        """The number of steps that must run one after the other, in layers of the unedited model.

        A fork counts its longest branch, an LP pair as one layer, a late step like any other.
        """
        return _longest_chain(self.nodes) / steps_per_layer

    def sync_points(self, ranks: int) -> int:
        """Count the synchronisations that one forward pass waits for on this many tensor-parallel ranks.

        One per step and one per fork. The branches of a fork are spread over groups of ranks; where there are fewer
        branches than ranks, the steps of a branch synchronise within their group as well, at the same time in all
        groups, so that the branch with the most of them counts. One rank never synchronises.

        Raises:
            ValueError: if there is no rank.
        """
        if ranks < 1:
            raise ValueError(f"ranks must be at least 1, not {ranks}")
        return _sync_points(self.nodes, ranks)


# Cached nodes of unedited layers are mostly the same objects, which compare fast.
@lru_cache(maxsize=4096)
def layer_nodes(layer: int, steps_per_layer: int = 2) -> tuple[Node, ...]:
    """The nodes of one unedited layer."""
    attention = Sublayer(ATTENTION, (layer,))
    feed_forward = Sublayer(FEED_FORWARD, (layer,))
    if steps_per_layer == 1:
        return (Step((attention, feed_forward)),)
    return (Step((attention,)), Step((feed_forward,)))


def steps_of(nodes: tuple[Node, ...]) -> Iterator[Step]:
    """Every step in program order, those inside forks included."""
    for node in nodes:
        if isinstance(node, Step):
            yield node
        else:
            for branch in node.branches:
                yield from steps_of(branch)


def ranks_of_branches(fork: Fork, ranks: int) -> list[range]:
    """The ranks that share each branch: one where there are as many branches, which ranks take in turn."""
    branches = len(fork.branches)
    if branches >= ranks:
        return [range(branch % ranks, branch % ranks + 1) for branch in range(branches)]
    return [
        range(branch * ranks // branches, (branch + 1) * ranks // branches) for branch in range(branches)
    ]


def _rename(nodes: tuple[Node, ...], rename: Callable[[Sublayer], Sublayer]) -> tuple[Node, ...]:
    renamed: list[Node] = []
    for node in nodes:
        if isinstance(node, Fork):
            renamed.append(Fork(tuple(_rename(branch, rename) for branch in node.branches)))
            continue
        sublayers = tuple(map(rename, node.sublayers))
        renamed.append(node if sublayers == node.sublayers else Step(sublayers, node.late))
    return tuple(renamed)


def _longest_chain(nodes: tuple[Node, ...]) -> int:
    return sum(
        1 if isinstance(node, Step) else max(map(_longest_chain, node.branches)) for node in nodes
    )


def _sync_points(nodes: tuple[Node, ...], ranks: int) -> int:
    if ranks == 1:
        return 0
    count = 0
    for node in nodes:
        count += 1
        if isinstance(node, Fork):
            groups = ranks_of_branches(node, ranks)
            count += max(
                _sync_points(branch, len(group))
                for branch, group in zip(node.branches, groups, strict=True)
            )
    return count


_RANK = r"[a-z]+\d{1,9}"
_PARTS = r"[AF]\d{1,9}(?:~[AF]\d{1,9})*"
_EXPERTS = r"(?:!e\d{1,9}(?:,e\d{1,9})*)?"
_WIDTH = r"(?:#\d{1,9})?"
_PIECE = r"(?:/\d{1,9}:\d{1,9})?"
_TOKEN = re.compile(rf"\s*([\[\]{{}}|>]|{_PARTS}{_EXPERTS}{_WIDTH}{_PIECE}(?:@{_RANK}(?:,{_RANK})*)?|$)")
_DEEPEST = 50  # forks in each other


class _Parser:
    """Recursive descent over the tokens of a program's text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.place = 0
        self.token = ""
        self.depth = 0
        self.advance()

    def advance(self) -> str:
        """Take the current token and look at the next one."""
        taken = self.token
        match = _TOKEN.match(self.text, self.place)
        if match is None:
            found = self.text[self.place :].split()[0]
            start = self.text.index(found, self.place)
            raise ValueError(
                f"cannot read {found!r} at character {start} of the program; expected e.g. A4, F4, [, {{, >"
            )
        self.place = match.end()
        self.token = match[1]
        return taken

    def program(self) -> Program:
        nodes = self.nodes(ends=("",))
        return Program(nodes)

    def nodes(self, ends: tuple[str, ...]) -> tuple[Node, ...]:
        nodes: list[Node] = []
        while self.token not in ends:
            nodes.append(self.node())
        return tuple(nodes)

    def node(self) -> Node:
        if self.token == "{":
            return self.fork()
        late = self.token == ">"
        if late:
            self.advance()
        if self.token != "[":
            return Step((self.sublayer(),), late)
        self.advance()
        sublayers = []
        while self.token != "]":
            sublayers.append(self.sublayer())
        self.advance()
        return Step(tuple(sublayers), late)

    def fork(self) -> Fork:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise ValueError(
                f"forks lie more than {_DEEPEST} deep in each other at character {self.place}"
            )
        branches = []
        while True:
            self.advance()  # { or |
            branches.append(self.nodes(ends=("|", "}", "")))
            if self.token != "|":
                break
        if self.token != "}":
            raise ValueError("the program ends inside a fork: a closing } is missing")
        self.advance()
        self.depth -= 1
        return Fork(tuple(branches))

    def sublayer(self) -> Sublayer:
        if self.token[:1] not in KINDS or not self.token:
            found = repr(self.token) if self.token else "the end"
            raise ValueError(
                f"expected a sublayer such as A4 or F4 before character {self.place}, found {found}"
            )
        named, _, ranks = self.advance().partition("@")
        wide, _, piece = named.partition("/")
        chosen, _, width = wide.partition("#")
        whole, _, experts = chosen.partition("!")
        parts = whole.split("~")
        if len({part[0] for part in parts}) > 1:
            raise ValueError(
                f"{whole} averages attention with feed-forward; only sublayers of one kind can be averaged"
            )
        layers = tuple(int(part[1:]) for part in parts)
        count, _, index = piece.partition(":")
        pairs = [re.fullmatch(r"([a-z]+)(\d+)", rank) for rank in ranks.split(",") if rank]
        return Sublayer(
            whole[0],
            layers,
            (int(index), int(count)) if piece else None,
            tuple((pair[1], int(pair[2])) for pair in pairs if pair is not None),
            int(width) if width else None,
            tuple(int(expert[1:]) for expert in experts.split(",")) if experts else None,
        )
