"""Which attentions share tables of blocks, and how much of the cache that leaves to others: every division is counted.

What a text holds is found by looking back from each of its tokens here, not by the formulas of blocks.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surgeon.models.families import FAMILIES
from surgeon.runtime.batching.blocks import text_blocks
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.memory import LEAST_SAVED, MOST_GROUPS, CacheGroups, cache_groups, footprint
from surgeon.runtime.plan.specification import Plan

SIZE = 16  # tokens of a block
Window = int | None
# The layers of each: one, or a pair, whose layers go to a rank each where there are two.
Steps = list[tuple[int, ...]]


@cache
def held(tokens: int, window: Window) -> int:
    """The most blocks at a time that hold what any token of a text looks at, itself the last."""
    first = [0 if window is None else max(0, token - window + 1) for token in range(tokens)]
    return max(token // SIZE - begin // SIZE + 1 for token, begin in enumerate(first))


def plan_of(windows: tuple[Window, ...], steps: Steps, ranks: int, tokens: int) -> Plan:
    """A plan without a checkpoint; of its shape nothing matters but layers and windows."""
    program = " ".join(
        f"A{step[0]} F{step[0]}"
        if len(step) == 1
        else f"[A{step[0]} A{step[1]}] [F{step[0]} F{step[1]}]"
        for step in steps
    )
    shape = {"head_dim": 8, "hidden": 64, "vocabulary": 96}
    rest: dict[str, Any] = {"tied": False, "dtype": "float32"}
    folder, layers = Path("nowhere"), len(windows)
    return Plan(
        folder,
        FAMILIES["llama"],
        program,
        ranks,
        layers=layers,
        max_tokens=tokens,
        windows=windows,
        **shape,
        **rest,
    )


def by_rank(plan: Plan, steps: Steps) -> list[list[Window]]:
    """The window of each rank's attentions; one that a text does not outgrow is none."""
    layers = [[step[rank % len(step)] for step in steps] for rank in range(plan.ranks)]
    if plan.ranks == 1:
        layers = [[layer for step in steps for layer in step]]
    windows = [[plan.windows[layer] for layer in own] for own in layers]
    return [
        [one if one is not None and one < plan.max_tokens else None for one in own] for own in windows
    ]


def room(windows: list[list[Window]], width: int, tokens: int) -> tuple[int, int]:
    """What a text takes of all ranks where no group has more attentions than that on any, and how many groups are."""
    parts = {one: max(-(-own.count(one) // width) for own in windows) for own in windows for one in own}
    blocks = sum(count * held(tokens, one) for one, count in parts.items())
    widths = [max(-(-own.count(one) // count) for one, count in parts.items()) for own in windows]
    return blocks * sum(widths), sum(parts.values())


def taken(groups: CacheGroups, tokens: int) -> int:
    """The same of a division as it is: a block is as wide as the group with the most attentions of its rank."""
    widths = [max(Counter(slots).values()) for slots in groups.slots]
    return sum(held(tokens, window) for window in groups.windows) * sum(widths)


@pytest.mark.parametrize(
    ("family", "config", "tokens", "window", "windowed", "stated"),
    [
        ("mistral", {"num_layers": 32, "sliding_window": 4096}, 32768, 4096, 32, 1 / 8),
        ("gemma2", {"num_layers": 42, "sliding_window": 4096}, 8192, 4096, 21, 3 / 4),
        ("gpt_neo", {"num_layers": 32, "window_size": 256}, 2048, 256, 16, 0.57),
    ],
    ids=["Mistral-7B v0.1", "Gemma2-9B", "GPT-Neo-2.7B"],
)
def test_the_shares_that_serving_md_states(
    family: str,
    config: dict[str, Any],
    tokens: int,
    window: int,
    windowed: int,
    stated: float,
    tiny_model: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """Of models with the layers, windows and positions of these; how wide they are makes no difference to a share."""
    model = tiny_model(family, max_position_embeddings=tokens, **config)
    model.save_pretrained(tmp_path)
    plan = make_plan(tmp_path, 1, tokens)
    layers, kv_heads = config["num_layers"], getattr(model.config, "num_key_value_heads", None) or 4
    share = (windowed * held(tokens, window) + (layers - windowed) * tokens // SIZE) / (
        layers * tokens // SIZE
    )
    assert share == pytest.approx(stated, abs=0.005)
    groups, sizes = cache_groups(plan), footprint(plan)
    assert taken(groups, tokens) == pytest.approx(share * layers * tokens // SIZE)
    whole = 2 * layers * kv_heads * plan.head_dim * plan.dtype_bytes * tokens
    assert text_blocks(tokens, groups.windows) * sizes.block[0] == pytest.approx(share * whole)


@st.composite
def drawn(draw: st.DrawFn) -> tuple[Plan, Steps]:
    """Layers with windows of a few kinds, some of them as long as a text, each alone or in a pair."""
    tokens = 16 * draw(st.integers(1, 20))
    kinds = draw(
        st.lists(st.sampled_from((None, 1, 5, 40, 100, 320)), min_size=1, max_size=4, unique=True)
    )
    windows = tuple(draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=14)))
    steps: Steps = []
    while (layer := sum(map(len, steps))) < len(windows):
        steps.append(
            (layer, layer + 1) if layer + 1 < len(windows) and draw(st.booleans()) else (layer,)
        )
    plan = plan_of(windows, steps, draw(st.sampled_from((1, 2))), tokens)
    return plan, steps


@given(drawn())
def test_no_attention_loses_what_it_looks_at(case: tuple[Plan, Steps]) -> None:
    plan, steps = case
    groups = cache_groups(plan)
    for own, slots in zip(by_rank(plan, steps), groups.slots, strict=True):
        assert len(own) == len(slots)
        for window, group in zip(own, slots, strict=True):
            kept = groups.windows[group]
            assert kept is None or (window is not None and window <= kept)


@given(drawn())
def test_the_division_is_the_one_that_takes_least(case: tuple[Plan, Steps]) -> None:
    plan, steps = case
    windows, tokens, groups = by_rank(plan, steps), plan.max_tokens, cache_groups(plan)
    assert groups.room(tokens) == taken(groups, tokens)
    different = {one for own in windows for one in own}
    widest = None if None in different else max(one for one in different if one is not None)
    together = held(tokens, widest) * sum(map(len, windows))
    found = [room(windows, width, tokens) for width in range(1, max(map(len, windows)) + 1)]
    least = min((one for one in found if one[1] <= MOST_GROUPS), default=(together, 1))
    if len(different) == 1 or 1 - least[0] / together < LEAST_SAVED:
        assert (groups.windows, taken(groups, tokens)) == ((widest,), together)
    else:
        assert (taken(groups, tokens), len(groups.windows)) == least


def test_a_division_has_to_save_a_tenth() -> None:
    """Of the 20 blocks of each of two attentions a window leaves 15 in one, 12.5% of all less, or 17, 7.5% less."""
    steps: Steps = [(0,), (1,)]
    assert cache_groups(plan_of((None, 225), steps, 1, 320)).windows == (225, None)
    assert cache_groups(plan_of((None, 257), steps, 1, 320)).windows == (None,)


def test_there_are_no_more_groups_than_tables_are_worth() -> None:
    """Ten windowed layers for one without would be ten groups of one attention; what is left is two and one."""
    steps: Steps = [(layer,) for layer in range(11)]
    groups = cache_groups(plan_of((None, *[16] * 10), steps, 1, 320))
    assert groups.windows == (16, 16, 16, 16, 16, None)
    assert Counter(groups.slots[0]) == {5: 1} | dict.fromkeys(range(5), 2)


def test_attentions_in_rank_space_share_their_blocks() -> None:
    plan = plan_of((None, 16), [(0,), (1,)], 1, 320)
    plain = Plan(**(vars(plan) | {"program": "A0@k3,v4 F0 A1 F1", "kv": "full"}))
    assert len(cache_groups(plain).windows) == 2
    assert cache_groups(Plan(**(vars(plain) | {"kv": "lowrank"}))).windows == (None,)
