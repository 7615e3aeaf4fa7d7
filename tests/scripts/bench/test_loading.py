"""The random checkpoint whose loading is measured is one that the runtime loads, in several shards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from scripts.bench import loading
from surgeon.checkpoint.read import Checkpoint
from surgeon.runtime.comm.collectives import Alone
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.memory import footprint


def test_a_checkpoint_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "SHARD_BYTES", 20_000)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
    )
    loading.make_model(tmp_path, config)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    checkpoint = Checkpoint(tmp_path)
    assert {checkpoint.dtype(name) for name in checkpoint.names()} == {torch.bfloat16}
    plan = make_plan(tmp_path, 1, 32, dtype="bfloat16")
    engine = RankEngine(plan, Alone(), torch.device("cpu"))
    assert engine.vocabulary.embedding.dtype == torch.bfloat16
    (share,) = footprint(plan).weights
    assert share == 2 * sum(
        rows * columns for _, (rows, *rest) in loading.shapes(config) for columns in rest
    )  # norms are left out
