"""Routing against the routers of `transformers`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.llama4.modeling_llama4 import Llama4Router
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from surgeon.models.routing import Routing, route

EXPERTS, TOP, HIDDEN, TOKENS = 16, 4, 8, 50
CONFIG = {
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": TOP,
    "hidden_size": HIDDEN,
}
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
CASES: dict[str, tuple[Any, dict[str, Any], Routing]] = {
    "mixtral": (MixtralTopKRouter, {}, Routing(TOP, normalise=True)),
    "qwen3": (Qwen3MoeTopKRouter, {"norm_topk_prob": True}, Routing(TOP, normalise=True)),
    "olmoe": (OlmoeTopKRouter, {"norm_topk_prob": False}, Routing(TOP)),
    "gpt-oss": (GptOssTopKRouter, {}, Routing(TOP, "softmax of chosen")),
    "llama 4": (Llama4Router, {}, Routing(TOP, "sigmoid")),
    "deepseek-v2": (
        DeepseekV2TopkRouter,
        GROUPS | {"topk_method": "group_limited_greedy"},
        Routing(TOP, scale=2.5, groups=4, top_groups=2),
    ),
    "deepseek-v3": (
        DeepseekV3TopkRouter,
        GROUPS | {"norm_topk_prob": True},
        Routing(TOP, "sigmoid", normalise=True, scale=2.5, groups=4, top_groups=2, group_best=2),
    ),
}


def by_expert(experts: Tensor, weights: Tensor) -> Tensor:
    """(T, E), whatever the order of the experts."""
    return torch.zeros(len(experts), EXPERTS).scatter(1, experts, weights.float())


def by_expert_of(router: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and the same of what a router of transformers says."""
    if isinstance(router, Llama4Router):
        weights, logits = router(tokens)  # 0 where a token does not go
        return logits, weights
    logits, weights, experts = router(tokens)
    return logits, by_expert(experts, weights)


@pytest.mark.parametrize("name", CASES)
def test_routers_of_transformers(name: str) -> None:
    router_class, own, routing = CASES[name]
    router = router_class(SimpleNamespace(**CONFIG, **own))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in (*router.parameters(), *router.buffers()):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        tokens = torch.randn(TOKENS, HIDDEN, generator=generator)
        logits, expected = by_expert_of(router, tokens)
        found = route(logits, routing, getattr(router, "e_score_correction_bias", None))
    torch.testing.assert_close(by_expert(*found), expected)


def test_fewer_experts_than_a_token_is_sent_to() -> None:
    logits = torch.tensor([[1.0, 2.0]])
    experts, weights = route(logits, Routing(4, normalise=True))
    torch.testing.assert_close(weights.gather(1, experts.argsort()), logits.softmax(-1))


def test_groups_have_equally_many() -> None:
    with pytest.raises(
        ValueError, match="15 experts do not divide into 4 groups of 1 or more; keep equally many"
    ):
        route(torch.zeros(1, 15), Routing(2, groups=4, top_groups=2))
    with pytest.raises(
        ValueError, match="2 groups of 2 experts have fewer than the 6 that a token is sent to"
    ):
        route(torch.zeros(1, 8), Routing(6, groups=4, top_groups=2))
