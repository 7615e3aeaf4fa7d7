"""An architecture that no family describes: which one is nearest, and what of it is otherwise.

Modeling files of transformers repeat what architectures have in common, under names of their own. So functions that
say the same once these names are gone compute the same, and what is left is what a new family would have to describe.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from surgeon.errors import first_line, shown
from surgeon.models.families import FAMILIES, Family
from surgeon.words import first_few

MOST_NAMED = 12  # functions, modules, entries
# What says nothing of how a text is continued.
_ASIDE = (
    *("__init__", "_init_weights", "prepare_inputs_for_generation", "extra_repr"),
    *("get_input_embeddings", "set_input_embeddings", "set_output_embeddings"),
)
_HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


class Likeness(NamedTuple):
    """An architecture beside a family.

    Attributes:
        alike: functions of the modeling code that compute the same.
        otherwise: those that do not.
        more: those that the family does not have.
    """

    family: Family
    alike: list[str]
    otherwise: list[str]
    more: list[str]


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
    if not (likenesses := _likenesses(config.model_type)):
        return {"unknown": f"transformers has no causal language model of {config.model_type!r}"}
    nearest = max(likenesses, key=lambda one: len(one.alike) / (len(one.alike + one.otherwise + one.more) or 1))
    compared = len(nearest.alike + nearest.otherwise)
    found = {
        "nearest": f"{nearest.family.name}: {len(nearest.alike)} of {compared} functions of their modeling code say "
        "the same",
        "otherwise": _some(nearest.otherwise),
        "besides": _some(nearest.more),
        "modules": _undescribed(config, nearest.family),
        "entries": _some(_own_entries(config, nearest.family)),
    }
    return {label: text for label, text in found.items() if text} | {
        "to add it": 'a family, one short file that describes it (docs/extending.md, "Adding a family")'
    }


def _likenesses(model_type: str) -> list[Likeness]:
    own, found = _functions(model_type), []
    for name, family in FAMILIES.items() if own else ():
        theirs = _functions(name)
        both = [function for function in own if function in theirs]
        alike = [function for function in both if own[function] == theirs[function]]
        otherwise = [function for function in both if function not in alike]
        found.append(Likeness(family, alike, otherwise, [function for function in own if function not in theirs]))
    return found


@cache
def _functions(model_type: str) -> dict[str, str]:
    """The functions of an architecture's modeling file, without its name and without annotations; nothing of others."""
    package = f"transformers.models.{model_type_to_module_name(model_type)}"
    source = find_spec(package)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, "")
    files = [] if source is None or source.origin is None else list(Path(source.origin).parent.glob("modeling_*.py"))
    text = next((text for file in files if f"class {model_class}(" in (text := file.read_text(encoding="utf-8"))), "")
    if not isinstance(model_class, str) or not text:
        return {}
    prefix = model_class.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    found: dict[str, str] = {}
    for node in ast.parse(text.replace(prefix, "")).body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith(_HEADS):
            inside = (one for one in node.body if isinstance(one, ast.FunctionDef) and one.name not in _ASIDE)
            found |= {f"{node.name}.{one.name}".removesuffix(".forward"): _said(one) for one in inside}
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = _said(node)
    return found


def _said(function: ast.FunctionDef) -> str:
    """A function's body and the names of its arguments."""
    for node in ast.walk(function):
        if isinstance(node, ast.AnnAssign | ast.arg):
            node.annotation = ast.Constant(None)
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return "\n".join([ast.unparse(function.args), *map(ast.unparse, body)])


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
    whole, found = len(layers), sorted(where.items())
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
