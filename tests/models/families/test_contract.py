"""The contract every family keeps (surgeon/testing/families.py), on tiny random models with disturbed norms and biases.

To test a new family, add its name to FAMILY_NAMES and, where its layout is new, its computation to tests/reference.py.
"""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from transformers import PreTrainedModel

from surgeon.language.program import Program
from surgeon.models.edit import edit
from surgeon.models.families import FAMILIES, Unsupported, family_of
from surgeon.testing import FamilyContract
from surgeon.testing.families import order_of_attentions
from surgeon.testing.sublayers import EDITS, LAYERS
from tests.reference import Reference
from tests.selection import case
from tests.tiny_models import tiny_model

FAMILY_NAMES = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "phi3",
    "opt",
    "gpt2",
    "gpt_neo",
    "gpt_neox",
]
FAMILY_NAMES += ["smollm3", "granite", "glm", "glm4", "gemma3_text", "cohere", "cohere2"]
FAMILY_NAMES += ["qwen3_moe", "mixtral", "ministral", "ministral3", "olmo2", "olmo3"]
FAMILY_NAMES += ["exaone4", "seed_oss", "starcoder2", "gemma", "phi", "stablelm", "gptj"]
FAMILY_NAMES += ["olmoe", "gpt_oss", "deepseek_v2", "deepseek_v3"]
FAMILY_NAMES += ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "llama4_text"]
FAMILY_NAMES += ["olmo", "qwen2_moe", "glm4_moe", "minimax_m2"]
# Those whose mechanisms others have, too, or that have tests of their own; and those that are flags of one of these.
THOROUGH = (
    "mistral",
    "qwen2",
    "granite",
    "cohere",
    "mixtral",
    "olmo2",
    "gemma3_text",
    "phi",
    "gptj",
    "olmoe",
    "deepseek_v2",
)
THOROUGH += (
    "qwen3_next",
    "qwen3_5_moe_text",
    "llama4_text",
    "stablelm",
    "glm4_moe",
    "smollm3",
    "glm",
    "ministral3",
)
ALIKE = (
    "ministral",
    "exaone4",
    "seed_oss",
    "starcoder2",
    "gemma",
    "qwen3_5_text",
    "olmo",
    "qwen2_moe",
    "minimax_m2",
)


@pytest.mark.sampled(
    "test_cached_generation_equals_uncached",
    "test_edits_equal_their_equations",
    "test_an_export_with_the_program_loads_again",
    "test_a_plain_export_loads_again",
    "test_layers_that_are_all_as_narrow_are_a_plain_export",
)
class TestFamilies(FamilyContract):
    @pytest.fixture(
        scope="class",
        params=[case(name, default=name not in THOROUGH, slow=name in ALIKE) for name in FAMILY_NAMES],
    )
    def family_model(self, request: pytest.FixtureRequest) -> PreTrainedModel:
        return tiny_model(request.param, num_layers=LAYERS)

    def plain(self, model: PreTrainedModel) -> Reference:
        return Reference(model)


@pytest.mark.thorough
class TestHeadsWithANormEach(TestFamilies):
    """StableLM 2 12B's."""

    @pytest.fixture(scope="class")
    def family_model(self) -> PreTrainedModel:
        return tiny_model("stablelm", num_layers=LAYERS, qk_layernorm=True, use_parallel_residual=True)


@pytest.mark.thorough
class TestFalcon(TestFamilies):
    drops_out = False

    @pytest.fixture(scope="class")
    def family_model(self) -> PreTrainedModel:
        return tiny_model("falcon", num_layers=LAYERS)


@pytest.mark.parametrize(
    ("name", "entries", "reason"),
    [
        ("gemma", {"use_bidirectional_attention": True}, "look at those behind them"),
        ("phi", {"qk_layernorm": True}, "heads have layer norms with shifts"),
        ("falcon", {"alibi": True}, r"ALiBi's \(alibi is true, as in falcon-rw\)"),
        ("falcon", {"hidden_dropout": 0.1}, "set hidden_dropout and attention_dropout to 0, not 0.1"),
        ("falcon", {"parallel_attn": False}, "parallel_attn is false beside new_decoder_architecture"),
        (
            "falcon",
            {"new_decoder_architecture": False, "num_ln_in_parallel_attn": 2},
            "must be 1, or 2 with",
        ),
        (
            "falcon",
            {"new_decoder_architecture": False, "multi_query": False, "num_ln_in_parallel_attn": 1},
            "num_kv_heads must be 4, as its heads",
        ),
        ("gptj", {"rotary_dim": 10}, "an even number, of a head's 8 features, not 10"),
        ("gptj", {"rotary_dim": 9}, "an even number, of a head's 8 features, not 9"),
    ],
)
def test_what_is_not_computed_is_refused(name: str, entries: dict[str, Any], reason: str) -> None:
    config = tiny_model(name, 1).config
    for key, value in entries.items():
        setattr(config, key, value)
    with pytest.raises(Unsupported, match=reason):
        family_of(config)


def test_every_family_is_under_contract() -> None:
    assert {*FAMILY_NAMES, "falcon"} == set(FAMILIES)


def test_families_go_to_ranks_with_plans() -> None:
    assert list(pickle.loads(pickle.dumps(FAMILIES))) == list(FAMILIES)


@pytest.mark.parametrize("name", ["shuffle", "prune", "repeat", "lp"])
def test_gpt_neos_other_list_of_layers_follows_too(name: str) -> None:
    model = tiny_model("gpt_neo", num_layers=LAYERS)
    before, order = model.config.to_dict(), order_of_attentions(model, name)
    edit(model, EDITS[name][0](Program.dense(LAYERS)))
    assert model.config.expand_attention_types_params(model.config.attention_types) == [
        before["attention_layers"][k] for k in order
    ]
