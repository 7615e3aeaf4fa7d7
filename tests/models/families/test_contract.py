"""The contract every family keeps (surgeon/testing/families.py), on tiny random models with disturbed norms and biases.

To test a new family, add its name to FAMILY_NAMES and, where its layout is new, its computation to tests/reference.py.
"""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from surgeon.language.program import Program
from surgeon.models.edit import edit
from surgeon.models.families import FAMILIES
from surgeon.testing import FamilyContract
from surgeon.testing.families import order_of_attentions
from surgeon.testing.sublayers import EDITS, LAYERS
from tests.reference import Reference
from tests.selection import case
from tests.tiny_models import tiny_model

FAMILY_NAMES = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "opt", "gpt2", "gpt_neo", "gpt_neox"]
FAMILY_NAMES += ["smollm3", "granite", "glm", "glm4", "gemma3_text", "cohere", "cohere2"]
FAMILY_NAMES += ["qwen3_moe", "mixtral", "ministral", "ministral3", "olmo2", "olmo3"]
FAMILY_NAMES += ["exaone4", "seed_oss", "starcoder2"]
FAMILY_NAMES += ["olmoe", "gpt_oss", "deepseek_v2", "deepseek_v3"]
FAMILY_NAMES += ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "llama4_text"]
FAMILY_NAMES += ["olmo", "qwen2_moe", "glm4_moe", "minimax_m2"]
THOROUGH = (
    "glm",
    "cohere",
    "mixtral",
    "ministral",
    "olmo2",
    "gemma3_text",
    "exaone4",
    "seed_oss",
    "starcoder2",
    "olmoe",
    "deepseek_v2",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "llama4_text",
    "olmo",
    "qwen2_moe",
    "glm4_moe",
    "minimax_m2",
)  # whose mechanisms others have, too, or that have tests of their own


class TestFamilies(FamilyContract):
    @pytest.fixture(scope="class", params=[case(name, default=name not in THOROUGH) for name in FAMILY_NAMES])
    def family_model(self, request: pytest.FixtureRequest) -> PreTrainedModel:
        return tiny_model(request.param, num_layers=LAYERS)

    def plain(self, model: PreTrainedModel) -> Reference:
        return Reference(model)


def test_every_family_is_under_contract() -> None:
    assert set(FAMILY_NAMES) == set(FAMILIES)


@pytest.mark.parametrize("name", ["shuffle", "prune", "repeat", "lp"])
def test_gpt_neos_other_list_of_layers_follows_too(name: str) -> None:
    model = tiny_model("gpt_neo", num_layers=LAYERS)
    before, order = model.config.to_dict(), order_of_attentions(model, name)
    edit(model, EDITS[name][0](Program.dense(LAYERS)))
    assert model.config.expand_attention_types_params(model.config.attention_types) == [
        before["attention_layers"][k] for k in order
    ]
