"""YAML from anybody: what is read, and that nothing small stands for something without end."""

from __future__ import annotations

from time import monotonic
from typing import Any

import pytest

from surgeon.language.yaml import MOST_NODES, YamlError, read_yaml

LAUGHS = "a0: &a0 [lol, lol]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
MERGES = "a0: &a0 {k: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 40))
LONG_TEXTS = f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 1000)}]\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (LAUGHS, "with its aliases written out, it has more than 10,000 entries"),
        (MERGES, "with its aliases written out, it has more than 10,000 entries"),
        (LONG_TEXTS, "with its aliases written out, it has more than 1,048,576 characters"),
        ("- a\n" * MOST_NODES, "it has more than 10,000 entries"),
        (" " * (1 << 20) + "a", "line 1: the text has 1,048,577 characters, and at most 1,048,576 are read"),
        ("[" * 100_000, "lie more than 50 deep in each other"),
        ("- " * 100_000, "lie more than 50 deep in each other"),
        ("a: &a {b: {c: *a}}", "line 1: it has an alias to itself inside"),
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
    assert monotonic() - begun < 20  # where these would be written out, it takes longer than anybody waits


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("a: [1, 2.5, true, null, x]", {"a": [1, 2.5, True, None, "x"]}),
        ("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}", {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}}),
        ("a: {<<: [{x: 1}, {x: 2, y: 2}]}", {"a": {"x": 1, "y": 2}}),
        ("a: {<<: {<<: {x: 1}, y: 2}}", {"a": {"x": 1, "y": 2}}),
        ("[=, <<, !!str 5]", ["=", "<<", "5"]),
    ],
)
def test_what_is_read(text: str, value: Any) -> None:
    assert read_yaml(text).value == value


def test_every_entry_has_its_line() -> None:
    lines = read_yaml("a: &a\n  x: 1\nb:\n  <<: *a\n  y:\n    - 2\n").lines
    assert lines == {(): 1, ("a",): 1, ("a", "x"): 2, ("b",): 3, ("b", "x"): 2, ("b", "y"): 5, ("b", "y", 0): 6}
