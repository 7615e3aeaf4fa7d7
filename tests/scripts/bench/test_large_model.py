"""The random checkpoint is one that `transformers` loads, in shards of the size that was asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig

from scripts.bench.large_model import make_model

SHARD = 20_000


def small_config() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large") / "model"
    make_model(folder, small_config(), SHARD)
    return folder


def test_every_file_has_as_much_as_it_may(folder: Path) -> None:
    files = sorted(folder.glob("*.safetensors"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    contents = []
    for path in files:
        with safe_open(path, "pt") as file:
            assert {name for name, where in index["weight_map"].items() if where == path.name} == set(
                file.keys()
            )
            contents.append([file.get_tensor(name).nbytes for name in file.keys()])  # noqa: SIM118
    assert len(files) > 3
    assert all(sum(sizes) <= SHARD or len(sizes) == 1 for sizes in contents)
    assert sum(map(sum, contents)) == index["metadata"]["total_size"]


def test_transformers_loads_all_of_it(folder: Path) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.bfloat16}
    with torch.inference_mode():
        assert model(torch.tensor([[3, 1, 4]])).logits.isfinite().all()


def test_values_are_those_of_a_model_at_its_beginning(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, tensor in model.state_dict().items():
        if tensor.dim() == 1:
            assert abs(float(tensor.mean()) - 1) < 0.1, name
        else:
            assert float(tensor.std()) == pytest.approx(tensor.shape[1] ** -0.5, rel=0.1), name


def test_a_model_is_the_same_every_time(folder: Path, tmp_path: Path) -> None:
    make_model(tmp_path, small_config(), SHARD)
    for path in folder.glob("*.safetensors"):
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()
