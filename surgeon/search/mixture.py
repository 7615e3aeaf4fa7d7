"""Several spaces as one: which edits go together, and the program and the recipe that a choice of them comes to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from surgeon.program import Program
from surgeon.recipe import AppliedOperation
from surgeon.search.edit import Choice, Edit, as_choice
from surgeon.search.spaces.base import Claim, Searched, Space


@dataclass(frozen=True)
class Mixture:
    """The spaces of a search, on one model.

    Attributes:
        spaces: in the order in which they change the program.
    """

    spaces: tuple[Space, ...]
    model: Searched

    @cached_property
    def edits(self) -> tuple[Edit, ...]:
        """Every edit that the model can have by itself and that changes its program, in ascending order."""
        every = {edit for space in self.spaces for edit in space.edits(self.model)}
        return tuple(edit for edit in sorted(every) if self._changes(edit))

    def operations(self, choice: Iterable[Edit]) -> tuple[AppliedOperation, ...]:
        """What carries out a choice, in the order of a recipe.

        Raises:
            ValueError: if its edits do not go together on this model.
        """
        return tuple(operation for operation, _ in self._applied(as_choice(choice)))

    def program(self, choice: Iterable[Edit]) -> Program:
        """The program that a choice comes to; ValueError as `operations`."""
        program = self.model.dense
        for _, program in self._applied(as_choice(choice)):  # noqa: B007 - the last one is wanted
            pass
        return program

    def exclude(self, one: Edit, other: Edit) -> bool:
        """Whether two edits cannot both be chosen; an edit excludes itself."""
        return not self.claims(one).isdisjoint(self.claims(other))

    def claims(self, edit: Edit) -> frozenset[Claim]:
        """What an edit wants for itself."""
        if edit not in self._claims:
            self._claims[edit] = self._spaces[edit.space].claims(edit)
        return self._claims[edit]

    def is_free(self, choice: Sequence[Edit], edit: Edit) -> bool:
        """Whether an edit can be added to a choice."""
        return not any(self.exclude(edit, other) for other in choice)

    def neighbours(self, edit: Edit) -> Iterator[Edit]:
        """Edits that may stand in the place of one."""
        known = set(self.edits)
        return (other for other in self._spaces[edit.space].neighbours(edit, self.model) if other in known)

    def stretches(self) -> Iterator[list[Edit]]:
        """Unbroken stretches of every space, as far as the model can have their edits."""
        known = set(self.edits)
        for space in self.spaces:
            for stretch in space.stretches(self.model):
                yield [edit for edit in stretch if edit in known]

    @cached_property
    def _spaces(self) -> dict[str, Space]:
        return {space.name: space for space in self.spaces}

    @cached_property
    def _claims(self) -> dict[Edit, frozenset[Claim]]:
        return {}

    def _changes(self, edit: Edit) -> bool:
        try:
            return self.program((edit,)) != self.model.dense
        except ValueError:
            return False

    def _applied(self, choice: Choice) -> Iterator[tuple[AppliedOperation, Program]]:
        """The operations, each with the program after it."""
        program = self.model.dense
        shapes = self.model.layer_shapes
        for space in self.spaces:
            edits = [edit for edit in choice if edit.space == space.name]
            for operation in space.operations(edits, program, self.model) if edits else ():
                program = operation.apply(program, shapes)
                yield operation, program
