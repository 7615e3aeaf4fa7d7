"""The edits a recipe can ask for, one short file each.

Every module of this folder is imported here, so that an operation is known as soon as its file is there. Code that is
checked for types takes a function from its module (`from surgeon.language.operations.pair import pair`); otherwise the
package has it, too (`from surgeon.language.operations import pair`).
"""

from importlib import import_module
from pkgutil import iter_modules

from surgeon.language.operations.base import (
    HEATMAPS,
    OPERATIONS,
    VARIANTS,
    Heatmap,
    Operation,
    Variant,
    operation,
)

__all__ = ["HEATMAPS", "OPERATIONS", "VARIANTS", "Heatmap", "Operation", "Variant", "operation"]

for _name in sorted(found.name for found in iter_modules(__path__)):
    import_module(f"{__name__}.{_name}")
# Over the modules, which importing them has put under the same names.
globals().update({name: one.function for name, one in OPERATIONS.items()})
