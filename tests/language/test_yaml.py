"""YAML from anybody: what is read, and what is refused."""

from __future__ import annotations

from time import monotonic
from typing import Any

import pytest

from surgeon.language.yaml import MOST_NODES, YamlError, read_yaml


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &a [lol]\nb: [*a, *a]", r"line 2: \*a is an alias; write out what is meant"),
        ("a: &a {b: {c: *a}}", r"line 1: \*a is an alias; write out what is meant"),
        ("a: {<<: {b: 1}}", "line 1: << merges nothing here; write out what is meant"),
        ("- a\n" * MOST_NODES, "it has more than 10,000 entries"),
        (
            " " * (1 << 20) + "a",
            "line 1: the text has 1,048,577 characters, and at most 1,048,576 are read",
        ),
        ("[" * 100_000, "lie more than 50 deep in each other"),
        ("- " * 100_000, "lie more than 50 deep in each other"),
        ("a: 1\na: 2", "line 2: 'a' is there twice; keep one of them"),
        ("1: a\ntrue: 2", "line 2: True is there twice"),
        ("a: !!omap []", "line 1: the tag '!!omap' is not supported; remove it"),
        ("a: !!timestamp x", "line 1: 'x' is no valid timestamp"),
        ("a: !!bool x", "line 1: 'x' is no valid bool"),
        ("a: " + ":".join(["1"] * 1000), "line 1: '1:1:1:.*it has more than 100 characters"),
        ("a\n---\nb", "line 2: not valid YAML: but found another document"),
    ],
)
def test_what_is_refused_and_soon(text: str, said: str) -> None:
    begun = monotonic()
    with pytest.raises(YamlError, match=said):
        read_yaml(text)
    assert monotonic() - begun < 20


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("a: [1, 2.5, true, null, x]", {"a": [1, 2.5, True, None, "x"]}),
        ("[=, <<, !!str 5]", ["=", "<<", "5"]),
    ],
)
def test_what_is_read(text: str, value: Any) -> None:
    assert read_yaml(text)[0] == value


def test_every_entry_has_its_line() -> None:
    _, lines = read_yaml("a:\n  x: 1\nb:\n  y:\n    - 2\n")
    assert lines == {(): 1, ("a",): 1, ("a", "x"): 2, ("b",): 3, ("b", "y"): 4, ("b", "y", 0): 5}
