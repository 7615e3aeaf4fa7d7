"""config.json in the words of earlier versions of transformers, as models on the hub have it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from surgeon.opened import open_model
from surgeon.runtime.comm.collectives import Alone
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.plan.checks import make_plan
from tests.checkpoint.helpers import logits_of, plain_logits, relative_error, run_export
from tests.runtime.on_ranks import chunked_logits
from tests.selection import case
from tests.tiny_models import disturb

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 97,
    "head_dim": 16,
}
SIZES |= {
    "max_position_embeddings": 128,
    "torch_dtype": "float32",
    "sliding_window": 6,
    "pad_token_id": 0,
}
# One layer in six looks at everything, with rotary positions of another base, which may be scaled.
GEMMA3 = SIZES | {
    "model_type": "gemma3_text",
    "num_hidden_layers": 7,
    "num_key_value_heads": 1,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 24,
    "rope_theta": 10000,
    "rope_local_base_freq": 100,
    "rope_scaling": None,
    "sliding_window_pattern": 6,
}
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32,
    "beta_slow": 1,
}
OLMO3 = SIZES | {
    "model_type": "olmo3",
    "num_hidden_layers": 5,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "layer_types": [*["sliding_attention"] * 3, "full_attention", "sliding_attention"],
    "rope_theta": 5000,
    "rope_scaling": YARN | {"original_max_position_embeddings": 16},
}
CONFIGS: dict[str, tuple[dict[str, Any], int]] = {
    "gemma3": (GEMMA3, 2),
    "gemma3, scaled": (GEMMA3 | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 2),
    "gemma3, all windows": (GEMMA3 | {"num_hidden_layers": 5, "attention_bias": True}, 1),
    "gemma3, a cap that it ignores": (
        GEMMA3 | {"attn_logit_softcapping": 2.0, "tie_word_embeddings": False},
        2,
    ),
    "olmo3": (OLMO3, 2),
    "olmo3, one base": (
        OLMO3 | {"rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": True},
        1,
    ),
    "olmo3, no kinds of layers": (
        {key: value for key, value in OLMO3.items() if key != "layer_types"},
        2,
    ),
    "olmo3, no windows": (OLMO3 | {"layer_types": ["full_attention"] * 5, "num_key_value_heads": 1}, 1),
}
IDS = torch.randint(3, 90, (2, 23), generator=torch.Generator().manual_seed(0))


def dense(layers: list[int]) -> str:
    """So many whole layers, one after the other."""
    return " ".join(f"A{layer} F{layer}" for layer in layers)


@pytest.mark.parametrize(
    "name", [case(name, default=name in ("gemma3, scaled", "olmo3")) for name in CONFIGS]
)
def test_kinds_of_layers_and_their_positions_follow(name: str, tmp_path: Path) -> None:
    """The model itself on a rank, and what is left of it in the stock class, beyond windows and first lengths."""
    (stored, kinds), folder = CONFIGS[name], tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(stored))
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder), dtype=torch.float32
    ).eval()
    disturb(model)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(stored))
    whole = list(range(model.config.num_hidden_layers))
    expected = plain_logits(model, dense(whole), IDS)
    assert relative_error(logits_of(model, IDS), expected) < 1e-5
    plan = make_plan(folder, 1, 40)
    assert len(plan.arithmetic.rotaries) == kinds
    engine = RankEngine(plan, Alone(), torch.device("cpu"))
    with torch.inference_mode():
        found = torch.cat(list(chunked_logits(engine, list(IDS.split([13, 9, 1], 1)))), 1)
    assert relative_error(found, expected) < 1e-5
    left = [layer for layer in whole if layer != 1]
    run_export(folder, tmp_path / "pruned", dense(left), form="plain")
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "pruned").eval()
    assert relative_error(logits_of(again, IDS), plain_logits(model, dense(left), IDS)) < 1e-5
    assert again.config.layer_types == [model.config.layer_types[layer] for layer in left]


def test_an_encoder_is_no_language_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA3 | {"use_bidirectional_attention": True}))
    with pytest.raises(
        ValueError, match="this Gemma3 model cannot be operated on: its tokens look at those behind them"
    ):
        open_model(tmp_path, weights=False)
