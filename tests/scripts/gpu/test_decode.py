"""scripts/gpu/speeds.py: decoding on the CPU, with a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from scripts.gpu import speeds


def test_what_a_pass_reads(tmp_path: Path) -> None:
    """Every weight once but the norms', in float32 here, and keys and values of half the way."""
    config, texts = speeds.SMALL, speeds.Load(3, 20, 10)
    folders = [
        speeds.make_model(tmp_path / str(n), one, "cpu")
        for n, one in enumerate((config, speeds.fused(config)))
    ]
    dense, fused = (speeds.open_engine(folder, texts, "cpu", "static") for folder in folders)
    attention = (
        config.hidden_size
        * config.head_dim
        * (2 * config.num_attention_heads + 2 * config.num_key_value_heads)
    )
    layer = attention + 3 * config.hidden_size * config.intermediate_size
    layers = config.num_hidden_layers
    kept = 2 * layers * config.num_key_value_heads * config.head_dim * 3 * 25
    expected = 4 * (layers * layer + config.hidden_size * config.vocab_size + kept)
    assert speeds.bytes_read(dense, texts) == speeds.bytes_read(fused, texts) == expected
    assert fused.plan.layers == 2
    found, seconds = speeds.continued(dense, texts)
    assert found != speeds.continued(fused, texts)[0]
    at_once = speeds.continued(dense, texts, at_once=4)
    assert at_once[0] == found
    assert (len(seconds), len(at_once[1])) == (9, 3)


def test_the_shape_of_three_billion_parameters() -> None:
    with torch.device("meta"):
        models = [LlamaForCausalLM(config) for config in (speeds.LARGE, speeds.fused(speeds.LARGE))]
    dense, fused = (sum(parameter.numel() for parameter in model.parameters()) for model in models)
    assert 3.1e9 < dense < 3.3e9
    # Half of two norms in each layer.
    assert dense - fused == speeds.LARGE.num_hidden_layers * speeds.LARGE.hidden_size


def test_bandwidth_is_that_of_the_faster_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.5, 0.2])
    monkeypatch.setattr(speeds, "shortest", lambda *_: next(times))
    # The copy moves 8000 bytes in half a second.
    assert speeds.bandwidth("cpu", 4000) == pytest.approx(4000 / 0.2)
