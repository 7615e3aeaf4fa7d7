"""Slices read from a file against slices of the whole tensors; and that nothing else is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from surgeon.checkpoint.stored import Checkpoint
from surgeon.language.program import Program
from surgeon.language.sublayer import Sublayer
from surgeon.models.families import FAMILIES, family_of
from surgeon.models.families.specs import Units, unit_bounds, unit_share
from surgeon.models.weights import ModelWeights, ModuleStore, NamedTensors, indivisible, stored_tensors


@pytest.fixture
def llama(tiny_model: Callable[..., Any], tmp_path: Path) -> tuple[Any, ModelWeights]:
    model = tiny_model("llama", attention_bias=True, mlp_bias=True)
    model.save_pretrained(tmp_path)
    return model, ModelWeights(Checkpoint(tmp_path), family_of(model.config), 8)


def sublayer(text: str) -> Sublayer:
    return next(Program.parse(text).sublayers())


def test_a_slice_of_an_attention(llama: tuple[Any, ModelWeights]) -> None:
    model, source = llama
    attention = model.model.layers[2].self_attn
    tensors = source.sublayer(sublayer("A2/2:1"), torch.float32)
    assert "post_norm.weight" not in tensors
    # 4 heads of 8 features over 2 KV heads: slice 1 has heads 2 and 3, which share KV head 1.
    assert torch.equal(tensors["q.weight"], attention.q_proj.weight[16:32])
    assert torch.equal(tensors["q.bias"], attention.q_proj.bias[16:32])
    assert torch.equal(tensors["k.weight"], attention.k_proj.weight[8:16])
    assert torch.equal(tensors["v.bias"], attention.v_proj.bias[8:16])
    assert torch.equal(tensors["o.weight"], attention.o_proj.weight[:, 16:32])
    assert torch.equal(tensors["norm.weight"], model.model.layers[2].input_layernorm.weight)
    assert "o.bias" not in tensors  # slice 0 adds it
    first = source.sublayer(sublayer("A2/2:0"), torch.float32)
    assert torch.equal(first["o.bias"], attention.o_proj.bias)


def test_more_slices_than_kv_heads_share_them(llama: tuple[Any, ModelWeights]) -> None:
    model, source = llama
    attention = model.model.layers[0].self_attn
    for index in range(4):
        tensors = source.sublayer(sublayer(f"A0/4:{index}"), torch.float32)
        assert torch.equal(tensors["q.weight"], attention.q_proj.weight[8 * index : 8 * index + 8])
        first = 8 * (index // 2)
        assert torch.equal(tensors["k.weight"], attention.k_proj.weight[first : first + 8])


def test_a_slice_of_an_average(llama: tuple[Any, ModelWeights]) -> None:
    model, source = llama
    tensors = source.sublayer(sublayer("F0~F3/3:2"), torch.float32)
    mean = (model.model.layers[0].mlp.up_proj.weight + model.model.layers[3].mlp.up_proj.weight) / 2
    assert torch.equal(tensors["up.weight"], mean[32:48])


def test_units_come_from_the_shapes(llama: tuple[Any, ModelWeights]) -> None:
    _, source = llama
    source.store.config["num_attention_heads"] = 999
    assert source.units(sublayer("A1")) == {"heads": 4, "kv_heads": 2}
    assert source.units(sublayer("F1")) == {"neurons": 48}


def test_only_the_slice_is_read(
    llama: tuple[Any, ModelWeights], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, source = llama
    whole: list[str] = []
    parts: list[tuple[str, int, int, int]] = []
    read_whole, read_part = source.store.tensor, source.store.part
    monkeypatch.setattr(source.store, "tensor", lambda name: whole.append(name) or read_whole(name))
    monkeypatch.setattr(source.store, "part", lambda *what: parts.append(what) or read_part(*what))
    source.sublayer(sublayer("F1/4:3"), torch.float32)
    layer = "model.layers.1."
    assert whole == [f"{layer}post_attention_layernorm.weight"]
    assert set(parts) == {
        (f"{layer}mlp.gate_proj.weight", 0, 36, 48),
        (f"{layer}mlp.gate_proj.bias", 0, 36, 48),
        (f"{layer}mlp.up_proj.weight", 0, 36, 48),
        (f"{layer}mlp.up_proj.bias", 0, 36, 48),
        (f"{layer}mlp.down_proj.weight", 1, 36, 48),
    }


@pytest.mark.parametrize(
    ("family", "reads", "roles"),
    [
        # Slice 1 of 2: heads 2 and 3 of 4 heads of 8, whose q, k and v follow each other head by head.
        (
            "gpt_neox",
            [("attention.query_key_value.weight", 0, first, first + 32) for first in (48, 56, 64)]
            + [("attention.dense.weight", 1, 16, 32)],
            {"q": [*range(48, 56), *range(72, 80)], "k": [*range(56, 64), *range(80, 88)]},
        ),
        # 4 heads and 2 KV heads: rows of q, of k, of v.
        (
            "phi3",
            [
                ("self_attn.qkv_proj.weight", 0, first, end)
                for first, end in [(16, 32), (40, 48), (56, 64)]
            ]
            + [("self_attn.o_proj.weight", 1, 16, 32)],
            {"q": range(16, 32), "k": range(40, 48), "v": range(56, 64)},
        ),
        # Stored the other way round.
        (
            "gpt2",
            [("attn.c_attn.weight", 1, first, first + 16) for first in (16, 48, 80)]
            + [("attn.c_proj.weight", 0, 16, 32)],
            {"q": range(16, 32), "k": range(48, 64), "v": range(80, 96)},
        ),
    ],
)
def test_packed_projections(
    family: str,
    reads: list[tuple[str, int, int, int]],
    roles: dict[str, Any],
    tiny_model: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    source = ModelWeights(Checkpoint(tmp_path), FAMILIES[family], 8)
    parts: list[tuple[str, int, int, int]] = []
    read_part = source.store.part
    monkeypatch.setattr(source.store, "part", lambda *what: parts.append(what) or read_part(*what))
    tensors = source.sublayer(sublayer("A1/2:1"), torch.float32)
    prefix = f"{FAMILIES[family].layers}.1."
    assert [part for part in parts if part[0].endswith("weight")] == [
        (prefix + name, *where) for name, *where in reads
    ]
    packed = model.get_parameter(prefix + reads[0][0])
    packed = packed.T if family == "gpt2" else packed
    for role, rows in roles.items():
        assert torch.equal(tensors[f"{role}.weight"], packed[list(rows)])
    output = model.get_parameter(prefix + reads[-1][0])
    assert torch.equal(tensors["o.weight"], (output.T if family == "gpt2" else output)[:, 16:32])
    assert "o.bias" not in tensors


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2", "gpt_neox", "opt"])
def test_matrices_are_seen_alike_in_modules_and_folders(
    family: str, tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    """Shapes without reading, values whole and by rows, of whole, averaged and sliced sublayers."""
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    described = family_of(model.config)
    homes = [ModelWeights(store, described, 8) for store in (Checkpoint(tmp_path), ModuleStore(model))]
    for text in ("A1", "A0~A2/2:1", "F3/4:2", "F1~F0"):
        one = sublayer(text)
        for projection in described.spec(one.kind).projections:
            in_files, in_memory = (home.matrix(one, projection.role) for home in homes)
            assert in_files.shape == in_memory.shape == tuple(in_files.whole().shape)
            assert torch.equal(in_files.whole(), in_memory.whole())
            assert torch.equal(in_files.rows(3, 7), in_files.whole()[3:7])
            assert torch.equal(in_files.whole(torch.float64), in_memory.whole(torch.float64))
        stored = [stored_tensors(one, home) for home in homes]
        assert stored[0].keys() == stored[1].keys()
        assert all(torch.equal(stored[0][name], stored[1][name]) for name in stored[0])
    whole = stored_tensors(sublayer("A2"), homes[0])
    layer = model.get_submodule(described.layers)[2]
    assert all(torch.equal(tensor, layer.get_parameter(path)) for path, tensor in whole.items())


def test_what_is_not_there_is_named(llama: tuple[Any, ModelWeights]) -> None:
    model, _ = llama
    for store, said in (
        (ModuleStore(model), "the model has no parameter 'x.y'"),
        (NamedTensors({}), "has no 'x.y'"),
    ):
        assert "x.y" not in store
        with pytest.raises(ValueError, match=said):
            store.tensor("x.y")
    with pytest.raises(
        ValueError, match=r"the state dict has no tensors named model.layers.\*, as Llama has"
    ):
        ModelWeights(NamedTensors({}), FAMILIES["llama"], 8).count_layers()


def test_norms_behind_sublayers(tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    model = tiny_model("gemma2")
    model.save_pretrained(tmp_path)
    source = ModelWeights(Checkpoint(tmp_path), FAMILIES["gemma2"], 16)
    gains = [layer.post_feedforward_layernorm.weight for layer in model.model.layers]
    assert torch.equal(source.norms(sublayer("F2"))["post_norm.weight"], gains[2])
    averaged = source.norms(sublayer("F0~F3"), torch.float32)["post_norm.weight"]
    assert torch.equal(averaged, (gains[0] + gains[3]) / 2)


def test_sixteen_bit_weights_are_averaged_in_the_computing_dtype(
    tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    source = ModelWeights(Checkpoint(tmp_path), FAMILIES["llama"], 8)
    found = source.sublayer(sublayer("F0~F1"), torch.float32)["up.weight"]
    layers = [model.model.layers[k].mlp.up_proj.weight.float() for k in (0, 1)]
    assert torch.equal(found, (layers[0] + layers[1]) / 2)


def test_checkpoints_of_bare_decoders(tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    model.model.save_pretrained(tmp_path)
    source = ModelWeights(Checkpoint(tmp_path), FAMILIES["llama"], 8)
    assert source.shape("model.embed_tokens.weight") == tuple(model.model.embed_tokens.weight.shape)
    assert source.units(sublayer("A1")) == {"heads": 4, "kv_heads": 2}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("A1", None),
        ("A1/2:0", None),
        ("A1/4:0", "the 4 heads and 2 KV heads of A1 do not divide into 4 slices"),
        ("A1/3:0", "the 4 heads and 2 KV heads of A1 do not divide into 3 slices"),
        ("A1~A2/8:0", "the 4 heads and 2 KV heads of A1~A2 do not divide into 8 slices"),
    ],
)
def test_indivisible(text: str, reason: str | None) -> None:
    assert indivisible(sublayer(text), {"heads": 4, "kv_heads": 2}) == reason


@pytest.mark.parametrize(
    ("units", "count", "heads", "kv_heads"),
    [
        ({"heads": 6, "kv_heads": 3}, 3, [(0, 2), (2, 4), (4, 6)], [(0, 1), (1, 2), (2, 3)]),
        (
            {"heads": 4, "kv_heads": 2},
            4,
            [(0, 1), (1, 2), (2, 3), (3, 4)],
            [(0, 1), (0, 1), (1, 2), (1, 2)],
        ),
        # SmolLM2-135M on two ranks: one KV group and two.
        ({"heads": 9, "kv_heads": 3}, 2, [(0, 3), (3, 9)], [(0, 1), (1, 3)]),
        # On four: the last group's heads are shared out, and so is none of its keys.
        (
            {"heads": 9, "kv_heads": 3},
            4,
            [(0, 1), (1, 3), (3, 6), (6, 9)],
            [(0, 1), (0, 1), (1, 2), (2, 3)],
        ),
        # More ranks than heads: some have none.
        (
            {"heads": 2, "kv_heads": 2},
            4,
            [(0, 0), (0, 1), (1, 1), (1, 2)],
            [(0, 0), (0, 1), (1, 1), (1, 2)],
        ),
    ],
)
def test_bounds_of_heads(
    units: Units, count: int, heads: list[tuple[int, int]], kv_heads: list[tuple[int, int]]
) -> None:
    assert [unit_bounds(units, "heads", (index, count)) for index in range(count)] == heads
    assert [unit_bounds(units, "kv_heads", (index, count)) for index in range(count)] == kv_heads


def test_bounds_of_neurons() -> None:
    assert [unit_bounds({"neurons": 5}, "neurons", (index, 3)) for index in range(3)] == [
        (0, 1),
        (1, 3),
        (3, 5),
    ]
    assert unit_bounds({"neurons": 5}, "neurons", None) == (0, 5)


@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 40), st.integers(1, 4))
def test_slices_are_all_of_it(groups: int, each: int, count: int, inner: int) -> None:
    """Heads are in one slice each, as equal as groups leave them, with their KV heads; slices of slices are slices."""
    units: Units = {"heads": groups * each, "kv_heads": groups}
    found = [unit_bounds(units, "heads", (index, count)) for index in range(count)]
    assert [head for first, end in found for head in range(first, end)] == list(range(groups * each))
    assert max(end - first for first, end in found) <= -(-groups // count) * each
    if count >= groups:
        assert max(end - first for first, end in found) <= -(-each // (count // groups))
    for index, (first, end) in enumerate(found):
        kv_heads = unit_bounds(units, "kv_heads", (index, count))
        assert set(range(*kv_heads)) == {head // each for head in range(first, end)}
    shares = [unit_share(units, "kv_heads", (index, count)) for index in range(count)]
    assert sum(shares) == pytest.approx(1)
    if groups % count == 0:  # as slices of a program are
        for index, (first, end) in enumerate(found):
            parts = [
                unit_bounds(units, "heads", (index * inner + part, count * inner))
                for part in range(inner)
            ]
            assert [head for part in parts for head in range(*part)] == list(range(first, end))
