"""Passes by the kernels for GPUs, which are interpreted on CPUs, against those by PyTorch's operations on a CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from surgeon.runtime.batching.request import Wanted
from surgeon.runtime.comm.collectives import Alone
from surgeon.runtime.kernels import functions
from surgeon.runtime.kernels.triton.functions import TritonKernels
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.model.recorded import StaticDecode
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.specification import Decoding
from tests.runtime.model.test_static_decode import TABLES, row
from tests.selection import case
from tests.tiny_models import VOCABULARY, tiny_model

pytest.importorskip("triton", reason="triton is not installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where kernels compute, or are interpreted
TOLERANCE = 1e-5 if DEVICE == "cpu" else 1e-4
# Grouped heads with biases, norms of heads, post norms with windows and bounds, learned positions, partial rotary ones.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {"tie_word_embeddings": True},
    "gemma2": {},
    "gpt2": {},
    "opt": {},
    "gpt_neox": {},
    "smollm3": {},
    "cohere2": {},
    "ministral3": {},
    "gemma3_text": {},
    "olmo3": {},
    "llama4_text": {},
}
MORE_LAUNCHES = {"gemma2": 11, "gemma3_text": 11, "ministral3": 10, "olmo3": 12}
PROGRAMS = {
    "dense": "A0 F0 A1 F1",
    "ladder over LP": "A0 >[A1 A2] >[F1 F2] >F3 A3",
    "fork": "A0 {A1 F1 | A2 F2} >F3",
    "low rank": "A0@q4,k4,v4,o4 F0 A1 F1",
}
CASES = [("llama", name) for name in PROGRAMS] + [
    (family, "dense") for family in FAMILIES if family != "llama"
]
# What kernels compute of these they compute of others, too.
BY_DEFAULT = [
    ("gemma2", "dense"),
    ("gpt_neox", "dense"),
    ("olmo3", "dense"),
    ("gpt_oss", "dense"),
    ("llama", "fork"),
]
LENGTHS = (3, 17)  # the second has two blocks
TEXTS = torch.randint(
    2, VOCABULARY, (len(LENGTHS), 40), generator=torch.Generator().manual_seed(5)
).tolist()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("triton")
    for family, overrides in FAMILIES.items():
        tiny_model(family, **overrides).save_pretrained(folder / family)
    return {family: folder / family for family in FAMILIES}


@contextmanager
def as_on_gpus(kernels: bool = True) -> Iterator[None]:
    """Compute as on GPUs: without kernels for CPUs, with those for GPUs if wanted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functions, "kernels", lambda: None)
        patch.setattr(functions, "used_on", lambda _: kernels)
        yield


def engine_of(
    folder: Path, program: str, decoding: Decoding, dtype: str = "float32", kv: Any = "full"
) -> RankEngine:
    plan = replace(make_plan(folder, 1, 64, program, kv=kv), decoding=decoding, dtype=dtype)
    return RankEngine(plan, Alone(), torch.device(DEVICE if decoding == "static" else "cpu"))


def passes(engine: RankEngine, steps: int = 2) -> Iterator[Tensor]:
    """Logits of the last text's prompt beside the first text's next token, then of both texts' next tokens."""
    cache, (first, second) = engine.new_cache(24), LENGTHS
    engine.step([row(0, 0, TABLES[0], Wanted.NOTHING)._replace(tokens=TEXTS[0][:first])], cache)
    prompt = row(0, 0, TABLES[3], Wanted.LOGITS)._replace(tokens=TEXTS[1][:second])
    mixed = engine.step([row(TEXTS[0][first], first, TABLES[0]), prompt], cache).logits
    assert mixed is not None
    yield mixed.cpu().clone()
    for step in range(steps):
        places = first + 1 + step, second + step
        rows = [
            row(text[at], at, table)
            for text, at, table in zip(TEXTS, places, (TABLES[0], TABLES[3]), strict=True)
        ]
        logits = engine.step(rows, cache).logits
        assert logits is not None
        yield logits.cpu().clone()


def error_between(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(
        float((one - other).abs().max() / other.abs().max())
        for one, other in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize(("family", "program"), [case(*one, default=one in BY_DEFAULT) for one in CASES])
def test_logits_are_those_of_pytorch(family: str, program: str, checkpoints: dict[str, Path]) -> None:
    folder, text = checkpoints[family], PROGRAMS[program]
    with as_on_gpus():
        engine = engine_of(folder, text, "static")
        found = list(passes(engine))
    assert isinstance(engine.ways[0], StaticDecode)
    assert error_between(found, list(passes(engine_of(folder, text, "dynamic")))) < TOLERANCE


class Launches(TorchDispatchMode):
    """Counts what a GPU would be given to do: operations that compute, which views and allocations do not."""

    ALLOCATING = ("empty", "new_empty", "empty_like", "empty_strided")

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in self.ALLOCATING:
            self.counted[name] += 1
        return func(*args, **(kwargs or {}))


def launches_of(folder: Path, program: str) -> Counter[str]:
    """What one pass over two texts launches; kernels for GPUs are counted in place of being computed."""
    mode = Launches()

    def launch(_: TritonKernels, name: str, *__: Any, **___: Any) -> None:
        mode.counted[f"triton {name}"] += 1

    with as_on_gpus(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(TritonKernels, "launch", launch)
        engine = engine_of(folder, program, "static")
        cache = engine.new_cache(24)
        with mode:
            engine.step(
                [row(3, 5, TABLES[0], Wanted.NOTHING), row(4, 9, TABLES[1], Wanted.NOTHING)], cache
            )
    return mode.counted


@pytest.mark.parametrize(
    ("family", "launches"),
    [(family, MORE_LAUNCHES.get(family, 9)) for family in FAMILIES if family != "llama4_text"],
)
def test_launches_of_a_layer(family: str, launches: int, checkpoints: dict[str, Path]) -> None:
    """Four products, two norms, placing, attention and the activation; Gemma2 has two more norms, behind sublayers.

    OLMo3 has them in place of those before, so that streams are added by themselves, and squares of queries and keys.
    Ministral 3's queries have a factor: they are placed twice.
    """
    two, three = (
        launches_of(checkpoints[family], program) for program in ("A0 F0 A1 F1", "A0 F0 A1 F1 A2 F2")
    )
    layer = three - two
    assert layer.total() == launches, layer
    assert {name for name in layer if name.startswith("triton")} >= {
        "triton attend",
        "triton place",
        "triton norm",
    }


def test_caches_in_rank_space_are_copied(checkpoints: dict[str, Path]) -> None:
    """Beside attentions that kernels compute."""
    with as_on_gpus():
        engine = engine_of(checkpoints["llama"], PROGRAMS["low rank"], "static", kv="lowrank")
        assert list(engine.model.rebuilds()) == [0]
        found = list(passes(engine, 1))
    dynamic = engine_of(checkpoints["llama"], PROGRAMS["low rank"], "dynamic", kv="lowrank")
    assert error_between(found, list(passes(dynamic, 1))) < TOLERANCE


@pytest.mark.thorough
def test_sixteen_bits(checkpoints: dict[str, Path]) -> None:
    with as_on_gpus():
        found = list(passes(engine_of(checkpoints["llama"], PROGRAMS["dense"], "static", "bfloat16"), 1))
    expected = list(passes(engine_of(checkpoints["llama"], PROGRAMS["dense"], "dynamic", "bfloat16"), 1))
    assert found[0].dtype == torch.bfloat16
    assert error_between(found, expected) < 0.05


@pytest.mark.parametrize(("kernels", "sizes"), [(True, 1), (False, 2)])
def test_one_recording_for_texts_of_any_lengths(
    kernels: bool, sizes: int, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without kernels there is one more for each power of two of blocks."""
    monkeypatch.setattr(TritonKernels, "launch", lambda *_, **__: None)
    with as_on_gpus(kernels):
        engine = engine_of(checkpoints["llama"], PROGRAMS["dense"], "static")
        static, cache = engine.ways[0], engine.new_cache(24)
        for start in (5, 40):
            engine.step([row(3, start, TABLES[3], Wanted.NOTHING)], cache)
    assert isinstance(static, StaticDecode)
    assert len(static._passes[cache]) == sizes


def test_texts_beside_a_prompt_share_a_launch(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: Counter[str] = Counter()
    monkeypatch.setattr(TritonKernels, "launch", lambda _, name, *__, **___: counted.update([name]))
    with as_on_gpus():
        engine = engine_of(checkpoints["llama"], PROGRAMS["dense"], "static")
        prompt = row(0, 0, TABLES[3], Wanted.NOTHING)._replace(tokens=TEXTS[1][:17])
        texts = [row(3, 5 + text, [text], Wanted.NOTHING) for text in range(3)]
        engine.step([*texts, prompt], engine.new_cache(24))
    assert counted["attend"] == 2  # one in each layer
