"""The contract every family keeps, on a tiny random model of its class with disturbed norms and biases.

To test a new family, add its name to FAMILY_NAMES and, where its layout is new, its computation to tests/reference.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from surgeon.families import FAMILIES, family_of
from surgeon.model import edit, program_of, restore
from surgeon.program import Program
from tests.models import tiny_model
from tests.reference import Reference

FAMILY_NAMES = ["llama", "qwen3", "opt"]
LAYERS = 4
IDS = torch.randint(3, 90, (2, 11), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=FAMILY_NAMES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_model(request.param, num_layers=LAYERS)


def test_every_family_is_under_contract() -> None:
    assert set(FAMILY_NAMES) == set(FAMILIES)


def logits_of(model: PreTrainedModel, ids: Tensor = IDS, **arguments: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, **arguments).logits
    return logits


def test_described_modules_and_units_are_there(model: PreTrainedModel) -> None:
    restore(model)
    family = family_of(model.config)
    layer = model.get_submodule(family.layers)[0]
    for kind in "AF":
        spec = family.spec(kind)
        for path in (spec.norm, *spec.modules, *spec.head_norms):
            layer.get_submodule(path)
        for projection in spec.projections:
            weight = layer.get_submodule(projection.path).weight
            divided = weight.shape[0 if projection.reads_stream else 1]
            units = family.units(model.config)[projection.unit]
            width = family.head_dim(model.config) if projection.unit != "neurons" else 1
            assert divided == units * width
    for path in (family.embedding, family.final_norm, family.head, family.position_embedding):
        if path is not None:
            model.get_submodule(path)


def test_the_unedited_program_is_the_stock_model_bit_for_bit(model: PreTrainedModel) -> None:
    stock = logits_of(restore(model))
    edited = logits_of(edit(model, Program.dense(LAYERS)))
    assert torch.equal(stock, edited)
    assert program_of(model) == Program.dense(LAYERS)


def sequential(r: Reference, x: Tensor, layers: list[int]) -> Tensor:
    for k in layers:
        x = x + r.attention(k, x)
        x = x + r.feed_forward(k, x)
    return x


def lp(r: Reference, x: Tensor) -> Tensor:
    x = sequential(r, x, [0])
    x = x + r.attention(1, x) + r.attention(2, x)
    x = x + r.feed_forward(1, x) + r.feed_forward(2, x)
    return sequential(r, x, [3])


def par(r: Reference, x: Tensor) -> Tensor:
    x = sequential(r, x, [0])
    x = x + sum(sequential(r, x, [k]) - x for k in (1, 2, 3))
    return x


def ladder_from_one(r: Reference, x: Tensor) -> Tensor:
    """Ladder Residual, equation 2: x_{i+1} = x_i + h_{i+1}(x_{i-1}) for every sublayer from A1 on."""
    previous = x + r.attention(0, x)
    x = previous + r.feed_forward(0, previous)
    for k in (1, 2, 3):
        for sublayer in (r.attention, r.feed_forward):
            previous, x = x, x + sublayer(k, previous)
    return x


def beside(r: Reference, x: Tensor) -> Tensor:
    for k in range(LAYERS):
        x = x + r.attention(k, x) + r.feed_forward(k, x)
    return x


EDITS: dict[str, tuple[str, Callable[[Reference, Tensor], Tensor]]] = {
    "dense": (str(Program.dense(LAYERS)), lambda r, x: sequential(r, x, [0, 1, 2, 3])),
    "shuffle": ("A0 F0 A2 F2 A1 F1 A3 F3", lambda r, x: sequential(r, x, [0, 2, 1, 3])),
    "prune": ("A0 F0 A3 F3", lambda r, x: sequential(r, x, [0, 3])),
    "repeat": ("A0 F0 A1 F1 A1 F1 A3 F3 A1 F1", lambda r, x: sequential(r, x, [0, 1, 1, 3, 1])),
    "merge": ("A0 F0 A1~A2 F1~F2 A3 F3", lambda r, x: sequential(r.averaged([1, 2], 1), x, [0, 1, 3])),
    "lp": ("A0 F0 [A1 A2] [F1 F2] A3 F3", lp),
    "par": ("A0 F0 {A1 F1 | A2 F2 | A3 F3}", par),
    "ladder": ("A0 F0 >A1 >F1 >A2 >F2 >A3 >F3", ladder_from_one),
    "attention beside MLP": ("[A0 F0] [A1 F1] [A2 F2] [A3 F3]", beside),
    "slices of one layer": ("[A0/2:0 A0/2:1] [F0/2:0 F0/2:1] A1 F1", lambda r, x: sequential(r, x, [0, 1])),
}


@pytest.mark.parametrize("name", EDITS)
def test_edits_equal_their_equations(model: PreTrainedModel, name: str) -> None:
    text, equation = EDITS[name]
    reference = Reference(restore(model))
    expected = reference.logits(equation(reference, reference.embed(IDS)))
    torch.testing.assert_close(logits_of(edit(model, text)), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", EDITS)
def test_cached_generation_equals_uncached(model: PreTrainedModel, name: str) -> None:
    edit(model, EDITS[name][0])
    arguments = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    with torch.no_grad():
        cached = model.generate(IDS, use_cache=True, **arguments)
        uncached = model.generate(IDS, use_cache=False, **arguments)
    assert cached.shape[1] == IDS.shape[1] + 8
    assert torch.equal(cached, uncached)


@pytest.mark.parametrize("name", ["dense", "lp", "par", "ladder", "merge"])
def test_left_padding_changes_nothing(model: PreTrainedModel, name: str) -> None:
    edit(model, EDITS[name][0])
    pad = 3
    padded = torch.cat([torch.zeros(2, pad, dtype=torch.long), IDS], 1)
    mask = torch.cat([torch.zeros(2, pad, dtype=torch.long), torch.ones_like(IDS)], 1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    got = logits_of(model, padded, attention_mask=mask, position_ids=positions)
    torch.testing.assert_close(got[:, pad:], logits_of(model), rtol=1e-4, atol=1e-5)
