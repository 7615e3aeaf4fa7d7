"""Plans of ranks with stretches of a program: where it is cut, what each rank loads, and what is refused."""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch

from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.drafts import even_stretches, with_stretches
from surgeon.runtime.plan.memory import footprint
from surgeon.runtime.plan.specification import Plan
from surgeon.runtime.worker.worker import StretchEngine
from tests.codas import save_codas
from tests.tiny_models import tiny_model

LADDER = "A0 F0 >A1 >F1 >A2 >F2 A3 F3"


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    save_codas(tmp_path, model, cut=1)
    return make_plan(tmp_path, 1, 64)


def test_the_most_costly_stretch_costs_least() -> None:
    costs, cuts = [3, 1, 4, 1, 5, 9, 2, 6], [1, 2, 4, 5, 7]
    ways = [(*ends, 8) for ends in combinations(cuts, 2)]
    most = {ends: max(sum(costs[a:b]) for a, b in pairwise((0, *ends))) for ends in ways}
    assert most[even_stretches(costs, cuts, 3)] == min(most.values())
    from_two = {ends: cost for ends, cost in most.items() if ends[0] == 2}
    assert most[even_stretches(costs, [2, 4, 5, 7], 3, first=2)] == min(from_two.values())
    assert even_stretches(costs, cuts, 3, first=2)[0] == 2


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_rank_loads_its_stretch_only(ranks: int, plan: Plan) -> None:
    whole, cut = footprint(plan), with_stretches(plan, ranks, drafts=False)
    assert sum(footprint(cut).weights) == sum(whole.weights)
    assert sum(map(sum, footprint(cut).kept)) == sum(map(sum, whole.kept))
    programs = [cut.of_rank(rank)[0].program for rank in range(ranks)]
    assert " ".join(programs) == plan.program
    for rank in range(ranks):
        engine = StretchEngine(cut, rank, torch.device("cpu"))
        attentions = map(str, engine.model.program.attentions())
        assert [*attentions] == [one for one in programs[rank].split() if one[0] == "A"]
        assert engine.model.own_logits(torch.zeros(1, plan.hidden)).shape[1] == (
            0 if rank else plan.vocabulary
        )


def test_a_coda_is_rank_0s(plan: Plan) -> None:
    cut = with_stretches(plan, 3, drafts=True)
    assert cut.stretches[0] == 2
    assert cut.of_rank(0)[0].coda is not None
    assert cut.of_rank(1)[0].coda is None
    bare = with_stretches(plan, 3, drafts=False)
    assert bare.coda is None
    assert sum(footprint(cut).weights) > sum(footprint(bare).weights)


def test_no_stretch_begins_with_a_late_step(plan: Plan) -> None:
    cut = with_stretches(make_plan(plan.folder, 1, 64, LADDER), 3, drafts=False)
    assert all(not cut.of_rank(rank)[0].program.startswith(">") for rank in range(3))


@pytest.mark.parametrize(
    ("program", "ranks", "said"),
    [
        (None, 5, "5 ranks would have a stretch of layers each, and the model has 4"),
        (
            "A0 F0 >A1 >F1 >A2 >F2 >A3 >F3",
            3,
            "split into stretches for 2 ranks at most, not for 3; a late step",
        ),
        ("{A0 F0 | A1 F1}", 2, "the program's 1 node split into stretches for 1 rank at most"),
    ],
)
def test_what_does_not_split(program: str | None, ranks: int, said: str, plan: Plan) -> None:
    with pytest.raises(ValueError, match=said):
        with_stretches(make_plan(plan.folder, 1, 64, program), ranks, drafts=False)


def test_no_fixed_shapes(plan: Plan) -> None:
    with pytest.raises(ValueError, match="decoding static cannot"):
        with_stretches(make_plan(plan.folder, 1, 64, decoding="static"), 2, drafts=False)
