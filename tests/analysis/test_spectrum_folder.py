"""A spectrum's folder: that a killed one goes on, what is added to it, and what is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

import surgeon
from surgeon.analysis.spectrum import JOURNAL
from surgeon.quality.head import OutputHead
from tests.analysis.spectra import LAYERS, run, text
from tests.tiny_models import HIDDEN, tiny_model


def contents(folder: Path) -> dict[str, str]:
    return {
        name: (folder / name).read_text()
        for name in ("spectrum.csv", "singular_values.csv", "damage.csv")
    }


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.9, 1.0])
def test_a_killed_spectrum_goes_on(share: float, tmp_path: Path) -> None:
    model = tiny_model("phi3", LAYERS)
    run(tmp_path / "whole", model)
    whole = (tmp_path / "whole" / JOURNAL).read_bytes()
    cut = tmp_path / "cut"
    cut.mkdir()
    (cut / JOURNAL).write_bytes(whole[: int(share * len(whole))])
    run(cut, model)
    assert contents(cut) == contents(tmp_path / "whole")
    assert (cut / JOURNAL).read_bytes() == whole


def test_what_is_measured_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", LAYERS)
    run(tmp_path, model, ranks="", layers=range(2))
    run(tmp_path, model, ranks="1/4", layers=range(2))
    run(tmp_path, model, ranks="1/4,1/2", layers=range(2))
    run(tmp_path, model, ranks="1/4", method="plain")
    lines = (tmp_path / JOURNAL).read_text().splitlines()
    assert len(lines) == len(set(lines)) == 2 + 7 * 3 + 7 * 2 * 2 + 7 * 3
    assert pd.read_csv(tmp_path / "damage.csv")["method"].unique().tolist() == ["plain"]
    monkeypatch.setattr(OutputHead, "reference", None)
    monkeypatch.setattr(OutputHead, "compare", None)
    again = run(tmp_path, model, ranks="1/2,1/4", layers=range(1))
    assert (tmp_path / JOURNAL).read_text().splitlines() == lines
    assert again.damage["rank"].tolist()[:2] == [16, 8]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"model_hash": "other"},
            "another model (hash of its configuration and weights): weights, now other",
        ),
        ({"measured": text(5, 12, 8)}, "another text (hash of its tokens): digest 5 x"),
        ({"calibration": text(8, 12, 6)}, "another calibration text (hash of its tokens): digest 9 x"),
        ({"measured": text(5, 11, 5)}, "another text"),
    ],
)
def test_a_folder_of_something_else(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = tiny_model("llama", LAYERS)
    run(tmp_path, model, ranks="")
    before = contents_of(tmp_path)
    with pytest.raises(
        ValueError, match=f"holds a spectrum of {re.escape(message)}.*; use another output folder"
    ):
        run(tmp_path, model, ranks="", **changed)
    assert contents_of(tmp_path) == before


def contents_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_folder_of_another_precision_or_of_a_scan(tmp_path: Path) -> None:
    model = tiny_model("llama", LAYERS)
    run(tmp_path, model, ranks="")
    with pytest.raises(ValueError, match="another dtype to compute in: float32, now float64"):
        run(tmp_path, model.double(), ranks="")
    (tmp_path / JOURNAL).write_text('{"scan":{"window":12}}\n')
    with pytest.raises(ValueError, match="was not written by surgeon spectrum"):
        run(tmp_path, model, ranks="")


def test_a_damaged_journal(tmp_path: Path) -> None:
    model = tiny_model("llama", LAYERS)
    run(tmp_path, model, ranks="")
    path = tmp_path / JOURNAL
    lines = path.read_text().splitlines()
    for damage in ('{"layer":0,"weight":"q"}', "{"):
        path.write_text("\n".join([*lines[:3], damage, *lines[4:], ""]))
        with pytest.raises(ValueError, match="damaged in line 4; delete the file"):
            run(tmp_path, model, ranks="")


def llama_with(change: Callable[[Any], None]) -> Any:
    model = tiny_model("llama", LAYERS)
    with torch.no_grad():
        change(model)
    return model


def nan_in_a_weight(model: Any) -> None:
    model.model.layers[2].mlp.up_proj.weight[3, 4] = math.nan


def infinity_in_a_norm(model: Any) -> None:
    model.model.layers[1].post_attention_layernorm.weight[3] = math.inf


def overflow_of_an_output(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.weight.fill_(3e38)


def nan_in_the_embedding(model: Any) -> None:
    model.model.embed_tokens.weight[:] = math.nan


def nan_in_the_head(model: Any) -> None:
    model.lm_head.weight[5, 5] = math.nan


class Wrapped(nn.Linear):
    """As libraries wrap or quantise a linear module, with parameters beside its own."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.scale = nn.Parameter(torch.ones(outputs))


def a_wrapped_module(model: Any) -> None:
    model.model.layers[2].self_attn.k_proj = Wrapped(HIDDEN, HIDDEN // 2)


def an_offloaded_module(model: Any) -> None:
    model.model.layers[2].self_attn.k_proj.to("meta")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (nan_in_a_weight, "up of layer 2 holds NaN or infinity"),
        (infinity_in_a_norm, "the inputs of gate of layer 1 hold NaN or infinity"),
        (overflow_of_an_output, "appears first in F1; check that layer's weights"),
        (nan_in_the_embedding, "embedded tokens are not finite"),
        (nan_in_the_head, "check the final norm and the output head"),
        (a_wrapped_module, "k of layer 2 is a Wrapped, not a plain linear module"),
        (an_offloaded_module, "k of layer 2 is not in memory"),
    ],
)
def test_models_that_cannot_be_measured(
    change: Callable[[Any], None], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        run(tmp_path, llama_with(change))


def test_bad_requests(tmp_path: Path) -> None:
    model = tiny_model("llama", LAYERS)
    with pytest.raises(ValueError, match="layers 1:4 are out of range: the model's layers are 0:3"):
        run(tmp_path, model, layers=range(1, 4))
    with pytest.raises(ValueError, match="Llama has no weight 'gat'; did you mean 'gate'?"):
        run(tmp_path, model, weights=["q", "gat"])
    with pytest.raises(ValueError, match="no weight is named"):
        run(tmp_path, model, weights=[])
    with pytest.raises(ValueError, match="GPT-2 has no weight 'gate'; known: q, k, v, o, up, down"):
        run(tmp_path, tiny_model("gpt2", LAYERS), weights=["gate"])
    with pytest.raises(ValueError, match="rank 17 is above the full rank 16 of k of layer 0"):
        run(tmp_path, model, ranks="17")
    with pytest.raises(ValueError, match="no method 'svd'; use whitened or plain"):
        run(tmp_path, model, method="svd")
    with pytest.raises(ValueError, match="program does not run A1 as it is stored"):
        run(tmp_path, surgeon.edit(tiny_model("llama", LAYERS), "A0 F0 A2 F2"))
    assert not (tmp_path / "spectrum.csv").exists()
