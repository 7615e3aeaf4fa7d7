"""What mixtures of experts can be configured to do: in their class, in plain PyTorch, edited, and on a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from surgeon.models.edit import edit, restore
from surgeon.runtime.comm.collectives import Alone
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.plan.checks import make_plan
from tests.checkpoint.helpers import IDS, plain_logits, relative_error
from tests.runtime.on_ranks import chunked_logits
from tests.tiny_models import tiny_model

PROGRAM = "A0 >F0 [A1 A3] [F1 F3] A2 F2"
EIGHT = {"n_routed_experts": 8, "num_experts_per_tok": 3}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "every second layer": (
        "qwen2_moe",
        {"decoder_sparse_step": 2, "mlp_only_layers": [3], "qkv_bias": False},
    ),
    "weights add up to 1": ("qwen2_moe", {"norm_topk_prob": True, "use_sliding_window": False}),
    "as GLM-4.5-Air": (
        "glm4_moe",
        {"use_qk_norm": False, "routed_scaling_factor": 1.0, "n_shared_experts": 1},
    ),
    "two dense layers": (
        "glm4_moe",
        {"first_k_dense_replace": 2, "norm_topk_prob": False, "attention_bias": False},
    ),
    "heads turn whole": (
        "glm4_moe",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    ),
    "groups": ("glm4_moe", EIGHT | {"n_group": 4, "topk_group": 2}),
    "as MiniMax-M2": ("minimax_m2", {"num_local_experts": 8, "num_experts_per_tok": 4, "rotary_dim": 4}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_configurations(name: str, tmp_path: Path) -> None:
    family, given = VARIANTS[name]
    model = tiny_model(family, **given)
    with torch.no_grad():
        stock = model(IDS).logits
        assert torch.equal(edit(model, "A0 F0 A1 F1 A2 F2 A3 F3")(IDS).logits, stock)
        edited = edit(model, PROGRAM)(IDS).logits
    if name != "groups":  # which the plain computation has not
        assert relative_error(edited, plain_logits(restore(model), PROGRAM)) < 1e-5
    restore(model).save_pretrained(tmp_path)
    for program, expected in ((None, stock), (PROGRAM, edited)):
        engine = RankEngine(make_plan(tmp_path, 1, IDS.shape[1], program), Alone(), torch.device("cpu"))
        with torch.inference_mode():
            found = torch.cat(list(chunked_logits(engine, [IDS[:, :5], IDS[:, 5:6], IDS[:, 6:]])), 1)
        assert relative_error(found, expected) < 1e-5
