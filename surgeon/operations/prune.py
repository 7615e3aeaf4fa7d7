"""Leave layers out."""

from surgeon.operations.base import find_stretch, operation
from surgeon.program import Program


@operation
def prune(program: Program, layers: range) -> Program:
    """Leave the layers out (Layer Parallelism, section 3, figure 3c)."""
    return find_stretch(program, layers).replaced_by()
