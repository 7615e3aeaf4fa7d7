"""Which KV groups and neurons a narrowed sublayer keeps, and what that leaves of weights, slices and factors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from surgeon.language.program import Program
from surgeon.language.sublayer import Sublayer
from surgeon.models.edit import edit
from surgeon.models.families import family_of
from surgeon.models.weights import (
    Factors,
    FactorSource,
    Magnitude,
    ModelWeights,
    ModuleStore,
    NamedTensors,
    ScoredUnits,
    TruncatedSVD,
    UnitsByLayer,
)
from surgeon.models.weights.layers import StoredWeights


class LastFirst(TruncatedSVD):
    """Takes the last unit to be the most important one."""

    def order(self, kind: str, layer: int, weights: StoredWeights) -> Tensor:
        return torch.arange(weights.stored_width(kind, layer)).flip(0)


def seen(model: Any, factors: FactorSource | None = None) -> ModelWeights:
    family = family_of(model.config)
    return ModelWeights(ModuleStore(model), family, family.head_dim(model.config), factors)


def sublayer(text: str) -> Sublayer:
    return next(Program.parse(text).sublayers())


@pytest.fixture
def llama(tiny_model: Callable[..., Any]) -> Any:
    return tiny_model(
        "llama", 2, attention_bias=True, mlp_bias=True, num_attention_heads=8, num_key_value_heads=4
    )


def test_the_largest_are_kept_as_they_stand(llama: Any) -> None:
    mlp, weights = llama.model.layers[1].mlp, seen(llama, UnitsByLayer({("F", 1): Magnitude()}))
    mlp.up_proj.weight.data[[40, 7]] *= 100
    mlp.down_proj.weight.data[:, 30] *= 80
    mlp.gate_proj.weight.data[3] *= 60
    assert weights.kept_units(sublayer("F1#3")).tolist() == [7, 30, 40]
    # Narrower choices lie within wider ones.
    assert weights.kept_units(sublayer("F1#4")).tolist() == [3, 7, 30, 40]
    tensors = weights.sublayer(sublayer("F1#3"))
    assert torch.equal(tensors["gate.weight"], mlp.gate_proj.weight[[7, 30, 40]])
    assert torch.equal(tensors["up.bias"], mlp.up_proj.bias[[7, 30, 40]])
    assert torch.equal(tensors["down.weight"], mlp.down_proj.weight[:, [7, 30, 40]])
    assert torch.equal(tensors["down.bias"], mlp.down_proj.bias)  # of the stream: it stays


def test_any_neurons_are_kept_where_nothing_says_which(llama: Any) -> None:
    """The same ones every time, others in each layer; narrower choices lie within wider ones."""
    kept = {
        text: set(seen(llama).kept_units(sublayer(text)).tolist()) for text in ("F0#9", "F1#9", "F1#20")
    }
    assert kept["F1#9"] < kept["F1#20"]
    assert kept["F0#9"] != kept["F1#9"]
    for layer in llama.model.layers:
        layer.mlp.up_proj.weight.data[::2] *= 100
    assert all(
        set(seen(llama).kept_units(sublayer(text)).tolist()) == found for text, found in kept.items()
    )


def test_heads_are_kept_by_their_kv_group(llama: Any) -> None:
    attention, weights = llama.model.layers[0].self_attn, seen(llama)
    attention.v_proj.weight.data[4:8] *= 100  # of KV group 1, which heads 2 and 3 share
    attention.o_proj.weight.data[:, 28:] *= 60  # of head 7, which KV group 3 has
    assert weights.kept_units(sublayer("A0#2")).tolist() == [1, 3]
    assert weights.units(sublayer("A0#2")) == {"heads": 4, "kv_heads": 2}
    heads, groups = [*range(8, 16), *range(24, 32)], [*range(4, 8), *range(12, 16)]
    tensors = weights.sublayer(sublayer("A0#2"))
    assert torch.equal(tensors["q.weight"], attention.q_proj.weight[heads])
    assert torch.equal(tensors["k.bias"], attention.k_proj.bias[groups])
    assert torch.equal(tensors["o.weight"], attention.o_proj.weight[:, heads])
    assert torch.equal(tensors["o.bias"], attention.o_proj.bias)
    second = weights.sublayer(sublayer("A0#2/2:1"))  # a slice is of what is left
    assert torch.equal(second["q.weight"], attention.q_proj.weight[24:32])
    assert torch.equal(second["k.weight"], attention.k_proj.weight[12:16])
    assert "o.bias" not in second


def test_a_source_may_know_better(llama: Any) -> None:
    up = llama.model.layers[0].mlp.up_proj.weight
    assert torch.equal(seen(llama, LastFirst()).sublayer(sublayer("F0#2"))["up.weight"], up[[46, 47]])
    edited = edit(llama, "A0#1 F0#2", factors=LastFirst())
    assert torch.equal(edited.get_parameter("model.layers.F0#2.mlp.up_proj.weight"), up[[46, 47]])


def test_scores_say_which_are_kept(llama: Any) -> None:
    """Of equal ones those that stand first; layers without scores go by their weights."""
    source = UnitsByLayer({("A", 0): ScoredUnits(torch.tensor([1.0, 3, 2, 3]), "taste")}, TruncatedSVD())
    weights = seen(llama, source)
    assert [weights.kept_units(sublayer(f"A0#{count}")).tolist() for count in (1, 2, 3)] == [
        [1],
        [1, 3],
        [1, 2, 3],
    ]
    by_weights = seen(llama).kept_units(sublayer("A1#2"))
    assert weights.kept_units(sublayer("A1#2")).tolist() == by_weights.tolist()
    found = weights.sublayer(sublayer("A0#2@q16"))
    whole = weights.sublayer(sublayer("A0#2"))["q.weight"]
    torch.testing.assert_close(found["q.second.weight"] @ found["q.first.weight"], whole)
    with pytest.raises(ValueError, match="scores of 3 units of F1, which has 48"):
        seen(llama, UnitsByLayer({("F", 1): ScoredUnits(torch.ones(3), "taste")})).kept_units(
            sublayer("F1#2")
        )


def test_factors_are_of_what_is_left(llama: Any) -> None:
    weights = seen(llama)
    factors = weights.sublayer(sublayer("A1#2@q3"))
    narrow = weights.sublayer(sublayer("A1#2"))["q.weight"].detach()
    left, values, right = torch.linalg.svd(narrow, full_matrices=False)
    found = factors["q.second.weight"] @ factors["q.first.weight"]
    torch.testing.assert_close(found, (left[:, :3] * values[:3]) @ right[:3])


def test_a_layer_that_is_stored_so_is_used_as_it_is(llama: Any) -> None:
    narrow = {
        f"model.layers.0.{path}": parameter.detach()
        for path, parameter in edit(llama, "A0#2 F0#5")
        .model.layers.get_submodule("A0#2")
        .named_parameters()
    }
    stored = ModelWeights(NamedTensors(narrow), family_of(llama.config), 4)
    assert stored.stored_width("A", 0) == 2
    for text in ("A0#2", "A0"):
        assert torch.equal(
            stored.sublayer(sublayer(text))["k.weight"], narrow["model.layers.0.self_attn.k_proj.weight"]
        )
    with pytest.raises(
        ValueError, match="A0#3 has more KV groups than the 2 of its layer; use at most 2"
    ):
        stored.sublayer(sublayer("A0#3"))


def test_what_cannot_be_is_refused(llama: Any) -> None:
    for text, said in (
        ("A0#5", "A0#5 has more KV groups than the 4 of its layer"),
        ("F1#49", "more neurons than the 48"),
        ("A1#3/2:0", "the 6 heads and 3 KV heads of A1#3 do not divide into 2 slices"),
        ("F1#5@up6", "rank 6 of up is above that of a matrix of 5 x 32"),
    ):
        with pytest.raises(ValueError, match=said):
            edit(llama, f"A0 {text}")


def test_a_source_of_factors_alone_leaves_units_to_the_weights(llama: Any) -> None:
    class Plain:
        def factors(self, sublayer: Sublayer, role: str, matrix: Any) -> Factors:
            return TruncatedSVD().factors(sublayer, role, matrix)

    assert torch.equal(
        seen(llama, Plain()).kept_units(sublayer("F0#9")),
        seen(llama).kept_units(sublayer("F0#9")),
    )
