"""Passes in two halves that take turns, against the same passes in one piece: bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surgeon.language.program import Program
from surgeon.runtime.batching.request import LEAST_IN_HALF, Row, Targets, Wanted, halves_of
from surgeon.runtime.comm.collectives import Alone, Counts, Unconnected
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.model.linear import laid_out
from surgeon.runtime.model.rank_model import HalvedPasses
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.worker.rank import RankOptions
from surgeon.runtime.worker.ranks import Ranks
from tests.runtime.model.conftest import Several
from tests.runtime.model.test_static_decode import PROGRAMS as WHOLE
from tests.runtime.on_ranks import in_halves
from tests.selection import case
from tests.tiny_models import tiny_model

BY_KERNELS = laid_out(torch.ones(64, 64)).by_kernels
SIZES = {"hidden_size": 64, "intermediate_size": 256, "n_inner": 256, "vocab_size": 128}
PROGRAMS = WHOLE | {
    "ladder": "A0 F0 >A1 >F1 >A2 >F2 >A3 >F3",
    "factors": "A0@q9,k3,v5,o7 F0@gate11,up13,down6 >A1@k20 >F1 [A2@o9 A3@o5] [F2@down5 F3@down6,up60]",
}
CASES = [case("llama", name, default=name in ("dense", "ladder over LP")) for name in PROGRAMS]
FAMILIES = ("gemma2", "qwen3", "mixtral", "smollm3", "gpt2", "gpt_neox", "gemma3_text")
CASES += [case(family, "dense", default=False) for family in FAMILIES]


def text(
    start: int, count: int, blocks: list[int], wanted: Wanted = Wanted.LOGITS, top: int | None = None
) -> Row:
    """The next tokens of a text; with a `top` all but the last are asked how likely the ones behind them are."""
    tokens = [(7 * start + 13 * blocks[0] + 5 * at) % 120 + 2 for at in range(count)]
    targets = None if top is None else Targets(0, tokens[1:], top)
    return Row(start, tokens, ([(block, 1) for block in blocks],), wanted, targets)


PASSES = [
    [text(0, 9, [0, 1]), text(0, 5, [2, 3], Wanted.BEST), text(0, 1, [4, 5])],  # prompts
    # One goes on beside two new tokens.
    [text(9, 12, [0, 1], top=3), text(5, 1, [2, 3]), text(1, 1, [4, 5])],
    [text(21, 1, [0, 1]), text(6, 1, [2, 3], Wanted.BEST), text(2, 1, [4, 5])],
    [text(0, 37, [9, 6, 8])],  # a prompt alone is cut
    [text(22, 1, [0, 1]), text(37, 20, [9, 6, 8, 7], Wanted.NOTHING)],
]


@pytest.fixture(scope="module", params=[2, case(4, default=False)])
def several(request: pytest.FixtureRequest) -> Iterator[Several]:
    with Ranks(RankOptions(request.param)) as started:
        yield Several(request.param, started)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Models of the families, saved once."""
    saved: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in saved:
            saved[family] = tmp_path_factory.mktemp(family)
            tiny_model(family, 4, **SIZES).save_pretrained(saved[family])
        return saved[family]

    return folder


@pytest.mark.parametrize(("family", "program"), CASES)
def test_the_same_bits_by_twice_the_collectives(
    family: str, program: str, several: Several, folders: Callable[[str], Path]
) -> None:
    parsed = Program.parse(PROGRAMS[program])
    if several.count > 2 and (program == "tracks" or family == "smollm3"):
        pytest.skip("divides among two ranks only")
    # Auto goes by the clock, for each number of tokens.
    plan = make_plan(folders(family), several.count, 64, parsed, low_rank="gather")
    for found in several.started.call(in_halves, plan, PASSES, 12):
        whole, halved = found.results
        for one, other in zip(whole, halved, strict=True):
            assert one.best == other.best
            if BY_KERNELS:
                assert one.scores == other.scores
            if one.logits is not None:
                assert other.logits is not None
                assert (
                    torch.equal(one.logits, other.logits)
                    if BY_KERNELS
                    else torch.allclose(one.logits, other.logits)
                )
        assert not BY_KERNELS or torch.equal(*found.cached)
        assert found.halved == [0, len(PASSES)]
        one, other = found.sent
        assert (other.all_reduces, other.all_gathers) == (2 * one.all_reduces, 2 * one.all_gathers)
        # Behind the last attention one token goes on of a half of which nothing is asked.
        assert one.bytes <= other.bytes <= one.bytes + len(PASSES) * SIZES["hidden_size"] * 4
        if program != "factors":  # ranks exchange these inside steps, too
            assert one.all_reduces == len(PASSES) * parsed.sync_points(several.count)


class Noting(Unconnected):
    """Ranks that wait for nobody, and note when sums are started and asked for."""

    def __init__(self) -> None:
        super().__init__(0, (0, 1))
        self.events = list[tuple[str, int]]()
        self.at_once = list[bool]()

    def all_reduce(self, tensor: Tensor, counts: Counts, at_once: bool = False) -> Callable[[], Tensor]:
        number = len(self.at_once)
        self.at_once.append(at_once)
        self.events.append(("start", number))
        wait = super().all_reduce(tensor, counts, at_once)

        def noted() -> Tensor:
            self.events.append(("wait", number))
            return wait()

        return noted


def test_one_half_is_computed_while_the_other_is_reduced(folders: Callable[[str], Path]) -> None:
    plan, collectives = make_plan(folders("llama"), 2, 64, halves="on"), Noting()
    engine = RankEngine(plan, collectives, torch.device("cpu"))
    engine.step([text(0, 20, [0, 1])], engine.new_cache(12))
    nodes = len(Program.parse(plan.program))
    assert collectives.at_once == [True] + 2 * nodes * [False]  # the embedding is summed whole
    places = {event: place for place, event in enumerate(collectives.events)}
    for number in range(1, 2 * nodes):
        assert places["start", number + 1] < places["wait", number]


@st.composite
def drawn_rows(draw: st.DrawFn) -> list[Row]:
    """Texts of any lengths, each with any number of new tokens."""
    counts = draw(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 70)), min_size=1, max_size=5))
    return [
        text(start, count, list(range(7 * at, 7 * at + 7))) for at, (start, count) in enumerate(counts)
    ]


@given(rows=drawn_rows())
def test_halves_are_the_rows_in_two(rows: list[Row]) -> None:
    halves = halves_of(rows)
    longest = max(len(row.tokens) for row in rows)
    if halves is None:
        assert len(rows) == 1
        assert longest < 2 * LEAST_IN_HALF
        return
    first, second = halves
    assert first
    assert second
    whole = [token for row in rows for token in row.tokens]
    assert [token for row in chain(first, second) for token in row.tokens] == whole
    sizes = [sum(len(row.tokens) for row in half) for half in halves]
    assert abs(sizes[0] - sizes[1]) <= max(
        1, longest if len(rows) > 1 and longest < 4 * LEAST_IN_HALF else 2 * LEAST_IN_HALF
    )
    pieces = [(row.start, row.runs, row.wanted, row.targets, row.prompt) for row in chain(first, second)]
    if len(pieces) == len(rows):
        assert [*first, *second] == rows
    else:
        cut = first[-1]
        assert second[0].start == cut.start + len(cut.tokens)
        assert min(len(cut.tokens), len(second[0].tokens)) >= LEAST_IN_HALF
        assert second[0] == rows[len(first) - 1]._replace(tokens=second[0].tokens, start=second[0].start)


@pytest.mark.skipif(
    not BY_KERNELS, reason="products of PyTorch may round otherwise for other numbers of tokens"
)
@settings(max_examples=12)
@given(rows=drawn_rows())
def test_whatever_rows_a_pass_has(rows: list[Row], folders: Callable[[str], Path]) -> None:
    """On one rank, where nothing travels; what was cached before is anything."""
    plan = make_plan(folders("llama"), 1, 112)
    model = RankEngine(replace(plan, decoding="dynamic"), Alone(), torch.device("cpu"))
    found = []
    for way in (model.ways[-1], HalvedPasses(model.model)):
        cache = model.new_cache(35)
        cache.stored.copy_(torch.randn(cache.stored.shape, generator=torch.Generator().manual_seed(1)))
        if way.fits(rows):
            with torch.inference_mode():
                logits = way.step(rows, cache).logits
            assert logits is not None
            found.append((logits, way.logits(rows, cache), cache.stored))
    assert all(map(torch.equal, found[0], found[-1]))


@pytest.mark.thorough
def test_over_gloo_the_same_as_its_halves_one_after_the_other(folders: Callable[[str], Path]) -> None:
    plan = make_plan(folders("llama"), 4, 64, PROGRAMS["ladder"])
    halves = [
        [row._replace(targets=None) for row in half] for rows in PASSES for half in halves_of(rows) or ()
    ]
    with Ranks(RankOptions(4, "cpu", "gloo")) as ranks:
        for together, apart in zip(
            ranks.call(in_halves, plan, PASSES, 12), ranks.call(in_halves, plan, halves, 12), strict=True
        ):
            assert torch.equal(together.cached[1], apart.cached[0])


def test_one_rank_has_nothing_to_hide(folders: Callable[[str], Path]) -> None:
    with pytest.raises(
        ValueError, match="one rank has nothing to reduce; use more ranks, or halves off"
    ):
        make_plan(folders("llama"), 1, 64, halves="on")
    with pytest.raises(ValueError, match="there is no mode 'yes' of computing passes in halves"):
        make_plan(folders("llama"), 2, 64, halves="yes")
