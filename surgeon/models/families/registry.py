"""All families of this folder; a new file is found by itself."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from surgeon.models.families.base import Family

_NOT_OF_ONE_ARCHITECTURE = ("base", "fused", "mixtures", "registry", "specs")


FAMILIES: dict[str, Family] = {
    found.model_type: found
    for module in iter_modules([str(Path(__file__).parent)])
    if module.name not in _NOT_OF_ONE_ARCHITECTURE
    for found in vars(import_module(f"{__name__.rpartition('.')[0]}.{module.name}")).values()
    if isinstance(found, Family)
}
