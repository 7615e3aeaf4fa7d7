"""A step of training on paper, against sums by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import LlamaConfig

from surgeon.cost.hardware_file import load_hardware
from surgeon.cost.training import TrainingLoad, training_step
from surgeon.language.program import Program
from surgeon.models.shapes import ModelShapes

CONFIG = LlamaConfig(
    hidden_size=1024,
    intermediate_size=2048,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=10_000,
    tie_word_embeddings=True,
)
LOAD = TrainingLoad(ModelShapes.of("small", CONFIG), Program.dense(4), batch=64, micro_batch=4, window=1024)
H100 = load_hardware("h100-sxm")
LAYER = 2 * 1024**2 + 2 * 1024 * 512 + 3 * 1024 * 2048
PARAMETERS = 4 * LAYER + 10_000 * 1024


def test_one_device_by_hand() -> None:
    assert LOAD.parameters == PARAMETERS
    token = 2 * PARAMETERS + 4 * 4 * 1024 * 512  # each layer's queries and values over half a window of 1,024
    assert LOAD.forward_flops == token
    step = training_step(LOAD, H100, 1)
    layer = 16 * 1024 + 2 * 2 * (1024 + 512) + 2 * 3 * 2048
    kept = 4 * 1024 * (4 * layer + 10 * 10_000)  # of 4 windows
    products = 3 * token * 64 * 1024 / (989.4e12 * 0.52)
    assert step.computing == pytest.approx(products + 16 * 3 * kept / (3.35e12 * 0.92))
    assert step.updating == pytest.approx(28 * PARAMETERS / (3.35e12 * 0.92))
    assert (step.how, step.waiting) == ("ddp", 0)
    assert step.seconds == step.computing + step.updating
    assert step.memory == 18 * PARAMETERS + kept
    assert step.tokens_per_day == pytest.approx(64 * 1024 / step.seconds * 86400)


def test_devices_share_the_batch_and_where_it_must_be_the_model() -> None:
    eight = training_step(LOAD, H100, 8)
    assert eight.computing == pytest.approx(training_step(LOAD, H100, 1).computing / 8)
    small = replace(H100, device=replace(H100.device, memory=1.5e9))
    assert training_step(LOAD, small, 1).fits is False
    sharded = training_step(LOAD, small, 8)
    assert (sharded.how, sharded.fits) == ("fsdp", True)
    tiny = training_step(LOAD, replace(H100, device=replace(H100.device, memory=1.1e9)), 8)
    assert tiny.how == "fsdp, recomputed"
    assert tiny.computing == pytest.approx(sharded.computing * 4 / 3)


def test_what_late_steps_and_pairs_change_nothing_of() -> None:
    for text in (">A0 >F0 >A1 >F1 >A2 >F2 >A3 >F3", "[A0 F0] [A1 F1] [A2 F2] [A3 F3]"):
        assert training_step(replace(LOAD, program=Program.parse(text)), H100, 8) == training_step(LOAD, H100, 8)


def test_a_batch_that_is_not_shared_out() -> None:
    with pytest.raises(ValueError, match="a batch of 64 windows is not shared out to 65 devices; take 1 to 64"):
        training_step(LOAD, H100, 65)
