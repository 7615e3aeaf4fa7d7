"""How experts are used, against loops over tokens with the model's own weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from surgeon.analysis.engine import machine
from surgeon.analysis.importance import expert_use
from surgeon.findings.scan import Scan
from surgeon.language.program import Program
from surgeon.models.edit import edit
from tests.analysis.scanning import LAYERS, plain_nll, run
from tests.analysis.spectra import text
from tests.tiny_models import tiny_model

TEXT = text(6, 12, 6)


def block_of(model: Any, layer: int) -> Any:
    found = model.model.layers[layer]
    return found.feed_forward if hasattr(found, "feed_forward") else found.mlp


def inputs_of(model: Any, layer: int) -> Tensor:
    """What a mixture gets, (tokens, hidden), from transformers' own pass."""
    seen: list[Tensor] = []
    block = block_of(model, layer)
    hook = block.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten(0, 1)))
    with torch.inference_mode():
        model(TEXT.ids)
    hook.remove()
    return torch.cat(seen)


def expert(block: Any, number: int, x: Tensor) -> Tensor:
    """What one expert makes of a token, written out."""
    gate, up = (block.experts.gate_up_proj[number] @ x).chunk(2)
    made: Tensor = block.experts.down_proj[number] @ (torch.nn.functional.silu(gate) * up)
    return made


@torch.inference_mode()
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_use_is_counted_token_by_token(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine.TOKENS_AT_ONCE, "cpu", 24)  # several walks
    model = tiny_model(family, 3)
    found = expert_use(model, TEXT)
    assert list(found) == ([0, 1] if family == "qwen3_moe" else [0, 1, 2])
    use, block = found[1], model.model.layers[1].mlp
    sums = np.zeros((4, 4))
    tokens = inputs_of(model, 1)
    for x in tokens:
        shares = (block.gate.weight @ x).softmax(0)
        best = shares.argsort(descending=True).tolist()
        # Qwen3's tiny one does not divide.
        total = float(shares[best[:2]].sum()) if family == "mixtral" else 1.0
        for one in best[:2]:
            size, weight = float(expert(block, one, x).norm()), float(shares[one]) / total
            sums[one] += [1, weight, size, weight * size]
    assert use.tokens == len(tokens) == TEXT.ids.numel()
    ours = np.stack([use.sent, use.weights, use.sizes, use.saliency], axis=1)
    np.testing.assert_allclose(ours, sums, rtol=1e-4)
    means = sums[:, 3] / np.maximum(1, sums[:, 0])
    assert use.order() == np.argsort(-means).tolist()


@torch.inference_mode()
def test_experts_that_read_weighed_tokens() -> None:
    """Llama 4's: what an expert gives is what it makes of a token times its weight."""
    model = tiny_model("llama4_text", 2)
    use, block = expert_use(model, TEXT)[1], block_of(model, 1)
    sums = np.zeros((4, 4))
    for x in inputs_of(model, 1):
        logits = block.router.weight @ x
        for one in logits.argsort(descending=True).tolist()[:2]:
            weight = float(logits[one].sigmoid())
            gate, up = (weight * x @ block.experts.gate_up_proj[one]).chunk(2)
            size = float((torch.nn.functional.silu(gate) * up @ block.experts.down_proj[one]).norm())
            sums[one] += [1, weight, size, size]
    found = np.stack([use.sent, use.weights, use.sizes, use.saliency], axis=1)
    np.testing.assert_allclose(found, sums, rtol=1e-4)


def test_a_scan_leaves_out_each_expert(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", LAYERS)
    found = run(tmp_path, TEXT, model, ["experts"])
    cells = found.cells.set_index(["first", "drop"])
    assert list(cells.index) == [(layer, one) for layer in (0, 1, 3) for one in range(4)], (
        "layer 2 is dense"
    )
    program = Program.parse("A0 F0 A1 F1!e0,e1,e3 A2 F2 A3 F3")
    nll = float(np.mean(plain_nll(model, TEXT.ids, program)))
    assert cells.loc[(1, 2), "perplexity"] == pytest.approx(np.exp(nll), rel=1e-5)
    use = expert_use(model, TEXT)[1]
    experts = found.experts.set_index(["layer", "expert"])
    assert experts.groupby("layer")["load"].sum().tolist() == pytest.approx([2, 2, 2])
    assert experts.loc[(1, 3), "saliency"] == pytest.approx(float(use.saliency[3] / use.sent[3]))
    assert {"experts", "heatmap-experts"} <= found.pictures().keys()
    pd.testing.assert_frame_equal(Scan.read(tmp_path).experts, found.experts, check_exact=False)
    assert run(tmp_path, TEXT, model, ["prune"]).experts.equals(found.experts), (
        "tables of earlier scans stay"
    )


def test_a_scan_of_experts_of_a_model_without_mixtures(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="the model has nothing that experts could change in these layers"
    ):
        run(tmp_path, TEXT, operations=["experts"])


def test_an_edited_model_is_measured_as_it_runs_and_left_as_it_is() -> None:
    model = edit(tiny_model("mixtral", 2), "A0 F0 A0 F0 A1 F1")
    use = expert_use(model, TEXT, [0])[0]
    assert use.tokens == 2 * TEXT.ids.numel(), "its layer runs twice"
    with pytest.raises(ValueError, match="does not run F1,"):
        expert_use(edit(tiny_model("mixtral", 2), "A0 F0 A1"), TEXT)


def test_models_without_mixtures_have_no_experts() -> None:
    assert expert_use(tiny_model("llama", 2), TEXT) == {}
