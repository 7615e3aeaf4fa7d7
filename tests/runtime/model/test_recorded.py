"""Decode passes that are recorded, against the same passes computed one operation after the other: bit for bit."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surgeon.benchmarks.timing import TimedEngine
from surgeon.runtime.batching.blocks import BLOCK_TOKENS
from surgeon.runtime.batching.request import Row, Wanted
from surgeon.runtime.comm.collectives import Alone, Counts, EmulatedLink, Link
from surgeon.runtime.comm.shared_memory import SharedMemoryCollectives, create_memory
from surgeon.runtime.kernels.functions import kernels
from surgeon.runtime.kernels.recording import Arena, Recording
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.model.layers import FeedForward
from surgeon.runtime.model.linear import Linear, laid_out
from surgeon.runtime.model.paged_cache import PagedCache
from surgeon.runtime.model.recorded import RecordedDecode
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.specification import Plan
from surgeon.runtime.worker.rank import RankOptions
from surgeon.runtime.worker.ranks import Ranks
from tests.runtime.model.test_static_decode import PROGRAMS as WHOLE
from tests.runtime.on_ranks import continued_both_ways
from tests.selection import case
from tests.tiny_models import tiny_model

SIZES = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 128}
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "vocab_size": 256,
}  # slices are packed on four ranks
BLOCKS = 40
# Matrices that are two factors, and sublayers that are summed before the second one, alone and next to others.
PROGRAMS = WHOLE | {
    "factors": "A0@q9,k3,v5,o7 F0@gate11,up13,down6 >A1@k20 >F1 [A2@o9 A3@o5] [F2@down5 F3@down6,up60] A0@q5,o6 F1@up7",
    "factors of many columns": "A0@q16,k8,v16,o24 F0@gate16,up24,down8 A1 F1 A2@q8 F2@up40",
    "factors of pairs": "A0 F0 [A1@q9 A2@o7] [F1 F2@down6] A3@o16 F3@gate9",
}
FAMILIES = ("llama", "qwen3", "gemma2", "granite", "smollm3", "mistral", "ministral3", "glm4")
FAMILIES += ("gemma3_text", "olmo3", "mixtral", "qwen3_moe")
CASES = [("llama", name) for name in PROGRAMS] + [
    (family, "dense") for family in FAMILIES if family != "llama"
]
CASES += [("gemma2", "LP"), ("gemma2", "factors of pairs"), ("granite", "factors")]

pytestmark = pytest.mark.skipif(
    not laid_out(torch.ones(64, 64)).by_kernels,
    reason="no kernels multiply: no C++ compiler, or another processor",
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Models of the families, saved once."""
    saved: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in saved:
            saved[family] = tmp_path_factory.mktemp(family)
            sizes = WIDE if family.startswith("wide") else SIZES
            if family == "wide qwen3_moe":
                sizes = sizes | {"moe_intermediate_size": 37}  # ranks divide its experts
            tiny_model(family.removeprefix("wide "), 4, **sizes).save_pretrained(saved[family])
        return saved[family]

    return folder


def engines(plan: Plan) -> tuple[RankEngine, RankEngine]:
    """One that records, and one that does not."""
    made = [
        RankEngine(replace(plan, decoding=way), Alone(), torch.device("cpu"))
        for way in ("auto", "dynamic")
    ]
    assert [len(one.ways) for one in made] == [2, 1]
    return made[0], made[1]


def recorded_by(engine: RankEngine) -> RecordedDecode:
    way = engine.ways[0]
    assert isinstance(way, RecordedDecode)
    return way


Texts = list[tuple[int, list[int]]]  # of each how many tokens there are, and its blocks


def one_more(texts: Texts, token: int) -> list[Row]:
    """Rows that add one token to each."""
    return [
        Row(length, [(token + at) % 50 + 2], ([(block, 1) for block in blocks],), Wanted.LOGITS)
        for at, (length, blocks) in enumerate(texts)
    ]


@st.composite
def drawn_texts(draw: st.DrawFn) -> list[Texts]:
    """Texts of any lengths in any blocks, and which of them, in any order, each of some passes continues."""
    order = draw(st.permutations(range(BLOCKS)))
    lengths = draw(st.lists(st.integers(1, 4 * BLOCK_TOKENS), min_size=1, max_size=6))
    texts = [(length, list(order[6 * at : 6 * at + 6])) for at, length in enumerate(lengths)]
    passes = []
    for _ in range(draw(st.integers(2, 6))):
        chosen = draw(st.lists(st.sampled_from(range(len(texts))), min_size=1, unique=True))
        passes.append([texts[at] for at in chosen])
        texts = [(length + (at in chosen), blocks) for at, (length, blocks) in enumerate(texts)]
    return passes


@pytest.mark.sampled
@pytest.mark.parametrize(("family", "program"), CASES)
@settings(max_examples=8)  # the first saves a model
@given(passes=drawn_texts())
def test_the_same_bits(
    family: str, program: str, passes: list[Texts], folders: Callable[[str], Path]
) -> None:
    """Whatever texts a pass continues, wherever they lie; the caches hold the same afterwards."""
    plan = replace(make_plan(folders(family), 1, 100), program=PROGRAMS[program])
    logits, caches = [], []
    for engine in engines(plan):
        cache = engine.new_cache(BLOCKS)
        cache.stored.copy_(torch.randn(cache.stored.shape, generator=torch.Generator().manual_seed(1)))
        found = [
            engine.step(one_more(texts, number), cache).logits for number, texts in enumerate(passes)
        ]
        logits.append(found)
        caches.append(cache.stored)
        if len(engine.ways) > 1:
            assert recorded_by(engine).problems == {}
    for own, expected in zip(*logits, strict=True):
        assert own is not None
        assert expected is not None
        assert torch.equal(own, expected)
    assert torch.equal(*caches)


@pytest.fixture
def pair(folders: Callable[[str], Path]) -> tuple[RankEngine, RankEngine]:
    return engines(make_plan(folders("llama"), 1, 100))


def recordings(monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    """All that are begun from now on."""
    made = list[Recording]()
    begin = Recording.__init__

    def noting(self: Recording, *arguments: Any) -> None:
        made.append(self)
        begin(self, *arguments)

    monkeypatch.setattr(Recording, "__init__", noting)
    return made


def test_one_recording_for_each_number_of_texts(
    pair: tuple[RankEngine, RankEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, (engine, _) = recordings(monkeypatch), pair
    cache = engine.reusable_cache(BLOCKS)
    for number in range(12):
        engine.step(
            one_more([(5 + number, [0, 1]), (9 + number, [2, 3])][: 1 + number % 2], number), cache
        )
    assert len(made) == 2
    assert engine.reusable_cache(BLOCKS) is cache
    engine.step(one_more([(5, [0, 1])], 3), cache)
    assert len(made) == 2
    engine.step(one_more([(5, [0, 1])], 3), engine.new_cache(BLOCKS))  # at other addresses
    assert len(made) == 3


def test_a_text_in_more_runs_than_there_was_room_for(
    pair: tuple[RankEngine, RankEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, logits = recordings(monkeypatch), []
    for engine in pair:
        cache = engine.new_cache(BLOCKS)
        cache.stored.fill_(0.5)
        apart = list(range(0, BLOCKS, 2))
        found = [
            engine.step(one_more([(length, apart[:6])], 1), cache).logits
            for length in (3, 20, 40, 70, 90, 5)
        ]
        logits.append(found)
    assert all(torch.equal(*each) for each in zip(*logits, strict=True))  # type: ignore[arg-type]
    assert len(made) == 2  # with room for 2 runs and for 8


def test_recordings_go_with_their_cache(pair: tuple[RankEngine, RankEngine]) -> None:
    engine, _ = pair
    cache: PagedCache | None = engine.new_cache(BLOCKS)
    assert cache is not None
    engine.step(one_more([(5, [0, 1])], 3), cache)
    assert len(recorded_by(engine)._passes) == 1
    cache = None
    gc.collect()
    assert len(recorded_by(engine)._passes) == 0


def test_what_cannot_be_recorded_is_tried_once(
    pair: tuple[RankEngine, RankEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, (engine, dynamic) = recordings(monkeypatch), pair
    for one in (engine, dynamic):
        for sublayer in one.model.program.sublayers.values():
            if isinstance(sublayer, FeedForward):
                monkeypatch.setattr(sublayer, "down", lambda x, own=sublayer.down: own(x).exp().log())
    found = []
    for one in (engine, dynamic):
        cache = one.new_cache(BLOCKS)
        cache.stored.fill_(0.5)
        found.append(
            [one.step(one_more([(5 + number, [0, 1])], number), cache).logits for number in range(3)]
        )
    assert all(torch.equal(*each) for each in zip(*found, strict=True))  # type: ignore[arg-type]
    assert len(made) == 1
    assert recorded_by(engine).problems == {1: "aten.exp.default"}


def test_one_size_that_cannot_be_recorded_leaves_the_others(
    pair: tuple[RankEngine, RankEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the sum of a large batch does not fit into what ranks share."""
    made, (engine, _) = recordings(monkeypatch), pair
    for sublayer in engine.model.program.sublayers.values():
        if isinstance(sublayer, FeedForward):
            monkeypatch.setattr(
                sublayer, "down", lambda x, own=sublayer.down: own(x) if len(x) < 2 else own(x).exp()
            )
    cache = engine.new_cache(BLOCKS)
    for texts in (1, 2, 1, 2, 1):
        engine.step(one_more([(5, [0, 1]), (9, [2, 3])][:texts], 1), cache)
    assert len(made) == 2
    assert recorded_by(engine).problems == {2: "aten.exp.default"}
    assert list(recorded_by(engine)._passes[cache]) == [1]


def test_prompts_and_slow_links_are_not_recorded(folders: Callable[[str], Path]) -> None:
    plan = make_plan(folders("llama"), 1, 100)
    slow = EmulatedLink(Alone(), Link(delay=0.1))
    assert len(RankEngine(plan, slow, torch.device("cpu")).ways) == 1
    recorded = recorded_by(engines(plan)[0])
    assert not recorded.fits([Row(0, [1, 2], ([(0, 1)],), Wanted.BEST)])
    assert recorded.fits([Row(0, [1], ([(0, 1)],), Wanted.BEST)])


# Engines that say where the time went say so of recorded passes, too.


def test_waits_of_recorded_passes_are_timed(folders: Callable[[str], Path]) -> None:
    rank: Any = SimpleNamespace(device=torch.device("cpu"), engines={})
    engine = TimedEngine(make_plan(folders("llama"), 1, 100), rank, Alone())
    cache = engine.new_cache(BLOCKS)
    for number in range(3):
        engine.step(one_more([(5 + number, [0, 1])], number), cache)
    assert recorded_by(engine).problems == {}
    for one in engine.recorder.passes:
        assert one.waiting == 0


def test_what_is_computed_again_keeps_its_weights(pair: tuple[RankEngine, RankEngine]) -> None:
    """Ways of sharing factors are measured with maps that nobody else has."""
    for engine in pair:
        x, linear = torch.randn(1, 64), Linear([torch.randn(64, 64)], [None])
        with torch.inference_mode():
            again = engine.model.program._repeatable(linear, x, linear.by_kernels)
        there = weakref.ref(linear)
        del linear
        gc.collect()
        assert there() is not None
        again()
        del again
        gc.collect()
        assert there() is None


# Ranks.


@pytest.fixture(scope="module", params=[2, 4])
def several(request: pytest.FixtureRequest) -> Iterator[tuple[int, Ranks]]:
    """How many ranks, and these."""
    with Ranks(RankOptions(request.param, collectives="shm")) as started:
        yield request.param, started


ON_RANKS = [("wide llama", name, "auto") for name in ("dense", "ladder over LP", "fork", "tracks")]
ON_RANKS += [("wide llama", "factors", way) for way in ("gather", "replicate")]
ON_RANKS += [
    ("wide qwen2", "factors of many columns", "base"),
    ("wide gemma2", "factors of pairs", "gather"),
]
# Sliced, and divided.
ON_RANKS += [("wide mixtral", "LP", "auto"), ("wide qwen3_moe", "ladder over LP", "auto")]
ON_RANKS += [("wide olmo3", "LP", "auto"), ("wide olmo2", "factors of pairs", "gather")]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("several", "family", "name", "way"),
    [
        case(count, *each, default=(at + count // 2) % 2 == 1)
        for count in (2, 4)
        for at, each in enumerate(ON_RANKS)
    ],
    indirect=["several"],
)
def test_the_same_bits_on_ranks(
    family: str, name: str, way: str, several: tuple[int, Ranks], folders: Callable[[str], Path]
) -> None:
    count, ranks = several
    plan = replace(make_plan(folders(family), count, 100, low_rank=way), program=PROGRAMS[name])
    for recorded, dynamic, counts, problems in ranks.call(continued_both_ways, plan):
        assert problems == {}
        assert torch.equal(recorded, dynamic)
        assert counts[0] == counts[1]


def test_sums_in_flight_while_passes_are_recorded_and_replayed() -> None:
    """Three ranks in one process: each starts all of its sums before any asks."""
    descriptor = create_memory(3)
    members = [SharedMemoryCollectives(rank, (0, 1, 2), descriptor, 3) for rank in range(3)]
    own = kernels()
    assert own is not None
    made = [Recording(own, Arena()) for _ in members]
    parts = [torch.arange(5.0) * (rank + 1) for rank in range(3)]
    waits = list[list[Callable[[], Tensor]]]()
    with torch.inference_mode():
        for member, recording, part in zip(members, made, parts, strict=True):
            with recording.during():
                waits.append([member.all_reduce(part, Counts()) for _ in range(3)])
        totals = []
        for recording, own_waits in zip(made, waits, strict=True):
            with recording.during():
                totals.append([wait() for wait in reversed(own_waits)])
    assert all(
        torch.equal(total, torch.arange(5.0) * 6) for own_totals in totals for total in own_totals
    )
    starts = [[name for name, _ in recording.calls] for recording in made]
    assert starts == [["start_exchange"] * 3 + ["finish_sum"] * 3] * 3
    assert [arguments[1] for _, arguments in made[0].calls[3:]] == [1, 2, 3]
    os.close(descriptor)


def test_a_rank_that_never_comes_to_a_recorded_sum_is_named() -> None:
    descriptor = create_memory(2)
    own, other = (SharedMemoryCollectives(rank, (0, 1), descriptor, 2) for rank in range(2))
    library = kernels()
    assert library is not None
    recording, part = Recording(library, Arena()), torch.ones(2)
    with torch.inference_mode():
        with recording.during():
            wait = own.all_reduce(part, Counts())
        other.all_reduce(torch.ones(2), Counts())()
        with recording.during():
            total = wait()
        assert total.tolist() == [2, 2]
        replay = recording.finish()
        assert replay is not None, recording.problem
        own.check()
        own.exchanges.timeout_seconds = 0
        with pytest.raises(TimeoutError, match=r"^rank 0 has waited 0 s for rank 1, in vain$"):
            replay(False)
    os.close(descriptor)
