"""Sweeps: which models a configuration says to train."""

from __future__ import annotations

import pytest

from surgeon.training.scratch.config import parse_config
from surgeon.training.scratch.sweep import parse_sweep

BASE = """\
surgeon: 1
model: {model_type: llama, num_hidden_layers: 2}
tokenizer: demo
data: demo:train
training: {steps: 3, seed: 7, learning_rate: 5.0e-3, arguments: {weight_decay: 0.1}}
"""
SWEEP = """\
sweep:
  programs:
    dense: {}
    ladder:
      operations: [ladder: {layers: "0:2"}]
    tracks: {tracks: {count: 2, depth: 1}}
  seeds: [0, 3]
  learning_rates: [2e-3, 0.01]
"""


def test_every_program_rate_and_seed() -> None:
    models = parse_sweep(BASE + SWEEP)
    assert [model.name for model in models][:5] == [
        *("dense-lr0.002-seed0", "dense-lr0.002-seed3", "dense-lr0.01-seed0", "dense-lr0.01-seed3"),
        "ladder-lr0.002-seed0",
    ]
    assert len(models) == 12
    last = models[-1].config
    assert (last.settings.seed, last.settings.rate, last.settings.steps) == (3, 0.01, 3)
    assert last.tracks is not None
    alone = parse_config(BASE + 'operations: [ladder: {layers: "0:2"}]\n').with_settings(seed=0, learning_rate=2e-3)
    assert models[4].config.to_yaml() == alone.to_yaml()


def test_one_seed_and_rate_are_those_of_training() -> None:
    (model,) = parse_sweep(BASE + "sweep: {programs: {dense: {}}}\n")
    assert (model.name, model.config) == ("dense-lr0.005-seed7", parse_config(BASE))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (SWEEP, "", "x.yaml:1: the key 'sweep' is missing, which says what to train"),
        ("tokenizer: demo", "tokenizer: demo\nprogram: A0 F0", "x.yaml:4: program stands under each program of the"),
        ("seeds: [0, 3]", "seeds: [0, 0]", "x.yaml:6: sweep: dense-lr0.002-seed0 would be trained twice"),
        ("seeds: [0, 3]", "seeds: [-1]", "x.yaml:12: .*not -1"),
        ("seeds: [0, 3]", "seeds: []", "x.yaml:12: sweep: seeds: List should have at least 1"),
        ("[2e-3, 0.01]", "[0.0]", "x.yaml:13: .*not 0.0"),
        ("seeds:", "seed:", "x.yaml:12: unknown key 'seed'; did you mean 'seeds'"),
        ("dense: {}", "a/b: {}", "x.yaml:8: the program's name 'a/b' is no folder's"),
        ("dense: {}", "dense: {window: 8}", "x.yaml:8: unknown key 'window' of a program"),
        ('{layers: "0:2"}', "{layer: 3}", "x.yaml:10: ladder needs layers"),
        ("depth: 1", "deep: 1", "x.yaml:11: .*unknown key 'deep'; did you mean 'depth'"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(before: str, after: str, message: str) -> None:
    text = BASE + SWEEP
    assert before in text
    with pytest.raises(ValueError, match=message):
        parse_sweep(text.replace(before, after), "x.yaml")


def test_a_sweep_is_not_trained_as_one_model() -> None:
    with pytest.raises(ValueError, match="x.yaml:6: sweep: it is of several models; train it as a sweep, or remove it"):
        parse_config(BASE + SWEEP, "x.yaml")
