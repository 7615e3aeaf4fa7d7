"""recipes/: the papers' configurations, applied to models of those sizes on meta tensors, which need no memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config

import surgeon
from surgeon.language.recipe import Recipe, read_recipe

FOLDER = Path(__file__).resolve().parents[2] / "recipes"
RECIPES = {path.stem: read_recipe(path) for path in sorted(FOLDER.glob("*.yaml"))}

LLAMA_8B = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
)
LLAMA_3B = LlamaConfig(
    hidden_size=3072,
    intermediate_size=8192,
    num_hidden_layers=28,
    num_attention_heads=24,
    num_key_value_heads=8,
    vocab_size=128256,
    tie_word_embeddings=True,
)
QWEN3_4B = Qwen3Config(
    hidden_size=2560,
    intermediate_size=9728,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    tie_word_embeddings=True,
)
QWEN3_14B = Qwen3Config(
    hidden_size=5120,
    intermediate_size=17408,
    num_hidden_layers=40,
    num_attention_heads=40,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
)
CONFIGS: dict[str, PreTrainedConfig] = {
    "meta-llama/Llama-2-7b-chat-hf": LlamaConfig(),  # the defaults are its sizes
    "meta-llama/Llama-3.2-3B-Instruct": LLAMA_3B,
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA_8B,
    "Qwen/Qwen3-4B": QWEN3_4B,
    "Qwen/Qwen3-14B": QWEN3_14B,
}
# Layer Parallelism, table 1: effective depths. Section 5 and figure 7: where the pairs end (layers count from 0).
TABLE_1 = {
    "meta-llama/Llama-2-7b-chat-hf": ({27, 26, 25, 24, 23}, 28),
    "meta-llama/Llama-3.2-3B-Instruct": ({24, 23, 22, 21, 20}, 25),
    "Qwen/Qwen3-4B": ({31, 30, 29, 28, 27}, 36 - 3),
    "Qwen/Qwen3-14B": ({35, 34, 33, 32, 31, 30}, 40 - 3),
}


@pytest.fixture(scope="module")
def models() -> dict[str, torch.nn.Module]:
    with torch.device("meta"):
        return {name: AutoModelForCausalLM.from_config(config) for name, config in CONFIGS.items()}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_its_model_and_costs_what_the_paper_says(
    name: str, models: dict[str, torch.nn.Module]
) -> None:
    recipe = RECIPES[name]
    model = models[recipe.model]
    layers = model.config.num_hidden_layers
    program = recipe.program(layers)
    depth = int(name.rpartition("-")[2]) if name.startswith("lp-") else layers
    assert recipe.expect.effective_depth == program.effective_depth() == depth
    # Two all-reduces for each layer of the effective depth; a ladder moves them, it saves none.
    assert recipe.expect.sync_points == program.sync_points(2) == 2 * depth
    surgeon.edit(model, str(program))
    assert surgeon.program_of(model) == program
    surgeon.restore(model)


@pytest.mark.parametrize("model", TABLE_1)
def test_every_row_of_table_1_is_there(model: str) -> None:
    depths, end = TABLE_1[model]
    mine = [
        recipe for name, recipe in RECIPES.items() if name.startswith("lp-") and recipe.model == model
    ]
    assert {recipe.expect.effective_depth for recipe in mine} == depths
    layers = CONFIGS[model].num_hidden_layers
    for recipe in mine:
        (stretch,) = only_operation(recipe, "pair")
        assert stretch.stop == end
        assert len(stretch) == 2 * (layers - recipe.expect.effective_depth)


def test_the_hybrids_of_ladder_residual() -> None:
    """The upper half of the layers, and layers 12 to the end (section 4.2.1 of Ladder Residual)."""
    mine = {
        name: only_operation(recipe, "ladder")
        for name, recipe in RECIPES.items()
        if name.startswith("ladder-")
    }
    assert mine == {
        "ladder-llama-3.1-8b-instruct-16l": (range(16, 32),),
        "ladder-llama-3.1-8b-instruct-20l": (range(12, 32),),
    }


def only_operation(recipe: Recipe, name: str) -> tuple[range, ...]:
    """The stretches of the recipe's one operation."""
    (operation,) = recipe.operations
    assert operation.name == name
    return operation.layers
