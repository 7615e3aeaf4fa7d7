"""The contract of spaces of a search."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import pytest
from transformers import AutoConfig

from surgeon.cost.deployment import Deployment, Workload
from surgeon.language.operations.applied import Choice, Edit, as_choice
from surgeon.language.program import Program
from surgeon.language.recipe import Recipe, parse_recipe
from surgeon.opened import Model
from surgeon.searches.mixture import Mixture
from surgeon.searches.pricing import Pricing
from surgeon.searches.quantities import Aspect
from surgeon.searches.spaces import DEEPER, SPACES, Space, parse_spaces
from surgeon.searches.spaces.base import TIMES

_FAMILIES = ("llama", "gpt_neox")  # layers of two steps, and of one
_MIXTURE = "qwen3_moe"  # of spaces whose edits are of mixtures


def small_model(family: str = "llama", layers: int = 4, **config: Any) -> Model:
    """A small model to search, without any weights.

    Args:
        config: other sizes, as the architecture's configuration names them.
    """
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 97}
    sizes |= {"num_hidden_layers": layers, "max_position_embeddings": 128, "tie_word_embeddings": False}
    if family != "gpt_neox":
        sizes["num_key_value_heads"] = 2
    if family == _MIXTURE:
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return Model.of_config(AutoConfig.for_model(family, **(sizes | config)), family)


class SpaceContract:
    """Tests of one space, on a model whose layers have two steps, and one, alone and with all that are registered.

        class TestPairs(SpaceContract):
            @pytest.fixture
            def space(self):
                return SPACES["pair"]()

    Choices are drawn at random, the same every time.
    """

    @pytest.fixture
    def space(self) -> Space:
        """The space: an object of an entry of `surgeon.searches.spaces.SPACES`."""
        raise NotImplementedError(
            "give a fixture `space` that returns an object of surgeon.searches.spaces.SPACES"
        )

    @pytest.fixture(params=_FAMILIES)
    def model(self, request: pytest.FixtureRequest, space: Space) -> Model:
        """The model to search."""
        if space.of_mixtures and request.param != _FAMILIES[0]:
            pytest.skip("mixtures have layers of two steps")
        return small_model(_MIXTURE if space.of_mixtures else request.param)

    @pytest.fixture
    def alone(self, space: Space, model: Model) -> Mixture:
        """A search of this space only."""
        return Mixture((space,), model)

    @pytest.fixture
    def mixed(self, space: Space, model: Model) -> Mixture:
        """A search of this space and all others."""
        others = [other() for name, other in SPACES.items() if name != space.name]
        return Mixture(tuple(sorted((space, *others), key=lambda each: each.place)), model)

    def test_it_is_known_and_described(self, space: Space) -> None:
        assert SPACES.get(space.name) is type(space), "register it, so that searches find it"
        assert space.summary
        assert "\n" not in space.summary
        others = {other.place: name for name, other in SPACES.items() if name != space.name}
        assert space.place not in others, (
            f"{others[space.place]} has this place, too: which comes first?"
        )
        assert [*map(type, parse_spaces(space.name))] == [type(space)]
        with pytest.raises(ValueError, match=rf"^[^\n]*\b{space.name}\b[^\n]*$"):
            parse_spaces(f"{space.name}:no-such-thing")

    def test_its_edits_are_its_own(self, space: Space, model: Model) -> None:
        """Each is there once, lies within the model, and can be written and read."""
        edits = [*space.edits(model)]
        assert edits or model.family.steps_per_layer == 1, "it has to have edits of layers of two steps"
        assert len(set(edits)) == len(edits)
        for edit in edits:
            assert edit.space == space.name
            assert 0 <= edit.first < edit.stop <= model.num_layers
            assert Edit.parse(str(edit)) == edit

    def test_its_edits_claim_something_of_their_layers(self, space: Space, model: Model) -> None:
        for edit in space.edits(model):
            claims = space.claims(edit)
            assert claims, f"{edit} goes together with itself"
            assert {layer for _, layer in claims} <= set(edit.layers)

    def test_an_edit_changes_its_layers_alone(self, alone: Mixture) -> None:
        dense = alone.model.program
        for edit in alone.edits:
            program = alone.program([edit])
            assert program != dense
            steps = alone.model.family.steps_per_layer
            before = edit.first * steps
            after = (alone.model.num_layers - edit.stop) * steps
            assert program.nodes[:before] == dense.nodes[:before], f"{edit} changes what comes before"
            assert program.nodes[len(program) - after :] == dense.nodes[len(dense) - after :], (
                f"{edit}: what follows"
            )

    def test_what_an_edit_makes_is_written_as_a_recipe(self, alone: Mixture) -> None:
        for edit in alone.edits:
            check_choice(alone, (edit,))

    def test_edits_of_its_own_go_together(self, alone: Mixture) -> None:
        """Any two that do not exclude each other, and as many more as can be drawn."""
        for one, other in combinations(alone.edits, 2):
            if not alone.exclude(one, other):
                check_choice(alone, (one, other), written=False)
        for choice in drawn_choices(alone, 20):
            check_choice(alone, choice)

    def test_it_lessens_what_it_serves(self, space: Space) -> None:
        """By its name alone, where layers have two steps; times are of a hardware, and left out."""
        # Each of two ranks has several KV heads, of which it may have fewer.
        family = _MIXTURE if space.of_mixtures else _FAMILIES[0]
        alone = Mixture(
            (type(space)(),), small_model(family, num_attention_heads=8, num_key_value_heads=4)
        )
        for name in set(space.serves) - set(TIMES):
            aspect = Aspect("depth", deep=True) if name == DEEPER else Aspect(name)
            pricing = Pricing(alone.model, (aspect,), Deployment(2), Workload(1, 16, 8))
            prices = [pricing.price(aspect, program) for program in alone.single_edits]
            assert min(prices) < pricing.dense[aspect], f"no edit lessens {name}"

    def test_its_edits_go_together_with_those_of_others(self, space: Space, mixed: Mixture) -> None:
        own = [edit for edit in mixed.edits if edit.space == space.name]
        for edit in own:
            for other in mixed.edits:
                if not mixed.exclude(edit, other):
                    check_choice(mixed, (other, edit), written=False)
        for choice in drawn_choices(mixed, 20, own):
            check_choice(mixed, choice)

    def test_stretches_are_choices(self, alone: Mixture) -> None:
        stretches = [*alone.stretches()]
        assert bool(stretches) == bool(alone.edits)
        for stretch in stretches:
            assert not any(alone.exclude(one, other) for one, other in combinations(stretch, 2))
            assert stretch == sorted(stretch)
            touched = {layer for edit in stretch for layer in edit.layers}
            assert touched == set(range(min(touched), max(touched) + 1)), "a stretch is unbroken"
            check_choice(alone, stretch)

    def test_what_it_refuses_takes_a_line(self, space: Space, model: Model, alone: Mixture) -> None:
        """Edits that the model cannot have are no edits of the mixture; the reason takes one line."""
        for edit in set(space.edits(model)) - set(alone.edits):
            assert len(_refusal(alone, edit).splitlines()) <= 1
        if not alone.edits:
            with pytest.raises(ValueError, match=rf"^the space {space.name} has no edits of [^\n]*$"):
                alone.require_edits()


def check_choice(mixture: Mixture, choice: Sequence[Edit], written: bool = True) -> None:
    """Check that a choice gives a program, the same in any order, and as text; and, if asked for, as a recipe."""
    shown = ", ".join(map(str, choice))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            program = mixture.program(choice)
            again = program
            if written:
                recipe = parse_recipe(Recipe("small", mixture.operations(choice)).to_yaml())
                model = mixture.model
                steps = model.family.steps_per_layer
                again = recipe.program(model.num_layers, steps, model.layer_shapes)
        except ValueError as error:
            raise AssertionError(f"{shown}: {error}") from error
    assert program == mixture.program([*reversed(choice)]), (
        f"{shown}: the order of a choice means nothing"
    )
    assert program == again, f"{shown}: the recipe says something else"
    assert not written or Program.parse(str(program)) == program


def drawn_choices(mixture: Mixture, count: int, among: Sequence[Edit] = ()) -> Iterator[Choice]:
    """Draw choices to which nothing can be added, or a part of them; each with one edit of `among`, if any."""
    draw = random.Random(0)
    for _ in range(count if mixture.edits else 0):
        found = [draw.choice(among)] if among else []
        most = draw.randint(1, mixture.model.num_layers * 3)
        for edit in draw.sample(mixture.edits, len(mixture.edits)):
            if len(found) < most and mixture.is_free(found, edit):
                found.append(edit)
        yield as_choice(found)


def _refusal(mixture: Mixture, edit: Edit) -> str:
    try:
        mixture.program([edit])
    except ValueError as error:
        return str(error)
    return ""
