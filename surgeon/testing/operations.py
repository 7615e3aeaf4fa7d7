"""The contract of operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import combinations, product
from typing import Any, ClassVar

import pytest

from surgeon.language.operations.applied import AppliedOperation
from surgeon.language.operations.base import VARIANTS, Operation, show_range
from surgeon.language.operations.pair import pair
from surgeon.language.operations.prune import prune
from surgeon.language.operations.variants import variant
from surgeon.language.program import Program
from surgeon.language.recipe import parse_recipe
from surgeon.language.sublayer import LayerShapes

LAYERS = 8
STRETCHES = (range(2, 6), range(0, 8), range(1, 3), range(3, 4), range(2, 7))
RANKS = 2
STEPS_PER_LAYER = (2, 1)
_QUERIES = (32, 32)
_KEYS = (16, 32)
_NEURONS = (48, 32)
SHAPES = LayerShapes(
    {
        "q": _QUERIES,
        "k": _KEYS,
        "v": _KEYS,
        "o": _QUERIES,
        "gate": _NEURONS,
        "up": _NEURONS,
        "down": (32, 48),
    },
    units={"A": 2, "F": 48},
)


class OperationContract:
    """Tests of one operation, on models whose layers have two steps, and one.

        class TestParallel(OperationContract):
            @pytest.fixture
            def operation(self):
                return OPERATIONS["parallel"]

    Attributes:
        parameters: a value for each parameter that has no default.
        edits_steps: whether it applies to steps that other operations made, too, as `ladder` does.
        draws_weights: whether its seed is about weights, which no program tells, as that of `width` is.
        shapes: of the models' layers.
    """

    parameters: ClassVar[dict[str, Any]] = {}
    edits_steps: ClassVar[bool] = False
    draws_weights: ClassVar[bool] = False
    shapes: ClassVar[LayerShapes] = SHAPES

    @pytest.fixture
    def operation(self) -> Operation:
        """The operation: an entry of `surgeon.language.operations.OPERATIONS`."""
        raise NotImplementedError(
            "give a fixture `operation` that returns an entry of surgeon.language.operations.OPERATIONS"
        )

    @pytest.fixture
    def given(self, operation: Operation) -> dict[str, Any]:  # noqa: ARG002 - of which several may be tested in turn
        """The parameters it is tested with."""
        return self.parameters

    def test_it_is_described_in_a_sentence(self, operation: Operation) -> None:
        assert operation.summary.endswith((".", ")."))

    @pytest.mark.parametrize("steps_per_layer", STEPS_PER_LAYER)
    def test_it_says_what_it_makes_of_a_program(
        self, operation: Operation, given: dict[str, Any], steps_per_layer: int
    ) -> None:
        """The program can be read again, is the same every time, and differs in the stretch alone."""
        dense = Program.dense(LAYERS, steps_per_layer)
        made = {
            layers: _make(partial(operation.apply, dense, layers, self.shapes, **given))
            for layers in STRETCHES
        }
        applied = {layers: program for layers, program in made.items() if program is not None}
        for layers, program in applied.items():
            assert Program.parse(str(program)) == program
            assert operation.apply(dense, layers, self.shapes, **given) == program
            assert {layer for sublayer in program.sublayers() for layer in sublayer.layers} <= set(
                range(LAYERS)
            )
            before = layers.start * steps_per_layer
            after = (LAYERS - layers.stop) * steps_per_layer
            assert program.nodes[:before] == dense.nodes[:before], "what comes before the stretch stays"
            assert program.nodes[len(program.nodes) - after :] == dense.nodes[len(dense) - after :], (
                "and what comes after"
            )
        assert applied or steps_per_layer == 1, "it has to apply to layers of two steps"

    def test_its_seed_is_all_that_is_random(self, operation: Operation, given: dict[str, Any]) -> None:
        if "seed" not in operation.parameters.model_fields:
            pytest.skip("nothing is random")
        dense = Program.dense(LAYERS)
        layers = range(LAYERS)
        by_seed = {
            seed: operation.apply(dense, layers, self.shapes, **{**given, "seed": seed})
            for seed in range(20)
        }
        assert (len(set(by_seed.values())) > 1) != self.draws_weights
        for seed, program in by_seed.items():
            assert operation.apply(dense, layers, self.shapes, **{**given, "seed": seed}) == program

    @pytest.mark.parametrize("steps_per_layer", STEPS_PER_LAYER)
    def test_layers_that_are_not_there_are_refused(
        self, operation: Operation, given: dict[str, Any], steps_per_layer: int
    ) -> None:
        dense = Program.dense(6, steps_per_layer)
        with pytest.raises(ValueError, match=r"layers 4:9 are out of range: the model's layers are 0:6"):
            operation.apply(dense, range(4, 9), self.shapes, **given)
        with pytest.raises(ValueError, match=r"layers 4:4 are empty"):
            operation.apply(dense, range(4, 4), self.shapes, **given)
        with pytest.raises(ValueError, match=r"layers 2:5 overlap"):
            operation.apply(prune(dense, range(1, 3)), range(2, 5), self.shapes, **given)

    def test_layers_another_operation_changed_are_refused(
        self, operation: Operation, given: dict[str, Any]
    ) -> None:
        if self.edits_steps:
            pytest.skip("it applies to steps that others made")
        with pytest.raises(
            ValueError, match=r"layers 3:6 overlap with what an earlier operation changed"
        ):
            operation.apply(pair(Program.dense(6), range(0, 4)), range(3, 6), self.shapes, **given)

    @pytest.mark.parametrize("steps_per_layer", STEPS_PER_LAYER)
    def test_its_maps_have_a_program_for_every_stretch(
        self, operation: Operation, steps_per_layer: int
    ) -> None:
        dense = Program.dense(LAYERS, steps_per_layer)
        for name, heatmap in operation.heatmaps.items():
            assert heatmap.title, f"{name} needs a title"
            assert heatmap.group >= 1
            assert (heatmap.varied is None) == (not heatmap.values), (
                f"{name} varies a parameter that has values"
            )
            assert {heatmap.varied} - {None} <= set(operation.parameters.model_fields)
            seeded: dict[str, Any] = {"seed": 3} if heatmap.is_seeded else {}
            columns: list[dict[str, Any]] = [
                {heatmap.varied or "": value} for value in heatmap.columns(0, self.shapes)
            ] or [{}]
            for (first, end), column in product(combinations(range(LAYERS + 1), 2), columns):
                layers = range(first, end)
                more = seeded | column
                program = _make(partial(heatmap, dense, layers, self.shapes, **more))
                assert program is not None or steps_per_layer == 1, (
                    f"{name} has to apply to layers of two steps"
                )
                if program is None:
                    continue
                assert Program.parse(str(program)) == program
                assert heatmap(dense, layers, self.shapes, **more) == program
                if len(layers) < heatmap.group:
                    assert program == dense, (
                        f"{name} takes {heatmap.group} layers together, so that fewer stay as they are"
                    )

    @pytest.mark.parametrize("steps_per_layer", STEPS_PER_LAYER)
    def test_its_variants_have_a_program(self, operation: Operation, steps_per_layer: int) -> None:
        dense = Program.dense(LAYERS, steps_per_layer)
        layers = range(2, 6)
        for shown, declared in operation.variants.items():
            assert (":" in shown) == (declared.argument is not None), (
                f"{shown}: the number stands behind a colon"
            )
            assert declared.over is None or declared.over in VARIANTS
            assert (
                not {declared.argument, declared.ranks} - {None} - set(operation.parameters.model_fields)
            )
            name = shown if declared.argument is None else f"{shown.partition(':')[0]}:2"
            start = f"{name} of layers {show_range(layers)}: "
            program = _make(partial(variant, name, dense, layers, RANKS), start)
            assert program is not None or steps_per_layer == 1, (
                f"{name} has to apply to layers of two steps"
            )
            if program is not None:
                assert Program.parse(str(program)) == program
                assert program != dense

    def test_recipes_have_it(self, operation: Operation, given: dict[str, Any]) -> None:
        layers = range(2, 6)
        applied = AppliedOperation(operation.name, (layers,), given)
        recipe = parse_recipe(_recipe(applied.to_yaml()))
        (again,) = recipe.operations
        assert (again.name, again.layers, again.parameters) == (operation.name, (layers,), given)
        program = recipe.program(LAYERS, shapes=self.shapes)
        assert program == operation.apply(Program.dense(LAYERS), layers, self.shapes, **given)
        defaults = {
            name: field.default
            for name, field in operation.parameters.model_fields.items()
            if not field.is_required()
        }
        written = AppliedOperation(operation.name, (layers,), {**defaults, **given}).to_yaml()
        assert parse_recipe(_recipe(written)).program(LAYERS, shapes=self.shapes) == program

    def test_recipes_refuse_what_it_does_not_know(
        self, operation: Operation, given: dict[str, Any]
    ) -> None:
        written = AppliedOperation(operation.name, (range(2, 6),), {**given, "lair": 1}).to_yaml()
        with pytest.raises(ValueError, match=f"recipe:4: {operation.name} has no parameter 'lair'; "):
            parse_recipe(_recipe(written))
        for name, field in operation.parameters.model_fields.items():
            rest = {key: value for key, value in given.items() if key != name}
            wrong = AppliedOperation(operation.name, (range(2, 6),), {**rest, name: [None]}).to_yaml()
            with pytest.raises(ValueError, match=rf"recipe:4: {operation.name}: {name}[.\w]*: "):
                parse_recipe(_recipe(wrong))
            if field.is_required():
                missing = AppliedOperation(operation.name, (range(2, 6),), rest).to_yaml()
                with pytest.raises(
                    ValueError, match=f"recipe:4: {operation.name}: {name}: Field required"
                ):
                    parse_recipe(_recipe(missing))


def _recipe(applied: str) -> str:
    return f"surgeon: 1\nmodel: demo\noperations:\n  - {applied}\n"


def _make(make: Callable[[], Program], start: str = "") -> Program | None:
    """The program, or None if it is refused, in one line with a certain start."""
    try:
        return make()
    except ValueError as error:
        refusal = str(error)
    assert refusal.startswith(start)
    assert len(refusal.splitlines()) == 1
    return None
