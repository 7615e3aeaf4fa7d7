"""What stands in for a decoder's layers: slices that share what is not divided."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from surgeon.models.edit import decoder_layers, edit
from surgeon.models.families import FAMILIES
from surgeon.models.families.specs import StreamNorm
from tests.tiny_models import tiny_model

IDS = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(1))
SLICED = "{A0/2:0 F0/2:0 | A0/2:1 F0/2:1} A0/4:0 A1/2:0@k5,o6 A1/2:1@k5,o6"


def test_slices_share_what_is_not_divided() -> None:
    model = edit(tiny_model("gpt2", 2, dropout=0.0), SLICED)
    named = dict(decoder_layers(model).named_parameters(remove_duplicate=False))

    def shared(first: str, other: str) -> set[str]:
        own = {
            name.removeprefix(f"{first}."): one
            for name, one in named.items()
            if name.startswith(f"{first}.")
        }
        return {path for path, one in own.items() if named.get(f"{other}.{path}") is one}

    assert shared("A0/2:0", "A0/2:1") == {"ln_1.weight", "ln_1.bias"}
    assert shared("F0/2:0", "F0/2:1") == {"ln_2.weight", "ln_2.bias"}
    # The factor on the stream's side of its matrix, too: k's first one, and o's second one.
    first, other = "A1/2:0@k5,o6", "A1/2:1@k5,o6"
    expected = {"ln_1.weight", "ln_1.bias", "attn.c_attn.k.first.weight", "attn.c_proj.second.weight"}
    assert shared(first, other) == expected
    # Slices of other numbers are stored as another layer, and those of a layer are not the layer itself.
    assert not shared("A0/2:0", "A0/4:0")
    assert not any(
        named[f"0.ln_1.{part}"] is named[f"A0/2:0.ln_1.{part}"] for part in ("weight", "bias")
    )


def test_gradients_of_slices_add_up_and_one_of_them_has_the_bias() -> None:
    whole, sliced = (tiny_model("gpt2", 1, dropout=0.0) for _ in range(2))
    edit(whole, "A0 F0")
    edit(sliced, "[A0/2:0 A0/2:1] [F0/2:0 F0/2:1]")
    for model in (whole, sliced):
        model(input_ids=IDS, labels=IDS).loss.backward()
    layer, first, other = (
        decoder_layers(whole).layer(0),
        *map(decoder_layers(sliced).get_submodule, ("A0/2:0", "A0/2:1")),
    )
    torch.testing.assert_close(first.ln_1.weight.grad, layer.ln_1.weight.grad)
    torch.testing.assert_close(first.attn.c_proj.bias.grad, layer.attn.c_proj.bias.grad)
    sliced.requires_grad_(True)
    assert "attn.c_proj.bias" not in dict(other.named_parameters())
    assert not other.attn.c_proj.bias.requires_grad
    assert not other.attn.c_proj.bias.any()


@pytest.mark.parametrize("place", ["before", "behind", "nowhere"])
def test_a_norm_is_where_it_stands_among_the_stages(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = StreamNorm("post_attention_layernorm")
    stages = {"before": (norm, "mlp"), "behind": ("mlp", norm), "nowhere": ("mlp",)}[place]
    family = FAMILIES["llama"]
    monkeypatch.setitem(FAMILIES, "llama", replace(family, mlp=replace(family.mlp, stages=stages)))
    model = tiny_model("llama", 2)
    layer = model.model.layers[1]
    with torch.no_grad():
        stream = added = model.model.embed_tokens(IDS)
        for path in stages:
            added = layer.get_submodule(path)(added)
        expected = model.lm_head(model.model.norm(stream + added))
        assert torch.equal(edit(model, "F1")(input_ids=IDS, use_cache=False).logits, expected)
