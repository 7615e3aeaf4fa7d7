"""recipes/train/papers/: every configuration parses, can be built, and is as large and as wide as its paper says."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from surgeon.training.scratch.build import Blueprint, blueprint
from surgeon.training.scratch.config import ScratchConfig, read_config_file
from tests.tiny_models import sizes_of

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "train" / "papers"
CONFIGS = {path.stem: read_config_file(path) for path in sorted(FOLDER.glob("*.yaml"))}
TRACKS = [f"tracks-{size}-d{depth}" for size in ("6b", "13b", "30b") for depth in (2, 4, 8)]
# All-reduces of a pass on ranks: two a layer, one of attention beside MLP, and 8 tracks meet every D layers.
SYNCS = {
    "dense-1.2b": 44,
    "ladder-1.2b": 44,
    "attention-mlp-1.2b": 22,
    "ladder-1.5b": 56,
    "dense-3.5b": 60,
    "ladder-3.5b": 60,
    "attention-mlp-3.5b": 30,
    "ladder-4.5b": 76,
    "dense-6b": 64,
    "dense-13b": 80,
    "dense-30b": 96,
    **dict(zip(TRACKS, (16, 8, 4, 20, 10, 5, 24, 12, 6), strict=True)),
    "racks-1b": 32,
    "racks-2.8b": 64,
    "racks-7b": 64,
    "racks-13b": 80,
}
# Tokens of the whole run, in billions (Ladder Residual, section 4.1; Parallel Track, section 3.1; the article).
TOKENS = {"1.2b": 100, "1.5b": 100, "3.5b": 100, "4.5b": 100, "6b": 800, "30b": 400}
SOME = ("ladder-1.2b", "tracks-6b-d8", "racks-1b")


def size_of(name: str) -> str:
    return next(part for part in name.split("-") if part.endswith("b"))


def plan_of(config: ScratchConfig) -> Blueprint:
    """With the demo's tokenizer, which needs no network; the configuration says how large the vocabulary is."""
    return blueprint(replace(config, tokenizer="demo"))


def test_every_one_is_known() -> None:
    assert CONFIGS.keys() == SYNCS.keys()


@pytest.mark.parametrize(
    "name", [name if name in SOME else pytest.param(name, marks=pytest.mark.thorough) for name in SYNCS]
)
def test_it_describes_the_papers_model(name: str) -> None:
    plan = plan_of(CONFIGS[name])
    assert plan.program.sync_points(8) == SYNCS[name]
    dense = plan_of(replace(plan.config, tracks=None))
    # LLaMA's 7B are 6.74B.
    assert dense.parameters == pytest.approx(1e9 * float(size_of(name)[:-1]), rel=0.04)
    layers = [sizes_of(one.architecture)[0] for one in (dense, plan)]
    # Tracks have narrower embeddings, and as large layers.
    assert layers[1] == pytest.approx(layers[0], rel=0.01)


@pytest.mark.parametrize("name", SYNCS)
def test_it_trains_as_printed(name: str) -> None:
    settings, racks = CONFIGS[name].settings, CONFIGS[name].racks
    tokens = settings.tokens_on(CONFIGS[name].window) / 1e9
    if racks is None:
        assert tokens == pytest.approx(TOKENS.get(size_of(name), 400), rel=0.001)
    else:
        parameters = float(size_of(name)[:-1])
        assert (
            tokens == pytest.approx(9.7, rel=0.001) if name == "racks-13b" else tokens < 2 * parameters
        )
        assert len(racks.ranges) == 4
    if size_of(name) in ("1.2b", "1.5b", "3.5b", "4.5b"):
        assert settings.batch * CONFIGS[name].window == 4 * 1024**2
        assert settings.warmup * settings.batch * CONFIGS[name].window == pytest.approx(8e9, rel=0.001)
        least = json.loads(settings.arguments["lr_scheduler_kwargs"])["min_lr_rate"]
        assert (settings.learning_rate, settings.rate * least) == (3e-4, pytest.approx(3e-5))


@pytest.mark.parametrize("size", ["6b", "13b", "30b"])
def test_tracks_have_the_heads_of_table_1(size: str) -> None:
    layers, heads = {"6b": (32, 4), "13b": (40, 5), "30b": (48, 8)}[size]
    model, tracks = CONFIGS[f"tracks-{size}-d4"].model, CONFIGS[f"tracks-{size}-d4"].tracks
    assert tracks is not None
    assert (model["num_hidden_layers"], model["num_attention_heads"] // tracks.count) == (layers, heads)
    assert model["num_key_value_heads"] // tracks.count == 1
    assert math.isclose(model["hidden_size"] / model["num_attention_heads"], 128)
