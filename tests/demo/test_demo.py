"""The demo model is whole and as small as promised, and its text is what it was not trained on."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import surgeon
import surgeon.demo
import surgeon.named
from surgeon.checkpoint.stored import Checkpoint
from surgeon.demo import library_files, library_text


def test_the_model_is_small_deep_and_groups_its_kv_heads() -> None:
    folder = surgeon.demo_model()
    assert sum(path.stat().st_size for path in folder.iterdir()) < 10e6
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["num_hidden_layers"] >= 16
    assert config["num_key_value_heads"] < config["num_attention_heads"]


def test_the_model_has_learnt_something() -> None:
    """On a file it has not seen it is far better than guessing among 2,048 tokens, and than a shuffled file allows."""
    model = surgeon.load(surgeon.demo_model())
    tokenizer = AutoTokenizer.from_pretrained(surgeon.demo_model())
    ids = torch.tensor(
        [tokenizer(text)["input_ids"][:256] for text in surgeon.demo_data() if len(text) > 2000][:8]
    )
    shuffled = ids[:, torch.randperm(256, generator=torch.Generator().manual_seed(0))]
    with torch.no_grad():
        perplexity, of_shuffled = (
            math.exp(model(input_ids=x, labels=x).loss.item()) for x in (ids, shuffled)
        )
    assert perplexity < 40
    assert of_shuffled > 10 * perplexity


def test_a_missing_model_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(surgeon.named, "MODEL_FOLDER", tmp_path)
    with pytest.raises(FileNotFoundError, match="train it again with scripts/demo_model/train"):
        surgeon.demo_model()


def test_data_is_the_held_out_part_in_another_order() -> None:
    documents = surgeon.demo_data()
    assert documents == surgeon.demo_data()
    assert sorted(documents) == sorted(library_text(held_out=True))
    assert documents != library_text(held_out=True)


def test_held_out_files_are_a_small_part_and_nowhere_else() -> None:
    held_out, others = library_files(held_out=True), library_files(held_out=False)
    assert not set(held_out) & set(others)
    assert 0.02 < len(held_out) / len(others) < 0.15
    assert not any("test" in path.parts or "site-packages" in path.parts for path in held_out + others)


def test_a_python_without_its_sources_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(FileNotFoundError, match="give a text file of your own instead"):
        surgeon.demo_data()


def test_the_recipe_on_the_page_of_recipes_names_the_demo_model() -> None:
    page = Path(__file__).parents[2] / "docs" / "recipes.md"
    assert f"weights: sha256:{Checkpoint(surgeon.demo_model()).model_hash()} " in page.read_text(
        encoding="utf-8"
    )
