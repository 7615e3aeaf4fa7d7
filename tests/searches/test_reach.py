"""Limits as users write them, how far programs are from them, and what edits can reach."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from surgeon.cost.deployment import Deployment, Workload
from surgeon.cost.predict import predict
from surgeon.language.operations.applied import AppliedOperation, Edit
from surgeon.language.program import Program
from surgeon.opened import Model
from surgeon.quality.summary import Quality
from surgeon.searches.mixture import Mixture
from surgeon.searches.pricing import Pricing, reach, require_reachable, require_work
from surgeon.searches.quantities import Aspect, Limit, parse_limits
from surgeon.searches.spaces.base import Claim, Space, claims_of_shape, parse_spaces
from surgeon.searches.spaces.pair import Pairs
from tests.cost.examples import hardware, model

SIX = model(num_hidden_layers=6)
PAIR = Program.parse("A0 F0 [A1 A2] [F1 F2] A3 F3 A4 F4 A5 F5")


def budget(text: str, ranks: int = 2) -> tuple[Sequence[Limit], Pricing]:
    limits = parse_limits(text)
    aspects = tuple(limit.aspect for limit in limits if limit.aspect.is_priced)
    pricing = Pricing(SIX, aspects, Deployment(ranks), Workload(1, 5, 4), {"l4": hardware(launch="0")})
    return limits, pricing


def shortfalls(asked: tuple[Sequence[Limit], Pricing], program: Program) -> tuple[float, ...]:
    limits, pricing = asked
    return pricing.shortfalls(limits, program)


def mixture(spaces: str = "pair") -> Mixture:
    return Mixture(parse_spaces(spaces), SIX)


def measured(perplexity: float, divergence: float) -> Quality:
    return Quality(perplexity, divergence=divergence)


@pytest.mark.parametrize(
    ("text", "amount", "relative"),
    [
        ("depth=12", 12, False),
        ("depth <= 11.5", 11.5, False),
        ("syncs<=20", 20, False),
        ("params=3M", 3e6, False),
        ("params=0.8x", 0.8, True),
        ("weight_bytes=20MB", 20e6, False),
        ("kv_bytes<=0.5x", 0.5, True),
        ("wire_bytes=40KB", 40e3, False),
        ("latency<=12ms@h100-sxm", 0.012, False),
        ("latency=0.5x@some file.yaml", 0.5, True),
        ("speedup>=1.25@l4", 0.8, False),
        ("speedup=1.25x@here", 0.8, False),
        ("divergence<=0.02", 0.02, False),
        ("perplexity<=1.05x", 1.05, True),
        ("perplexity<=7.5", 7.5, False),
    ],
)
def test_limits_are_read(text: str, amount: float, relative: bool) -> None:
    (limit,) = parse_limits(text)
    assert (limit.amount, limit.relative, limit.text) == (pytest.approx(amount), relative, text)


def test_several_limits() -> None:
    found = parse_limits("depth=12, latency<=12ms@h100-sxm,latency<=30ms@l4,divergence<=0.02")
    aspects = [
        Aspect("depth"),
        Aspect("latency", "h100-sxm"),
        Aspect("latency", "l4"),
        Aspect("divergence"),
    ]
    assert [limit.aspect for limit in found] == aspects
    assert [limit.aspect.is_priced for limit in found] == [True, True, True, False]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dpeth=12", "unknown quantity 'dpeth' in 'dpeth=12'; did you mean 'depth'?"),
        ("depth=0", "'0' is no depth"),
        ("depth=-3", "'-3' is no number"),
        ("depth=11.7", "whole or half layers"),
        ("depth", "as in depth=12"),
        ("depth=12,", "as in depth=12"),
        ("depth=12,depth<=0.5x", "limits depth twice, by depth=12 and depth<=0.5x; keep one"),
        ("depth=8@l4", "depth is the same on any hardware; leave @l4 out"),
        ("params>=8M", "no limit to what a search may spend; write params<=8M"),
        ("depth>=0x", "0x of the unedited model's should be above 0, such as 1x or 1.25x"),
        ("depth>=8,depth>=9", "limits depth twice"),
        ("speedup<=2@l4", "write speedup>=2@l4"),
        (
            "latency=12ms",
            "say on which, as in latency=12ms@h100-sxm, or measured on this machine: latency=12ms@here",
        ),
        ("latency=12@l4", "'12' is no delay; write e.g. 1ms"),
        ("speedup=fast@l4", "'fast' is no number"),
        ("speedup=0.9@l4", "a number above 1"),
        ("params=1.5x", "1.5x of the unedited model's should be above 0 and at most 1x"),
        ("params=1.5q", "write e.g. 3M"),
        ("syncs=1.5", "whole number"),
        ("weight_bytes=much", "no amount of memory"),
        ("divergence=1.05x", "the unedited model's divergence is 0; write a number without x"),
        ("perplexity<=0.9x", "should be at least 1x, such as 1.05x"),
    ],
)
def test_what_is_no_limit(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=".") as caught:
        parse_limits(text)
    assert said in str(caught.value)


def test_a_model_that_is_to_be_deeper() -> None:
    deeper = Program.parse("A0 F0 A1 F1 A2 F2 A1 F1 A2 F2 A3 F3 A4 F4 A5 F5")
    wanted = budget("depth>=10,depth<=12")
    assert shortfalls(wanted, Program.dense(6)) == (1, 0)
    assert shortfalls(wanted, deeper) == (0.5, 0)
    assert shortfalls(budget("depth>=1.25x"), deeper) == (0,)
    limits, pricing = wanted
    assert [limit.aspect.show(pricing.price(limit.aspect, deeper)) for limit in limits] == [
        "depth 8",
        "depth 8",
    ]
    assert limits[0].aspect.natural(-8) == 8
    (kept,) = require_work(*budget("params=0.8x,depth>=1x"))
    assert (
        kept
        == "depth>=1x: the unedited model has depth 6 already; it only keeps programs from being shallower"
    )
    for text, said in (
        ("depth>=5", "ask for more"),
        ("depth=8", "ask for less, or for a deeper model by depth>=8"),
    ):
        with pytest.raises(ValueError, match=f"has depth 6 already; {said}"):
            require_work(*budget(text))


def test_how_far_programs_are() -> None:
    wanted = budget("depth=4,wire_bytes=0.75x,params=1x")
    assert shortfalls(wanted, Program.dense(6)) == (1, 1, 0)
    assert shortfalls(wanted, PAIR) == (0.5, pytest.approx(1 / 3), 0)
    assert shortfalls(wanted, Program.parse("A0 F0 A1 F1 A2 F2 A3 F3")) == (0, 0, 0)
    # One more of what the unedited model is within the limit of is in parts of the limit.
    more = Program.parse("A0@q64 F0 A1 F1 A2 F2 A3 F3")
    assert shortfalls(budget("params=1x"), more) == (0,)
    whole = next(iter(budget("params=1x")[1].dense.values()))
    widened = "A0@q64 F0 A1 F1 A2 F2 A3 F3 A4 F4 A5 F5"
    assert shortfalls(budget("params=1x"), Program.parse(widened)) == (pytest.approx(64 * 64 / whole),)


def test_quality_is_limited_by_what_is_measured() -> None:
    (_, *wanted), _ = budget("depth=5,divergence<=0.02,perplexity<=1.05x")

    def lacks(perplexity: float, divergence: float) -> list[float]:
        return [limit.lack(measured(perplexity, divergence), measured(10, 0)) for limit in wanted]

    assert lacks(10.5, 0.02) == [0, 0]
    assert lacks(12.6, 0.03) == pytest.approx([0.5, 0.2])
    assert not any(lacks(10.4, 0.01))
    assert any(lacks(10.4, 0.021))
    assert any(lacks(10.6, 0.01))


def test_limits_that_ask_for_nothing() -> None:
    with pytest.raises(
        ValueError, match="budget depth=6: the unedited model has depth 6 already; ask for less"
    ):
        require_work(*budget("depth=6"))
    with pytest.raises(ValueError, match="has depth 6 already and the unedited model has params"):
        require_work(*budget("depth=8,params=1x"))
    notes = require_work(*budget("depth=5,params=1x,divergence=0.1"))
    assert len(notes) == 1
    assert "params=1x: the unedited model has params" in notes[0]
    assert require_work(*budget("divergence=0.1")) == []
    with pytest.raises(ValueError, match="syncs<=3: the unedited model has syncs 0 on 1 rank"):
        require_work(*budget("syncs<=3", ranks=1))


@pytest.mark.parametrize(
    ("text", "spaces", "edits"),
    [
        ("syncs<=1", "drop", 6),
        ("params=0.2x", "drop,pair", 5),
        ("depth=5", "pair", 1),
        ("depth=3", "pair", 3),
        ("depth=2", "pair:3", 2),
        ("syncs<=8,wire_bytes=0.7x", "pair", 2),
    ],
)
def test_what_can_be_reached(text: str, spaces: str, edits: int) -> None:
    wanted = budget(text)
    found = require_reachable(*wanted, mixture(spaces))
    assert len(found) == edits
    assert not any(shortfalls(wanted, mixture(spaces).program(found)))


def test_a_time_is_reached_with_as_few_edits_as_it_takes() -> None:
    dense = next(iter(budget("latency=1x@l4")[1].dense.values()))
    one = budget("latency=1x@l4")[1].price(Aspect("latency", "l4"), PAIR)
    found = require_reachable(
        *budget(f"latency={1e3 * (dense - 1.5 * (dense - one)):.6f}ms@l4"), mixture()
    )
    assert len(found) == 2


@pytest.mark.parametrize(
    ("text", "spaces", "said"),
    [
        (
            "depth=2",
            "pair",
            "budget depth=2 is out of reach: pair brings the model from depth 6 to depth 3 at the least",
        ),
        ("depth=1", "pair:3,par", "pair, par bring the model from depth 6 to depth 2 at the least"),
        (
            "syncs<=0",
            "drop",
            "drop brings the model from syncs 12 to syncs 1 at the least, as a program has to keep one attention",
        ),
        (
            "syncs<=1",
            "drop:layers",
            "drop brings the model from syncs 12 to syncs 2 at the least, as a program",
        ),
        (
            "depth=1",
            "drop:attention",
            "drop brings the model from depth 6 to depth 3.5 at the least, as a program",
        ),
        ("depth>=8", "pair", "depth>=8 is out of reach: no edit of pair raises the model's depth 6"),
        (
            "kv_bytes=0.5x,depth=4",
            "pair",
            "kv_bytes=0.5x is out of reach: no edit of pair lowers the model's kv_bytes",
        ),
    ],
)
def test_what_is_out_of_reach(text: str, spaces: str, said: str) -> None:
    with pytest.raises(ValueError, match=".") as caught:
        require_reachable(*budget(text), mixture(spaces))
    assert said in str(caught.value)


def test_the_fastest_that_edits_reach_is_said() -> None:
    times = [
        predict(
            SIX.shapes,
            Program.parse(text),
            hardware(launch="0"),
            Workload(1, 5, 4),
            Deployment(2, "float32"),
        ).per_token
        for text in (str(Program.dense(6)), "[A0 A1] [F0 F1] [A2 A3] [F2 F3] [A4 A5] [F4 F5]")
    ]
    said = (
        f"pair brings the model from speedup 1x@l4 to speedup {times[0] / times[1]:.4g}x@l4 at the most"
    )
    with pytest.raises(ValueError, match=said):
        require_reachable(*budget("speedup=9@l4"), mixture())


class Thinner(Space):
    """Ranks, in layers that then keep their place: what pairs save and what these save exclude each other."""

    name, summary, place = "thinner", "", 90

    def edits(self, model: Model) -> Iterator[Edit]:
        return (Edit(layer, layer + 1, self.name) for layer in range(model.num_layers))

    def claims(self, edit: Edit) -> frozenset[Claim]:
        return claims_of_shape(edit)

    def operations(
        self,
        edits: Sequence[Edit],
        program: Program,  # noqa: ARG002
        model: Model,  # noqa: ARG002
    ) -> tuple[AppliedOperation, ...]:
        return (AppliedOperation("lowrank", tuple(edit.layers for edit in edits), {"keep": 0.5}),)


def test_limits_that_exclude_each_other_are_told_from_those_out_of_reach() -> None:
    both = Mixture((Pairs(), Thinner()), SIX)
    found = require_reachable(*budget("depth=5,params=0.7x"), both)
    assert [edit.space for edit in found].count("pair") == 1
    assert len(found) == 1 + 4  # four layers at half their parameters leave two thirds
    with pytest.raises(
        ValueError, match=r"each of its limits can be met, but not all at once.* nearest has depth"
    ):
        require_reachable(*budget("depth=3,params=0.7x"), both)


def test_without_limits_on_programs_there_is_nothing_to_reach() -> None:
    assert reach(*budget("divergence=0.1"), mixture()) == ()
