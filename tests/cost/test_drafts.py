"""Drafting on hardware of round figures, against the equation written out and every number of tokens tried."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from surgeon.cost.deployment import USABLE, Deployment, Workload
from surgeon.cost.predict import DraftPrices, predict, predict_drafting
from surgeon.language.operations.variants import variant
from surgeon.language.program import Program
from surgeon.runtime.batching.ahead import LEAST_GAIN
from tests.cost.examples import hardware, shapes

SMALL, DENSE = shapes(), Program.dense(4)
HALF = Program.parse("A0 F0 A3 F3")


@pytest.mark.parametrize(("batch", "acceptance"), product((1, 3), (0.3, 0.6, 0.9)))
def test_the_best_number_of_tokens_is_that_of_all_that_were_tried(batch: int, acceptance: float) -> None:
    machine, ranks, load = hardware(), Deployment(2), Workload(batch, 5, 4)
    model = predict(SMALL, DENSE, machine, load, ranks)
    (found,) = predict_drafting(model, HALF, [acceptance])

    def seconds(program: Program, texts: int) -> float:
        return predict(SMALL, program, machine, Workload(texts, 5, 4), ranks).per_token

    def each_token(ahead: int) -> float:
        expected = (1 - acceptance ** (ahead + 1)) / (1 - acceptance)
        return (ahead * seconds(HALF, batch) + seconds(DENSE, batch * (ahead + 1))) / expected

    best = min(range(9), key=each_token)
    best = best if LEAST_GAIN * each_token(best) < each_token(0) else 0
    assert found.ahead == best
    assert found.per_token == pytest.approx(each_token(best))
    assert found.verify == pytest.approx(seconds(DENSE, batch * (best + 1)))
    assert found.draft == pytest.approx(seconds(HALF, batch))
    first = predict(SMALL, DENSE, machine, load, ranks).first_token
    assert found.rate == pytest.approx(4 * batch / (first + 3 * each_token(best)))


def test_rounds_by_hand_where_nothing_but_messages_takes_time() -> None:
    """Two ranks, 9 all-reduces of two hops of 1 ms and a gather of one; a draft of half the layers has 5."""
    wire = replace(hardware().link(), bandwidth=1e30)
    machine = replace(hardware(), links={"wire": wire})
    load = Workload(1, 5, 4)
    model = predict(SMALL, DENSE, machine, load, Deployment(2))
    never, often = predict_drafting(model, HALF, [0.0, 1.0])
    compute = predict(SMALL, HALF, machine, load, Deployment(2, connected=False)).per_token
    assert often.draft == pytest.approx(5 * 2e-3 + 1e-3 + compute, rel=1e-4)
    assert (never.ahead, often.ahead) == (0, 8)
    assert never.per_token == never.model.per_token
    assert often.per_token == pytest.approx((8 * often.draft + often.verify) / 9)


def test_pairs_lie_on_ranks_in_slices_beside_the_models_keys() -> None:
    """Alone each of two ranks has one layer of a pair; then neither would have all keys that its heads need."""
    machine, ranks, load = hardware(), Deployment(2), Workload(1, 5, 4)
    pairs = variant("lp", DENSE, range(4), 2)
    (found,) = predict_drafting(predict(SMALL, DENSE, machine, load, ranks), pairs, [0.9])
    alone = predict(SMALL, pairs, machine, load, ranks)
    assert alone.decode is not None
    assert found.draft == pytest.approx(alone.per_token, rel=0.05)
    assert found.draft != alone.per_token


@pytest.mark.parametrize(
    ("draft", "load", "acceptance", "said"),
    [
        ("A0 F0", Workload(1, 5, 4), 1.2, "an acceptance is a chance from 0 to 1, not 1.2"),
        ("A0 F0", Workload(1, 5, 1), 0.5, "ask for at least 2"),
        ("A0 F0 A7", Workload(1, 5, 4), 0.5, "the draft cannot run beside its model: .*A7"),
        (
            "A0 A0 F0",
            Workload(1, 5, 4),
            0.5,
            "the model and its draft need .* on a rank, and round has .* for it",
        ),
    ],
)
def test_what_cannot_be_is_refused(draft: str, load: Workload, acceptance: float, said: str) -> None:
    machine = hardware()
    if draft == "A0 A0 F0":  # room for the model, not for another attention's keys
        needed = int(predict(SMALL, DENSE, machine, load, Deployment()).memory.needed / USABLE) + 1
        machine = replace(machine, device=replace(machine.device, memory=needed))
    model = predict(SMALL, DENSE, machine, load, Deployment())
    with pytest.raises(ValueError, match=said):
        predict_drafting(model, Program.parse(draft), [acceptance])


def test_keys_of_its_own_cost_a_pass_over_prompts() -> None:
    """Spread over the tokens behind it; where that is more than drafts save, nothing is drafted."""
    twice = Program.parse("A0 F0 A0")
    for new, pays in ((400, True), (4, False)):
        machine, load = hardware(), Workload(1, 64, new)
        model = predict(SMALL, DENSE, machine, load, Deployment(2))
        (found,) = predict_drafting(model, twice, [0.9])
        drafting = DraftPrices(model)
        prompt = predict(SMALL, twice, machine, load, Deployment(2)).first_token
        without = drafting.at(0.9, found.draft)
        assert (without.ahead > 0, found.ahead > 0) == (True, pays)
        expected = without.per_token + prompt / (new - 1)
        assert found.per_token == pytest.approx(expected if pays else found.model.per_token)
        assert pays == (expected < found.model.per_token)
