"""Whole engines with the kernels and without them."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from surgeon.machine import torch_threads
from surgeon.runtime.batching.blocks import blocks_for
from surgeon.runtime.batching.request import Row, Wanted
from surgeon.runtime.comm.collectives import Alone
from surgeon.runtime.kernels import functions
from surgeon.runtime.kernels.functions import kernels
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.model.linear import Panels, Transposed
from surgeon.runtime.plan.checks import make_plan

FAMILIES = (
    "llama",
    "qwen3",
    "gemma2",
    "opt",
    "gpt_neox",
    "phi3",
    "gpt_neo",
    "smollm3",
    "granite",
    "mistral",
)
FAMILIES += ("gemma3_text", "olmo3")
LENGTHS = (3, 21, 40)  # of the prompts: fewer and more tokens than windows and blocks have


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_logits(
    family: str,
    dtype: str,
    tiny_model: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of texts of several lengths, computed together, whose blocks lie scattered; the caches hold the same, too."""
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    plan = make_plan(tmp_path, 1, 64, dtype=dtype)
    found = logits_of(RankEngine(plan, Alone(), torch.device("cpu")))
    monkeypatch.setattr(functions, "kernels", lambda: None)
    without = RankEngine(plan, Alone(), torch.device("cpu"))
    assert all(
        getattr(made.norm, "kernels", None) is None for made in without.model.program.sublayers.values()
    )
    expected = logits_of(without)
    assert (found - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_head_that_is_tied_to_the_embedding(
    family: str, tiny_model: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is packed, and there is no other copy of the embedding: rows of it are read where it is packed."""
    tiny_model(family, vocab_size=128, hidden_size=64, tie_word_embeddings=True).save_pretrained(
        tmp_path
    )
    plan = make_plan(tmp_path, 1, 64)
    engine = RankEngine(plan, Alone(), torch.device("cpu"))
    if kernels() is not None and platform.machine() in ("x86_64", "AMD64"):
        assert isinstance(engine.model.vocabulary.head, Panels)
        assert engine.model.vocabulary.embedding is engine.model.vocabulary.head
        assert engine.model.vocabulary.like.untyped_storage().nbytes() == 0
    found = logits_of(engine)
    monkeypatch.setattr(functions, "kernels", lambda: None)
    without = RankEngine(plan, Alone(), torch.device("cpu"))
    assert isinstance(without.model.vocabulary.head, Transposed)
    expected = logits_of(without)
    assert (found - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize(
    ("family", "options", "alone"),
    [
        ("llama", {}, True),
        ("llama", {"hidden_act": "relu"}, False),
        ("llama", {"hidden_size": 24, "intermediate_size": 7000}, True),
        ("opt", {"ffn_dim": 128, "word_embed_proj_dim": 64}, False),  # norms are PyTorch's
    ],
)
def test_pytorch_has_one_thread_where_little_is_left_for_it(
    family: str,
    options: dict[str, Any],
    alone: bool,
    tiny_model: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128} if family == "llama" else {"hidden_size": 64}
    tiny_model(family, **(sizes | options)).save_pretrained(tmp_path)
    threads = list[int]()
    with torch_threads(2):
        engine = RankEngine(make_plan(tmp_path, 1, 64), Alone(), torch.device("cpu"))
        embed = engine.model.vocabulary.embed

        def noting(*arguments: Any) -> torch.Tensor:
            threads.append(torch.get_num_threads())
            return embed(*arguments)

        monkeypatch.setattr(engine.model.vocabulary, "embed", noting)
        logits_of(engine)
        assert torch.get_num_threads() == 2
    by_kernels = alone and kernels() is not None and platform.machine() in ("x86_64", "AMD64")
    assert set(threads) == {1 if by_kernels else 2}


def logits_of(engine: RankEngine) -> torch.Tensor:
    """Of some passes of texts that are continued, (passes * texts, vocabulary)."""
    blocks = [blocks_for(length + 8) for length in LENGTHS]
    cache = engine.new_cache(2 * sum(blocks))
    rows: list[Row] = []
    place = 0
    for length, count in zip(LENGTHS, blocks, strict=True):
        runs = [(place + 2 * number, 1) for number in range(count)]  # every other block
        place += 2 * count
        tokens = [(7 * at + length) % 50 for at in range(length)]
        rows.append(Row(0, tokens, (runs,), Wanted.LOGITS))
    found = []
    for number in range(4):
        results = engine.step(rows, cache)
        assert results.logits is not None
        found.append(results.logits)
        rows = [
            Row(row.start + len(row.tokens), [number + at], row.runs, row.wanted)
            for at, row in enumerate(rows)
        ]
    return torch.cat(found)
