"""The edits a recipe can ask for, one short file each."""

from surgeon.operations.base import OPERATIONS, Operation, operation
from surgeon.operations.desync import desync
from surgeon.operations.fuse_attention_mlp import fuse_attention_mlp
from surgeon.operations.ladder import ladder
from surgeon.operations.merge import merge
from surgeon.operations.pair import pair
from surgeon.operations.parallel import parallel
from surgeon.operations.prune import prune
from surgeon.operations.shuffle import permutation, shuffle
from surgeon.operations.tracks import tracks

__all__ = [
    "OPERATIONS",
    "Operation",
    "desync",
    "fuse_attention_mlp",
    "ladder",
    "merge",
    "operation",
    "pair",
    "parallel",
    "permutation",
    "prune",
    "shuffle",
    "tracks",
]
