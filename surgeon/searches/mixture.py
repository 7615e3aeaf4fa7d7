"""Several spaces as one: the edits that go together, and the program and recipe of a choice of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution

from surgeon.language.operations.applied import (
    AppliedOperation,
    Choice,
    Edit,
    as_choice,
    require_whole_layers,
)
from surgeon.language.operations.lowrank import Calibration
from surgeon.language.program import Program
from surgeon.language.recipe import Expect, Recipe
from surgeon.language.sublayer import ATTENTION
from surgeon.opened import Model
from surgeon.quality.summary import Quality
from surgeon.searches.spaces.base import Claim, Space
from surgeon.searches.spaces.experts import KeptExperts, Orders

NONE = ""  # the value of a parameter of which no edit is chosen


@dataclass(frozen=True)
class Mixture:
    """The spaces of a search, on one model.

    Attributes:
        spaces: in the order in which they change the program.
        obstacle: the reason, if any, why the program of a recipe is not searched for.
    """

    spaces: tuple[Space, ...]
    model: Model
    obstacle: Callable[[Recipe, Program], str] | None = field(default=None, repr=False, compare=False)
    _claims: dict[Edit, frozenset[Claim]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def on_text(self, text: Calibration) -> Mixture:
        """Bind the spaces to a search's text, as recipes name it."""
        return replace(self, spaces=tuple(replace(space, text=text) for space in self.spaces))

    def by_saliency(self, orders: Orders) -> Mixture:
        """Give the spaces the saliency orders of mixtures' experts on the search's text."""
        spaces = (
            replace(one, orders=orders) if isinstance(one, KeptExperts) else one for one in self.spaces
        )
        return replace(self, spaces=tuple(spaces))

    @cached_property
    def most_salient(self) -> dict[Edit, Edit]:
        """Replace each edit of experts by one that keeps as many, the most salient ones."""
        found: dict[Edit, Edit] = {}
        for space in self.spaces:
            if isinstance(space, KeptExperts):
                first: dict[tuple[int, int], Edit] = {}
                for edit in space.edits(self.model):
                    found[edit] = first.setdefault((edit.first, edit.option.count(",")), edit)
        return found

    def with_most_salient(self, choice: Choice) -> Choice:
        return as_choice(self.most_salient.get(edit, edit) for edit in choice)

    @cached_property
    def edits(self) -> tuple[Edit, ...]:
        """Every edit that the model can have by itself and that changes its program, in ascending order.

        Edits of different spaces may come to the same program, as a track of one layer and a dropped synchronisation.
        """
        return tuple(edit for edit, reason in self._looked_at.items() if not reason)

    @cached_property
    def refusals(self) -> dict[str, Counter[str]]:
        """By space, the reasons against edits that are not searched for, with their numbers.

        Reasons that differ in numbers alone, as those of layers do, are one, in the words of the first.
        """
        found: dict[str, Counter[str]] = {}
        first: dict[tuple[str, str], str] = {}
        for edit, reason in self._looked_at.items():
            if reason:
                alike = first.setdefault((edit.space, re.sub(r"\d+", "", reason)), reason)
                found.setdefault(edit.space, Counter())[alike] += 1
        return found

    @cached_property
    def _looked_at(self) -> dict[Edit, str]:
        """All edits that change the program, each with the obstacle to it."""
        found = {}
        for edit in sorted({edit for space in self.spaces for edit in space.edits(self.model)}):
            try:
                program = self.program((edit,))
            except ValueError:
                continue
            if program != self.model.program:
                found[edit] = self.obstacle(self.recipe((edit,), ""), program) if self.obstacle else ""
        return found

    @property
    def single_edits(self) -> list[Program]:
        return [self.program((edit,)) for edit in self.edits]

    def require_edits(self) -> None:
        """Refuse edited models, and spaces without edits of the model."""
        if self.model.own is not None:
            try:
                require_whole_layers(self.model.own, self.model.num_layers)
            except ValueError as error:
                raise ValueError(
                    f"{self.model.label} is an edited model, or one that others pruned or decomposed; search the one "
                    f"that it was made of ({error})"
                ) from error
        there = {edit.space for edit in self.edits}
        for space in self.spaces:
            if space.name not in there:
                reason = next(iter(self.refusals.get(space.name, ())), None) or space.obstacle(
                    self.model
                )
                raise ValueError(
                    f"the space {space.name} has no edits of {self.model.label}: {reason}; leave it out"
                )

    def operations(self, choice: Iterable[Edit]) -> tuple[AppliedOperation, ...]:
        """The operations of a choice, in the order of a recipe."""
        return tuple(operation for operation, _ in self._apply(as_choice(choice)))

    def program(self, choice: Iterable[Edit]) -> Program:
        """The program of a choice; ValueError as `operations`."""
        program = self.model.program
        for _, program in self._apply(as_choice(choice)):  # noqa: B007 - the last one is wanted
            pass
        return program

    def allows(self, choice: Iterable[Edit]) -> bool:
        try:
            self.program(choice)
        except ValueError:
            return False
        return True

    def recipe(self, choice: Iterable[Edit], model: str, weights: str | None = None) -> Recipe:
        """The recipe that makes a choice's program of the model, with its expected depth and synchronisations."""
        program = self.program(choice)
        depth = program.effective_depth(self.model.family.steps_per_layer)
        expect = Expect(effective_depth=depth, sync_points=program.sync_points(2))
        return Recipe(model, self.operations(choice), expect, weights)

    def exclude(self, one: Edit, other: Edit) -> bool:
        """Tell whether two edits cannot both be chosen; an edit excludes itself."""
        return not self.claims(one).isdisjoint(self.claims(other))

    @cached_property
    def exclusions(self) -> NDArray[np.bool_]:
        """(edits, edits), in the order of `edits`: `exclude` of every two."""
        numbers: dict[Claim, int] = {}
        claimed = [
            [numbers.setdefault(claim, len(numbers)) for claim in self.claims(edit)]
            for edit in self.edits
        ]
        claims = np.zeros((len(self.edits), len(numbers)), dtype=np.float32)
        for row, columns in enumerate(claimed):
            claims[row, columns] = 1
        found: NDArray[np.bool_] = claims @ claims.T > 0
        return found

    def claims(self, edit: Edit) -> frozenset[Claim]:
        """The claims of an edit."""
        if edit not in self._claims:
            spaces = {space.name: space for space in self.spaces}
            if edit.space not in spaces:
                raise ValueError(
                    f"{edit} is of none of the spaces that are searched: {', '.join(spaces)}"
                )
            self._claims[edit] = spaces[edit.space].claims(edit)
        return self._claims[edit]

    @cached_property
    def attentions_lost(self) -> dict[Edit, int]:
        """Count the layers that lose their attention by each edit."""
        there = _attending_layers(self.model.program)
        return {edit: len(there - _attending_layers(self.program((edit,)))) for edit in self.edits}

    @cached_property
    def most_lost(self) -> int:
        """Number of layers that may lose their attention: one has to keep it."""
        return len(_attending_layers(self.model.program)) - 1

    def is_free(self, choice: Sequence[Edit], edit: Edit) -> bool:
        """Tell whether an edit can be added to a choice."""
        lost = sum(self.attentions_lost[one] for one in (*choice, edit))
        return lost <= self.most_lost and not any(self.exclude(edit, other) for other in choice)

    def stretches(self) -> Iterator[list[Edit]]:
        """Unbroken stretches of every space, as far as the model can have their edits together, each once."""
        found: dict[Choice, None] = {}
        for stretch in (stretch for space in self.spaces for stretch in space.stretches(self.model)):
            there = [edit for edit in stretch if edit in self.attentions_lost]
            lost = accumulate(self.attentions_lost[edit] for edit in there)
            keeping = tuple(
                edit for edit, gone in zip(there, lost, strict=True) if gone <= self.most_lost
            )
            found |= {keeping: None} if keeping else {}
        return map(list, found)

    @cached_property
    def parameters(self) -> dict[str, tuple[Edit, ...]]:
        """By name (the space, the layer, and what tells it from others of both), the edits that a parameter has.

        Each is of edits that begin at one layer and exclude each other: low ranks of an attention and of an MLP are of
        two. Its value is an edit's text or `NONE`.
        """
        found: dict[tuple[str, int], list[list[Edit]]] = {}
        for edit in self.edits:
            groups = found.setdefault((edit.space, edit.first), [])
            fitting = (group for group in groups if all(self.exclude(edit, other) for other in group))
            group = next(fitting, None)
            groups.append([edit]) if group is None else group.append(edit)
        digits = len(str(self.model.num_layers - 1))
        named: dict[str, tuple[Edit, ...]] = {}
        for (space, first), groups in found.items():
            heads = [{edit.option.partition(":")[0] for edit in group} for group in groups]
            for number, (group, head) in enumerate(zip(groups, heads, strict=True), 1):
                words = [space, f"{first:0{digits}}"]
                if len(groups) > 1:
                    own = len(head) == 1 and heads.count(head) == 1
                    words.append(*head) if own else words.append(str(number))
                named[" ".join(words)] = tuple(group)
        return named

    @cached_property
    def categories(self) -> dict[str, BaseDistribution]:
        return {
            name: CategoricalDistribution([NONE, *map(str, edits)])
            for name, edits in self.parameters.items()
        }

    def values(self, choice: Choice) -> dict[str, str]:
        found = dict.fromkeys(self.parameters, NONE)
        for name, edits in self.parameters.items():
            for edit in edits:
                if edit in choice:
                    found[name] = str(edit)
        return found

    def choice(self, values: Mapping[str, Any]) -> Choice:
        """The choice of parameters' values.

        In ascending order of edits (by their first layer, their last one, their space) each is taken that goes together
        with those before it, so that the choice follows from the values alone. Constraints in its place kept Optuna's
        samplers, whose first trials have many edits, from finding anything good.
        """
        wanted: list[Edit] = []
        for name, value in values.items():
            if name not in self.parameters:
                continue
            edits = {str(edit): edit for edit in self.parameters[name]}
            if value in edits:
                wanted.append(edits[value])
            elif value != NONE:
                raise ValueError(
                    f"the parameter {name} is {value!r}; it should be one of "
                    f"{', '.join(map(repr, [NONE, *edits]))}"
                )
        chosen: list[Edit] = []
        for edit in sorted(wanted):
            if self.is_free(chosen, edit):
                chosen.append(edit)
        return tuple(chosen)

    def _apply(self, choice: Choice) -> Iterator[tuple[AppliedOperation, Program]]:
        """The operations, each with the program after it."""
        taken: dict[Claim, Edit] = {}
        for edit in choice:
            for claim in self.claims(edit):
                other = taken.setdefault(claim, edit)
                if other is not edit:
                    raise ValueError(
                        f"{other} and {edit} do not go together: both decide {claim[0]} of layer {claim[1]}"
                    )
        program = self.model.program
        for space in self.spaces:
            edits = [edit for edit in choice if edit.space == space.name]
            for operation in space.operations(edits, program, self.model) if edits else ():
                program = operation.apply(program, self.model.layer_shapes, self.model.own)
                yield operation, program
        if not _attending_layers(program):
            raise ValueError(
                f"{', '.join(map(str, choice))}: no attention is left; a program has to keep one"
            )


def _attending_layers(program: Program) -> set[int]:
    return {layer for one in program.sublayers() if one.kind == ATTENTION for layer in one.layers}


@dataclass(frozen=True)
class Proposal:
    """A program to try.

    Attributes:
        key: the program's text: equal programs are tried once.
        source: of the choice, one of `surgeon.findings.trials.SOURCES`.
        level: for which it was made, where a search has several: the effective depth, say.
    """

    key: str
    source: str
    choice: Choice
    level: float | None = None

    @property
    def program(self) -> Program:
        return Program.parse(self.key)

    @property
    def edits(self) -> str:
        return "; ".join(map(str, self.choice))


@dataclass(frozen=True, kw_only=True)
class Trial(Proposal):
    """A proposal that was measured.

    Attributes:
        number: its place in the order in which trials were asked for.
    """

    number: int
    measured: Quality
