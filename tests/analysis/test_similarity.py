"""Similarity against plain loops over plain sublayers, with n x n kernel matrices and arccosines."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

import surgeon
from surgeon.analysis.engine import machine
from surgeon.analysis.similarity import CKA_COLUMNS, similarity
from surgeon.checkpoint.tensor_file import FileTensor
from surgeon.findings.similarity import Similarity
from surgeon.models.edit import program_of
from surgeon.opened import load, load_streamed
from surgeon.quality.data import Windows
from tests.analysis.subjects import subject_of
from tests.analysis.test_cka import biased_hsic, by_kernels, unbiased_hsic
from tests.reference import Reference
from tests.tiny_models import save_checkpoint, tiny_model

LAYERS, WINDOWS, TOKENS = 3, 5, 12
FAMILIES = ("llama", "opt", "gpt_neox")


@pytest.fixture(autouse=True)
def _two_windows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine.TOKENS_AT_ONCE, "cpu", 2 * TOKENS)


class Plain:
    """Sublayer outputs and streams of a model, (samples, hidden) in float64, by the paper's equations."""

    def __init__(self, model: Any, ids: Tensor) -> None:
        self.reference = Reference(model)
        self.together = model.config.model_type == "gpt_neox"
        self.streams = [self.reference.embed(ids)]
        self.attention: list[Tensor] = []
        self.mlp: list[Tensor] = []
        for layer in range(model.config.num_hidden_layers):
            attention, mlp = self.run(layer, self.streams[-1])
            self.attention.append(attention)
            self.mlp.append(mlp)
            self.streams.append(self.streams[-1] + attention + mlp)

    def run(self, layer: int, stream: Tensor) -> tuple[Tensor, Tensor]:
        attention = self.reference.attention(layer, stream)
        return attention, self.reference.feed_forward(
            layer, stream if self.together else stream + attention
        )

    def without_previous(self, layer: int) -> tuple[Tensor, Tensor]:
        stream = self.streams[layer] - self.attention[layer - 1] - self.mlp[layer - 1]
        return self.run(layer, stream)


def rows(features: Tensor) -> Tensor:
    return features.flatten(0, 1).double()


def run(family: str, windows: Windows, folder: Path) -> tuple[Similarity, Plain]:
    model = tiny_model(family, LAYERS)
    with torch.no_grad():
        plain = Plain(model, windows.ids)
    return similarity(subject_of(model, windows), folder), plain


@pytest.mark.parametrize("family", FAMILIES)
def test_cka_without_the_previous_layer(family: str, windows: Windows, tmp_path: Path) -> None:
    found, plain = run(family, windows, tmp_path)
    table = found.layers.set_index("layer")
    assert table.loc[0, list(CKA_COLUMNS)].isna().all()
    for layer in range(1, LAYERS):
        attention, mlp = plain.without_previous(layer)
        pairs = (rows(plain.attention[layer]), rows(attention)), (rows(plain.mlp[layer]), rows(mlp))
        expected = [by_kernels(hsic, *pair) for pair in pairs for hsic in (biased_hsic, unbiased_hsic)]
        assert len(set(expected)) == 4
        assert table.loc[layer, list(CKA_COLUMNS)].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_influence_and_sizes(family: str, windows: Windows, tmp_path: Path) -> None:
    found, plain = run(family, windows, tmp_path)
    for row in found.layers.itertuples():
        before, after = rows(plain.streams[row.layer]), rows(plain.streams[row.layer + 1])
        attention, mlp = rows(plain.attention[row.layer]), rows(plain.mlp[row.layer])
        middle = before if plain.together else before + attention
        cosine = torch.nn.functional.cosine_similarity(before, after, dim=-1).mean()
        assert row.block_influence == pytest.approx(1 - float(cosine), abs=1e-6)
        assert row.attention_size == pytest.approx(
            float((attention.norm(dim=1) / before.norm(dim=1)).mean()), rel=1e-5
        )
        assert row.mlp_size == pytest.approx(
            float((mlp.norm(dim=1) / middle.norm(dim=1)).mean()), rel=1e-5
        )


def test_distances_of_every_stretch(windows: Windows, tmp_path: Path) -> None:
    found, plain = run("llama", windows, tmp_path)
    assert list(zip(found.distances["first"], found.distances["last"], strict=True)) == [
        (first, last) for first in range(LAYERS) for last in range(first, LAYERS)
    ]
    for row in found.distances.itertuples():
        before, after = plain.streams[row.first].double(), plain.streams[row.last + 1].double()
        angles = torch.nn.functional.cosine_similarity(before, after, dim=-1).acos() / math.pi
        assert row.angular_distance == pytest.approx(float(angles.mean()), abs=1e-6)
        assert row.angular_distance_last_token == pytest.approx(float(angles[:, -1].mean()), abs=1e-6)
    by_layer = found.distances[found.distances["first"] == found.distances["last"]]
    assert by_layer["cosine_distance"].tolist() == pytest.approx(
        found.layers["block_influence"].tolist()
    )


def test_layers_that_ignore_the_previous_one_are_the_same_without_it(
    windows: Windows, tmp_path: Path
) -> None:
    model = tiny_model("llama", LAYERS)
    for projection in (model.model.layers[1].self_attn.o_proj, model.model.layers[1].mlp.down_proj):
        projection.weight.data.zero_()
    found = similarity(subject_of(model, windows), tmp_path)
    assert found.layers.loc[2, list(CKA_COLUMNS)].tolist() == pytest.approx([1.0] * 4)
    assert found.layers.loc[1, "block_influence"] == pytest.approx(0, abs=1e-12)
    distances = found.distances.set_index(["first", "last"])["angular_distance"]
    # An angle of 0, not the 3e-4 of float32 cosines.
    assert distances[1, 1] == pytest.approx(0, abs=1e-7)


def test_files(windows: Windows, tmp_path: Path) -> None:
    found, _ = run("llama", windows, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "similarity.csv",
        "distances.csv",
        "similarity.json",
    }
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "similarity.csv"), found.layers, rtol=1e-8)
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "distances.csv"), found.distances, rtol=1e-8)
    record = json.loads((tmp_path / "similarity.json").read_text())
    assert (record["model"], record["samples"], record["features"]) == ("tiny", WINDOWS * TOKENS, 32)


def test_what_is_not_finite_is_named(windows: Windows, tmp_path: Path) -> None:
    model = tiny_model("llama", LAYERS)
    model.model.layers[1].mlp.down_proj.weight.data[3, 4] = math.nan
    with pytest.raises(
        ValueError, match="NaN or infinity appears first in F1; check that layer's weights"
    ):
        similarity(subject_of(model, windows), tmp_path)
    model.model.layers[1].self_attn.v_proj.weight.data[3, 4] = math.inf
    with pytest.raises(ValueError, match="first in A1"):
        similarity(subject_of(model, windows), tmp_path)
    model.model.embed_tokens.weight.data.fill_(math.inf)
    with pytest.raises(ValueError, match="embedding's weights"):
        similarity(subject_of(model, windows), tmp_path)
    assert not list(tmp_path.glob("*.csv"))


def test_weights_that_are_read_when_needed(
    windows: Windows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_checkpoint(tmp_path / "model", num_layers=LAYERS, vocab_size=300)
    whole = similarity(subject_of(load(folder), windows), tmp_path / "whole")
    model = load_streamed(folder)
    read: Counter[str] = Counter()
    original = FileTensor.read
    monkeypatch.setattr(
        FileTensor, "read", lambda tensor: read.update([tensor.name]) or original(tensor)
    )
    found = similarity(subject_of(model, windows), tmp_path / "streamed")
    pd.testing.assert_frame_equal(found.layers, whole.layers, rtol=1e-6)
    pd.testing.assert_frame_equal(found.distances, whole.distances, rtol=1e-6)
    # Three batches of two shapes: once for each of them for the distances, once for each shape for the CKA.
    assert len(read) == 9 * LAYERS
    assert set(read.values()) == {3 + 2}


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_native_tracks_are_compared_each_with_itself(
    family: str, windows: Windows, tmp_path: Path
) -> None:
    """Two blocks of two tracks, of two layers and of one; what comes before a meeting is the track's own last layer."""
    model = tiny_model(family, 6)
    with torch.no_grad():
        plain = Plain(model, windows.ids)
        starts, blocks = [plain.streams[0]], ([[0, 1], [2, 3]], [[4], [5]])
        steps: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        expected: dict[int, tuple[Tensor, Tensor] | None] = {}
        for number, tracks in enumerate(blocks):
            updates = []
            for track, layers in enumerate(tracks):
                stream = starts[-1]
                for place, layer in enumerate(layers):
                    steps[layer] = stream, *plain.run(layer, stream)
                    last = layers[place - 1] if place else (blocks[0][track][-1] if number else None)
                    expected[layer] = (
                        None if last is None else plain.run(layer, stream - sum(steps[last][1:]))
                    )
                    stream = stream + steps[layer][1] + steps[layer][2]
                updates.append(stream - starts[-1])
            starts.append(starts[-1] + sum(updates))
    own = "{A0 F0 A1 F1 | A2 F2 A3 F3} {A4 F4 | A5 F5}"
    if family == "gpt_neox":
        own = re.sub(r"A(\d) F\d", r"[A\1 F\1]", own)
    found = similarity(subject_of(surgeon.edit(model, own), windows), tmp_path)
    assert str(program_of(model)) == found.record["program"] == own
    table = found.layers.set_index("layer")
    for layer, without in expected.items():
        stream, attention, mlp = steps[layer]
        cosine = torch.nn.functional.cosine_similarity(
            rows(stream), rows(stream + attention + mlp), dim=-1
        ).mean()
        assert table.loc[layer, "block_influence"] == pytest.approx(1 - float(cosine), abs=1e-6)
        got = table.loc[layer, list(CKA_COLUMNS)]
        if without is None:
            assert got.isna().all()
            continue
        pairs = zip((attention, mlp), without, strict=True)
        cka = [
            by_kernels(hsic, *map(rows, pair)) for pair in pairs for hsic in (biased_hsic, unbiased_hsic)
        ]
        # Two layers before a block with few tokens are all noise: kernels of doubles and sums in single precision.
        assert got.tolist() == pytest.approx(cka, abs=1e-4)
    stretches = list(zip(found.distances["first"], found.distances["last"], strict=True))
    assert stretches == [(0, 0), (0, 1), (1, 1), (2, 2), (2, 3), (3, 3), (4, 4), (5, 5)]
    end = steps[3][0] + steps[3][1] + steps[3][2]
    angles = (
        torch.nn.functional.cosine_similarity(starts[0].double(), end.double(), dim=-1).acos() / math.pi
    )
    assert found.distances["angular_distance"][4] == pytest.approx(float(angles.mean()), abs=1e-6)


def test_whole_layers_beside_others(windows: Windows, tmp_path: Path) -> None:
    """Late steps and pairs run, and have no rows; a late step behind a whole layer reads what it should."""
    model = tiny_model("llama", 6)
    with torch.no_grad():
        plain = Plain(model, windows.ids)
        start = plain.streams[0]
        first = plain.run(0, start)
        middle = start + first[0]
        late = plain.reference.attention(1, middle)
        read = middle + first[1] + late
        read = read + plain.reference.feed_forward(1, read)
        mlp = plain.run(2, read)
    found = similarity(
        subject_of(surgeon.edit(model, "A0 F0 >A1 F1 A2 F2 [A3 A4] [F3 F4]"), windows), tmp_path
    )
    assert found.layers["layer"].tolist() == [0, 2]
    assert found.layers[list(CKA_COLUMNS)].isna().all(axis=None)
    sizes = [
        rows(mlp[0]).norm(dim=1) / rows(read).norm(dim=1),
        rows(mlp[1]).norm(dim=1) / rows(read + mlp[0]).norm(dim=1),
    ]
    got = found.layers.loc[1, ["attention_size", "mlp_size"]].tolist()
    assert got == pytest.approx([float(size.mean()) for size in sizes], rel=1e-5)


def test_what_cannot_be_compared(windows: Windows, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 4 tokens, not 3"):
        similarity(subject_of(tiny_model("llama", 2), Windows(windows.ids[:1, :3], "", "")), tmp_path)
    with pytest.raises(ValueError, match="runs no layer whole: its program is .>A0 F0 "):
        similarity(subject_of(surgeon.edit(tiny_model("llama", 2), ">A0 F0 [A1 F1]"), windows), tmp_path)
    with pytest.raises(ValueError, match="runs A0~A1, whose weights are those of no layer"):
        similarity(subject_of(surgeon.edit(tiny_model("llama", 2), "A0~A1 F0"), windows), tmp_path)
