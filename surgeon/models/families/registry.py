"""All families of this folder; a new file is found by itself."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from surgeon.models.families.base import Family

_NOT_OF_ONE_ARCHITECTURE = ("base", "fused", "mixtures", "positions", "registry", "specs")


def _describe_families() -> Iterator[Family]:
    package = __name__.rpartition(".")[0]
    for module in iter_modules([str(Path(__file__).parent)]):
        if module.name not in _NOT_OF_ONE_ARCHITECTURE:
            described = vars(import_module(f"{package}.{module.name}")).values()
            yield from (found for found in described if isinstance(found, Family))


FAMILIES: dict[str, Family] = {family.model_type: family for family in _describe_families()}
