"""Spaces: kinds of edits, with their exclusions and the operations of a recipe.

A point of a search is a choice of edits. Edits that claim the same thing exclude each other; all others go together,
within a space and across spaces. A choice is decoded space by space, those of lower place first: each sees the program
that the ones before it made, and gives the operations of its edits there.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from surgeon.language.operations.applied import AppliedOperation, Edit
from surgeon.language.operations.lowrank import Calibration
from surgeon.language.program import Program
from surgeon.language.sublayer import ATTENTION, FEED_FORWARD, KINDS, ROLES
from surgeon.words import did_you_mean

if TYPE_CHECKING:  # who lists the spaces does without torch, which takes seconds
    from surgeon.opened import Model

S = TypeVar("S", bound="type[Space]")
# A property of a layer that an edit changes: the order of its steps, say, or a late attention.
Claim = tuple[str, int]

# Kinds of a layer's sublayers, by an edit's option.
HALVES = {"": KINDS, "attention": (ATTENTION,), "mlp": (FEED_FORWARD,)}
SHAPE = "the steps"  # how they stand in the program
TIMES = ("latency", "speedup", "draft_pass")  # quantities
WEIGHTS = ("params", "weight_bytes", "size")
DEEPER = "deeper"
_SLICES = {ATTENTION: "the slices of the attention", FEED_FORWARD: "the slices of the MLP"}
_LATE = {ATTENTION: "the lateness of the attention", FEED_FORWARD: "the lateness of the MLP"}


@dataclass(eq=False)
class Space(ABC):
    """Edits of one kind; operations and claims follow from the arguments alone.

    A space gives the layers of its edits, and one operation of them; where that is not enough it has an `edits` and
    `operations` of its own.

    Attributes:
        name: as users write it, and as its edits begin.
        summary: what it is, a few words.
        place: of several spaces, those of lower place change the program first.
        of_two_steps: whether its edits are of layers whose attention and MLP are steps of their own.
        of_mixtures: whether they are of mixtures of experts.
        serves: names of the quantities for which it is searched where a user names no space; `DEEPER` is more depth.
        arguments: what can stand behind the colon (`drop:mlp`).
        ranks: tensor-parallel ones, that programs are to run on.
        argument: one of `arguments`.
        text: of a search, as recipes name it.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    place: ClassVar[int]
    of_two_steps: ClassVar[bool] = False
    of_mixtures: ClassVar[bool] = False
    serves: ClassVar[tuple[str, ...]] = ()
    arguments: ClassVar[Collection[str]] = ("",)
    ranks: int = 2
    argument: str = ""
    text: Calibration | None = None

    @classmethod
    def read(cls, argument: str) -> dict[str, Any]:
        """Parse the text behind the colon (`pair:4`), which may be empty, into arguments of the constructor.

        Raises:
            ValueError: if it takes no such argument.
        """
        if argument in cls.arguments:
            return {"argument": argument}
        *names, last = (f"{cls.name}:{one}".removesuffix(":") for one in cls.arguments)
        if not names:
            raise ValueError(
                f"the space {cls.name} takes no argument; write {cls.name}, not {cls.name}:{argument}"
            )
        raise ValueError(f"there is no {cls.name}:{argument}; write {', '.join(names)} or {last}")

    def sizes(self, model: Model) -> Iterable[int]:  # noqa: ARG002
        """Numbers of layers that an edit can have."""
        return (1,)

    def options(self, model: Model) -> Iterable[str]:  # noqa: ARG002
        """Ways in which layers can be edited."""
        return ("",)

    def edits(self, model: Model) -> Iterator[Edit]:
        """Every edit there is; one whose operations refuse the model is left out by the caller."""
        if self.of_two_steps and model.family.steps_per_layer == 1:
            return
        for option in self.options(model):
            for size in self.sizes(model):
                for first in range(model.num_layers - size + 1):
                    yield Edit(first, first + size, self.name, option)

    def claims(self, edit: Edit) -> frozenset[Claim]:
        """Claims of the edit."""
        return claims_of_shape(edit)

    def operations(
        self,
        edits: Sequence[Edit],
        program: Program,  # noqa: ARG002
        model: Model,  # noqa: ARG002
    ) -> tuple[AppliedOperation, ...]:
        """The operations that carry out these edits, which do not exclude each other, on a program.

        One for each option and size, neighbouring edits joined into one stretch.

        Args:
            edits: at least one, in ascending order.
            program: made of the model by spaces of lower place.
        """
        ways = sorted({_way(edit) for edit in edits})
        return tuple(
            self.operation(join_stretches(e.layers for e in edits if _way(e) == way), *way)
            for way in ways
        )

    def operation(self, layers: tuple[range, ...], option: str, size: int) -> AppliedOperation:
        """The operation that carries out edits of one option and size, on unbroken stretches."""
        raise NotImplementedError(f"the space {self.name} says no operation")

    def obstacle(self, model: Model) -> str:
        """The reason why the model can have none of the edits, where it cannot."""
        if self.of_two_steps and model.family.steps_per_layer == 1:
            return "attention and MLP of its layers read the same stream already"
        if model.own is not None:
            return (
                "the model runs a program of its own, whose branches have nothing that it could change"
            )
        return f"the model has {model.num_layers} layer{'s' * (model.num_layers != 1)}"

    def stretches(self, model: Model) -> Iterator[list[Edit]]:
        """Unbroken stretches, as papers choose them: edits side by side, from every layer on, as far as there are.

        A first proposal has as many of each one's first edits as a budget needs.
        """
        for _, edits in groupby(sorted(self.edits(model), key=_way), key=_way):
            by_first = {edit.first: edit for edit in edits}
            for start in by_first:
                stretch = []
                layer = start
                while layer in by_first:
                    stretch.append(by_first[layer])
                    layer = by_first[layer].stop
                yield stretch


@dataclass(eq=False)
class SizedSpace(Space):
    """A space of edits of several sizes; a whole number behind the colon is the largest (`pair:4`).

    Attributes:
        largest: the most layers of an edit.
        least: the smallest number that makes sense.
        example, asked: a number and its meaning, for messages.
    """

    least: ClassVar[int] = 2
    example: ClassVar[int] = 4
    asked: ClassVar[str]
    largest: int = 2

    @classmethod
    def read(cls, argument: str) -> dict[str, Any]:
        if not argument:
            return {}
        if not argument.isdecimal() or len(argument) > 9 or int(argument) < cls.least:
            raise ValueError(
                f"{cls.name}:{argument} should say {cls.asked}, as in {cls.name}:{cls.example}"
            )
        return {"largest": int(argument)}

    def sizes(self, model: Model) -> Iterable[int]:
        return range(self.least, min(self.largest, model.num_layers) + 1)


def _way(edit: Edit) -> tuple[str, int]:
    return edit.option, edit.stop - edit.first


def claims_of_shape(edit: Edit, late: bool = False) -> frozenset[Claim]:
    """Claims of an edit that arranges the steps of its layers anew, perhaps so that they can read late no more."""
    shape = {(SHAPE, layer) for layer in edit.layers}
    return frozenset(shape.union(*(claims_of_late(edit, kind) for kind in KINDS)) if late else shape)


def claims_of_late(edit: Edit, kind: str) -> frozenset[Claim]:
    """Claims of an edit that tells when attentions or feed-forwards read the stream."""
    return frozenset((_LATE[kind], layer) for layer in edit.layers)


def claims_of_ranks(edit: Edit, kind: str, roles: Collection[str] | None = None) -> frozenset[Claim]:
    """Claims of an edit that gives matrices of attentions or feed-forwards ranks; by default all of them."""
    return frozenset(
        (f"the rank of {role}", layer) for role in roles or ROLES[kind] for layer in edit.layers
    )


def claims_of_slices(edit: Edit, kind: str) -> frozenset[Claim]:
    """Claims of an edit that cuts attentions or feed-forwards into slices, or needs them whole."""
    return frozenset((_SLICES[kind], layer) for layer in edit.layers)


def join_stretches(stretches: Iterable[range]) -> tuple[range, ...]:
    """Put stretches in order, those that touch as one."""
    found: list[range] = []
    for stretch in sorted(stretches, key=lambda each: each.start):
        if found and found[-1].stop == stretch.start:
            found[-1] = range(found[-1].start, stretch.stop)
        else:
            found.append(stretch)
    return tuple(found)


def layers_joined(layers: Iterable[int]) -> tuple[range, ...]:
    """Join layers into stretches."""
    return join_stretches(range(layer, layer + 1) for layer in layers)


def from_every_layer(edits: Iterable[Edit]) -> Iterator[list[Edit]]:
    """Group edits of single layers that go together: those from every layer on."""
    ordered = sorted(edits)
    for start in sorted({edit.first for edit in ordered}):
        yield [edit for edit in ordered if edit.first >= start]


SPACES: dict[str, type[Space]] = {}


def register(space: S) -> S:
    """Register a space by its name; ValueError if another one has it."""
    if SPACES.setdefault(space.name, space) is not space:
        raise ValueError(f"there are two spaces called {space.name}")
    return space


def usual_spaces(quantities: Collection[str]) -> tuple[str, ...]:
    """Name the spaces of a question that names none: all that lessen its quantities.

    Of depth alone that is layers in pairs, which keep all weights.
    """
    if not {*quantities} - {"depth"}:
        return ("pair",)
    by_place = sorted(SPACES.values(), key=lambda space: space.place)
    return tuple(space.name for space in by_place if not {*quantities}.isdisjoint(space.serves))


def parse_spaces(text: str, ranks: int = 2) -> tuple[Space, ...]:
    """Parse spaces: pair, or pair:4,ladder,rank.

    Args:
        ranks: tensor-parallel ranks that programs are to run on.

    Raises:
        ValueError: if one is not known, is named twice, or takes no such argument.
    """
    found: dict[str, Space] = {}
    for part in text.split(","):
        name, _, argument = part.strip().partition(":")
        if name not in SPACES:
            raise ValueError(f"unknown space {name!r}; {did_you_mean(name, SPACES)}")
        if name in found:
            raise ValueError(f"the space {name} is named twice in {text!r}")
        found[name] = SPACES[name](**SPACES[name].read(argument), ranks=ranks)
    return tuple(sorted(found.values(), key=lambda space: space.place))
