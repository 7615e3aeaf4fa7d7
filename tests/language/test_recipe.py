"""Recipes: what they mean, and that every mistake is answered with the line, the value and what would be right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surgeon.language.operations.base import parse_range
from surgeon.language.recipe import parse_recipe, read_recipe
from surgeon.named import is_recipe

GOOD = """\
surgeon: 1
model: some/model
operations:
  - pair: {layers: "4:10"}
  - ladder: {layers: ["4:10", "12:14"]}
expect: {effective_depth: 13, sync_points: 26}
"""


def test_operations_apply_in_order() -> None:
    recipe = parse_recipe(GOOD)
    program = str(recipe.program(16))
    assert recipe.model == "some/model"
    assert ">[A4 A5] >[F4 F5]" in program
    assert "A11 F11 >A12 >F12 >A13 >F13 A14" in program


def test_a_recipe_written_reads_the_same() -> None:
    recipe = parse_recipe(GOOD)
    again = parse_recipe(recipe.to_yaml())
    assert again.to_yaml() == recipe.to_yaml()
    assert again.program(16) == recipe.program(16)
    assert again.expect == recipe.expect
    nothing = parse_recipe("surgeon: 1\nmodel: m\noperations: []\n")
    assert parse_recipe(nothing.to_yaml()).operations == ()


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("pair:", "pare:", "recipe:4: unknown operation 'pare'; did you mean 'pair'?"),
        ('layers: "4:10"}', 'layrs: "4:10"}', "recipe:4: pair needs layers"),
        ('"4:10"}', '"4:10", siez: 3}', "recipe:4: pair has no parameter 'siez'; did you mean 'size'?"),
        (
            '"4:10"}',
            '"4:10", size: two}',
            "recipe:4: pair: size: Input should be a valid integer, not 'two'",
        ),
        (
            '"4:10"}',
            '"4:10", form: seq}',
            "recipe:4: pair: form: Input should be 'lp' or 'par', not 'seq'",
        ),
        (
            '"4:10"}',
            '"4:40"}',
            "recipe:4: pair: layers 4:40 are out of range: the model's layers are 0:16",
        ),
        ('"4:10"}', '"10:4"}', "recipe:4: pair: layers '10:4' are no range"),
        ('"4:10"}', "4:10}", "recipe:4: pair: layers must stand in quotes"),
        ("ladder: {layers: [", 'merge: {layers: ["5:8", ', "recipe:5: merge: layers 5:8 overlap"),
        (
            "depth: 13",
            "depth: 12",
            "recipe:6: expect: effective_depth 12 does not hold: the operations give 13",
        ),
        (
            "points: 26",
            "points: 32",
            "recipe:6: expect: sync_points 32 does not hold: the operations give 26",
        ),
        ("expect: {", "expect: {deph: 1, ", "recipe:6: unknown key 'deph'"),
        (
            "model: some/model",
            "modle: some/model",
            "recipe:2: unknown key 'modle'; did you mean 'model'?",
        ),
        ("model: some/model", "model: 7", "recipe:2: model must be a folder or a hub name, not 7"),
        ("model: some/model\n", "", "recipe:1: the key 'model' is missing"),
        ("model:", "model: twice\nmodel:", "recipe:3: 'model' is there twice"),
        ("surgeon: 1", "surgeon: 2", "recipe:1: recipe format 2 is not known"),
        (
            "model: some/model",
            "model: m\nweights: sha256:12ab",
            "recipe:3: weights must be sha256: and 64 digits",
        ),
        (
            "model: some/model",
            "model: m\nweights: 12",
            "recipe:3: weights must be sha256: and 64 digits",
        ),
        ("model: some/model", "model: m\nweights:", "recipe:3: weights must be sha256: and 64 digits"),
        (
            "model: some/model",
            "model: 2020-13-45",
            "recipe:2: '2020-13-45' is no valid timestamp (month must be in",
        ),
        (
            "model: some/model",
            "model: 2020-01-02",
            "recipe:2: model must be a folder or a hub name, not datetime.date(",
        ),
        (
            "model: some/model",
            "model: 1.0e+400",
            "recipe:2: model must be a folder or a hub name, not inf",
        ),
        ("model: some/model", "model: !!float x", "recipe:2: 'x' is no valid float (could not convert"),
        ("model: some/model", "model: 0x" + "f" * 9999, "recipe:2: '0xfffffff"),
        (
            "model: some/model",
            "model: !!binary YQ==",
            "recipe:2: the tag '!!binary' is not supported; remove it",
        ),
        (
            "model: some/model",
            "model: !!set {a}",
            "recipe:2: the tag '!!set' is not supported; remove it",
        ),
        (
            "model: some/model",
            "model: a\x07b",
            r"recipe:2: not valid YAML: the character '\x07' cannot stand in it",
        ),
        (
            "model: some/model",
            r'model: "a\ab"',
            r"recipe:2: model must be a folder or a hub name, not 'a\x07b'",
        ),
        ("model: some/model", r'model: "\ud800"', r"recipe:2: '\ud800' has characters that are none"),
        ("model: some/model", r'model: "\Uffffffff"', "recipe:2: not valid YAML: "),
        ("model: some/model", "model: ' '", "recipe:2: model must be a folder or a hub name, not ' '"),
        ("model: some/model", "model: *b", "recipe:2: *b is an alias; write out what is meant"),
        (
            "model: some/model",
            "model: m\n<<: 5",
            "recipe:3: << merges nothing here; write out what is meant",
        ),
        ("model: some/model", "model: m\n5: 6", "recipe:3: unknown key 5; known: surgeon, model"),
        (
            "model: some/model",
            "model: m\n? [a]\n: 6",
            "recipe:3: a key is a text or a number, not a list",
        ),
        (
            "model: some/model",
            "model: " + "[" * 2000,
            "recipe:2: lists and mappings lie more than 50 deep",
        ),
        ("surgeon: 1", "surgeon: true", "recipe:1: recipe format True is not known; write surgeon: 1"),
        ("pair:", "5:", "recipe:4: unknown operation 5; known: "),
        ('"4:10"}', '"4:10", 5: 3}', "recipe:4: pair has no parameter 5; known: "),
        (
            "depth: 13",
            "depth: .nan",
            "recipe:6: expect: effective_depth: Input should be a finite number, not nan",
        ),
        (
            "  - pair: {",
            "  - tracks: {depth: 2, count: 10000000000, ",
            "recipe:4: tracks: count must be at least 2",
        ),
        ("  - pair", "  - [pair", "recipe:5: not valid YAML"),
        ("  - pair: {", "  - {", "recipe:4: unknown operation 'layers'"),
    ],
)
def test_mistakes_name_line_value_and_remedy(before: str, after: str, said: str) -> None:
    assert before in GOOD
    with pytest.raises(ValueError, match=".") as caught:
        parse_recipe(GOOD.replace(before, after, 1)).program(16)
    assert str(caught.value).startswith(said)


ANYTHING = st.recursive(
    st.one_of(
        st.sampled_from(
            [
                "surgeon: 1",
                "1",
                "pair",
                '"4:10"',
                "*a",
                "<<",
                "2020-13-45",
                "1e400",
                "!!set",
                "{",
                "[",
                "-",
            ]
        ),
        st.text(max_size=8),
        st.integers(-9, 10**30).map(str),
        st.sampled_from(
            ["!!int", "!!float", "!!timestamp", "!!bool", "!!null", "!!str", "!!map", "!!seq", "!x"]
        ),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
        st.lists(st.tuples(inner, inner), max_size=3).map(
            lambda items: "{" + ", ".join(f"{key}: {value}" for key, value in items) + "}"
        ),
        inner.map(lambda text: f"&a {text}"),
        inner.map(lambda text: f"!!int {text}"),
    ),
    max_leaves=5,
)


@settings(derandomize=True, database=None, max_examples=30)
@given(
    ANYTHING,
    st.sampled_from(["surgeon: 1", "1", "some/model", "pair", '"4:10"', "13", "layers", "pair:"]),
)
def test_whatever_stands_in_it_is_a_recipe_or_a_mistake_on_a_line(text: str, place: str) -> None:
    for recipe in (text, GOOD.replace(place, text, 1)):
        try:
            parse_recipe(recipe).program(16)
        except ValueError as error:
            assert re.match(r"recipe:\d+: ", str(error)), error  # noqa: PT017 - that there is one is not expected


def test_a_recipe_bound_to_a_model() -> None:
    own, weights, other = "0a" * 32, "b" * 64, "f" * 64
    bound = parse_recipe(
        GOOD.replace("operations:", f"weights: sha256:{own}\noperations:"), "found.yaml"
    )
    assert bound.weights == parse_recipe(bound.to_yaml()).weights == own
    assert bound.program(16) == parse_recipe(GOOD).program(16)
    bound.require_model(own, weights)
    with pytest.raises(
        ValueError, match=f"found.yaml:3: weights: .*made for sha256:{own}.* has sha256:{other}; "
    ):
        bound.require_model(other, weights)
    earlier = (
        f"found.yaml:3: weights: sha256:{own} names the model's weights alone, .* write sha256:{other}, "
    )
    with pytest.raises(ValueError, match=earlier):
        bound.require_model(other, own)
    free = parse_recipe(GOOD)
    free.require_model(other, weights)
    assert (free.weights, "weights" in free.to_yaml()) == (None, False)


@pytest.mark.parametrize("text", ["", "[]", "just words", "surgeon: 1\nmodel: m\noperations: {}\n"])
def test_what_is_no_recipe_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"recipe:\d"):
        parse_recipe(text)


def test_yaml_tags_do_not_run_code() -> None:
    with pytest.raises(
        ValueError, match="recipe:2: the tag '!!python/object/apply:os.system' is not supported"
    ):
        parse_recipe("surgeon: 1\nmodel: !!python/object/apply:os.system ['true']\noperations: []\n")


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    with pytest.raises(FileNotFoundError, match="there is no recipe"):
        read_recipe(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not a text file"):
        read_recipe(path)
    path.write_text("#" * (1 << 23))
    with pytest.raises(ValueError, match="has 8,388,608 bytes, which is too much for a recipe"):
        read_recipe(path)
    path.write_text(GOOD)
    assert read_recipe(path).source == str(path)
    assert is_recipe("Recipe.YAML")
    assert is_recipe("recipe.yml")
    assert not is_recipe("yaml")


def test_ranges_are_python_slices() -> None:
    assert list(parse_range("4:7")) == [4, 5, 6]
    for wrong in ("4", "4:4", "-1:3", "a:b", "4:5:6", None):
        with pytest.raises(ValueError, match="are no range"):
            parse_range(wrong)
