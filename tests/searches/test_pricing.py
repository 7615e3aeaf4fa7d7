"""What programs cost, against sums by hand, whole predictions, and what ranks of the runtime count."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from surgeon.cost.deployment import Deployment, Workload
from surgeon.cost.hardware import Hardware
from surgeon.cost.predict import predict
from surgeon.language.operations.variants import variant
from surgeon.language.program import Program
from surgeon.language.sublayer import Sublayer
from surgeon.opened import Model
from surgeon.runtime.comm.collectives import Link
from surgeon.searches.pricing import Pricing
from surgeon.searches.quantities import Aspect
from surgeon.searches.question import Question
from tests.cost.examples import hardware, model
from tests.cost.test_passes import counted_bytes
from tests.tiny_models import tiny_model

SMALL = model()
LOAD = Workload(2, 5, 4)
DENSE = Program.dense(4)
OF_PROGRAMS = ("depth", "syncs", "params", "weight_bytes", "kv_bytes", "wire_bytes")
MIXED = [
    "A0 F0 [A1 A2] [F1 F2] A3 F3",
    "A0 F0 >A1 >F1 A2 F2 >A3 >F3",
    ">A0 >F0 >[A1 A2] >[F1 F2] A3 F3",
    "{A0 F0 | A1 F1} [A2 F2] A3@q32,k16,v16,o32 >F3@gate24,up24,down24",
    "{A0/2:0 >F0/2:0 | A0/2:1 >F0/2:1} A1~A2 F1~F2 A3 F3",
    "F0 A1 >A2 F3",
]


def prices_of(pricing: Pricing, program: Program) -> tuple[float, ...]:
    """A program's costs, in the order of the aspects; infinite where the ranks cannot run it."""
    return tuple(pricing.price(aspect, program) for aspect in pricing.aspects)


def priced(
    names: tuple[str, ...] = OF_PROGRAMS,
    of: Model = SMALL,
    on: Hardware | None = None,
    **deployment: object,
) -> Pricing:
    ways = Deployment(**({"ranks": 2} | deployment))  # type: ignore[arg-type]
    aspects = tuple(Aspect(name, "hw" if name in ("latency", "speedup") else None) for name in names)
    return Pricing(of, aspects, ways, LOAD, {"hw": on or hardware()})


def test_the_unedited_model_by_hand() -> None:
    """Stream 64, 8 heads over 4 of 8 numbers each, 96 neurons; numbers of 4 bytes."""
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96
    assert tuple(priced().dense.values()) == (4, 8, 4 * layer, 16 * layer, 4 * 2 * 32 * 4, 8 * 64 * 4)
    assert tuple(priced(ranks=1).dense.values()) == (4, 0, 4 * layer, 16 * layer, 4 * 2 * 32 * 4, 0)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2", "opt", "qwen3", "gemma2", "phi3"])
def test_the_size_is_of_all_matrices_of_the_model(family: str) -> None:
    """Also of those outside of its layers; a shared one counts once, biases and norms do not."""
    module = tiny_model(family, num_layers=2)
    pricing = priced(("size", "weight_bytes"), Model.of_config(module.config, family))
    whole, layers = pricing.dense.values()
    assert whole == 4 * sum(weight.numel() for weight in module.parameters() if weight.dim() > 1)
    smaller = prices_of(pricing, Program.parse("A0" if family != "gpt_neox" else "[A0 F0]"))
    assert whole - smaller[0] == layers - smaller[1] > 0


def test_edits_by_hand() -> None:
    pricing = priced()
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96
    pair = prices_of(pricing, Program.parse("A0 F0 [A1 A2] [F1 F2] A3 F3"))
    assert pair == (3, 6, 4 * layer, 16 * layer, 1024, 6 * 256)
    # A merged layer is one; layers that occur twice have one set of weights and two caches.
    assert prices_of(pricing, Program.parse("A0 F0 A0~A1 F1")) == (
        2,
        4,
        2 * layer,
        8 * layer,
        512,
        4 * 256,
    )
    assert prices_of(pricing, Program.parse("A0 F0 A0 F0"))[2:5] == (layer, 4 * layer, 512)
    factored = prices_of(pricing, Program.parse("A0@q32,o16 F0"))
    assert factored[2] == layer - 2 * 64 * 64 + (32 + 16) * 128
    # Half of q's 32 rank columns are gathered; o is summed in its rank, F in the width of the stream.
    assert factored[5] == 4 * (16 + 16 + 64)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2", "opt", "qwen3", "phi3", "gemma2"])
def test_families_keep_and_send_what_their_shapes_say(family: str) -> None:
    of = model(family)
    kv, per_layer = of.shapes.matrix(Sublayer("A", (0,)), "k").shape[0], of.family.steps_per_layer
    dense = tuple(priced(("kv_bytes", "wire_bytes", "params"), of).dense.values())
    assert dense[0] == of.num_layers * 2 * kv * 4
    # Norms behind sublayers keep the sums of a step apart.
    assert dense[1] == of.num_layers * per_layer * of.shapes.hidden * 4
    matrices = of.shapes.layer_shapes.matrices.values()
    assert dense[2] == of.num_layers * sum(outputs * inputs for outputs, inputs in matrices)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("program", MIXED)
def test_what_is_sent_is_what_ranks_count(program: str, ranks: int) -> None:
    for way in ("gather", "replicate", "base"):
        found = prices_of(priced(("wire_bytes",), ranks=ranks, low_rank=way), Program.parse(program))
        assert found == (counted_bytes(program, ranks, way),)


def test_keys_and_values_in_rank_space() -> None:
    program = Program.parse("A0@k16,v8 F0 A1 F1")
    assert prices_of(priced(("kv_bytes",), kv="full"), program) == (2 * 2 * 32 * 4,)
    # Both ranks keep what the first factors give, whole.
    assert prices_of(priced(("kv_bytes",), kv="lowrank"), program) == (2 * (16 + 8) * 4 + 2 * 32 * 4,)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_time_adds_up_over_stretches(ranks: int) -> None:
    """As whole programs are predicted, with contention and launches, and ranks that share a device."""
    slow = hardware(launch="1e-4", graph="1e-5", collective="2e-4", forward="1e-3")
    contended = replace(slow, links={"wire": replace(slow.link(), contention=0.3)})
    texts = [
        *MIXED,
        *(str(variant(name, DENSE, range(4), 2)) for name in ("ladder-over-lp", "tracks:2", "desync")),
    ]
    for hard in (hardware(), contended, hardware(asynchronous="false", launch="1e-4")):
        pricing = priced(("latency", "speedup"), on=hard, ranks=ranks)
        for program in map(Program.parse, texts):
            latency, share = prices_of(pricing, program)
            whole, dense = (
                predict(SMALL.shapes, each, hard, LOAD, Deployment(ranks, "float32")).per_token
                for each in (program, DENSE)
            )
            assert latency == pytest.approx(whole, rel=1e-9)
            assert share == pytest.approx(whole / dense, rel=1e-9)


UNEVEN = ["[A0 A1@q32,k16,v16,o32] F0 [A2 A3] [F1@up24 F2] [F2 F3@down8]", "{A0 F0 A1 | A2 F2} F3 A3"]


@pytest.mark.parametrize(
    "ways", [{"graphs": False}, {"emulated": Link(1e-2, 1e5)}, {"emulated": Link(1.0)}]
)
def test_time_that_does_not_add_up_is_predicted_whole(ways: dict[str, object]) -> None:
    slow = hardware(launch="1e-4", collective="2e-4")
    pricing = priced(("latency",), on=slow, **ways)
    for program in map(Program.parse, [*MIXED, *UNEVEN]):
        whole = predict(SMALL.shapes, program, slow, LOAD, Deployment(2, "float32", **ways))  # type: ignore[arg-type]
        assert prices_of(pricing, program) == (pytest.approx(whole.per_token, rel=1e-9),)


def test_layers_with_windows_are_told_apart() -> None:
    of = model("gemma2", sliding_window=3)
    assert len(set(of.shapes.windows)) == 2
    slow, load = hardware(hop="0"), Workload(1, 50, 4)
    pricing = Pricing(of, (Aspect("latency", "hw"),), Deployment(1), load, {"hw": slow})
    for text in ("A0 F0 A2 F2", "A1 F1 A3 F3", "[A0 A1] [F0 F1]"):
        whole = predict(of.shapes, Program.parse(text), slow, load, Deployment(1, "float32")).per_token
        assert prices_of(pricing, Program.parse(text)) == (pytest.approx(whole, rel=1e-9),)
    assert prices_of(pricing, Program.parse("A0 F0 A2 F2")) != prices_of(
        pricing, Program.parse("A1 F1 A3 F3")
    )


@pytest.mark.parametrize("link", [None, Link(1e-3)])
def test_thousands_of_programs_take_no_thousands_of_predictions(
    link: Link | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(
        "surgeon.searches.pricing.predict",
        lambda *arguments: asked.append(arguments) or predict(*arguments),
    )
    pricing, dice = priced(("latency",), emulated=link), random.Random(0)
    for _ in range(50):
        pair = dice.randrange(3)
        late = "".join(dice.choice(" >") for _ in range(4))
        text = f"{late[0]}A0 {late[1]}F0 [A{pair} A{pair + 1}] {late[2]}F2 {late[3]}A3".replace(
            "  ", " "
        )
        assert prices_of(pricing, Program.parse(text))[0] > 0
    assert len(asked) < 20


def test_what_ranks_cannot_run_costs_more_than_any_limit() -> None:
    pricing = priced(("depth", "syncs", "wire_bytes"), ranks=4)
    assert prices_of(pricing, Program.parse("A0/3:0 F0 A1")) == (1.5, 3, math.inf)


@pytest.mark.parametrize(
    ("ways", "load", "said"),
    [
        ({"ranks": 128}, LOAD, "128 ranks cannot share this model"),
        ({}, Workload(1, 4096, 4), "llama has 4096 positions"),
        ({}, Workload(1, 4, 1), "at least 2 new tokens"),
        ({"dtype": "float16"}, LOAD, "no figure of FLOP/s in float16"),
        ({"ranks": 8, "node": 4, "network": "lan"}, LOAD, "no network between nodes 'lan'"),
    ],
)
def test_what_cannot_be_priced_is_said_at_once(
    ways: dict[str, object], load: Workload, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        Pricing(
            SMALL,
            (Aspect("latency", "hw"),),
            Deployment(**({"ranks": 2} | ways)),
            load,
            {"hw": hardware()},
        )  # type: ignore[arg-type]


def test_hardware_is_opened_by_name() -> None:
    budget = "depth=3,latency<=9s@h100-sxm,latency<=9s@here"
    asked = Question("pair", budget, batch=LOAD.batch, prompt=LOAD.prompt, new=LOAD.new)
    pricing = asked.pricing(SMALL, here=hardware())
    assert pricing.aspects == (
        Aspect("depth"),
        Aspect("latency", "h100-sxm"),
        Aspect("latency", "here"),
    )
    assert pricing.hardware["h100-sxm"].name == "h100-sxm"
    latency = [*pricing.dense.values()][2]
    assert latency == pytest.approx(
        predict(SMALL.shapes, DENSE, hardware(), LOAD, Deployment(2)).per_token
    )
    with pytest.raises(ValueError, match="there is no hardware 'h100-sxn'; did you mean 'h100-sxm'"):
        Question("pair", "latency<=9s@h100-sxn").pricing(SMALL)


def test_a_model_that_does_not_fit_is_told() -> None:
    assert priced(("latency",)).notes == ()
    (note,) = priced(("latency",), on=hardware(memory="1e4")).notes
    assert "on each of 2 ranks, and hw has 9.2 KB" in note
