"""The memory foretold for weights and cache against what ranks then hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from surgeon.runtime.batching.request import Row, Wanted
from surgeon.runtime.comm.collectives import Alone, Collectives, Unconnected
from surgeon.runtime.kernels import functions
from surgeon.runtime.model import linear
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.model.linear import Linear, Panels
from surgeon.runtime.plan import specification
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.memory import Capacity, cache_groups, choose_cache, footprint
from tests.runtime.on_ranks import cache_bytes

PROGRAMS = [
    "A0 F0 A1 F1 A2 F2 A3 F3",
    "A0 F0 [A1 A2] [F1 F2]",
    "A0 {A1 F1 | F2} A0~A1 F0~F1",
    "[A0 A1 A2] A3/2:0 F3/3:1",
]


def held(engine: RankEngine) -> int:
    """Bytes of the matrices, embedding and head of an engine."""
    embedding, head = engine.model.vocabulary.embedding, engine.model.vocabulary.head.weight
    embedding = embedding.weight if isinstance(embedding, Panels) else embedding
    shared = head.untyped_storage().data_ptr() == embedding.untyped_storage().data_ptr()
    matrices = [embedding] if shared else [embedding, head]
    if engine.model.ends.positions is not None:
        matrices.append(engine.model.ends.positions)
    for made in engine.model.program.sublayers.values():
        matrices += [part.product.weight for part in vars(made).values() if isinstance(part, Linear)]
    return sum(matrix.nbytes for matrix in matrices)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2", "phi3", "gemma2"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_what_ranks_hold(
    family: str,
    program: str,
    ranks: int,
    tiny_model: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if family == "gemma2" and "/" in program:
        pytest.skip("its sublayers cannot be sliced")
    monkeypatch.setattr(linear, "kernels_for", lambda _: None)  # sides of 8 would be filled up to 16
    tiny_model(family, vocab_size=96).save_pretrained(tmp_path)
    plan = make_plan(tmp_path, ranks, 32, program)
    foretold = footprint(plan)
    for rank in range(ranks):
        everybody = tuple(range(ranks))
        collectives: Collectives = Alone() if ranks == 1 else Unconnected(rank, everybody)
        engine = RankEngine(plan, collectives, torch.device("cpu"))
        if engine.model.vocabulary.first + engine.model.vocabulary.rows <= plan.vocabulary:
            assert foretold.weights[rank] == held(engine)
        else:  # the last rank's rows are fewer
            assert foretold.weights[rank] > held(engine)
        assert foretold.block[rank] == cache_bytes(engine.new_cache(1, grouped=True))
        assert sum(foretold.kept[rank]) == cache_bytes(engine.new_cache(1))


def test_a_program_without_attention(tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    plan = make_plan(tmp_path, 1, 32, "F0 F1")
    assert footprint(plan).block == (0,)
    assert choose_cache(plan, "cpu", 4, None, None) == (plan, 8)


# Of 2 KV heads of 8, the last one saves nothing.
LOW_RANK = "A0@k3,v4 F0 A1@q5,k2,v2,o7 F1 A2@k16,v16 F2"


@pytest.mark.parametrize("mode", ["gather", "base"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_caches_in_rank_space(
    ranks: int, mode: str, tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    plan = make_plan(tmp_path, ranks, 32, LOW_RANK, low_rank=mode)
    whole = 2 * 2 * 8 // (1 if ranks == 1 else 2)
    base = 2 * 2 * 8 if mode == "base" else whole  # A1 can be computed so, with all heads on every rank
    numbers = {"full": 2 * whole + base, "lowrank": 7 + 4 + 32, "fewer": 7 + 4 + whole}
    for kv, expected in numbers.items():
        changed = replace(plan, kv=kv)
        foretold = footprint(changed)
        assert foretold.block == (expected * 16 * 4,) * ranks
        for rank in range(ranks):
            collectives: Collectives = Alone() if ranks == 1 else Unconnected(rank, (0, 1))
            cache = RankEngine(changed, collectives, torch.device("cpu")).new_cache(1)
            assert (foretold.block[rank], foretold.buffers[rank]) == (
                cache_bytes(cache),
                cache.buffers.kept.nbytes + cache.buffers.rebuilt.nbytes,
            )


def test_where_memory_is_the_limit_more_texts_fit_in_rank_space(
    tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    # 20 caches of 3 numbers in place of 32.
    plan = make_plan(tmp_path, 1, 32, " ".join(["A0@k1,v2 F0"] * 20))
    (weights,), (block,) = footprint(plan).weights, footprint(plan).block
    memory = weights + 12 * block

    def chosen(kv: str, texts: int, blocks: int | None = None, **changes: Any) -> tuple[bool, int]:
        changed, found = choose_cache(replace(plan, kv=kv, **changes), "cpu", texts, blocks, memory)
        assert changed.kv in (kv, "fewer")
        return changed.kv != kv, found

    assert chosen("auto", 6) == chosen("full", 6) == (False, 12)  # two blocks for each text
    assert chosen("full", 100) == (False, 12)
    # 12 blocks of 640 numbers of a token, less room to read 32 tokens, in blocks of 60 numbers.
    assert chosen("auto", 100) == (True, 126)
    assert chosen("lowrank", 100) == (False, 126)
    assert chosen("auto", 100, 13) == (True, 13)
    assert chosen("lowrank", 1, 126) == (False, 126)
    with pytest.raises(ValueError, match="at most 126 blocks do"):
        chosen("auto", 1, 127)
    assert chosen("lowrank", 100, decoding="static") == (False, 12 * 640 // (60 + 128 * 35))
    # Static passes of so many texts need more, and no less for keys and values that are copied side by side.
    assert chosen("auto", 100, decoding="static") == chosen("full", 100, decoding="static") == (False, 1)


def test_static_passes_verify_drafts_as_texts(tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    plan = make_plan(tmp_path, 1, 128, decoding="static")
    sizes = footprint(plan)
    allowed = sizes.weights[0] + 2 * (sizes.block[0] + 32 * sizes.copies[0])
    assert choose_cache(plan, "cpu", 4, None, allowed, drafts=7) == (plan, 2)
    assert choose_cache(plan, "cpu", 4, None, allowed)[1] > 2
    assert (
        choose_cache(plan, "cpu", 4, None, allowed, drafts=7)[1]
        == choose_cache(plan, "cpu", 32, None, allowed)[1]
    )


def test_short_caches_need_no_buffers_for_long_texts(
    tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    plan = make_plan(tmp_path, 1, 128, "A0@k3,v4 F0", kv="lowrank")
    sizes = footprint(plan)
    (weights,), (block,), (buffers,) = sizes.weights, sizes.block, sizes.buffers
    assert choose_cache(plan, "cpu", 1, None, weights + 3 * (block + buffers)) == (plan, 3)
    with pytest.raises(ValueError, match="the weights take"):
        choose_cache(plan, "cpu", 1, None, weights + block + buffers - 1)


LONG = 4096


@pytest.mark.parametrize(
    ("family", "config", "program", "ranks", "windows", "slots"),
    [
        ("mistral", {"sliding_window": 64}, "A0 F0 A1 F1 A2 F2 A3 F3", 1, (64,), ((0, 0, 0, 0),)),
        ("mistral", {"sliding_window": LONG}, "A0 F0 A1 F1", 1, (None,), ((0, 0),)),
        (
            "gemma2",
            {"sliding_window": 64},
            "A0 F0 A1 F1 A2 F2 A3 F3",
            2,
            (64, None),
            ((0, 1, 0, 1),) * 2,
        ),
        # Three with and one without: three groups with a window, of one attention each, as the one without.
        (
            "gemma2",
            {"sliding_window": 64},
            "A0 F0 A2 F2 A1 F1 A2 F2",
            1,
            (64, 64, 64, None),
            ((0, 1, 3, 2),),
        ),
        # Each rank has one layer of the pair: none has both kinds, and a division would save nothing.
        ("gemma2", {"sliding_window": 64}, "[A0 A1] [F0 F1]", 2, (None,), ((0,), (0,))),
        ("gemma2", {"sliding_window": LONG - 32}, "A0 F0 A1 F1", 1, (None,), ((0, 0),)),
    ],
)
def test_which_attentions_share_blocks(
    family: str,
    config: dict[str, Any],
    program: str,
    ranks: int,
    windows: tuple[int | None, ...],
    slots: tuple[tuple[int, ...], ...],
    tiny_model: Callable[..., Any],
    tmp_path: Path,
) -> None:
    tiny_model(family, max_position_embeddings=LONG, **config).save_pretrained(tmp_path)
    groups = cache_groups(make_plan(tmp_path, ranks, LONG, program))
    assert (groups.windows, groups.slots) == (windows, slots)


def test_layers_with_windows_make_room_for_more_texts(
    tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    """Of 4,096 tokens a window of 64 needs 5 blocks and not 256, beside 32 for the prompts of one pass."""
    found = {}
    for window in (64, None):
        tiny_model("mistral", max_position_embeddings=LONG, sliding_window=window).save_pretrained(
            tmp_path
        )
        plan = make_plan(tmp_path, 1, LONG)
        (weights,), (block,) = footprint(plan).weights, footprint(plan).block
        changed, blocks = choose_cache(plan, "cpu", 1000, None, weights + 1024 * block)
        found[window] = Capacity.of(changed, blocks, 1000)
        assert found[window].pass_tokens == 512  # and four times as many on a GPU:
        there = Capacity.of(changed, blocks, 1000, "cuda")
        assert there.texts(LONG) == ((1024 - 128) // 5 if window else 4)
    assert (found[64].texts(LONG), found[None].texts(LONG)) == ((1024 - 32) // 5, 4)
    assert (found[64].longest, found[None].longest) == (LONG, LONG)
    assert (
        "room for 4 texts of up to 4096 tokens (or 1000 of 16) at a time: weights" in found[None].line()
    )
    assert choose_cache(plan, "cpu", 3, None, None)[1] == 3 * 256
    asked = choose_cache(plan, "cuda", 3, None, None, free=lambda: weights + 20 * block)
    assert asked == (plan, 20)
    short = Capacity.of(plan, 20, 8)
    assert (short.longest, short.texts(100), short.texts(320)) == (320, 2, 1)
    assert short.line().startswith("room for 1 text of up to 320 tokens (or ")


class Copied(TorchDispatchMode):
    """The largest tensor that some places were copied to, in bytes."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.index_select:
            self.most = max(self.most, made.nbytes)
        return made


def test_copies_of_fixed_shapes(
    tiny_model: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without kernels for GPUs a cache leaves room for what all texts read side by side; with them it need not."""
    tiny_model("llama").save_pretrained(tmp_path)
    plan = replace(make_plan(tmp_path, 1, 64), decoding="static")
    sizes = footprint(plan)
    allowed = sizes.weights[0] + 8 * sizes.block[0]
    blocks = [choose_cache(plan, "cpu", 4, None, allowed)[1]]
    monkeypatch.setattr(specification, "used_on", lambda _: True)
    blocks.append(choose_cache(plan, "cpu", 4, None, allowed)[1])
    monkeypatch.undo()
    assert blocks == [max(8 * sizes.block[0] // (sizes.block[0] + 4 * sizes.copies[0]), 0), 8]
    monkeypatch.setattr(functions, "kernels", lambda: None)
    engine = RankEngine(plan, Alone(), torch.device("cpu"))
    # Three blocks, rounded up to four.
    rows = [Row(40, [5], ([(3 * text, 3)],), Wanted.BEST) for text in range(4)]
    with Copied() as copied:
        engine.step(rows, engine.new_cache(12))
    assert copied.most == 4 * 4 * sizes.copies[0]
