"""An architecture that no family describes: which one is nearest, and what a new family would have to describe."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from surgeon.errors import first_line, shown
from surgeon.models.families import FAMILIES, Family
from surgeon.models.families.nearest import nearest
from surgeon.words import first_few

MOST_NAMED = 12  # functions, modules, entries


def mechanisms(entries: dict[str, Any]) -> dict[str, str]:
    """What is to be known of an architecture that is not supported, by label.

    Args:
        entries: of its config.json.
    """
    model_type = str(entries.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        return {"unknown": f"transformers has no architecture {model_type!r}, or only a newer one than this has"}
    config = CONFIG_MAPPING[model_type].from_dict(entries).get_text_config()
    if config.model_type in FAMILIES:
        return {"inside": f"there is a decoder of {FAMILIES[config.model_type].name} in it"}
    if (found := nearest(config.model_type)) is None:
        return {"unknown": f"transformers has no causal language model of {config.model_type!r}"}
    compared = len(found.alike + found.otherwise)
    said = {
        "nearest": f"{found.family.name}: {len(found.alike)} of {compared} functions of their modeling code say the "
        "same",
        "otherwise": _some(found.otherwise),
        "besides": _some(found.more),
        "modules": _undescribed(config, found.family),
        "entries": _some(_own_entries(config, found.family)),
    }
    return {label: text for label, text in said.items() if text} | {
        "to add it": 'a family, one short file that describes it (docs/extending.md, "Adding a family")'
    }


def _undescribed(config: PreTrainedConfig, family: Family) -> str:
    """Modules with weights in decoder layers that the family does not describe, and those that are missing."""
    try:
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(config)
        lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
        layers = next(module for module in lists if len(module) == config.num_hidden_layers)
    except Exception as error:  # noqa: BLE001 - whatever it trips over, there is nothing to compare
        return f"its layers are not found ({first_line(error)})"
    described = {path for spec in (family.attention, family.mlp) for path in _paths(spec)}
    where: dict[str, list[int]] = {}
    for index, layer in enumerate(layers):
        own = {name.removesuffix(".weight").removesuffix(".bias") for name, _ in layer.named_parameters()}
        for path in own ^ described:
            where.setdefault(path if path in own else f"no {path}", []).append(index)
    whole = len(layers)
    found = sorted(where.items())
    return _some([f"{name} in {len(of)} of {whole} layers" if len(of) < whole else name for name, of in found])


def _paths(spec: Any) -> Iterable[str]:
    norms = (spec.norm, spec.post_norm, *spec.head_norms)
    return (path for path in (*norms, *(one.path for one in spec.projections)) if path)


def _own_entries(config: PreTrainedConfig, family: Family) -> list[str]:
    """Entries of the configuration that the family's does not have, and that say something."""
    theirs = CONFIG_MAPPING[family.model_type]()
    known = {*theirs.to_dict(), *theirs.attribute_map}
    own = config.to_dict()
    return [f"{name} {shown(value)}" for name, value in own.items() if name not in known and value not in (None, False)]


def _some(names: Collection[str]) -> str:
    return first_few(list(names), MOST_NAMED)
