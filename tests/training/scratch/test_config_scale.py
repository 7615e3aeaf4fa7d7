"""Configurations of the same shape, smaller: what is multiplied, what stays."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from pathlib import Path

import pytest

from surgeon.training.scratch.build import blueprint
from surgeon.training.scratch.config import parse_config, parse_scale, read_config_file, scale_config

PAPERS = Path(__file__).resolve().parents[3] / "recipes" / "train" / "papers"


def test_widths_become_small_and_counts_stay() -> None:
    config = read_config_file(PAPERS / "racks-2.8b.yaml")
    small = scale_config(config, 1 / 8)
    assert small.model == {
        **{name: value for name, value in config.model.items() if name != "vocab_size"},
        "hidden_size": 320,
        "intermediate_size": 896,
    }
    assert (small.racks, small.tokenizer, small.data) == (config.racks, config.tokenizer, config.data)
    # A 64th of the parameters and of the tokens: 512 windows of 2,048 are 64 of 256.
    assert (small.window, small.settings.batch, small.settings.steps) == (256, 64, config.settings.steps)
    assert small.settings.learning_rate == pytest.approx(3e-4 * sqrt(8))
    assert (small.settings.warmup, scale_config(config, 1 / 8, 191).settings.warmup) == (100, 10)


def test_windows_are_not_shorter_than_128_tokens() -> None:
    small = scale_config(read_config_file(PAPERS / "ladder-1.2b.yaml"), 1 / 64)
    assert (small.window, small.settings.batch) == (128, 8)  # 4M tokens through 4,096, in windows of 128


@pytest.mark.parametrize(
    "name",
    [
        "ladder-3.5b",
        "racks-13b",
        *(
            pytest.param(f"tracks-{size}-d4", marks=pytest.mark.thorough)
            for size in ("6b", "13b", "30b")
        ),
    ],
)
def test_the_papers_shapes_can_be_built_at_a_64th(name: str) -> None:
    config = replace(read_config_file(PAPERS / f"{name}.yaml"), tokenizer="demo")
    full, small = blueprint(config), blueprint(scale_config(config, 1 / 64))
    assert small.program == full.program
    assert small.config.racks == full.config.racks
    assert small.config.model["hidden_size"] == config.model["hidden_size"] / 64


def test_widths_have_their_names_and_heads_their_own() -> None:
    text = "surgeon: 1\nmodel: {}\ntokenizer: demo\ndata: demo:train\n"
    gpt2 = parse_config(text.replace("{}", "{model_type: gpt2, n_embd: 768, n_head: 12, n_layer: 3}"))
    assert scale_config(gpt2, 1 / 4).model == {
        "model_type": "gpt2",
        "n_embd": 192,
        "n_head": 12,
        "n_layer": 3,
        "n_inner": 768,
    }
    qwen = "{model_type: qwen3, hidden_size: 256, num_attention_heads: 8, head_dim: 64, intermediate_size: 512}"
    small = scale_config(parse_config(text.replace("{}", qwen)), 1 / 4).model
    assert (small["hidden_size"], small["head_dim"], small["intermediate_size"]) == (64, 16, 128)


def test_mistakes() -> None:
    for text in ("0", "2", "1/0", "small", "-1/4"):
        with pytest.raises(
            ValueError, match=f"a scale is above 0 and at most 1, such as 1/64 or 0.125, not '{text}'"
        ):
            parse_scale(text)
    assert parse_scale("1/64") == 1 / 64
    config = parse_config(
        "surgeon: 1\nmodel: {model_type: bert}\ntokenizer: demo\ndata: demo:train\n", "mine.yaml"
    )
    with pytest.raises(ValueError, match=r"mine.yaml:2: model: model_type 'bert' is not known"):
        scale_config(config, 0.5)
