"""The family that is nearest to an architecture, by what modeling files of transformers say.

They repeat what architectures have in common, under names of their own. So functions that say the same once these names
are gone compute the same.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from surgeon.models.families.base import Family
from surgeon.models.families.registry import FAMILIES

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

    @property
    def share(self) -> float:
        """How much of the modeling code says the same."""
        return len(self.alike) / (len(self.alike + self.otherwise + self.more) or 1)


def nearest(model_type: str) -> Likeness | None:
    """The family with the most in common, None where transformers has no causal language model of the architecture."""
    own = _functions(model_type)
    found = []
    for name, family in FAMILIES.items() if own else ():
        theirs = _functions(name)
        both = [function for function in own if function in theirs]
        alike = [function for function in both if own[function] == theirs[function]]
        otherwise = [function for function in both if function not in alike]
        found.append(Likeness(family, alike, otherwise, [function for function in own if function not in theirs]))
    # Of those as near, one without experts, whose MLP tells more of what a model without them lacks.
    return max(found, key=lambda one: (one.share, one.family.mixture is None), default=None)


@cache
def _functions(model_type: str) -> dict[str, str]:
    """The functions of an architecture's modeling file, without its name and without annotations; nothing of others."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    package = f"transformers.models.{model_type_to_module_name(model_type)}"
    source = find_spec(package)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, "")
    if source is None or source.origin is None:
        files = []
    else:
        files = list(Path(source.origin).parent.glob("modeling_*.py"))
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
