"""A mixture's edits as parameters that Optuna knows, and choices of edits as their values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from surgeon.findings.edit import Choice, Edit
from surgeon.searches.mixture import Mixture

NONE = ""  # the value of a parameter of which no edit is chosen


@dataclass(frozen=True)
class EditParameters:
    """One parameter for each space and layer at which its edits can begin; its values are none and these edits.

    Edits that begin at one layer and do not exclude each other, as low ranks of an attention and of an MLP, are of
    parameters of their own. A value is an edit's text, or for samplers that know no categories, its place among the
    parameter's values.
    """

    mixture: Mixture

    @cached_property
    def edits(self) -> dict[str, tuple[Edit, ...]]:
        """Those of each parameter, by its name: the space, the layer, and what tells it from others of both."""
        digits = len(str(self.mixture.model.num_layers - 1))
        named: dict[str, tuple[Edit, ...]] = {}
        for (space, first), groups in self._groups.items():
            heads = [{edit.option.partition(":")[0] for edit in group} for group in groups]
            for number, (group, head) in enumerate(zip(groups, heads, strict=True), 1):
                words = [space, f"{first:0{digits}}"]
                if len(groups) > 1:
                    own = len(head) == 1 and heads.count(head) == 1
                    words.append(*head) if own else words.append(str(number))
                named[" ".join(words)] = tuple(group)
        return named

    @property
    def categories(self) -> dict[str, BaseDistribution]:
        """What samplers search: the values of every parameter."""
        return {name: CategoricalDistribution(texts) for name, texts in self._texts.items()}

    @property
    def numbers(self) -> dict[str, BaseDistribution]:
        """The same as whole numbers."""
        return {name: IntDistribution(0, len(edits)) for name, edits in self.edits.items()}

    def values(self, choice: Choice) -> dict[str, str]:
        wanted = set(choice)
        return {name: next((str(edit) for edit in edits if edit in wanted), NONE) for name, edits in self.edits.items()}

    def choice(self, values: Mapping[str, Any]) -> Choice:
        """What values come to.

        In ascending order of edits (by their first layer, their last one, their space) each is taken that goes together
        with those before it, so that what values come to follows from them alone. What is left out breaks nothing: as a
        constraint it kept Optuna's samplers, whose first trials have many edits, from finding anything good.

        Raises:
            ValueError: if a value is none of its parameter's.
        """
        wanted = [self._edit(name, value) for name, value in values.items() if name in self.edits]
        chosen: list[Edit] = []
        for edit in sorted(edit for edit in wanted if edit is not None):
            if self.mixture.is_free(chosen, edit):
                chosen.append(edit)
        return tuple(chosen)

    def _edit(self, name: str, value: Any) -> Edit | None:
        texts = self._texts[name]
        place = value if isinstance(value, int) else texts.index(value) if value in texts else -1
        if not 0 <= place < len(texts):
            raise ValueError(f"the parameter {name} is {value!r}; it should be one of {', '.join(map(repr, texts))}")
        return self.edits[name][place - 1] if place else None

    @cached_property
    def _texts(self) -> dict[str, list[str]]:
        return {name: [NONE, *map(str, edits)] for name, edits in self.edits.items()}

    @cached_property
    def _groups(self) -> dict[tuple[str, int], list[list[Edit]]]:
        """By space and first layer, edits of which every two exclude each other."""
        found: dict[tuple[str, int], list[list[Edit]]] = {}
        for edit in self.mixture.edits:
            groups = found.setdefault((edit.space, edit.first), [])
            fitting = (group for group in groups if all(self.mixture.exclude(edit, other) for other in group))
            group = next(fitting, None)
            groups.append([edit]) if group is None else group.append(edit)
        return found
