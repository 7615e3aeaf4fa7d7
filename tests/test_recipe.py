"""Recipes: what they mean, and that every mistake is answered with the line, the value and what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from surgeon.recipe import parse_range, parse_recipe, read_recipe

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
        ('"4:10"}', '"4:10", size: two}', "recipe:4: pair: size: Input should be a valid integer, not 'two'"),
        ('"4:10"}', '"4:10", form: seq}', "recipe:4: pair: form: Input should be 'lp' or 'par', not 'seq'"),
        ('"4:10"}', '"4:40"}', "recipe:4: pair: layers 4:40 are out of range: the model's layers are 0:16"),
        ('"4:10"}', '"10:4"}', "recipe:4: pair: layers '10:4' are no range"),
        ('"4:10"}', "4:10}", "recipe:4: pair: layers must stand in quotes"),
        ("ladder: {layers: [", 'merge: {layers: ["5:8", ', "recipe:5: merge: layers 5:8 overlap"),
        ("depth: 13", "depth: 12", "recipe:6: expect: effective_depth 12 does not hold: the operations give 13"),
        ("points: 26", "points: 32", "recipe:6: expect: sync_points 32 does not hold: the operations give 26"),
        ("expect: {", "expect: {deph: 1, ", "recipe:6: unknown key 'deph'"),
        ("model: some/model", "modle: some/model", "recipe:2: unknown key 'modle'; did you mean 'model'?"),
        ("model: some/model", "model: 7", "recipe:2: model must be a folder or a hub name, not 7"),
        ("model: some/model\n", "", "recipe:1: the key 'model' is missing"),
        ("model:", "model: twice\nmodel:", "recipe:3: 'model' is there twice"),
        ("surgeon: 1", "surgeon: 2", "recipe:1: recipe format 2 is not known"),
        ("model: some/model", "model: m\nweights: sha256:12ab", "recipe:3: weights must be sha256: and 64 digits"),
        ("model: some/model", "model: m\nweights: 12", "recipe:3: weights must be sha256: and 64 digits"),
        ("model: some/model", "model: m\nweights:", "recipe:3: weights must be sha256: and 64 digits"),
        ("  - pair", "  - [pair", "recipe:5: not valid YAML"),
        ("  - pair: {", "  - {", "recipe:4: unknown operation 'layers'"),
    ],
)
def test_mistakes_name_line_value_and_remedy(before: str, after: str, said: str) -> None:
    assert before in GOOD
    with pytest.raises(ValueError, match=".") as caught:
        parse_recipe(GOOD.replace(before, after, 1)).program(16)
    assert str(caught.value).startswith(said)


def test_a_recipe_bound_to_a_model() -> None:
    own, weights, other = "0a" * 32, "b" * 64, "f" * 64
    bound = parse_recipe(GOOD.replace("operations:", f"weights: sha256:{own}\noperations:"), "found.yaml")
    assert bound.weights == parse_recipe(bound.to_yaml()).weights == own
    assert bound.program(16) == parse_recipe(GOOD).program(16)
    bound.require_model(own, weights)
    with pytest.raises(ValueError, match=f"found.yaml:3: weights: .*made for sha256:{own}.* has sha256:{other}; "):
        bound.require_model(other, weights)
    earlier = f"found.yaml:3: weights: sha256:{own} names the model's weights alone, .* write sha256:{other}, "
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
    with pytest.raises(ValueError, match="not valid YAML"):
        parse_recipe("surgeon: 1\nmodel: !!python/object/apply:os.system ['true']\noperations: []\n")


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    with pytest.raises(FileNotFoundError, match="there is no recipe"):
        read_recipe(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not a text file"):
        read_recipe(path)
    path.write_text(GOOD)
    assert read_recipe(path).source == str(path)


def test_ranges_are_python_slices() -> None:
    assert list(parse_range("4:7")) == [4, 5, 6]
    for wrong in ("4", "4:4", "-1:3", "a:b", "4:5:6", None):
        with pytest.raises(ValueError, match="are no range"):
            parse_range(wrong)
