"""What a recipe's operations make of a model that is known by its configuration."""

from __future__ import annotations

from typing import Any

from surgeon.language.operations.within import require_whole_layers
from surgeon.language.program import Program
from surgeon.language.recipe import Recipe
from surgeon.models.families import family_of


def recipe_program(recipe: Recipe, config: Any, own: Program | None = None) -> Program:
    """The program that a recipe's operations make of a model with this `transformers` configuration.

    Args:
        own: what the model runs in place of its layers one after the other, if it does.

    Raises:
        ValueError: as `Recipe.program`; if the architecture is not supported, or the model runs a program of its own
            that is not its layers, each whole and once.
    """
    family = family_of(config)
    layers = int(config.num_hidden_layers)
    if own is not None:
        try:
            require_whole_layers(own, layers)
        except ValueError as error:
            raise ValueError(
                f"{recipe.source}: {recipe.model or 'the model'} is an edited model, and operations change whole "
                f"layers; name the model it was made of, or give the whole program ({error})"
            ) from error
    return recipe.program(layers, family.steps_per_layer, family.layer_shapes(config), own)
