"""Whole predictions against sums made by hand, and what has to hold of all of them."""

from __future__ import annotations

from dataclasses import replace
from math import isnan

import pytest

from surgeon.cost.deployment import Deployment, Workload
from surgeon.cost.predict import Prediction, predict
from surgeon.language.operations.variants import variant
from surgeon.language.program import Program
from surgeon.runtime.comm.collectives import Link
from tests.cost.examples import hardware, shapes

SMALL = shapes()
DENSE = Program.dense(4)
LOAD = Workload(2, 5, 4)


def predicted(program: Program = DENSE, load: Workload = LOAD, **deployment: object) -> Prediction:
    return predict(SMALL, program, hardware(), load, Deployment(**deployment))  # type: ignore[arg-type]


@pytest.mark.parametrize(("asynchronous", "normed", "added"), [("true", 4, 0), ("false", 2, 3)])
def test_one_rank_by_hand(asynchronous: str, normed: int, added: int) -> None:
    """All of it is moving bytes, at 1e9 a second; kernels for GPUs add and norm at once."""
    texts, hidden, heads, kv, wide, vocabulary = 2, 64, 64, 32, 96, 100
    machine = hardware(asynchronous=asynchronous)
    decode = predict(SMALL, DENSE, machine, Workload(texts, 5, 2), Deployment()).decode
    assert decode is not None
    keys = texts * 6  # five of the prompt, and the token itself
    attention = (
        normed * texts * hidden
        + (heads + 2 * kv) * hidden + texts * (hidden + heads + 2 * kv)
        + 2 * texts * (heads + 2 * kv)  # placed, turned and cached
        + 2 * keys * kv + 2 * texts * heads
        + heads * hidden + texts * (heads + hidden)
        + added * texts * hidden  # to the stream
    )  # fmt: skip
    feed_forward = (
        normed * texts * hidden
        + 2 * wide * hidden + texts * (hidden + 2 * wide)
        + 3 * texts * wide
        + wide * hidden + texts * (wide + hidden)
        + added * texts * hidden
    )  # fmt: skip
    ends = 2 * texts * hidden + 2 * texts * hidden + vocabulary * hidden + texts * (hidden + vocabulary)
    numbers = 4 * (attention + feed_forward) + ends + texts * vocabulary
    assert decode.seconds == pytest.approx(4 * numbers / 1e9)
    assert decode.compute == decode.seconds
    assert decode.exposed == decode.communication == 0
    assert decode.launches == pytest.approx(0, abs=1e-15)


def test_prompts_are_computed_where_that_takes_longer() -> None:
    fast = hardware(float32="1e9", bandwidth="1e15")
    prefill = predict(SMALL, DENSE, fast, Workload(1, 10, 1), Deployment()).prefill
    products = 10 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96)
    attention = 2 * 64 * 10 * 11 / 2
    not_asked_of = 9 * 3 * 64 * 96  # the last token alone goes through the last MLP
    expected = 4 * (products + attention) - not_asked_of + 64 * 100
    assert prefill.seconds == pytest.approx(2 * expected / 1e9, rel=1e-5)


def test_a_window_bounds_what_attentions_read_and_compute() -> None:
    near = shapes("mistral", sliding_window=4)
    assert near.windows == (4,) * 4
    load = Workload(1, 1000, 3)
    all_of_it, window = (
        predict(one, DENSE, hardware(float32="1e6"), load, Deployment())
        for one in (shapes("mistral", sliding_window=None), near)
    )
    assert all_of_it.first_token - window.first_token == pytest.approx(
        4 * 4 * 64 * (1000 * 1001 / 2 - (4 * 1000 - 6)) / 1e6
    )
    assert all_of_it.per_token > window.per_token


def test_what_follows_from_both_passes() -> None:
    one = predicted(ranks=2)
    assert one.decode is not None
    assert one.total == one.first_token + 3 * one.per_token
    assert one.rate == 2 * 4 / one.total
    assert one.share == (one.prefill.exposed + 3 * one.decode.exposed) / one.total
    alone = predicted(load=Workload(1, 5, 1))
    assert alone.decode is None
    assert isnan(alone.per_token)
    assert alone.rate == 1 / alone.first_token


def test_the_mean_of_decoding_passes_is_that_of_all_of_them() -> None:
    """What a pass moves grows with the text on a straight line."""
    several = predicted(load=Workload(1, 10, 20)).per_token
    each = [predicted(load=Workload(1, 10 + more, 2)).per_token for more in range(19)]
    assert several == pytest.approx(sum(each) / len(each))
    assert predicted(load=Workload(1, 10, 3)).per_token == pytest.approx((each[0] + each[1]) / 2)


def test_collectives_add_up_by_hand() -> None:
    both, alone = predicted(ranks=2), predicted(ranks=2, connected=False)
    assert both.decode is not None
    assert alone.decode is not None
    # A ring of two: two messages, and the operand sent once; of embedding and head likewise.
    summed = 9 * (2e-3 + 2 * 64 * 4 / 1e6)
    gathered = 1e-3 + 2 * 16 / 1e6
    assert (
        both.decode.communication
        == pytest.approx(both.decode.exposed)
        == pytest.approx(summed + gathered)
    )
    assert both.decode.seconds - alone.decode.seconds == pytest.approx(summed + gathered)
    assert alone.decode.exposed == 0


@pytest.mark.parametrize("name", ["lp", "ladder", "ladder-over-lp", "fused", "tracks:2", "desync"])
def test_programs_that_wait_less_are_faster_and_no_faster_than_no_waiting(name: str) -> None:
    program = variant(name, DENSE, range(4), 2)
    slow = predicted(ranks=2).per_token
    edited, free = (predicted(program, ranks=2, connected=one).per_token for one in (True, False))
    assert free < edited < slow


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("narrow", ["A{}#2", "F{}#48"])
def test_a_narrow_sublayer_saves_the_same_behind_whole_ones_as_before_them(
    narrow: str, ranks: int
) -> None:
    def of(*layers: int) -> float:
        text = str(DENSE)
        for layer in layers:
            text = text.replace(f"{narrow[0]}{layer}", narrow.format(layer))
        return predicted(Program.parse(text), ranks=ranks).per_token

    none, first, last = of(), of(0), of(3)
    assert first == pytest.approx(last)
    assert none > first
    assert none - of(0, 1, 2, 3) == pytest.approx(4 * (none - first))


def test_links_that_take_nothing_make_a_ladder_dense() -> None:
    free = hardware(hop="0").link()
    instant = replace(hardware(), links={"none": replace(free, bandwidth=1e30)})
    ladder = variant("ladder", DENSE, range(4), 4)
    times = [
        predict(SMALL, program, instant, Workload(1, 5, 3), Deployment(4)).total
        for program in (DENSE, ladder)
    ]
    assert times[0] == pytest.approx(times[1])


def test_an_emulated_link_delays_dense_by_each_of_its_collectives() -> None:
    instant = hardware(hop="0")
    slow = Deployment(2, emulated=Link(0.25))
    later = predict(SMALL, DENSE, instant, Workload(1, 5, 2), slow).per_token
    assert later - predict(
        SMALL, DENSE, instant, Workload(1, 5, 2), Deployment(2)
    ).per_token == pytest.approx(10 * 0.25, rel=1e-2)


@pytest.mark.parametrize("texts", [1, 2, 3])
def test_halves_pay_for_prompts_whose_reductions_take_long_and_not_where_weights_are_read(
    texts: int,
) -> None:
    load, modes = Workload(texts, 64, 3), ("off", "on")

    def over_a_link(flops: str, seconds: float) -> list[Prediction]:
        wire = hardware(hop="0", float32=flops)
        instant = replace(wire, links={"none": replace(wire.link(), bandwidth=1e30)})
        ways = (Deployment(2, emulated=Link(seconds), halves=mode, graphs=False) for mode in modes)
        return [predict(SMALL, DENSE, instant, load, way) for way in ways]

    computing = predict(
        SMALL, DENSE, hardware(float32="1e8"), load, Deployment(2, connected=False)
    ).prefill.seconds
    dense, halves = over_a_link("1e8", computing / 8 / 2)  # half as long as a step computes
    assert 1.25 < dense.prefill.seconds / halves.prefill.seconds < 1.5
    assert halves.prefill.layers.all_reduces == 2 * dense.prefill.layers.all_reduces
    assert halves.prefill.vocabulary == dense.prefill.vocabulary

    reading = predict(SMALL, DENSE, hardware(), load, Deployment(2, connected=False)).per_token
    dense, halves = over_a_link("1e12", reading / 8 / 2)
    assert halves.decode.seconds >= dense.decode.seconds
    if texts == 1:
        assert halves.decode == dense.decode  # a token alone has no halves
    else:
        assert halves.per_token > dense.per_token
    without = (
        predict(SMALL, DENSE, hardware(), load, Deployment(1, halves=mode)).total for mode in modes
    )
    assert len({*without}) == 1


def test_launches_count_unless_they_are_captured() -> None:
    slow = hardware(launch="1e-3", graph="1e-5", forward="0.5", collective="1e-2")
    captured, eager = (
        predict(SMALL, DENSE, slow, Workload(1, 5, 2), Deployment(graphs=graphs)).decode
        for graphs in (True, False)
    )
    assert captured is not None
    assert eager is not None
    kernels = 4 * (5 + 4) + 4
    assert captured.launches == pytest.approx(0.5 + kernels * 1e-5)
    assert eager.launches == pytest.approx(0.5 + kernels * 1e-3, rel=2e-3)
    with pytest.raises(
        ValueError, match="round launches kernels one by one; captured graphs are for GPUs"
    ):
        predict(SMALL, DENSE, hardware(asynchronous="false"), Workload(1, 5, 2), Deployment(graphs=True))


def test_first_factors_are_shared_out_where_that_is_faster() -> None:
    program = Program.parse("A0@q32,k16,v16,o32 F0@gate24,up24,down24")
    fast, slow = hardware(hop="0", bandwidth="1e6").link(), hardware(hop="10")
    near = replace(hardware(), links={"wire": replace(fast, bandwidth=1e12)})
    for hard, best in ((near, "gather"), (slow, "replicate")):
        times = {
            way: predict(SMALL, program, hard, Workload(1, 4, 2), Deployment(2, low_rank=way)).per_token
            for way in ("auto", "gather", "replicate")
        }
        assert times["auto"] == min(times.values()) == times[best]


def test_integers_are_faster_where_bytes_cost_and_only_there() -> None:
    load, thin = Workload(8, 100, 2), hardware(hop="0")
    free = replace(thin, links={"wire": replace(thin.link(), bandwidth=1e30)})
    for hard, faster in ((thin, True), (free, False)):
        exact, short = (
            predict(SMALL, DENSE, hard, load, Deployment(2, compress=compress)).first_token
            for compress in (None, "int8")
        )
        assert (short < exact) == faster


def test_ranks_of_several_nodes_wait_for_the_network() -> None:
    inside, between = predicted(ranks=4), predicted(ranks=4, node=2)
    assert between.per_token > inside.per_token + 8 * 2e-2
    with pytest.raises(ValueError, match="round has no network between nodes"):
        predict(SMALL, DENSE, replace(hardware(), networks={}), Workload(), Deployment(4, node=2))


@pytest.mark.parametrize(
    ("program", "ranks", "load", "said"),
    [
        (
            DENSE,
            128,
            Workload(),
            "128 ranks cannot share this model, .* use at most 104",
        ),
        (Program.dense(5), 1, Workload(), "A4 is out of range: the model's layers are 0 to 3"),
        (
            Program.parse("F0@up65"),
            1,
            Workload(),
            "F0@up65: rank 65 of up is above that of a matrix of 96 x 64",
        ),
        (
            Program.parse("A0/3:0"),
            1,
            Workload(),
            "the 8 heads and 4 KV heads of A0 do not divide into 3 slices",
        ),
        (
            DENSE,
            1,
            Workload(prompt=4096),
            "prompt and output together are 4608 tokens, and llama has 4096 positions",
        ),
    ],
)
def test_what_does_not_fit_the_model_is_refused(
    program: Program, ranks: int, load: Workload, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        predict(SMALL, program, hardware(), load, Deployment(ranks))


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="batch must be at least 1, not 0"):
        Workload(0)
    with pytest.raises(ValueError, match="the number of ranks must be at least 1, not 0"):
        Deployment(0)
    with pytest.raises(ValueError, match="no figure of FLOP/s in float16; did you mean 'bfloat16'"):
        predicted(dtype="float16")


def test_the_rank_with_most_heads_is_waited_for() -> None:
    """Nine heads over three KV heads on two ranks: one has a KV group, the other two; neurons make up for it."""
    sizes = {"hidden_size": 576, "head_dim": 64, "intermediate_size": 1536}
    nine = shapes(num_attention_heads=9, num_key_value_heads=3, **sizes)

    def computing(program: str, ranks: int) -> float:
        found = predict(nine, Program.parse(program), hardware(), LOAD, Deployment(ranks)).decode
        assert found is not None
        return found.compute

    assert computing("A0", 2) == pytest.approx(2 / 3 * computing("A0", 1), rel=0.05)
    assert computing("F0", 2) == pytest.approx(1 / 2 * computing("F0", 1), rel=0.05)
    assert computing("[A0 F0]", 2) < 0.95 * computing("A0 F0", 2)
