"""The contract every family keeps, on a tiny random model of its class with disturbed norms and biases.

To test a new family, add its name to FAMILY_NAMES and, where its layout is new, its computation to tests/reference.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from surgeon.families import FAMILIES, family_of
from surgeon.model import edit, program_of, restore
from surgeon.operations import ladder, merge, pair, parallel, prune
from surgeon.program import Program
from surgeon.weights import features, projection_matrix, with_projection
from tests.models import tiny_model
from tests.reference import Reference

FAMILY_NAMES = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "opt", "gpt2", "gpt_neo", "gpt_neox"]
FAMILY_NAMES += ["smollm3", "granite"]
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
            packed = [other for other in spec.projections if other.path == projection.path]
            units = [family.units(model.config)[p.unit] * family.unit_width(model.config, p.unit) for p in packed]
            assert weight.shape[projection.divided_dim] == sum(units)
    for path in (family.embedding, family.final_norm, family.head, family.position_embedding):
        if path is not None:
            model.get_submodule(path)


def test_the_unedited_program_is_the_stock_model_bit_for_bit(model: PreTrainedModel) -> None:
    stock = logits_of(restore(model))
    program = program_of(model)
    assert program == dense(model)
    assert torch.equal(stock, logits_of(edit(model, program)))
    assert program_of(model) == program


def test_it_trains_and_drops_out_as_the_stock_model_does(model: PreTrainedModel) -> None:
    """Dropout is where the architecture has it, draws the same numbers, and is on only while the model trains."""
    stock = in_training(restore(model))
    assert not torch.equal(stock, logits_of(model))
    edit(model, dense(model))
    assert torch.equal(in_training(model), stock)
    assert torch.equal(logits_of(model), logits_of(restore(model)))


def test_edited_in_training_it_goes_on_training(model: PreTrainedModel) -> None:
    stock = in_training(restore(model))
    for mode in (True, False):
        edit(restore(model).train(mode), dense(model))
        assert {module.training for module in model.modules()} == {mode}
    restore(edit(model, dense(model)).train())  # and what it was told while edited is not forgotten
    assert {module.training for module in edit(model, dense(model)).modules()} == {True}
    torch.manual_seed(5)
    assert torch.equal(logits_of(model), stock)
    model.eval()


def in_training(model: PreTrainedModel) -> Tensor:
    """Logits with dropout, the same numbers each time."""
    torch.manual_seed(5)
    logits = logits_of(model.train())
    model.eval()
    return logits


def dense(model: PreTrainedModel) -> Program:
    return Program.dense(LAYERS, family_of(model.config).steps_per_layer)


def sequential(r: Reference, x: Tensor, layers: list[int]) -> Tensor:
    for k in layers:
        x = r.layer(k, x)
    return x


def lp(r: Reference, x: Tensor) -> Tensor:
    x = r.layer(0, x)
    if r.one_step:
        x = x + r.attention(1, x) + r.feed_forward(1, x) + r.attention(2, x) + r.feed_forward(2, x)
    else:
        x = x + r.attention(1, x) + r.attention(2, x)
        x = x + r.feed_forward(1, x) + r.feed_forward(2, x)
    return r.layer(3, x)


def par(r: Reference, x: Tensor) -> Tensor:
    x = r.layer(0, x)
    return x + sum(r.layer(k, x) - x for k in (1, 2, 3))


def ladder_from_one(r: Reference, x: Tensor) -> Tensor:
    """Ladder Residual, equation 2: x_{i+1} = x_i + h_{i+1}(x_{i-1}) for every step from layer 1 on."""
    if r.one_step:
        steps = [lambda y, k=k: r.attention(k, y) + r.feed_forward(k, y) for k in range(LAYERS)]
        late = 1
    else:
        steps = [partial(f, k) for k in range(LAYERS) for f in (r.attention, r.feed_forward)]
        late = 2
    previous = x
    for index, step in enumerate(steps):
        previous, x = x, x + step(previous if index >= late else x)
    return x


def beside(r: Reference, x: Tensor) -> Tensor:
    for k in range(LAYERS):
        x = x + r.attention(k, x) + r.feed_forward(k, x)
    return x


def one_after_the_other(r: Reference, x: Tensor) -> Tensor:
    for k in range(LAYERS):
        x = x + r.attention(k, x)
        x = x + r.feed_forward(k, x)
    return x


def moved(program: Program, order: list[int]) -> Program:
    """The layers of a dense program in another order."""
    steps = len(program) // LAYERS
    return Program(tuple(node for k in order for node in program.nodes[k * steps : (k + 1) * steps]))


def sliced(program: Program) -> Program:
    """Layer 0 in two slices, then layer 1."""
    text = (
        "[A0/2:0 F0/2:0 A0/2:1 F0/2:1] [A1 F1]" if len(program) == LAYERS else "[A0/2:0 A0/2:1] [F0/2:0 F0/2:1] A1 F1"
    )
    return Program.parse(text)


Edit = tuple[Callable[[Program], Program], Callable[[Reference, Tensor], Tensor]]
EDITS: dict[str, Edit] = {
    "dense": (lambda p: p, lambda r, x: sequential(r, x, [0, 1, 2, 3])),
    "shuffle": (lambda p: moved(p, [0, 2, 1, 3]), lambda r, x: sequential(r, x, [0, 2, 1, 3])),
    "prune": (lambda p: prune(p, range(1, 3)), lambda r, x: sequential(r, x, [0, 3])),
    "repeat": (lambda p: moved(p, [0, 1, 1, 3, 1]), lambda r, x: sequential(r, x, [0, 1, 1, 3, 1])),
    "merge": (lambda p: merge(p, range(1, 3)), lambda r, x: sequential(r.averaged([1, 2], 1), x, [0, 1, 3])),
    "lp": (lambda p: pair(p, range(1, 3)), lp),
    "par": (lambda p: parallel(p, range(1, 4)), par),
    "ladder": (lambda p: ladder(p, range(1, 4)), ladder_from_one),
    "attention beside MLP": (lambda _: Program.dense(LAYERS, 1), beside),
    "attention before MLP": (lambda _: Program.dense(LAYERS, 2), one_after_the_other),
    "slices of one layer": (sliced, lambda r, x: sequential(r, x, [0, 1])),
}


def edited(model: PreTrainedModel, name: str) -> PreTrainedModel:
    program = EDITS[name][0](dense(restore(model)))
    if family_of(model.config).attention.post_norm and any(sublayer.piece for sublayer in program.sublayers()):
        pytest.skip("the family cannot be sliced; that it says so is tested below")
    return edit(model, program)


@pytest.mark.parametrize("name", EDITS)
def test_edits_equal_their_equations(model: PreTrainedModel, name: str) -> None:
    reference = Reference(restore(model))
    expected = reference.logits(EDITS[name][1](reference, reference.embed(IDS)))
    torch.testing.assert_close(logits_of(edited(model, name)), expected, rtol=2e-5, atol=2e-5)


def test_what_cannot_be_sliced_says_so(model: PreTrainedModel) -> None:
    if family_of(model.config).attention.post_norm is None:
        assert edit(model, sliced(dense(restore(model))))
        return
    with pytest.raises(ValueError, match="cannot be sliced: their output goes through a norm"):
        edit(model, sliced(dense(restore(model))))


@pytest.mark.parametrize("name", EDITS)
def test_cached_generation_equals_uncached(model: PreTrainedModel, name: str) -> None:
    edited(model, name)
    arguments = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    with torch.no_grad():
        cached = model.generate(IDS, use_cache=True, **arguments)
        uncached = model.generate(IDS, use_cache=False, **arguments)
    assert cached.shape[1] == IDS.shape[1] + 8
    assert torch.equal(cached, uncached)


@pytest.mark.parametrize("program", ["F0 F1", "[F2 F3] >F0"])
def test_without_attention_positions_go_on_with_the_cache(model: PreTrainedModel, program: str) -> None:
    edit(model, program)
    with torch.no_grad():
        whole, cache, steps = logits_of(model), None, []
        for ids in IDS.split([4, 1, 6], 1):
            out = model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache, steps = out.past_key_values, [*steps, out.logits]
    assert cache.get_seq_length() == IDS.shape[1]
    torch.testing.assert_close(torch.cat(steps, 1), whole)


@pytest.mark.parametrize("name", ["dense", "lp", "par", "ladder", "merge"])
def test_left_padding_changes_nothing(model: PreTrainedModel, name: str) -> None:
    edited(model, name)
    pad = 3
    padded = torch.cat([torch.zeros(2, pad, dtype=torch.long), IDS], 1)
    mask = torch.cat([torch.zeros(2, pad, dtype=torch.long), torch.ones_like(IDS)], 1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    got = logits_of(model, padded, attention_mask=mask, position_ids=positions)
    torch.testing.assert_close(got[:, pad:], logits_of(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["shuffle", "prune", "repeat", "lp"])
def test_per_layer_entries_of_the_config_follow_their_layers(model: PreTrainedModel, name: str) -> None:
    restore(model)
    before = model.config.to_dict()
    order = [s.layers[0] for s in EDITS[name][0](dense(model)).sublayers() if s.kind == "A"]
    edited(model, name)
    for key in ("layer_types", "attention_layers"):
        if before.get(key) is not None:
            assert getattr(model.config, key) == [before[key][k] for k in order]
    if "attention_types" in before:
        assert model.config.expand_attention_types_params(model.config.attention_types) == [
            before["attention_layers"][k] for k in order
        ]
    assert restore(model).config.to_dict() == before


def test_projections_are_found_where_they_are_packed(model: PreTrainedModel) -> None:
    """Each projection's own matrix, and the product with it against what the module gives on its features."""
    restore(model)
    family, config = family_of(model.config), model.config
    layer = model.get_submodule(family.layers)[1]
    for projection in (*family.attention.projections, *family.mlp.projections):
        module = layer.get_submodule(projection.path)
        matrix = projection_matrix(module.weight, projection, family, config)
        x = torch.randn(3, matrix.shape[1])
        own = features(projection, family, config).flatten()
        with torch.no_grad():
            got = module(x) - (0 if module.bias is None else module.bias)
        expected = got[:, own] if projection.reads_stream else got
        torch.testing.assert_close(x @ matrix.T, expected, rtol=1e-4, atol=1e-5)
        changed = with_projection(module.weight, matrix * 2, projection, family, config)
        torch.testing.assert_close(projection_matrix(changed, projection, family, config), matrix * 2)
        others = [p for p in (*family.attention.projections, *family.mlp.projections) if p.path == projection.path]
        for other in set(others) - {projection}:
            assert torch.equal(
                projection_matrix(changed, other, family, config),
                projection_matrix(module.weight, other, family, config),
            )
