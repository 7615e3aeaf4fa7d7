"""Parts of a document checked by pydantic; what is wrong is named with its line, its value and what would be right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from surgeon.errors import did_you_mean, shown
from surgeon.language.yaml import Path, YamlError, line_of

# Pydantic's errors for unknown keys of a model, of a dataclass, and of other types.
UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument", "invalid_key")
MESSAGES = {
    **dict.fromkeys(UNKNOWN, "unknown key {key}; {known}"),
    "dataclass_type": "{within}{name} must be a mapping, not {value}",
}
OTHERWISE = "{within}{name}: {problem}, not {value}"
Checked = TypeVar("Checked")
# Making one can take longer than its use.
_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def checked(
    kind: type[Checked],
    value: Any,
    lines: Mapping[Path, int],
    path: Path = (),
    messages: Mapping[str, str] = MESSAGES,
) -> Checked:
    """Validate a part of a document as a type.

    Args:
        kind: a model of pydantic's, or a dataclass whose annotations are for pydantic.
        lines: as `Document` has them; `path` leads to this part.
        messages: what is said of an error, by pydantic's type of it, or by that and the entry's name. They hold {name},
            {value}, what pydantic says ({problem}), what the part is ({within}), and of a {key} the {known} ones.

    Raises:
        YamlError: of an entry that is not known first, then of one that is missing, then of any other.
    """
    try:
        found: Checked = _adapter(kind).validate_python(value)
        return found
    except ValidationError as error:
        first = min(
            error.errors(), key=lambda each: (each["type"] not in UNKNOWN, each["type"] != "missing")
        )
        type_ = first["type"]
        loc = (*path, *first["loc"])
        # pydantic spells keys, and has steps of its own ("[key]", into what stands for a whole) that lead nowhere here;
        # an entry that is missing is named all the same.
        spelled = {tuple(map(str, each)): each for each in lines}
        ends = (tuple(map(str, loc[:end])) for end in range(len(loc), len(path), -1))
        there = next((spelled[each] for each in ends if each in spelled), path)
        named = (loc if type_ == "missing" else there)[len(path) :]
        name = ".".join(map(str, named)) or "the document"
        of_all = type_ == "value_error" and not named  # what a dataclass says of its entries together
        if of_all:
            message = "{within}{problem}"
        else:
            message = messages.get(f"{type_} {name}") or messages.get(type_, OTHERWISE)
        problem = message.format(
            name=name,
            key=shown((there if len(there) == len(loc) else loc)[-1]) if type_ in UNKNOWN else "",
            known=did_you_mean(str(loc[-1]), _entries(kind, first["loc"][:-1]))
            if type_ in UNKNOWN
            else "",
            value=shown(first["input"]),
            problem=first.get("ctx", {}).get("error", first["msg"]),
            within=f"{path[-1]}: " if path else "",
        )
        raise YamlError(line_of(there, lines), problem) from error


def _entries(kind: Any, loc: tuple[Any, ...]) -> list[str]:
    """The entries of what a path leads to, in a type of this kind."""
    for key in (*loc, None):
        if get_origin(kind) in (Union, UnionType):
            kind = next(each for each in get_args(kind) if each is not type(None))
        if key is not None:
            inside = get_args(kind)  # of a list or a mapping, whose values come last
            if inside:
                kind = next(each for each in reversed(inside) if each is not ...)
            else:
                kind = get_type_hints(kind)[key]
    return list(getattr(kind, "model_fields", None) or get_type_hints(kind))
