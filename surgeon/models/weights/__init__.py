"""One view of a model's tensors, wherever they are stored: matrices by layer and role, slices and averages of them.

`Store` is where tensors are (a module in memory, a checkpoint's folder), `ModelWeights` sees one through its family.
The rules of packing, slicing and averaging stand here and nowhere else.
"""

from surgeon.models.weights.decompose import TruncatedSVD
from surgeon.models.weights.derive import (
    derive_sublayer,
    module_with,
    pack_tensors,
    share_undivided,
    stored_tensors,
)
from surgeon.models.weights.layers import (
    Group,
    Groups,
    Names,
    holds_output_bias,
    indivisible,
    require_sliceable,
    unit_features,
)
from surgeon.models.weights.modules import (
    absent_sublayers,
    family_entry,
    leave_out,
    make_room,
    take_experts_apart,
)
from surgeon.models.weights.store import (
    Averaged,
    Dense,
    Factored,
    Factorised,
    Factors,
    FactorSource,
    ModuleStore,
    NamedTensors,
    Store,
    Tensors,
    WeightMatrix,
    mean,
)
from surgeon.models.weights.units import (
    ListedUnits,
    Magnitude,
    RandomUnits,
    ScoredUnits,
    UnitsByLayer,
    UnitSource,
    Untold,
    rank_scores,
    unit_source,
)
from surgeon.models.weights.view import ModelWeights

__all__ = [
    "Averaged",
    "Dense",
    "FactorSource",
    "Factored",
    "Factorised",
    "Factors",
    "Group",
    "Groups",
    "ListedUnits",
    "Magnitude",
    "ModelWeights",
    "ModuleStore",
    "NamedTensors",
    "Names",
    "RandomUnits",
    "ScoredUnits",
    "Store",
    "Tensors",
    "TruncatedSVD",
    "UnitSource",
    "UnitsByLayer",
    "Untold",
    "WeightMatrix",
    "absent_sublayers",
    "derive_sublayer",
    "family_entry",
    "holds_output_bias",
    "indivisible",
    "leave_out",
    "make_room",
    "mean",
    "module_with",
    "pack_tensors",
    "rank_scores",
    "require_sliceable",
    "share_undivided",
    "stored_tensors",
    "take_experts_apart",
    "unit_features",
    "unit_source",
]
