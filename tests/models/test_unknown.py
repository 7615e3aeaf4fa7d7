"""What is said of architectures that no family describes."""

from __future__ import annotations

import pytest
from transformers import ArceeConfig, BloomConfig, Lfm2Config, MambaConfig

from surgeon.models.families import Unsupported, family_named
from surgeon.models.unknown import mechanisms

TINY = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 97, "intermediate_size": 48}


def test_of_llama_with_another_mlp_only_the_mlp_is_named() -> None:
    """Arcee is Llama but for squared ReLUs in place of a gate; transformers has that twice, under its name."""
    found = mechanisms(ArceeConfig(**TINY, bos_token_id=0, eos_token_id=1).to_dict())
    assert found["nearest"].startswith("Llama: 11 of 12 functions")
    assert found["otherwise"] == "MLP"
    assert found["modules"] == "no mlp.gate_proj"
    assert "besides" not in found
    assert "entries" not in found


def test_what_no_family_has_is_named() -> None:
    found = mechanisms(MambaConfig(num_hidden_layers=2, hidden_size=32).to_dict())
    assert "Mixer" in found["besides"]
    assert "mixer.conv1d" in found["modules"]
    assert "no mlp.gate_proj" in found["modules"]
    assert "state_size 16" in found["entries"]
    assert "build_alibi_tensor" in mechanisms(BloomConfig(n_layer=2, hidden_size=32, n_head=4).to_dict())["besides"]


def test_layers_that_differ_are_counted() -> None:
    kinds = ["conv", "conv", "full_attention"]
    config = Lfm2Config(**TINY | {"num_hidden_layers": 3}, layer_types=kinds)
    assert "conv.conv in 2 of 3 layers" in mechanisms(config.to_dict())["modules"]


def test_a_refusal_names_the_nearest_family() -> None:
    """MiniMax's first has Mixtral's experts, and linear attentions before most of them."""
    near = r"the nearest that is: Mixtral, which computes the same in 13 of its 25 functions"
    with pytest.raises(Unsupported, match=rf"architecture 'minimax' is not supported \({near}"):
        family_named("minimax")
    with pytest.raises(
        Unsupported, match=r"architecture 'nosuch' is not supported \(supported: Cohere, .*, StarCoder2\)"
    ):
        family_named("nosuch")


def test_what_transformers_does_not_know_either() -> None:
    assert mechanisms({"model_type": "nosuch"}) == {
        "unknown": "transformers has no architecture 'nosuch', or only a newer one than this has"
    }
    assert "no causal language model" in mechanisms({"model_type": "vit"})["unknown"]
