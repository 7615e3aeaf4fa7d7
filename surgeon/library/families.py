"""`surgeon.families`: the families that surgeon knows, and what each can do."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from transformers import CONFIG_MAPPING
from transformers.utils import logging

from surgeon.checkpoint.random_weights import RandomCheckpoint
from surgeon.findings.families import AREAS, FamilyRow, FamilyTable
from surgeon.library.capabilities import Capabilities
from surgeon.models import families as described
from surgeon.models.families import FAMILIES, Family, family_of
from surgeon.models.wrappers import WRAPPERS
from surgeon.opened import Model

RANKS = (1, 2)
# Of the default configuration, what is given beside it: the first that there is a model of counts.
_GIVEN: tuple[dict[str, Any], ...] = (
    {"num_hidden_layers": 6},
    {},
    {"num_hidden_layers": 6, "head_dim": 64},
    {"num_hidden_layers": 6, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "n_shared_experts": 2},
)


def families(model_types: Collection[str] | None = None) -> FamilyTable:
    """What each family can do, with the default configuration of its architecture.

    Args:
        model_types: of the families asked for; all of them by default.
    """
    chosen = {name: one for name, one in FAMILIES.items() if model_types is None or name in model_types}
    summaries, rows = _summaries(), list[FamilyRow]()
    for model_type, family in sorted(chosen.items(), key=lambda item: item[1].name.lower()):
        able = Capabilities(next(_examples(model_type, family.name)), RANKS, "bfloat16")
        rows.append(FamilyRow(family.name, model_type, summaries.get(model_type, ""), tuple(able.verdicts(AREAS))))
    around = sorted(WRAPPERS.values(), key=lambda wrapper: wrapper.name.lower())
    return FamilyTable.of(rows, {f"{one.name} (`{one.model_type}`)": f"`{one.decoder_type}`" for one in around})


def _summaries() -> dict[str, str]:
    """What the first sentence of each family's file says of it."""
    found = {}
    for module in map(import_module, (f"{described.__name__}.{one.name}" for one in iter_modules(described.__path__))):
        source, sentence = inspect.getsource(module), inspect.getdoc(module) or ""
        for name, value in vars(module).items():
            if isinstance(value, Family) and re.search(rf"^{name}\b.*= ", source, re.MULTILINE):
                found[value.model_type] = " ".join(sentence.partition("\n\n")[0].partition(": ")[2].split())
    return found


def _examples(model_type: str, name: str) -> Iterator[Model]:
    """Models of an architecture, without weights."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # some defaults do not go together
    try:
        for given in _GIVEN:
            try:
                config = CONFIG_MAPPING[model_type](**given)
                family_of(config)  # some defaults are no model
                yield Model(name, RandomCheckpoint(Path(name), config=config), config)
            except Exception:  # noqa: BLE001 - whatever it trips over, the next one is tried
                continue
    finally:
        logging.set_verbosity(verbosity)
