"""Matrices that are two factors, on two and four ranks, in every way of sharing them, against a plain computation."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from surgeon.language.program import Program
from surgeon.models.families import FAMILIES
from surgeon.runtime.comm.collectives import Counts
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.placement import summed_in_rank_space
from tests.checkpoint.helpers import IDS, plain_logits, relative_error, run_export
from tests.runtime.model.conftest import Several
from tests.runtime.on_ranks import logits_as_timed, logits_in_chunks
from tests.selection import case
from tests.tiny_models import DENSE_FAMILIES, tiny_model

TOLERANCE = 1e-4
WAYS = ("gather", "replicate", "base", "auto")
HIDDEN = 32
SENDING = "A0@q9,k3,v5,o7 F0@gate11,up13,down6"


def factored(family: str, layer: int, ranks: str) -> str:
    """Both sublayers of a layer with every matrix of it factorised."""
    roles = {kind: [one.role for one in FAMILIES[family].spec(kind).projections] for kind in "AF"}
    numbers = iter(ranks.split(","))
    texts = [
        f"{kind}{layer}@" + ",".join(f"{role}{next(numbers)}" for role in roles[kind]) for kind in "AF"
    ]
    return " ".join(texts)


# Ranks that do not divide by two or four, one that is lower than the number of ranks, and one without any savings.
PROGRAM_OF = {
    family: f"{factored(family, 0, '9,3,5,7,11,13,6')} {factored(family, 1, '16,8,1,31,16,16,30').replace('A', '>A')}"
    " A2@q5,v3 F2@up9"
    for family in DENSE_FAMILIES
}


# On four ranks a family of every kind: separate and packed matrices, two steps a layer and one.
KINDS = ("llama", "phi3", "gpt2", "gpt_neox")
CASES = [
    *(case(2, family, default=at % 2 == 0) for at, family in enumerate(DENSE_FAMILIES)),
    *(case(4, family, default=family in ("phi3", "gpt_neox")) for family in KINDS),
]


@pytest.mark.parametrize(("several", "family"), CASES, indirect=["several"])
def test_every_way_gives_the_same_numbers(family: str, several: Several, tmp_path: Path) -> None:
    model = tiny_model(family, 3, num_key_value_heads=4) if family == "llama" else tiny_model(family, 3)
    expected = plain_logits(model, PROGRAM_OF[family])
    model.save_pretrained(tmp_path)
    for way in WAYS:
        plan = make_plan(tmp_path, several.count, IDS.shape[1], PROGRAM_OF[family], low_rank=way)
        for logits, _, _ in several.started.call(logits_in_chunks, plan, list(IDS.split([5, 1, 3], 1))):
            assert relative_error(logits, expected) < TOLERANCE, way


def test_factors_in_every_kind_of_program(several: Several, tmp_path: Path) -> None:
    """Beside whole matrices, in LP steps, late ones and forks, of averages and slices; as a checkpoint stores them."""
    model = tiny_model("qwen2", 4)
    programs = (
        "[A0@q9,o5 A1@k3] [F0@down7 F1@down6] A2 F2",
        "[A0@o9 A1@o9] [F0@down7 F1@down6] >[A2@q3 F2@gate5]",
        "{A0@q5,o6 F0@up7 | A1 F1@down3} A2~A3@v3,o4 F2~F3@gate4,up4,down4",
        "{A0/2:0@q5,o6 F0/2:0@up7,down5 | A0/2:1@q5,o6 F0/2:1@up7,down5} >A1 >F1@up9",
    )
    model.save_pretrained(tmp_path / "source")
    for number, program in enumerate(programs):
        expected = plain_logits(model, program)
        run_export(tmp_path / "source", tmp_path / str(number), program)
        for way in ("gather", "base"):
            plan = make_plan(tmp_path / str(number), several.count, IDS.shape[1], low_rank=way)
            for logits, _, _ in several.started.call(logits_in_chunks, plan, list(IDS.split([8, 1], 1))):
                assert relative_error(logits, expected) < TOLERANCE, (program, way)


def test_the_same_factors_in_two_kinds_of_step(several: Several, tmp_path: Path) -> None:
    """By itself a sum of o's one column, beside a whole matrix one as wide as the stream."""
    tiny_model("llama", 2).save_pretrained(tmp_path)
    for program in ("A0@o1 [A0@o1 F1]", "[A1 F0@down5] F0@down5"):
        expected = plain_logits(tiny_model("llama", 2), program)
        plan = make_plan(tmp_path, several.count, IDS.shape[1], program, low_rank="replicate")
        for logits, _, _ in several.started.call(logits_in_chunks, plan, [IDS]):
            assert relative_error(logits, expected) < TOLERANCE, program


def test_what_is_sent(several: Several, tmp_path: Path) -> None:
    """One all-gather of ranks and one all-reduce of a rank for each sublayer; Base sums after every pair of factors."""
    model = tiny_model("llama", 1, num_key_value_heads=4)
    model.save_pretrained(tmp_path)
    n, tokens = several.count, IDS.numel()

    def sent(way: str) -> Counts:
        plan = make_plan(tmp_path, n, IDS.shape[1], SENDING, low_rank=way)
        return several.started.call(logits_in_chunks, plan, [IDS])[0][1][0]

    of_attention, of_mlp = -(-(9 + 3 + 5) // n), -(-(11 + 13) // n)  # gathered of each rank
    summed = 4 * tokens * (7 + 6)
    assert sent("gather") == Counts(2, 2, summed + 4 * tokens * (of_attention + of_mlp))
    assert sent("replicate") == Counts(2, 0, summed)
    assert sent("base") == Counts(7, 0, 4 * tokens * (4 * HIDDEN + 2 * 48 + HIDDEN))
    either = [[0, of_attention], [0, of_mlp]]  # what is measured decides, for each kind by itself
    ways = [
        Counts(2, sum(map(bool, gathered)), summed + 4 * tokens * sum(gathered))
        for gathered in product(*either)
    ]
    assert sent("auto") in ways


@pytest.mark.parametrize(("attention", "mlp"), product([True, False], repeat=2))
def test_auto_takes_the_way_that_is_faster_over_all_ranks(
    attention: bool, mlp: bool, several: Several, tmp_path: Path
) -> None:
    """Attentions and MLPs each by themselves; the first rank's times say the opposite of all ranks' together."""
    model = tiny_model("llama", 1, num_key_value_heads=4)
    model.save_pretrained(tmp_path)
    n, tokens = several.count, IDS.numel()
    plan = make_plan(tmp_path, n, IDS.shape[1], SENDING)
    faster = [attention, mlp]
    # By itself, together.
    first = [time for gathers in faster for time in ((1.0, 2.0) if gathers else (2.0, 1.0))]
    others = [time for gathers in faster for time in ((9.0, 1.0) if gathers else (1.0, 9.0))]
    found = several.started.call(logits_as_timed, plan, [IDS], [first] + [others] * (n - 1))
    gathered = [-(-(9 + 3 + 5) // n) * attention, -(-(11 + 13) // n) * mlp]
    for logits, counts, _ in found:
        assert relative_error(logits, plain_logits(model, SENDING)) < TOLERANCE
        assert counts == [Counts(2, sum(faster), 4 * tokens * (7 + 6 + sum(gathered)))]


def test_where_sums_are_taken() -> None:
    def summed(text: str, normed: bool = False) -> set[int]:
        (step,) = Program.parse(text).nodes
        return set(summed_in_rank_space(step, 32, normed))

    assert summed("A0@o31") == {0}
    assert summed("A0@o32") == summed("A0@q4") == set()
    assert summed("[A0@o15 A1@o16]") == {0, 1}
    # One sum of the stream's width is as little.
    assert summed("[A0@o16 A1@o16]") == summed("[A0@o4 A1]") == set()
    assert summed("[A0@o16 F1@down16]", normed=True) == {0, 1}
    assert summed("[A0@o4 A1]", normed=True) == {0}


def test_ways_that_there_are_not(tmp_path: Path) -> None:
    tiny_model("llama", 1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="there is no way 'gathr' of sharing factors among ranks"):
        make_plan(tmp_path, 2, 8, low_rank="gathr")
