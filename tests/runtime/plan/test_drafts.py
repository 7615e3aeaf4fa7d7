"""Plans with a program that drafts: which slots of the cache its attentions use, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.drafts import require_shared, with_draft
from surgeon.runtime.plan.memory import footprint
from surgeon.runtime.plan.specification import DraftPlan, Plan
from tests.tiny_models import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("draft") / "tiny"
    tiny_model("llama").save_pretrained(made)
    return made


def planned(
    folder: Path, ranks: int, draft: str, program: str | None = None, **ways: Any
) -> tuple[Plan, DraftPlan]:
    plan = with_draft(make_plan(folder, ranks, 64, program, **ways), folder, draft)
    assert plan.draft is not None
    return plan, plan.draft


def test_attentions_use_the_slots_of_their_layers(folder: Path) -> None:
    plan, draft = planned(folder, 2, "A0 F0 [A3 A1] [F1 F3]")
    assert draft.slots == ((0, 3, 1),) * 2
    assert draft.plan.sliced
    assert (plan.kv, plan.sliced, plan.program) == ("full", False, "A0 F0 A1 F1 A2 F2 A3 F3")


def test_a_variant_of_the_model_drafts_by_its_name(tmp_path: Path) -> None:
    tiny_model("llama", 7).save_pretrained(tmp_path)
    for name, middle in (("lp", "[A2 A3] [F2 F3] A4 F4"), ("ladder", ">A2 >F2 >A3 >F3 >A4 >F4")):
        _, draft = planned(tmp_path, 1, name)
        assert draft.plan.program == f"A0 F0 A1 F1 {middle} A5 F5 A6 F6"
    _, draft = planned(tmp_path, 2, "tracks:2")
    assert draft.plan.program.count("/2:1") == 6
    with pytest.raises(
        ValueError, match="tracks:2 has a slice of the layers for each rank; use 2 ranks or more"
    ):
        planned(tmp_path, 1, "tracks:2")


def test_pairs_lie_whole_on_ranks_where_the_verifier_has_them_so(folder: Path) -> None:
    _, draft = planned(folder, 2, "[A1 A2] A3", program="A0 F0 [A1 A2] [F1 F2] A3 F3")
    assert draft.slots == ((1, 2), (1, 2))
    assert not draft.plan.sliced


def test_memory_is_that_of_what_is_not_there_already(folder: Path) -> None:
    alone = footprint(make_plan(folder, 2, 64))
    assert footprint(planned(folder, 2, "A0 F0 [A1 A2] [F1 F2] >A3 >F3")[0]) == alone
    more = footprint(planned(folder, 2, "A0 F0 A1 F1@up12")[0])
    hidden, neurons = 32, int(AutoConfig.from_pretrained(folder).intermediate_size)
    # Gate and down of half the neurons, and both factors of up.
    numbers = 2 * hidden * neurons // 2 + 12 * (hidden + neurons // 2)
    assert [own - before for own, before in zip(more.weights, alone.weights, strict=True)] == [
        4 * numbers
    ] * 2
    assert more.kept == alone.kept


@pytest.mark.parametrize(
    ("ranks", "draft", "message"),
    [
        (1, "lp", "the model has 4 layers, and variants leave the first and last 2 alone"),
        (1, "A0 F0 A7", "the draft cannot run beside its model: .*A7"),
    ],
)
def test_what_is_refused(ranks: int, draft: str, message: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=message):
        planned(folder, ranks, draft)


@pytest.mark.parametrize(
    ("ranks", "draft", "slots", "own"),
    [
        (1, "A0~A1 F0 A2", ((4, 2),), ((0,),)),
        (1, "A0 F0 A0", ((0, 4),), ((1,),)),
        (1, "A3 {A1/2:0 | A1/2:1}", ((3, 4, 5),), ((1, 2),)),
        (2, "A0 {A1 F1 | A2 F2}", ((0, 4), (0, 4)), ((1,), (1,))),
        (2, "A0 {A1/2:0 F1 | A1/2:1 A2}", ((0, 1), (0, 1, 4)), ((), (2,))),
        (2, "A0~A1 [A2 A3]", ((4, 2, 3),) * 2, ((0,),) * 2),
    ],
)
def test_attentions_that_the_model_does_not_have_keep_their_own(
    ranks: int,
    draft: str,
    slots: tuple[tuple[int, ...], ...],
    own: tuple[tuple[int, ...], ...],
    folder: Path,
) -> None:
    plan, found = planned(folder, ranks, draft)
    assert (found.slots, found.own) == (slots, own)
    alone, beside = footprint(make_plan(folder, ranks, 64)), footprint(plan)
    by_itself = footprint(found.plan)
    for rank, numbers in enumerate(own):
        assert beside.kept[rank] == alone.kept[rank] + tuple(
            by_itself.kept[rank][number] for number in numbers
        )
    assert beside.groups.windows == (None,)
    assert beside.block == tuple(map(sum, beside.kept))
    with pytest.raises(
        ValueError, match="and keeps its own: why; draft with attentions of the model, each once"
    ):
        require_shared(found, "why")
