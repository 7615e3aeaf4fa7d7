"""What Llama 4 can be configured to do: in its class, in plain PyTorch, edited, and on a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from surgeon.models.edit import edit, restore
from surgeon.models.families import Unsupported, family_of
from surgeon.runtime.comm.collectives import Alone
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.plan.checks import make_plan
from tests.checkpoint.helpers import relative_error
from tests.reference import Reference
from tests.runtime.on_ranks import chunked_logits
from tests.tiny_models import VOCABULARY, tiny_model

IDS = torch.randint(2, VOCABULARY, (2, 23), generator=torch.Generator().manual_seed(5))
# Chunks of the text end inside.
CHUNKS = [IDS[:, :12], IDS[:, 12:20], IDS[:, 20:21], IDS[:, 21:22], IDS[:, 22:]]
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "as Scout": {
        "moe_layers": None,
        "num_experts_per_tok": 1,
        "rope_parameters": SCALED,
        "attention_bias": False,
    },
    "as Maverick": {
        "moe_layers": None,
        "interleave_moe_layer_step": 2,
        "num_experts_per_tok": 1,
        "use_qk_norm": False,
    },
    "queries stay": {
        "attn_temperature_tuning": False,
        "attention_chunk_size": 8,
        "no_rope_layer_interval": 2,
    },
    "positions everywhere": {
        "no_rope_layers": [1, 1, 1, 1],
        "layer_types": ["full_attention", "chunked_attention"] * 2,
    },
    "dense": {"moe_layers": [], "no_rope_layers": [0, 0, 0, 1], "attention_chunk_size": 1},
}
SCALED["original_max_position_embeddings"] = 32


@pytest.mark.parametrize("name", VARIANTS)
def test_configurations(name: str, tmp_path: Path) -> None:
    model = tiny_model("llama4_text", **VARIANTS[name])
    with torch.no_grad():
        stock = model(IDS).logits
        plain, x = Reference(model), model.model.embed_tokens(IDS)
        for layer in range(4):
            x = plain.layer(layer, x)
        assert relative_error(plain.logits(x), stock) < 1e-5
        assert torch.equal(edit(model, "A0 F0 A1 F1 A2 F2 A3 F3")(IDS).logits, stock)
    restore(model).save_pretrained(tmp_path)
    engine = RankEngine(make_plan(tmp_path, 1, IDS.shape[1]), Alone(), torch.device("cpu"))
    with torch.inference_mode():
        assert relative_error(torch.cat(list(chunked_logits(engine, CHUNKS)), 1), stock) < 1e-5


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            {"no_rope_layers": [1, 0]},
            "no_rope_layers has an entry for each of 2 layers, and there are 4",
        ),
        ({"attention_chunk_size": None}, "its configuration has no attention_chunk_size"),
    ],
)
def test_what_is_no_model(changed: dict[str, Any], reason: str) -> None:
    config = tiny_model("llama4_text").config
    for key, value in changed.items():
        setattr(config, key, value)
    with pytest.raises(Unsupported, match=reason):
        family_of(config)
