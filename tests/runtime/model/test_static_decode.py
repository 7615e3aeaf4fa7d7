"""Decode passes of fixed shapes: as they are and recorded, against passes of any shape and plain attention.

A CUDA graph needs a GPU. Recording is tested here with a trace of PyTorch operations instead: like a graph, its replay
runs no Python of the pass, and it knows nothing but what its tensors hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from surgeon.benchmarks.timing import TimedEngine
from surgeon.language.program import Program
from surgeon.runtime.batching.blocks import BLOCK_TOKENS, BlockTable, blocks_for
from surgeon.runtime.batching.request import Request, Row, Sampling, Targets, Wanted
from surgeon.runtime.batching.scheduler import Limits, Output
from surgeon.runtime.comm.collectives import Alone, Collectives, Counts
from surgeon.runtime.kernels import functions
from surgeon.runtime.kernels.functions import Weighting, Window
from surgeon.runtime.kernels.recording import WARM_UPS, CudaRecorder, Replay
from surgeon.runtime.model.engine import Figures, RankEngine
from surgeon.runtime.model.paged_cache import PagedCache
from surgeon.runtime.model.recorded import Outputs, PassSize, StaticDecode, StaticLayout, StaticPass
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.placement import Group
from surgeon.runtime.plan.specification import Decoding
from surgeon.runtime.worker.rank import RankOptions, Sender
from surgeon.runtime.worker.ranks import Ranks
from surgeon.runtime.worker.worker import Leader, complete, load, unload
from tests.pretended import pretended_gpus
from tests.runtime.model.test_paged_cache import places_of, plain_attention
from tests.runtime.on_ranks import complete_twice
from tests.selection import case, one_in
from tests.tiny_models import VOCABULARY, tiny_model

TOLERANCE = 1e-5
HEAD_DIM, BLOCKS = 8, 24
PROGRAMS = {
    "dense": "A0 F0 A1 F1 A2 F2 A3 F3",
    "LP": "A0 F0 [A1 A2] [F1 F2] A3 F3",
    "ladder over LP": "A0 F0 >[A1 A2] >[F1 F2] >A3 >F3",
    "fork": "A0 F0 {A1 F1 | A2 F2} >A3 >F3",
    "tracks": "A0 F0 {A1/2:0 F1/2:0 A2/2:0 F2/2:0 | A1/2:1 F1/2:1 A2/2:1 F2/2:1} A3 F3",
    "a layer twice": "A0 F0 A1 F1 A1 F1",
}
# The last one's layers look back 5 tokens only, or as far as they can, and bound their scores.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {"tie_word_embeddings": True},
    "opt": {},
    "gpt_neox": {},
    "smollm3": {},
    "cohere2": {},
    "ministral3": {},
    "granite": {},
    "gpt2": {},
    "gemma2": {},
    "gemma3_text": {},
    "olmo3": {},
    "llama4_text": {},
    "mixtral": {"num_local_experts": 12},  # more than one text goes to, fewer than eight do
}
CASES = [("llama", name) for name in PROGRAMS] + [
    (family, "dense") for family in FAMILIES if family != "llama"
]
GENERATOR = torch.Generator().manual_seed(23)
LENGTHS = (15, 3, 1, 33, 40)  # the first comes to the end of a block at once
TEXTS = [
    torch.randint(2, VOCABULARY, (length + 12,), generator=GENERATOR).tolist() for length in LENGTHS
]
# Blocks of each text: in one run, in several, and two texts that begin with the same block.
TABLES = [[5, 6], [9], [0], [20, 3, 7], [20, 11, 12, 2]]
TEXTS[4][:BLOCK_TOKENS] = TEXTS[3][:BLOCK_TOKENS]


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=5),
    st.permutations(range(BLOCKS)),
    st.none() | st.builds(Window, st.sampled_from([1, 5, 33, 400]), st.booleans()),
    st.sampled_from([None, 2.0]),
    st.sampled_from([None, 0.3]),
    st.integers(0, 2),
)
def test_attention_of_any_texts(
    starts: list[int],
    order: list[int],
    window: Window | None,
    cap: float | None,
    scale: float | None,
    spare: int,
) -> None:
    """Places that nobody has written to hold no numbers here, and nothing of them may be seen."""
    cache = PagedCache([3, 2], BLOCKS + 1, HEAD_DIM, torch.empty(0))
    cache.stored.fill_(torch.nan)
    free = iter(order)
    tables = [[next(free) for _ in range(blocks_for(start + 1))] for start in starts]
    size = PassSize(len(starts) + spare, max(len(table) for table in tables) + spare)
    texts = [torch.randn(2, start + 1, 2, HEAD_DIM) for start in starts]
    for table, text, start in zip(tables, texts, starts, strict=True):
        for kept, given_ in zip(cache.pairs[1].chunk(2), text, strict=True):
            kept[:, places_of(table, start)] = given_[:start].transpose(0, 1)
    static = StaticPass(size, BLOCKS, cache)
    static.load([row(0, start, table) for start, table in zip(starts, tables, strict=True)])
    newest = torch.zeros(2, size.texts, 2, HEAD_DIM)
    newest[:, : len(starts)] = torch.stack([text[:, -1] for text in texts], 1)
    queries, rule = torch.randn(size.texts, 4, HEAD_DIM), Weighting(scale, window, cap)
    found = StaticLayout(static.inputs, cache).attend(1, queries, torch.cat(list(newest), 1), rule)
    assert found.shape == (size.texts, 4 * HEAD_DIM)
    for query, text, answer in zip(queries, texts, found, strict=False):
        assert torch.allclose(answer, plain_attention(query[None], *text, rule)[0], atol=1e-5)
    for table, text in zip(tables, texts, strict=True):  # the new ones are in the cache now
        for kept, given_ in zip(cache.pairs[1].chunk(2), text, strict=True):
            assert torch.equal(kept[:, places_of(table, len(given_))], given_.transpose(0, 1))
    assert cache.pairs[0].chunk(2)[0].isnan().all()


def row(token: int, start: int, blocks: list[int], wanted: Wanted = Wanted.LOGITS) -> Row:
    table = BlockTable()
    table.extend(blocks)
    return Row(start, [token], (table.runs,), wanted)


@pytest.mark.parametrize(
    ("starts", "size"),
    [
        ([1], (1, 1)),
        ([15, 3], (2, 1)),
        ([16, 3, 9], (4, 2)),
        ([47] * 5, (8, 4)),
        ([100], (1, 7)),
        ([48] * 4, (4, 4)),
    ],
)
def test_sizes_are_powers_of_two_up_to_what_there_is(starts: list[int], size: tuple[int, int]) -> None:
    assert PassSize.of([row(0, start, [0]) for start in starts], 7) == size


def test_which_passes_have_a_fixed_shape(checkpoints: dict[str, Path]) -> None:
    model = RankEngine(make_plan(checkpoints["llama"], 1, 64), Alone(), torch.device("cpu"))
    way, one = StaticDecode(model.model, None), row(3, 9, [0])
    assert way.fits([one, one._replace(wanted=Wanted.NOTHING)])
    for other in (
        one._replace(start=0),
        one._replace(tokens=[1, 2]),
        one._replace(targets=Targets(0, [5], 1)),
    ):
        assert not way.fits([one, other])


class Together(Collectives):
    """Two ranks that hold the same: every sum is twice this rank's part, and waiting is nothing."""

    def __init__(self, group: Group = (0, 1)) -> None:
        super().__init__(0, group)

    def _connect(self, group: Group) -> Collectives:
        return Together(group)

    def _all_reduce(self, tensor: Tensor, _: bool) -> Callable[[], Tensor]:
        return lambda: 2 * tensor

    def _all_gather(self, tensor: Tensor, _: bool) -> Callable[[], Tensor]:
        return lambda: torch.stack([tensor, tensor])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("static")
    for family, overrides in FAMILIES.items():
        tiny_model(family, **overrides).save_pretrained(folder / family)
    return {family: folder / family for family in FAMILIES}


def engine_of(
    folder: Path, program: str, decoding: Decoding, dtype: str = "float32", device: str = "cpu"
) -> RankEngine:
    plan = replace(make_plan(folder, 1, 128, PROGRAMS[program]), decoding=decoding, dtype=dtype)
    return RankEngine(plan, Alone(), torch.device(device))


def all_logits(engine: RankEngine) -> Iterator[Tensor]:
    """Logits, (texts, vocabulary), of every pass that continues the texts, whose prompts are computed before."""
    cache = engine.new_cache(BLOCKS)
    for text, table, length in zip(TEXTS, TABLES, LENGTHS, strict=True):
        prompt = row(0, 0, table, Wanted.NOTHING)._replace(tokens=text[:length])
        engine.step([prompt], cache)
    for step in range(12):
        # Fewer and fewer texts, so that some lines of a pass have none and hold what a text has left there.
        left = range(len(TEXTS) if step < 6 else 3)
        rows = [row(TEXTS[at][LENGTHS[at] + step], LENGTHS[at] + step, TABLES[at]) for at in left]
        logits = engine.step(rows, cache).logits
        assert logits is not None
        yield logits.clone()


def error_between(engine: RankEngine, reference: RankEngine) -> float:
    pairs = zip(all_logits(engine), all_logits(reference), strict=True)
    return max(float((found - expected).abs().max() / expected.abs().max()) for found, expected in pairs)


def prompts_in(engine: RankEngine) -> PagedCache:
    """A cache with all tokens of the texts' prompts but the last ones."""
    cache = engine.new_cache(BLOCKS)
    for text, table, length in zip(TEXTS, TABLES, LENGTHS, strict=True):
        engine.step([row(0, 0, table, Wanted.NOTHING)._replace(tokens=text[:length])], cache)
    return cache


@pytest.mark.parametrize("decoding", ["static", "dynamic", "auto"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "ministral3"])
def test_passes_at_once(family: str, decoding: Decoding, checkpoints: dict[str, Path]) -> None:
    engine = engine_of(checkpoints[family], "dense", decoding)
    rows = [
        row(text[length], length, table, Wanted.BEST)
        for text, table, length in zip(TEXTS, TABLES, LENGTHS, strict=True)
    ]
    apart, cache = list[list[int]](), prompts_in(engine)
    going_on = rows
    for _ in range(7):
        apart.append(engine.step(going_on, cache).best)
        going_on = [
            one._replace(start=one.start + 1, tokens=[token])
            for one, token in zip(going_on, apart[-1], strict=True)
        ]
    cache = prompts_in(engine)
    before = engine.figures.decode.passes
    assert engine.several(rows, 3, cache) == apart[:3]
    further = [
        one._replace(start=one.start + 3, tokens=[token])
        for one, token in zip(rows, apart[2], strict=True)
    ]
    assert engine.several(further, 4, cache) == apart[3:]  # one line more than texts, in a static pass
    assert engine.figures.decode.passes == before + 7


@pytest.mark.parametrize(("family", "program"), CASES)
def test_logits_are_those_of_any_pass(family: str, program: str, checkpoints: dict[str, Path]) -> None:
    static, dynamic = (engine_of(checkpoints[family], program, one) for one in ("static", "dynamic"))
    assert error_between(static, dynamic) < TOLERANCE
    assert (type(static.ways[0]), len(dynamic.ways)) == (StaticDecode, 1)


def test_sixteen_bits(checkpoints: dict[str, Path]) -> None:
    static, dynamic = (
        engine_of(checkpoints["llama"], "dense", one, "bfloat16") for one in ("static", "dynamic")
    )
    assert next(all_logits(static)).dtype == torch.bfloat16
    assert error_between(static, dynamic) < 0.03


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("program", PROGRAMS)
def test_cuda_graphs(program: str, checkpoints: dict[str, Path]) -> None:
    captured = engine_of(checkpoints["llama"], program, "auto", device="cuda")
    assert (
        error_between(captured, engine_of(checkpoints["llama"], program, "dynamic", device="cuda"))
        < 1e-4
    )


@pytest.fixture
def as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute with PyTorch's operations alone, which are all that a trace sees: kernels of ours are for CPUs."""
    monkeypatch.setattr(functions, "kernels", lambda: None)


class Trace:
    """Records passes as traces of PyTorch operations, which read and write the same tensors as the pass itself.

    Attributes:
        made: how many there are.
        replays: how often they were replayed.
    """

    def __init__(self) -> None:
        self.made = self.replays = 0

    def __call__(self, compute: Replay) -> Replay:
        compute()  # as a CUDA graph's warm-up does
        with torch.inference_mode(False), torch.no_grad():
            traced = make_fx(lambda: tuple(compute()))()
        self.made += 1

        def replay() -> Outputs:
            self.replays += 1
            return traced()

        return replay


def record_by(trace: Trace | None, engine: RankEngine) -> StaticDecode:
    """Have static passes recorded."""
    engine.ways = (static := StaticDecode(engine.model, trace), *engine.ways[1:])
    return static


class FakeCuda:
    """As much of torch.cuda as a recorder uses; notes what happens in which stream or graph."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[Any] = []
        self.where = ["current"]
        names = ("Stream", "stream", "current_stream", "CUDAGraph", "graph", "graph_pool_handle")
        for name in names:
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def Stream(self, _: torch.device) -> SimpleNamespace:
        return self.named("aside")

    def current_stream(self, _: torch.device) -> SimpleNamespace:
        return self.named("current")

    def named(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(
            name=name, wait_stream=lambda other: self.events.append((name, "waits for", other.name))
        )

    def CUDAGraph(self) -> Mock:
        return Mock(replay=lambda: self.events.append("replay"))

    def graph_pool_handle(self) -> str:
        return "pool"

    @contextmanager
    def stream(self, stream: SimpleNamespace) -> Iterator[None]:
        self.where.append(stream.name)
        yield
        self.where.pop()

    @contextmanager
    def graph(
        self, _: Mock, pool: str, stream: SimpleNamespace, capture_error_mode: str
    ) -> Iterator[None]:
        assert (pool, stream.name, capture_error_mode) == ("pool", "aside", "thread_local")
        with self.stream(SimpleNamespace(name="graph")):
            yield


def test_what_becomes_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-ups run aside, before anything is recorded; the recorded tensors are what every replay brings."""
    cuda = FakeCuda(monkeypatch)
    made: list[Outputs] = []

    def compute() -> Outputs:
        cuda.events.append(cuda.where[-1])
        made.append((torch.zeros(1), torch.zeros(1, 1)))
        return made[-1]

    replay = CudaRecorder(torch.device("cuda"))(compute)
    waits = [("aside", "waits for", "current"), ("current", "waits for", "aside")]
    assert cuda.events == [waits[0], *["aside"] * WARM_UPS, waits[1], "graph"]
    assert replay() is replay() is made[-1]
    assert cuda.events[-2:] == ["replay", "replay"]


def test_graphs_come_after_others_that_have_gone() -> None:
    """They get other memory then; all of them are warmed up in one stream, as each keeps memory of libraries."""
    with pretended_gpus(1), patch.object(torch.cuda, "Stream", wraps=torch.cuda.Stream) as streams:
        record = CudaRecorder(torch.device("cuda", 0))
        x = torch.ones(1, device="cuda")
        for number in range(3):
            assert record(lambda number=number: x + number)().tolist() == [1.0 + number]
        assert streams.call_count == 1


@pytest.mark.usefixtures("as_on_gpus")
@pytest.mark.parametrize(
    ("family", "program"),
    [
        ("llama", "ladder over LP"),
        case("llama", "tracks", default=False),
        case("mixtral", "dense", default=False),
    ],
)
def test_a_recording_depends_on_its_inputs_only(
    family: str, program: str, checkpoints: dict[str, Path]
) -> None:
    recorded = engine_of(checkpoints[family], program, "static")
    trace = Trace()
    record_by(trace, recorded)
    assert error_between(recorded, engine_of(checkpoints[family], program, "dynamic")) < TOLERANCE
    assert (trace.made, trace.replays) == (2, 12)  # eight texts or four, of four blocks


@pytest.mark.usefixtures("as_on_gpus")
def test_a_cache_has_recordings_of_its_own(checkpoints: dict[str, Path]) -> None:
    engine, trace = engine_of(checkpoints["llama"], "dense", "static"), Trace()
    static = record_by(trace, engine)
    first, second = list(all_logits(engine)), list(all_logits(engine))
    assert trace.made == 4
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    assert len(static._passes) < 2  # those of caches that are gone go with them


@pytest.mark.thorough
@pytest.mark.usefixtures("as_on_gpus")
def test_passes_are_recorded_before_they_come(checkpoints: dict[str, Path]) -> None:
    """Up to four texts, and as many blocks as they have room for if all are as long; then none of them is recorded."""
    blocks, limits, found = 8, Limits(4, 120), []
    for trace in (None, Trace()):
        engine = engine_of(checkpoints["llama"], "dense", "static")
        record_by(trace, engine)
        leader = Leader(engine, engine.new_cache(blocks), blocks, limits, Sender(()))
        leader.record_ahead()
        assert engine.figures == Figures()
        recorded = [rows for way in engine.ways for rows in way.passes_to_record(leader.cache, 4)]
        assert len(recorded) == (0 if trace is None else 9)
        for number in range(4):
            sampling = Sampling(max_new_tokens=9 + number, ignore_end=True)
            leader.submit(Request(number, tuple(TEXTS[number][: 3 + 4 * number]), sampling))
        outputs: list[Output] = []
        while not leader.scheduler.idle:
            outputs += leader.step()
        found.append([(output.request, output.token) for output in outputs])
        assert trace is None or (trace.made, trace.replays) == (9, 9 + engine.figures.decode.passes)
    assert found[0] == found[1]


@pytest.mark.usefixtures("as_on_gpus")
@pytest.mark.parametrize("program", one_in(2, ["ladder over LP", "fork"], 1))
def test_replays_count_their_collectives(program: str, checkpoints: dict[str, Path]) -> None:
    plan = replace(make_plan(checkpoints["llama"], 2, 128, PROGRAMS[program]), decoding="static")
    counts = []
    for trace in (None, Trace()):
        engine = RankEngine(plan, Together(), torch.device("cpu"))
        record_by(trace, engine)
        list(all_logits(engine))
        counts.append((engine.figures.decode.layers, engine.figures.decode.vocabulary))
        assert engine.figures.decode.passes == 12
    assert counts[0] == counts[1]
    layers, vocabulary = counts[1]
    assert layers.all_reduces == 12 * Program.parse(PROGRAMS[program]).sync_points(2)
    # Likeliest tokens, and logits because they were wanted.
    assert vocabulary == Counts(12, 24, vocabulary.bytes)


def test_timing_of_recorded_passes(checkpoints: dict[str, Path]) -> None:
    """Replays start no exchange that could be timed; what they send is known all the same."""
    plan = replace(make_plan(checkpoints["llama"], 2, 128, PROGRAMS["LP"]), decoding="static")
    seen = []
    for trace in (None, Trace()):
        rank: Any = SimpleNamespace(device=torch.device("cpu"), engines={})
        engine = TimedEngine(plan, rank, Together())
        engine.recorder.marking = False
        record_by(trace, engine)
        list(all_logits(engine))
        seen.append([(one.decode, one.layers, one.vocabulary) for one in engine.recorder.passes])
    assert seen[0] == seen[1]
    assert [one[0] for one in seen[0]] == [False] * len(TEXTS) + [True] * 12
    syncs = Program.parse(PROGRAMS["LP"]).sync_points(2)
    assert all(layers.all_reduces == syncs for _, layers, _ in seen[0])


def test_cpus_decode_in_passes_of_any_shape(checkpoints: dict[str, Path]) -> None:
    assert not any(
        isinstance(way, StaticDecode) for way in engine_of(checkpoints["llama"], "dense", "auto").ways
    )


NEW = 14
SHARED = torch.randint(2, VOCABULARY, (33,), generator=GENERATOR).tolist()
PROMPTS = [
    *(text[:length] for text, length in zip(TEXTS, LENGTHS, strict=True)),
    [*SHARED, 7],
    [*SHARED, 9, 4],
    SHARED,
]
SAMPLED = Sampling(max_new_tokens=NEW, temperature=0.9, seed=3, ignore_end=True, logprobs=2)
REQUESTS = [
    Request(
        number, tuple(prompt), SAMPLED if number == 1 else Sampling(max_new_tokens=NEW, ignore_end=True)
    )
    for number, prompt in enumerate(PROMPTS)
]
LONG = [
    Request(90 + at, tuple(PROMPTS[at]), Sampling(max_new_tokens=40, ignore_end=True)) for at in range(3)
]


@pytest.fixture(scope="module", params=[1, 2])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(RankOptions(request.param, collectives="gloo")) as started:
        yield started


ON_RANKS = [
    case(1, "dense", default=True),
    *(case(1, program, default=False) for program in ("ladder over LP", "fork", "tracks")),
    *(
        case(2, program, default=program == "ladder over LP")
        for program in ("ladder over LP", "fork", "tracks")
    ),
]


@pytest.mark.parametrize(("ranks", "program"), ON_RANKS, indirect=["ranks"])
def test_on_ranks(program: str, ranks: Ranks, checkpoints: dict[str, Path]) -> None:
    """Tokens of mixed requests, with shared prefixes and preemption, and what their passes sent."""
    plan = make_plan(checkpoints["llama"], len(ranks.pids), 100, PROGRAMS[program])
    tokens: list[dict[int, list[int]]] = []
    for decoding in ("dynamic", "static"):
        ranks.call(load, replace(plan, decoding=decoding))
        tokens.append({})
        outputs, figures = ranks.call(complete, REQUESTS, 64, Limits(8, 100))[0]
        for output in outputs:
            tokens[-1].setdefault(output.request, []).append(output.token)
        decode = figures.decode
        assert decode.layers.all_reduces == decode.passes * Program.parse(PROGRAMS[program]).sync_points(
            plan.ranks
        )
        shared = ranks.call(complete_twice, REQUESTS[:6], REQUESTS[6:], 64, Limits(8, 100))[0]
        assert shared.tally.cached_tokens > 0
        assert shared.tokens == tokens[-1]
        crowded = ranks.call(complete_twice, LONG[:1], LONG, 5, Limits(8, 100, expected_share=0))[0]
        assert crowded.tally.preempted > 0
        tokens[-1] |= crowded.tokens
        ranks.call(unload)
    assert tokens[0] == tokens[1]
