"""YAML from anybody, read within bounds: a small text can stand for a huge document, and hold any object.

Aliases and merge keys are written out while what they stand for is counted, so that a document that names itself, or
one list in another many times over, is refused before it takes time or memory. There are texts, numbers, true and
false, null, dates, lists and mappings; any other tag is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import yaml

from surgeon.errors import first_line, shown

LONGEST = 1 << 20  # characters, with aliases and merge keys written out, too
MOST_NODES = 10_000  # likewise
DEEPEST = 50  # lists and mappings in each other
LONGEST_NUMBER = 100  # characters; more take long to read, and Python refuses to show them

_TAG = "tag:yaml.org,2002:"
_TEXTS = {f"{_TAG}{name}" for name in ("str", "value", "merge")}
_SCALARS = {f"{_TAG}{name}" for name in ("null", "bool", "int", "float", "timestamp")} | _TEXTS
_MERGE, _LIST, _MAPPING = f"{_TAG}merge", f"{_TAG}seq", f"{_TAG}map"

Path = tuple[Any, ...]


class YamlError(ValueError):
    """What is wrong with a document.

    Attributes:
        line: counts from 1.
        problem: what is wrong there, without the line.
    """

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(f"line {line}: {problem}")
        self.line = line
        self.problem = problem


@dataclass(frozen=True)
class Document:
    """What a text says, and where.

    Attributes:
        value: nothing, a text, a number, a date, or lists and mappings of these; nothing for an empty text.
        lines: of every entry, by the keys and indices that lead to it; () is the whole document.
    """

    value: Any
    lines: dict[Path, int]


def read_yaml(text: str) -> Document:
    """Read one document.

    Raises:
        YamlError: if it is no valid YAML, has a key twice, holds what is not supported, or is too large.
    """
    if len(text) > LONGEST:
        raise YamlError(1, f"the text has {len(text):,} characters, and at most {LONGEST:,} are read")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
    except YamlError:
        raise
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(
            line, f"not valid YAML: the character {chr(int(error.character))!r} cannot stand in it"
        ) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise YamlError(mark.line + 1 if mark else 1, f"not valid YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # escapes and versions of which there are none
        raise YamlError(loader.line + 1, f"not valid YAML: {first_line(error)}") from error
    lines: dict[Path, int] = {(): 1}
    return Document(None if node is None else _Expansion(loader, lines).value(node, ()), lines)


class _Loader(yaml.SafeLoader):
    """Composes no more, and nothing deeper, than is read."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.nodes = self.depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        self.nodes += 1
        self.depth += 1
        _check_size(self.nodes, self.depth, mark)
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


def _check_size(nodes: int, depth: int, mark: Any) -> None:
    if nodes > MOST_NODES:
        raise YamlError(mark.line + 1, f"with its aliases written out, it has more than {MOST_NODES:,} entries")
    if depth > DEEPEST:
        raise YamlError(mark.line + 1, f"lists and mappings lie more than {DEEPEST} deep in each other")


class _Expansion:
    """Builds values from nodes, of which one can stand in several places."""

    def __init__(self, loader: _Loader, lines: dict[Path, int]) -> None:
        self.loader = loader
        self.lines = lines
        self.nodes = self.characters = 0
        self.open: list[yaml.Node] = []

    def value(self, node: yaml.Node, path: Path) -> Any:
        """What a node says; the lines of what is inside are noted."""
        self.lines.setdefault(path, _line(node))
        with self._inside(node):
            if isinstance(node, yaml.SequenceNode) and node.tag == _LIST:
                return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
            if isinstance(node, yaml.MappingNode) and node.tag == _MAPPING:
                found = {}
                for key, (key_node, value_node) in self._pairs(node).items():
                    self.lines[*path, key] = _line(key_node)
                    found[key] = self.value(value_node, (*path, key))
                return found
            return self._scalar(node)

    @contextmanager
    def _inside(self, node: yaml.Node) -> Iterator[None]:
        if any(node is outer for outer in self.open):
            raise YamlError(_line(node), "it has an alias to itself inside; write out what is meant")
        self.nodes += 1
        self.open.append(node)
        _check_size(self.nodes, len(self.open), node.start_mark)
        yield
        self.open.pop()

    def _pairs(self, node: yaml.MappingNode) -> dict[Any, tuple[yaml.Node, yaml.Node]]:
        """The nodes of a mapping's keys and values, with those that are merged into it."""
        own: dict[Any, tuple[yaml.Node, yaml.Node]] = {}
        merged: dict[Any, tuple[yaml.Node, yaml.Node]] = {}
        merges = [value for key, value in node.value if key.tag == _MERGE]
        for value in merges:
            several = isinstance(value, yaml.SequenceNode)
            for base in value.value if several else [value]:
                merged = self._base(base) | merged
        for pair in node.value:
            if pair[0].tag == _MERGE and len(merges) == 1:
                continue
            with self._inside(pair[0]):
                key = self._scalar(pair[0])
            if key in own:
                raise YamlError(_line(pair[0]), f"{shown(key)} is there twice; keep one of them")
            own[key] = pair
        return merged | own

    def _base(self, node: yaml.Node) -> dict[Any, tuple[yaml.Node, yaml.Node]]:
        """What a merge key brings in from one mapping."""
        if not isinstance(node, yaml.MappingNode) or node.tag != _MAPPING:
            raise YamlError(_line(node), "<< merges a mapping, or a list of mappings, named by aliases: <<: *base")
        with self._inside(node):
            return self._pairs(node)

    def _scalar(self, node: yaml.Node) -> Any:
        tag, text = str(node.tag), node.value
        if not isinstance(node, yaml.ScalarNode) and tag in (_LIST, _MAPPING):
            raise YamlError(_line(node), "a key is a text or a number, not a list or a mapping")
        if tag not in _SCALARS or not isinstance(node, yaml.ScalarNode):
            raise YamlError(_line(node), f"the tag {shown(tag.replace(_TAG, '!!'))} is not supported; remove it")
        self.characters += len(text)
        if self.characters > LONGEST:
            raise YamlError(_line(node), f"with its aliases written out, it has more than {LONGEST:,} characters")
        if tag in _TEXTS:
            if text.encode(errors="ignore").decode() != text:
                raise YamlError(_line(node), f"{shown(text)} has characters that are none (surrogates); remove them")
            return text
        kind = tag.removeprefix(_TAG)
        try:
            if len(text) > LONGEST_NUMBER:
                raise ValueError(f"it has more than {LONGEST_NUMBER} characters")
            return self.loader.construct_object(node)
        except Exception as error:  # whatever it trips over is a fault of the text
            raise YamlError(
                _line(node), f"{shown(text)} is no valid {kind} ({first_line(error)}); put a text in quotes"
            ) from error


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
