"""Caches that keep what first factors give, against keys and values: the same texts from fewer numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from surgeon.models.families import FAMILIES
from surgeon.runtime.batching.request import Row, Wanted
from surgeon.runtime.comm.collectives import Alone, Counts, Unconnected
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.model.recorded import StaticDecode
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.specification import Plan
from tests.checkpoint.helpers import plain_logits, relative_error
from tests.runtime.model.conftest import Several
from tests.runtime.on_ranks import Continued, chunked_logits, continue_texts, continued
from tests.selection import one_in
from tests.tiny_models import DENSE_FAMILIES, VOCABULARY, tiny_model

TOLERANCE = 1e-4
PROMPTS = torch.randint(2, VOCABULARY, (2, 29), generator=torch.Generator().manual_seed(3))
NEW = 4  # across the end of a block of 16
# With factors of k and v, of k alone, and of all matrices; ranks that no number of ranks divides.
PROGRAM = "A0@k3,v5 F0 A1@k7 F1 A2@q9,k5,v3,o11 F2"
# In an LP step, a late one, a fork, of averages and slices.
COMBINED = (
    "[A0@k3,v5,o7 A1@q9,k2,v3,o5] [F0 F1] >A2@k3,v2 {A0/2:0@k3,v1 F2 | A0/2:1@k2,v5,q3} A1~A2@k5,v5"
)
WAYS = {"gather": "static", "replicate": "dynamic", "base": "static"}


def saved(folder: Path, family: str) -> Any:
    """A model of three layers, and its folder."""
    model = tiny_model(family, 3)
    model.save_pretrained(folder)
    return model


def alone(plan: Plan, **changes: Any) -> RankEngine:
    return RankEngine(replace(plan, **changes), Alone(), torch.device("cpu"))


def assert_same(found: Continued, expected: Continued) -> None:
    assert torch.equal(found.tokens, expected.tokens)
    assert relative_error(found.logits, expected.logits) < TOLERANCE


KEPT_LOW_RANK = [name for name in DENSE_FAMILIES if not FAMILIES[name].attention.joins_heads]


@pytest.mark.parametrize("family", one_in(2, KEPT_LOW_RANK, 1))
def test_the_same_texts(family: str, tmp_path: Path) -> None:
    """Rotary and learned positions, windows, biases, norms of heads, caps; in both shapes of decode passes."""
    model = saved(tmp_path, family)
    plan = make_plan(tmp_path, 1, 64, PROGRAM, kv="lowrank")
    expected = continued(alone(plan, kv="full"), PROMPTS, NEW)
    dynamic, static = alone(plan), alone(plan, decoding="static")
    for engine in (dynamic, static):
        found = continued(engine, PROMPTS, NEW)
        assert_same(found, expected)
        assert (
            found.numbers
            == 3 + 5 + 2 * engine.model.kv_heads()[1] * plan.head_dim + 5 + 3
            < expected.numbers
        )
    logits = torch.cat(list(chunked_logits(dynamic, list(PROMPTS.split([11, 17, 1], 1)))), 1)
    assert relative_error(logits, plain_logits(model, PROGRAM, PROMPTS)) < TOLERANCE


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "program"),
    [
        ("qwen2", PROGRAM),
        ("qwen3", PROGRAM),
        ("gemma2", PROGRAM),
        ("gpt2", PROGRAM),
        ("llama", COMBINED),
    ],
)
def test_on_ranks(family: str, program: str, several: Several, tmp_path: Path) -> None:
    saved(tmp_path, family)
    expected = continued(alone(make_plan(tmp_path, 1, 64, program, kv="full")), PROMPTS, NEW)
    for way, decoding in WAYS.items():
        plan = make_plan(
            tmp_path, several.count, 64, program, decoding=decoding, low_rank=way, kv="lowrank"
        )
        for found in several.started.call(continue_texts, plan, PROMPTS, NEW):
            assert_same(found, expected)


def test_every_rank_that_shares_a_sublayer_keeps_the_same_numbers(
    several: Several, tmp_path: Path
) -> None:
    """And sends what it sends without; Base gathers what it keeps in place of two sums."""
    saved(tmp_path, "llama")
    program, texts, n = "A0@q9,k3,v5,o7", len(PROMPTS), several.count

    def cost(way: str, kv: str) -> tuple[list[float], Counts]:
        plan = make_plan(tmp_path, n, 64, program, low_rank=way, kv=kv)
        found = several.started.call(continue_texts, plan, PROMPTS, 2)
        return [one.numbers for one in found], found[0].layers

    kv_width, hidden = 2 * 8, 32  # two KV heads
    for way in WAYS:
        assert cost(way, "lowrank")[0] == [3 + 5] * n
        assert cost(way, "full")[0] == [2 * kv_width if way == "base" else 2 * kv_width / min(n, 2)] * n
    gathered = -(-(9 + 3 + 5) // n)
    assert (
        cost("gather", "lowrank")[1]
        == cost("gather", "full")[1]
        == Counts(1, 1, 4 * texts * (gathered + 7))
    )
    assert cost("base", "full")[1] == Counts(4, 0, 4 * texts * (2 * hidden + 2 * kv_width))
    kept = -(-3 // n) + -(-5 // n)
    assert cost("base", "lowrank")[1] == Counts(2, 2, 4 * texts * (2 * hidden + kept))


def test_what_auto_keeps(tmp_path: Path) -> None:
    """Rank space where memory is the limit and it is less: 64 numbers are as many as of two KV heads."""
    saved(tmp_path, "qwen3")  # 2 KV heads of 16
    plan = make_plan(tmp_path, 1, 64, "A0@k31,v32 F0 A1@k32,v32 F1 A2@k3,v5 F2")

    def rebuilt(**changes: Any) -> list[int]:
        return list(alone(plan, **changes).model.rebuilds())

    assert plan.kv == "auto"
    assert rebuilt() == rebuilt(kv="full") == []
    assert rebuilt(kv="fewer") == [0, 2]
    assert rebuilt(kv="lowrank") == [0, 1, 2]


def test_all_ranks_take_passes_of_the_same_sizes(tmp_path: Path) -> None:
    """Where one keeps what first factors give, and kernels for GPUs read the other's cache as it is."""
    saved(tmp_path, "llama")
    plan = make_plan(
        tmp_path,
        *(2, 64, "[A0@k4,v4 A1] [F0 F1] A2 F2"),
        decoding="static",
        low_rank="replicate",
        kv="lowrank",
    )
    found = list[tuple[bool, bool]]()
    for rank in range(2):
        engine = RankEngine(plan, Unconnected(rank, (0, 1)), torch.device("cpu"))
        static, cache = engine.ways[0], engine.new_cache(4)
        assert isinstance(static, StaticDecode)
        cache.triton = Mock()
        found.append((bool(cache.rebuilds), static.gathers(cache)))
    assert found == [(True, True), (False, True)]


def test_buffers_are_there_before_they_are_needed(tmp_path: Path) -> None:
    """The largest passes of a cache's texts find room in them."""
    saved(tmp_path, "llama")
    for decoding in ("dynamic", "static"):
        engine = alone(make_plan(tmp_path, 1, 48, PROGRAM, decoding=decoding, kv="lowrank"))
        cache = engine.new_cache(9, 3)
        tokens = 4 * 4 * 16 if decoding == "static" else 48  # powers of two of texts and of blocks
        assert cache.buffers.kept.nbytes + cache.buffers.rebuilt.nbytes == 4 * tokens * (
            3 + 5 + 2 * 2 * 8
        )
        before = cache.buffers.kept.data_ptr()
        rows = [Row(0, [text] * 40, ([(3 * text, 3)],), Wanted.BEST) for text in range(3)]
        best = engine.step(rows, cache).best
        engine.step(
            [Row(40, [one], row.runs, Wanted.BEST) for one, row in zip(best, rows, strict=True)], cache
        )
        assert cache.buffers.kept.data_ptr() == before
        cache.buffers.reserve(tokens + 1)
        assert cache.buffers.kept.nbytes + cache.buffers.rebuilt.nbytes == 4 * (tokens + 1) * (
            3 + 5 + 2 * 2 * 8
        )


def test_where_there_is_nothing_to_keep_in_rank_space(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    with pytest.raises(ValueError, match="no attention here has factors of both"):
        make_plan(tmp_path, 1, 64, "A0@q3,k3 F0@up3 A1@v3", kv="lowrank")
    with pytest.raises(ValueError, match="there is no kv 'lowrnk'; did you mean 'lowrank'"):
        make_plan(tmp_path, 1, 64, PROGRAM, kv="lowrnk")
