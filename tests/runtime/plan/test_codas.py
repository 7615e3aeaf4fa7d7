"""Plans with a coda: what ranks are told of it, how much memory it takes, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from surgeon.runtime.batching.blocks import BLOCK_TOKENS
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.drafts import with_coda
from surgeon.runtime.plan.memory import footprint
from surgeon.runtime.plan.specification import Plan
from tests.codas import save_codas
from tests.tiny_models import tiny_model


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Plan]:
    """The plan of a tiny model of some family in a folder, which has a coda."""

    def save(family: str = "llama", ranks: int = 1, program: str | None = None, **options: Any) -> Plan:
        model = tiny_model(family, **options)
        model.save_pretrained(tmp_path)
        save_codas(tmp_path, model)
        return make_plan(tmp_path, ranks, 64, program)

    return save


def test_a_codas_windows_are_its_own(saved: Callable[..., Plan], tmp_path: Path) -> None:
    """Those of the last layer, whose number in the coda is another."""
    plan = saved("gemma2", sliding_window=8, tie_word_embeddings=False)
    draft = with_coda(plan).draft
    assert draft is not None
    coda = draft.plan.coda
    assert coda is not None
    assert draft.plan.program == "A0 F0 A1 F1"
    assert (draft.slots, draft.own) == (((0, 1, 4),), ((2,),))  # the coda's is behind those of the model
    assert coda.file == tmp_path / "codas" / "rack-0.safetensors"
    assert (coda.plan.program, coda.plan.layers, coda.plan.coda) == ("A0 F0", 1, None)
    assert (plan.windows[0], plan.windows[-1]) == (8, None)
    assert coda.plan.windows == ()


@pytest.mark.parametrize("ranks", [1, 2])
def test_memory_counts_the_coda(ranks: int, saved: Callable[..., Plan]) -> None:
    plan = saved(ranks=ranks, vocab_size=98)
    before, after = footprint(plan), footprint(with_coda(plan))
    tensors = load_file(plan.folder / "codas" / "rack-0.safetensors")
    matrices = sum(tensor.numel() for tensor in tensors.values() if tensor.dim() == 2)
    assert sum(after.weights) - sum(before.weights) == matrices * 4
    assert [more - less for more, less in zip(after.block, before.block, strict=True)] == [
        2 * (2 // ranks) * plan.head_dim * BLOCK_TOKENS * 4
    ] * ranks


def changed(plan: Plan, **entries: Any) -> None:
    file = plan.folder / "codas" / "codas.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def test_what_cannot_draft(saved: Callable[..., Plan]) -> None:
    plan = saved()
    with pytest.raises(
        ValueError, match="the program cannot be cut before >A2, which reads the stream as it was"
    ):
        with_coda(replace(plan, program="A0 F0 A1 F1 >A2 >F2"))
    with pytest.raises(
        ValueError, match="the first rack must have some of the program's 4 nodes, not 4"
    ):
        with_coda(replace(plan, program="A0 F0 A1 F1"))
    changed(plan, weights="of another model")
    with pytest.raises(ValueError, match="are of other weights than those in"):
        with_coda(plan)
    changed(plan, format=7)
    with pytest.raises(ValueError, match="has the format 7, and 1 is known here"):
        with_coda(plan)
    (plan.folder / "codas" / "codas.json").unlink()
    with pytest.raises(ValueError, match="has no codas .* surgeon heal --racks"):
        with_coda(plan)


def test_ranks_that_would_have_nothing_of_a_coda(saved: Callable[..., Plan]) -> None:
    with pytest.raises(ValueError, match="64 ranks cannot share this model"):
        with_coda(replace(saved(), ranks=64))
