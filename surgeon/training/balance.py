"""The load-balancing loss of a mixture's experts, where the configuration asks for it.

A router that is left to itself sends most tokens to few experts, and the others learn nothing. The loss is that of
Switch Transformers (Fedus et al. 2021, arXiv 2101.03961, equations 4 to 6), over all layers together, as `transformers`
adds it where `output_router_logits` is true; its weight is `router_aux_loss_coef`. Layers that kept different numbers
of experts are taken together by that number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from surgeon.models.edited_layers import ASKS_FOR_ROUTERS, EditedLayers


class ExpertBalance:
    """The balance loss of a model's experts.

    Attributes:
        weight: of the loss; 0 where the configuration asks for none, or no router is trained.

    Args:
        model: edited, or a wrapper of an edited one.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = next((module for module in model.modules() if isinstance(module, EditedLayers)), None)
        self.weight = 0.0
        self.routers = list[nn.Module]()
        self.top_k = 0
        self._logits = 0
        if layers is None or layers.family.mixture is None:
            return
        config: Any = layers.config
        asked = layers.config_before.get(ASKS_FOR_ROUTERS, getattr(config, ASKS_FOR_ROUTERS, False))
        routers = routers_of(layers)
        if asked and any(each.requires_grad for router in routers for each in router.parameters()):
            self.weight = float(getattr(config, "router_aux_loss_coef", None) or 0.0)
            self.routers = routers
            self.top_k = layers.family.mixture.routing(config).top_k
            self._logits = layers.family.mixture.logits

    @contextmanager
    def watched(self) -> Iterator[list[Tensor]]:
        """Collect the router logits of the next forward pass, (tokens, experts) each; nothing where the weight is 0."""
        seen: list[Tensor] = []

        def keep(_: nn.Module, __: Any, output: Any) -> None:
            seen.append(output[self._logits] if isinstance(output, tuple) else output)

        with ExitStack() as hooks:
            for router in self.routers if self.weight else ():
                hooks.callback(router.register_forward_hook(keep).remove)
            yield seen

    def loss(self, seen: Sequence[Tensor]) -> Tensor:
        """Compute `balance_loss` of collected logits."""
        if not any(each.requires_grad for each in seen):
            raise ValueError(
                "the choices of routers were not seen, as when a model is compiled, or its checkpointed passes are "
                "reentrant; train without torch_compile and use_reentrant, or with output_router_logits: false"
            )
        return balance_loss(seen, self.top_k)


def routers_of(layers: EditedLayers) -> list[nn.Module]:
    """The routers that a program runs, each once."""
    found = {}
    for sublayer in layers.program.sublayers():
        mixture = layers.family.spec(sublayer.kind, sublayer.layers[0]).mixture
        if mixture is not None:
            router = layers.owner(sublayer).get_submodule(mixture.router)
            found[id(router)] = router
    return list(found.values())


def balance_loss(logits: Sequence[Tensor], top_k: int) -> Tensor:
    """The experts' share of tokens times their share of scores, summed, times their number: k where all are alike.

    Args:
        logits: of each layer, (tokens, experts); layers with different numbers of experts count by their layers.
        top_k: experts of a token, k.

    Returns:
        A number, whose gradient is that of the scores.
    """
    by_experts = defaultdict[int, list[Tensor]](list)
    for each in logits:
        by_experts[each.shape[-1]].append(each)
    total = torch.zeros((), device=logits[0].device)
    for experts, layers in by_experts.items():
        sent, scored = (torch.zeros(experts, device=total.device) for _ in range(2))
        for each in layers:
            scores = each.to(total.device).softmax(-1).float()
            sent = sent + torch.bincount(
                scores.topk(min(top_k, experts)).indices.flatten(), minlength=experts
            )
            scored = scored + scores.sum(0)
        tokens = sum(len(each) for each in layers)
        total = total + len(layers) * experts * (sent / tokens * scored / tokens).sum()
    return total / len(logits)
