"""Products with weights as they lie on ranks, against plain ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from surgeon.runtime.comm.collectives import Alone
from surgeon.runtime.kernels import functions
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.model.linear import Linear, Panels, Transposed, laid_out
from surgeon.runtime.plan.checks import make_plan
from tests.runtime.on_ranks import greedy


def packed(weight: Tensor, packs: bool = True) -> bool:
    """Whether a weight is laid out in another way than transposed."""
    return not isinstance(laid_out(weight, packs), Transposed)


ON_X86 = packed(torch.zeros(64, 16))


@pytest.mark.parametrize(
    "shape", [(64, 16), (250, 500), (192, 512), (70, 33), (3, 7), (1, 300), (2, 1100), (0, 16), (70, 0)]
)
@pytest.mark.parametrize("tokens", [0, 1, 2, 9, 70, 200])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("by_kernels", [False, True])
def test_product(
    shape: tuple[int, int], tokens: int, biased: bool, by_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    if not by_kernels:
        monkeypatch.setattr(functions, "kernels", lambda: None)
    weight, x = torch.randn(shape), torch.randn(tokens, shape[1])
    bias = torch.randn(shape[0]) if biased else None
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias)
    found = laid_out(weight)(x, bias)
    assert found.shape == expected.shape
    assert torch.allclose(found.double(), expected, rtol=1e-4, atol=1e-4)


def test_which_weights_are_packed() -> None:
    """Of any shape for the kernels, in float32, and not where the product has to go to a given place."""
    for shape in [
        (1000, 500),
        (70, 33),
        (344, 128),
        (20, 1024),
        (520, 2048),
        (1, 5000),
        (0, 16),
        (16, 0),
    ]:
        assert packed(torch.zeros(shape)) == ON_X86, shape
    assert not packed(torch.zeros(64, 16, dtype=torch.bfloat16))
    assert not packed(torch.zeros(64, 16), packs=False)


def test_what_packing_fills_up() -> None:
    """Outputs to a multiple of 16: what few or odd ones take more is next to nothing."""
    if not isinstance(laid_out(torch.zeros(64, 16)), Panels):
        pytest.skip("the kernels are not compiled here, or not for this processor")
    for outputs, filled in [(64, 64), (65, 80), (16, 16), (1, 16), (190, 192), (0, 0)]:
        assert laid_out(torch.randn(outputs, 9)).weight.numel() == filled * 9


def test_a_row_of_a_wider_tensor() -> None:
    """Slices and columns of other tensors give what copies of them give."""
    weight, wide = torch.randn(64, 32), torch.randn(5, 96)
    product = laid_out(weight)
    for x in (wide[:, :32], wide[:, 64:], wide[:, ::3]):
        assert torch.allclose(product(x), x @ weight.t(), atol=1e-5)


def test_several_projections_as_one_product() -> None:
    """To a given place too; a bias that only one of them has is nothing for the others; the scale comes last."""
    first, second, bias, x = (
        torch.randn(64, 32),
        torch.randn(128, 32),
        torch.randn(128),
        torch.randn(3, 32),
    )
    expected = 0.5 * torch.cat([x @ first.t(), x @ second.t() + bias], 1)
    assert torch.allclose(Linear([first, second], [None, bias], 0.5)(x), expected, atol=1e-5)
    out = torch.empty(3, 192)
    assert Linear([first, second], [None, bias], 0.5, packs=False)(x, out) is out
    assert torch.allclose(out, expected, atol=1e-5)


def test_a_model_of_packed_weights(tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    """Its logits and greedy tokens are those of `transformers`, and it takes the memory of its weights."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": 128,
        "tie_word_embeddings": False,
    }
    model = tiny_model("llama", **sizes, attention_bias=True)
    model.save_pretrained(tmp_path)
    plan = make_plan(tmp_path, 1, 32)
    engine = RankEngine(plan, Alone(), torch.device("cpu"))
    weights = [
        part.product
        for made in engine.model.program.sublayers.values()
        for part in vars(made).values()
        if isinstance(part, Linear)
    ]
    assert len(weights) == 4 * 4
    assert all(
        isinstance(weight, Transposed) != ON_X86 for weight in [*weights, engine.model.vocabulary.head]
    )
    prompt = [3, 14, 15, 92, 65]
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0]
    assert (engine.text_logits(prompt) - expected).norm() < 1e-5 * expected.norm()
    continued = model.generate(
        torch.tensor([prompt]), max_new_tokens=9, min_new_tokens=9, do_sample=False
    )
    assert greedy(engine, prompt, 9) == continued[0, len(prompt) :].tolist()
