"""YAML from anybody, read within bounds: there are texts, numbers, true and false, null, dates, lists and mappings.

Aliases and merge keys, by which a small text can stand for a huge document, are refused, as is any other tag. Parts of
a document are checked by pydantic; what is wrong is named with its line, its value and what would be right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import UnionType
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from surgeon.words import did_you_mean, first_line, show_value

LONGEST = 1 << 20  # characters
MOST_NODES = 10_000
DEEPEST = 50  # lists and mappings in each other
LONGEST_NUMBER = 100  # characters; more take long to read, and Python refuses to show them

_TAG = "tag:yaml.org,2002:"
_KINDS = [f"{_TAG}{kind}" for kind in ("null", "bool", "int", "float", "timestamp", "str", "seq", "map")]
_SIGNS = _, _MERGE = f"{_TAG}value", f"{_TAG}merge"  # "=" and "<<", which are texts in a list

Path = tuple[Any, ...]


class YamlError(ValueError):
    """An error in a document.

    Attributes:
        line: counts from 1.
        problem: what is wrong there, without the line.
    """

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(f"line {line}: {problem}")
        self.line = line
        self.problem = problem


def line_of(path: Path, lines: Mapping[Path, int]) -> int:
    """The line of what a path leads to, or of the innermost thing on the way there that stands in the document."""
    return next((lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in lines), 1)


def read_yaml(text: str) -> tuple[Any, dict[Path, int]]:
    """Read one document.

    Returns:
        Nothing, a text, a number, a date, or lists and mappings of these (nothing for an empty text); and the line of
        every entry, by the keys and indices that lead to it; () is the whole document.

    Raises:
        YamlError: if it is no valid YAML, has a key twice, holds what is not supported, or is too large.
    """
    if len(text) > LONGEST:
        raise YamlError(1, f"the text has {len(text):,} characters, and at most {LONGEST:,} are read")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            value = None
        else:
            value = loader.construct_document(node)
    except YamlError:
        raise
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(
            line, f"not valid YAML: the character {chr(int(error.character))!r} cannot stand in it"
        ) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise YamlError(
            mark.line + 1 if mark else 1, f"not valid YAML: {error.problem or error.context}"
        ) from error
    except (
        yaml.YAMLError,
        ValueError,
        OverflowError,
    ) as error:  # escapes and versions of which there are none
        raise YamlError(loader.line + 1, f"not valid YAML: {first_line(error)}") from error
    lines: dict[Path, int] = {(): 1}
    if node is not None:
        _note_lines(loader, node, (), lines)
    return value, lines


def _note_lines(loader: _Loader, node: yaml.Node, path: Path, lines: dict[Path, int]) -> None:
    lines.setdefault(path, _line(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _note_lines(loader, item, (*path, index), lines)
    if isinstance(node, yaml.MappingNode):
        for key_node, value in node.value:
            key = loader.construct_object(key_node)
            lines[*path, key] = _line(key_node)
            _note_lines(loader, value, (*path, key), lines)


class _Loader(yaml.SafeLoader):
    """Composes no more, and nothing deeper, than is read, and builds nothing but what is named above."""

    yaml_constructors: ClassVar = {
        **{kind: yaml.SafeLoader.yaml_constructors[kind] for kind in _KINDS},
        **dict.fromkeys(_SIGNS, yaml.SafeLoader.construct_yaml_str),
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.entries = 0
        self.depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            raise YamlError(line, f"*{event.anchor} is an alias; write out what is meant")
        self.entries += 1
        if self.entries > MOST_NODES:
            raise YamlError(line, f"it has more than {MOST_NODES:,} entries")
        self.depth += 1
        if self.depth > DEEPEST:
            raise YamlError(line, f"lists and mappings lie more than {DEEPEST} deep in each other")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        earlier_keys = set()
        for key_node, _ in node.value:
            if key_node.tag == _MERGE:
                raise YamlError(_line(key_node), "<< merges nothing here; write out what is meant")
            if not isinstance(key_node, yaml.ScalarNode):
                raise YamlError(_line(key_node), "a key is a text or a number, not a list or a mapping")
            key = self.construct_object(key_node)
            if key in earlier_keys:
                raise YamlError(_line(key_node), f"{show_value(key)} is there twice; keep one of them")
            earlier_keys.add(key)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        tag = str(node.tag)
        text = node.value
        if tag not in self.yaml_constructors:
            raise YamlError(
                _line(node), f"the tag {show_value(tag.replace(_TAG, '!!'))} is not supported; remove it"
            )
        if not isinstance(node, yaml.ScalarNode):
            return super().construct_object(node, deep)
        kind = tag.removeprefix(_TAG)
        is_text = tag in (f"{_TAG}str", *_SIGNS)
        if is_text and text.encode(errors="ignore").decode() != text:
            raise YamlError(
                _line(node), f"{show_value(text)} has characters that are none (surrogates); remove them"
            )
        try:
            if len(text) > LONGEST_NUMBER and not is_text:
                raise ValueError(f"it has more than {LONGEST_NUMBER} characters")
            return super().construct_object(node, deep)
        except Exception as error:  # whatever it trips over is a fault of the text
            raise YamlError(
                _line(node),
                f"{show_value(text)} is no valid {kind} ({first_line(error)}); put a text in quotes",
            ) from error


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


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


def validate(
    kind: type[Checked],
    value: Any,
    lines: Mapping[Path, int],
    path: Path = (),
    messages: Mapping[str, str] = MESSAGES,
) -> Checked:
    """Validate a part of a document as a type.

    Args:
        kind: a model of pydantic's, or a dataclass whose annotations are for pydantic.
        lines: as of `read_yaml`; `path` leads to this part.
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
        key = suggestion = ""
        if type_ in UNKNOWN:
            key = show_value((there if len(there) == len(loc) else loc)[-1])
            suggestion = did_you_mean(str(loc[-1]), _entries(kind, first["loc"][:-1]))
        problem = message.format(
            name=name,
            key=key,
            known=suggestion,
            value=show_value(first["input"]),
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
