"""The edits a recipe can ask for, one short file each."""

from surgeon.operations.base import OPERATIONS, Operation, operation
from surgeon.operations.ladder import ladder
from surgeon.operations.merge import merge
from surgeon.operations.pair import pair
from surgeon.operations.parallel import parallel
from surgeon.operations.prune import prune
from surgeon.operations.shuffle import permutation, shuffle

__all__ = [
    "OPERATIONS",
    "Operation",
    "ladder",
    "merge",
    "operation",
    "pair",
    "parallel",
    "permutation",
    "prune",
    "shuffle",
]
