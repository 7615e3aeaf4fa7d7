"""An operation with its stretches and parameters, as an entry of a recipe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from surgeon.language.operations.base import OPERATIONS, show_range
from surgeon.language.operations.within import applied_within
from surgeon.language.program import Program
from surgeon.language.sublayer import LayerShapes


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
