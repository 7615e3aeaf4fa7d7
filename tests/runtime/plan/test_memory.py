"""The memory foretold for weights and cache against what ranks then hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from surgeon.runtime.comm.collectives import Alone, Collectives, Unconnected
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.memory import choose_blocks, footprint

PROGRAMS = [
    "A0 F0 A1 F1 A2 F2 A3 F3",
    "A0 F0 [A1 A2] [F1 F2]",
    "A0 {A1 F1 | F2} A0~A1 F0~F1",
    "[A0 A1 A2] A3/2:0 F3/3:1",
]


def held(engine: RankEngine) -> int:
    """Bytes of the matrices, embedding and head of an engine."""
    embedding, head = engine.vocabulary.embedding, engine.vocabulary.head
    shared = head.untyped_storage().data_ptr() == embedding.untyped_storage().data_ptr()
    matrices = [embedding] if shared else [embedding, head]
    if engine.ends.positions is not None:
        matrices.append(engine.ends.positions)
    for made in engine.sublayers.values():
        linears = [part for part in vars(made).values() if hasattr(part, "weight")]
        matrices += [linear.weight for linear in linears]
    return sum(matrix.nbytes for matrix in matrices)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2", "phi3", "gemma2"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_ranks_hold(family: str, program: str, ranks: int, tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    if family == "gemma2" and "/" in program:
        pytest.skip("its sublayers cannot be sliced")
    tiny_model(family, vocab_size=96).save_pretrained(tmp_path)
    plan = make_plan(tmp_path, ranks, 32, program)
    foretold = footprint(plan)
    for rank in range(ranks):
        collectives: Collectives = Alone() if ranks == 1 else Unconnected(rank, (0, 1))
        engine = RankEngine(plan, collectives, torch.device("cpu"))
        assert foretold.weights[rank] == held(engine)
        assert foretold.block[rank] == engine.new_cache(1).nbytes


def test_a_program_without_attention(tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    plan = make_plan(tmp_path, 1, 32, "F0 F1")
    assert footprint(plan).block == (0,)
    assert choose_blocks(plan, "cpu", 4, None, None) == 8
