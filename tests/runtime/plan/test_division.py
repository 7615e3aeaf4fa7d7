"""Neurons that make up for unequal heads, and how unequal ranks' shares are."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from surgeon.cost.deployment import plan_on_paper
from surgeon.language.program import Program, Step
from surgeon.language.sublayer import Sublayer
from surgeon.models.families import FAMILIES
from surgeon.models.families.specs import Units, unit_bounds
from surgeon.models.shapes import ModelShapes
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.memory import imbalance
from surgeon.runtime.plan.placement import placed_parts, require_equal_heads
from surgeon.runtime.plan.specification import Balance, Plan, cut_neurons
from tests.tiny_models import tiny_model

# SmolLM2-135M: 9 heads of 64 features, 3 KV heads, 1,536 neurons, 576 features of the stream.
SMOL = Balance(9, 3, 1536, 2 * 576 * 64, 2 * 576 * 64, 3 * 576)


@pytest.fixture(scope="module")
def nine_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nine")
    config = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 36}
    tiny_model("llama", head_dim=8, intermediate_size=41, **config).save_pretrained(folder)
    return folder


def test_neurons_make_up_for_heads() -> None:
    assert cut_neurons(SMOL, 1, 1, 3) is None  # three ranks have three heads each
    assert cut_neurons(SMOL, 1, 1, 2) == (848, 1536)
    first, second = 4 * SMOL.head + 848 * SMOL.neuron, 8 * SMOL.head + 688 * SMOL.neuron
    assert max(first, second) / ((first + second) / 2) < 1.01 < 1.08
    # Qwen2.5-0.5B: in steps of 16 neurons the busiest of eight would have more than by equal parts.
    qwen = Balance(14, 2, 4864, 2 * 896 * 64, 2 * 896 * 64, 3 * 896)
    assert cut_neurons(qwen, 1, 1, 8) is None


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 300), st.integers(1, 9), st.integers(1, 3))
def test_cuts_are_of_all_neurons(
    groups: int, each: int, neurons: int, members: int, attentions: int
) -> None:
    """Every member has some, and the busiest less than by equal parts."""
    balance = Balance(groups * each, groups, neurons, 8, 8, 3)
    ends = cut_neurons(balance, attentions, 1, members)
    if ends is None:
        return
    assert ends[-1] == neurons
    sizes = [end - first for first, end in zip((0, *ends), ends, strict=False)]
    assert min(sizes) > 0
    units = {"heads": groups * each, "kv_heads": groups}
    busy = []
    for member in range(members):
        bounds = (unit_bounds(units, unit, (member, members)) for unit in ("heads", "kv_heads"))
        busy.append(attentions * 8 * sum(end - first for first, end in bounds))
    even = max(
        own + 3 * (neurons * (at + 1) // members - neurons * at // members)
        for at, own in enumerate(busy)
    )
    assert max(own + 3 * size for own, size in zip(busy, sizes, strict=True)) < even


@pytest.mark.parametrize(
    ("steps", "is_balanced"),
    [
        ("A1 [A0 F0]", True),
        ("A1 >F0", True),
        (">A1 >F0", True),
        ("A1 F0", False),
        ("A1 [F0 F1]", False),
        ("A1 [A0 F0#20]", False),
        # Late ones beside no attention, or one that neurons cannot make up for.
        ("F1 >F0", False),
        ("A1#1 >F0", False),
        ("[A1 A2] >F0", False),
        ("{A1 | A2} >F0", False),
        ("A1 [A0#1 F0]", False),
        ("A1 [A0@q2,o2 F0]", False),
    ],
)
def test_where_neurons_make_up(steps: str, is_balanced: bool) -> None:
    before, node = Program.parse(steps).nodes
    assert isinstance(node, Step)
    parts = [placed_parts(node, member, 2, False, SMOL, before)[0] for member in range(2)]
    found = [part for own in parts for _, part in own if part.kind == "F" and part.span > 1]
    if not is_balanced:
        assert not found
        return
    assert found == [
        Sublayer("F", (0,), (0, 1536), span=848),
        Sublayer("F", (0,), (848, 1536), span=688),
    ]


def test_imbalance(nine_heads: Path) -> None:
    """By hand: ranks have 3 and 6 heads, 1 and 2 KV heads, and 20 and 21 of 41 neurons if not balanced."""
    head, neuron = 2 * 8 * 36, 3 * 36

    def found(program: str, ranks: int = 2) -> float:
        return imbalance(make_plan(nine_heads, ranks, 16, program))

    assert found("A0 F0", 1) == found("A0", 3) == found("[A0 A1]") == 1
    assert found("A0") == pytest.approx(8 / 6)
    total = 12 * head + 41 * neuron
    assert found("A0 F0") == pytest.approx(2 * (8 * head + 21 * neuron) / total)
    # Neurons are 31 and 10: 4 * 576 + 31 * 108 and 8 * 576 + 10 * 108.
    assert found("[A0 F0]") == pytest.approx(2 * (8 * head + 10 * neuron) / total)
    assert found("A0 >F0") < found("A0 F0")
    assert found("F0 >F1") == pytest.approx(42 / 41)  # beside no attention


def test_that_of_a_configuration_is_that_of_the_weights(nine_heads: Path) -> None:
    shapes = ModelShapes.of("nine", AutoConfig.from_pretrained(nine_heads))
    program = Program.parse("A0 F0 [A1 F1] >A2 >F2 A3 F3")
    on_paper = plan_on_paper(shapes, program, 2, 16, "float32", "auto", "auto")
    plan = make_plan(nine_heads, 2, 16, str(program))
    assert on_paper.balance == plan.balance
    assert imbalance(on_paper, shapes) == imbalance(plan)


@pytest.mark.parametrize(
    ("program", "ranks", "units", "divide"),
    [
        ("A0 F0", 2, {"heads": 4, "kv_heads": 2}, True),
        ("A0 F0", 4, {"heads": 4, "kv_heads": 2}, True),  # two ranks have each KV head
        ("A0 F0", 2, {"heads": 9, "kv_heads": 3}, False),
        ("A0 F0", 2, {"heads": 6, "kv_heads": 3}, False),
        ("[A0 A1] F0", 2, {"heads": 9, "kv_heads": 3}, True),  # a whole attention each
        ("A0 F0", 3, {"heads": 4}, False),
    ],
)
def test_heads_that_vllm_can_share(
    program: str, ranks: int, units: Units, divide: bool, tmp_path: Path
) -> None:
    plan = Plan(tmp_path, FAMILIES["llama"], program, ranks, 8, 32, 97, 2, 16, False, "float32")
    if divide:
        require_equal_heads(plan, lambda _: units)
        return
    with pytest.raises(ValueError, match=f"heads .*A0.* do not divide into {ranks}"):
        require_equal_heads(plan, lambda _: units)
