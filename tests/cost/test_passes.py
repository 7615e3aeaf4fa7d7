"""Collectives that are predicted against those that a rank of the runtime counts, run without values or other ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from surgeon.cost.deployment import Deployment, plan_on_paper
from surgeon.cost.predict import PredictedRanks
from surgeon.cost.work import Forward
from surgeon.language.program import Program
from surgeon.models.families import FAMILIES, family_of
from surgeon.models.families.gemma import GEMMA2
from surgeon.models.shapes import ModelShapes
from surgeon.models.weights import ModelWeights, NamedTensors
from surgeon.runtime.comm.collectives import Collectives, Compressed, Counts, Peers
from surgeon.runtime.model.attending import Pass
from surgeon.runtime.model.program import RankProgram
from surgeon.runtime.plan.placement import Group
from surgeon.runtime.plan.specification import Arithmetic, LowRankMode
from tests.cost.examples import SIZES, hardware

TOKENS = 3


class Nobody(Collectives):
    """Connected to no other ranks; what would be sent is counted."""

    def _connect(self, group: Group) -> Collectives:
        return Nobody(self.rank, group)

    def _all_reduce(self, tensor: Tensor, _: bool) -> Callable[[], Tensor]:
        return lambda: tensor

    def _all_gather(self, tensor: Tensor, _: bool) -> Callable[[], Tensor]:
        return lambda: tensor.expand(len(self.group), *tensor.shape)


def weights_of(config: Any, program: Program) -> ModelWeights:
    """Weights of a model without values; two factors in place of a matrix where the program has a rank."""
    with torch.device("meta"):
        named = dict(AutoModelForCausalLM.from_config(config).state_dict())
    family = family_of(config)
    for sublayer in program.sublayers():
        for role, rank in sublayer.ranks:
            projection = family.spec(sublayer.kind).projection(role)
            path = f"{family.layers}.{sublayer.layers[0]}.{projection.path}"
            outputs, inputs = named.pop(f"{path}.weight").shape
            named[f"{path}.first.weight"] = torch.empty(rank, inputs, device="meta")
            named[f"{path}.second.weight"] = torch.empty(outputs, rank, device="meta")
    return ModelWeights(NamedTensors(named), family, family.head_dim(config))


SILU = Arithmetic(activation="silu")


def counted(
    config: Any, ranks: PredictedRanks, rank: int, compress: str | None, places: list[int] | None = None
) -> Counts:
    """What a rank of the runtime counts in one pass, in which something is asked of the tokens at some places."""
    nobody: Collectives = Nobody(rank, tuple(range(ranks.plan.ranks)))
    collectives = Compressed(nobody, compress) if compress else nobody
    runtime = RankProgram(ranks.plan, Peers(collectives), torch.device("meta"))
    runtime.load(weights_of(config, ranks.program))
    stream = torch.empty(TOKENS, ranks.plan.hidden, device="meta")
    runtime.stream_after(
        stream, Pass(lambda _, queries, *__: queries.flatten(1), (), waits=False), places=places
    )
    return runtime.peers.counts.layers


def check(
    program: str,
    count: int,
    low_rank: LowRankMode = "auto",
    compress: str | None = None,
    model: str = "llama",
) -> Counts:
    """Compare a program's collectives on so many ranks; returns them."""
    config = AutoConfig.for_model(model, **SIZES)
    deployment = Deployment(count, compress=compress, low_rank=low_rank)
    shapes = ModelShapes.of(model, config)
    plan = plan_on_paper(shapes, Program.parse(program), count, 8, "float32", low_rank, "full")
    ranks = PredictedRanks(shapes, replace(plan, arithmetic=SILU), hardware(), deployment)
    predicted = ranks.forward(Forward(1, TOKENS), graphs=False)
    assert predicted.layers == counted(config, ranks, 0, compress)
    last = ranks.forward(Forward(1, TOKENS, asked=1), graphs=False)
    assert last.layers == counted(config, ranks, 0, compress, [TOKENS - 1])
    return predicted.layers


def counted_bytes(program: str, count: int, low_rank: LowRankMode) -> int:
    """What a rank of the runtime counts for one token."""
    config = AutoConfig.for_model("llama", **SIZES)
    shapes = ModelShapes.of("llama", config)
    plan = replace(
        plan_on_paper(shapes, Program.parse(program), count, 8, "float32", low_rank, "full"),
        arithmetic=SILU,
    )
    ranks = PredictedRanks(shapes, plan, hardware(), Deployment(count, low_rank=low_rank))
    return counted(config, ranks, 0, None).bytes // TOKENS


WHOLE = "A0 F0 A1 F1 A2 F2"
FACTORED = "A0@q32,k16,v16,o32 F0@gate24,up24,down24"


@pytest.mark.sampled
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize(
    "program",
    [
        WHOLE,
        "A0 F0 [A1 A2] [F1 F2]",
        "A0 F0 >A1 >F1 >A2 >F2",
        "A0 F0 >[A1 A2] >[F1 F2]",
        "[A0 F0] [A1 F1]",
        "[A0 A1 A2] F0~F1",
        "{A0/2:0 F0/2:0 | A0/2:1 F0/2:1} A1 F1",
        "{A0 F0 | A1 F1 | A2 F2 | A3 F3}",
        FACTORED,
        f"{FACTORED} [A1 A2@q32,k16,v16,o32] [F1@up24 F2@down8]",
        "[A0@o8 A1@o8] [F0@gate24,up24,down16 F1@gate24,up24,down16]",
    ],
)
def test_collectives_are_those_that_the_runtime_counts(program: str, ranks: int) -> None:
    for way in ("gather", "replicate", "base"):
        found = check(program, ranks, way)
        assert (found == Counts()) == (ranks == 1)


@pytest.mark.parametrize("compress", ["int8", "int4"])
@pytest.mark.parametrize("program", [WHOLE, FACTORED])
def test_integers_are_counted_as_what_is_sent(program: str, compress: str) -> None:
    found = check(program, 2, "gather", compress)
    assert found.all_reduces == 0 < found.all_gathers
    assert found.bytes < check(program, 2, "gather").bytes


def test_norms_behind_sublayers_keep_the_sums_of_a_step_apart() -> None:
    assert check("A0 F0 [A1 A2] [F1 F2]", 2, model="gemma2").bytes == 4 * TOKENS * 64 * 4
    # Of attention || MLP every rank has a slice of each, and both sums are needed whole.
    assert check("[A0 F0]", 2, model="gemma2").bytes == 4 * TOKENS * 2 * 64


def test_a_norm_behind_one_kind_of_sublayer_keeps_its_steps_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attention = replace(GEMMA2.attention, stages=GEMMA2.attention.stages[:-1])
    monkeypatch.setitem(FAMILIES, "gemma2", replace(GEMMA2, attention=attention))
    assert check("[A0 F0]", 2, model="gemma2").bytes == 4 * TOKENS * 2 * 64
    assert check("A0 F0 [A1 A2]", 2, model="gemma2").bytes == 4 * TOKENS * 3 * 64


@pytest.mark.parametrize("compress", [None, "int8"])
def test_norms_of_all_heads_are_one_more_small_sum_where_heads_are_divided(compress: str | None) -> None:
    for program, ranks, divided in (
        (WHOLE, 2, 3),
        ("A0 F0 [A1 A2] [F1 F2]", 2, 1),
        ("A0 F0 [A1 A2] [F1 F2]", 4, 2),
    ):
        found, like = (
            check(program, ranks, compress=compress, model="olmo2"),
            check(program, ranks, compress=compress),
        )
        assert found.all_reduces == like.all_reduces + divided
        # The sublayers of a step that are divided are summed by themselves, because each is normed by itself.
        if compress is None:
            apart = 64 * 2 * ("[" in program and ranks == 4)
            assert found.bytes == like.bytes + (2 * divided + apart) * TOKENS * 4


@pytest.mark.parametrize("low_rank", ["gather", "replicate", "base"])
def test_norms_of_all_heads_beside_factors(low_rank: LowRankMode) -> None:
    """In Base every rank has all heads."""
    extra = (
        check(FACTORED, 2, low_rank, model="olmo2").all_reduces
        - check(FACTORED, 2, low_rank).all_reduces
    )
    assert extra == (low_rank != "base")


def test_dense_by_hand() -> None:
    assert check(WHOLE, 2) == Counts(6, 0, 6 * TOKENS * 64 * 4)
    assert check("A0 F0 [A1 A2] [F1 F2]", 2) == Counts(4, 0, 4 * TOKENS * 64 * 4)
    gathered, summed = (32 + 16 + 16) // 2 + (24 + 24) // 2, 32 + 24
    assert check(FACTORED, 2, "gather") == Counts(2, 2, TOKENS * 4 * (gathered + summed))
