"""One view of a model's tensors, wherever they are stored: matrices by layer and role, slices and averages of them.

`Store` is where tensors are (a module in memory, a checkpoint's folder), `ModelWeights` sees one through its family:
names become paths, modules become roles. The rules of packing, slicing and averaging stand here and nowhere else.
"""

from surgeon.weights.derive import derive_sublayer, module_with, packed, stored_tensors
from surgeon.weights.layout import (
    holds_output_bias,
    indivisible,
    require_sliceable,
    unit_bounds,
    unit_features,
)
from surgeon.weights.matrix import Averaged, Dense, Matrix, mean
from surgeon.weights.names import Names
from surgeon.weights.store import ModuleStore, NamedTensors, Store, Tensors
from surgeon.weights.view import ModelWeights, norm_paths

__all__ = [
    "Averaged",
    "Dense",
    "Matrix",
    "ModelWeights",
    "ModuleStore",
    "NamedTensors",
    "Names",
    "Store",
    "Tensors",
    "derive_sublayer",
    "holds_output_bias",
    "indivisible",
    "mean",
    "module_with",
    "norm_paths",
    "packed",
    "require_sliceable",
    "stored_tensors",
    "unit_bounds",
    "unit_features",
]
