"""How a text uses each expert of a model's mixtures: how many tokens it gets, and what it gives.

In the unedited model, with w_e(x) the weight that the router gives expert e for a token x (0 where it is not chosen)
and f_e(x) what the expert makes of it,

    load        the share of tokens that are sent to the expert; those of a mixture come to top-k together
    weight      the mean of w_e(x) over these tokens
    size        the mean of ||f_e(x)|| over them
    saliency    the mean of w_e(x) ||f_e(x)|| over them (REAP, Lasby et al. 2025, section 4): what the layer's output
                loses where the expert is left out

Where weights are multiplied with what an expert reads, f_e(w_e(x) x) is what it makes of x, and size and saliency are
the mean of its norm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgeon.analysis.factors.matrices import Matrix
from surgeon.analysis.factors.program_run import EXPERTS, ProgramRun, matrices_in
from surgeon.language.program import Node, Program
from surgeon.language.sublayer import FEED_FORWARD, Sublayer
from surgeon.memory import stay_below
from surgeon.models.edit import as_stored
from surgeon.models.families import family_of
from surgeon.models.routing import Routing, route
from surgeon.models.weights import ModelWeights
from surgeon.progress import progress
from surgeon.quality.data import Windows


@dataclass(frozen=True)
class ExpertUse:
    """How one mixture's experts are used, sums over the tokens of a text.

    Attributes:
        tokens: of the text.
        sent: how many of them each expert gets, (experts,), float64.
        weights: the sum of their weights, (experts,).
        sizes: the sum of the norms of what it makes of them, (experts,).
        saliency: the sum of the products of both, (experts,).
    """

    tokens: int
    sent: Tensor
    weights: Tensor
    sizes: Tensor
    saliency: Tensor

    def mean(self, sums: Tensor) -> Tensor:
        """Over the tokens that each expert gets; 0 where it gets none."""
        return torch.where(self.sent > 0, sums / self.sent.clamp_min(1), 0.0)

    def order(self) -> list[int]:
        """The experts, the most salient first (REAP); of equal ones the first."""
        return self.mean(self.saliency).argsort(descending=True, stable=True).tolist()


def expert_use(
    model: PreTrainedModel, windows: Windows, layers: Iterable[int] | None = None, memory: int | None = None
) -> dict[int, ExpertUse]:
    """How the experts of a model's mixtures are used on a text, by layer, in one walk through the model.

    Args:
        model: in memory; it is left as it is. One that runs a program of its own is measured in that.
        layers: only of these; those that are no mixtures are passed over.
        memory: a limit in bytes on the memory of the whole process.

    Raises:
        ValueError: if numbers are not finite, the memory limit is too small, or a mixture is not run.
    """
    family = family_of(model.config)
    asked = range(int(model.config.num_hidden_layers)) if layers is None else layers
    wanted = {layer for layer in asked if family.spec(FEED_FORWARD, layer).mixture is not None}
    with as_stored(model) as own:
        places = {one: place for place, node in enumerate(own.nodes) for one in Program((node,)).sublayers()}
        blocks = {Matrix(Sublayer(FEED_FORWARD, (layer,)), EXPERTS) for layer in wanted}
        lost = sorted(one.layer for one in blocks if one.sublayer not in places)
        if lost:
            raise ValueError(f"the model does not run F{lost[0]}, so that nothing is known of its experts")
        nodes = own.nodes[: max((1 + places[one.sublayer] for one in blocks), default=0)]
        if nodes:
            return _walk(model, own, nodes, windows.ids, blocks, memory)
        return {}


def use_table(found: Mapping[int, ExpertUse]) -> pd.DataFrame:
    """`experts` as `surgeon.findings.scan.Scan` has them."""
    uses = []
    for layer, use in found.items():
        columns = {"load": use.sent / use.tokens, "weight": use.mean(use.weights), "size": use.mean(use.sizes)}
        columns["saliency"] = use.mean(use.saliency)
        experts = range(len(use.sent))
        uses.append(pd.DataFrame({"layer": layer, "expert": experts, **{k: v.cpu() for k, v in columns.items()}}))
    return pd.concat(uses, ignore_index=True) if uses else pd.DataFrame()


def _walk(
    model: PreTrainedModel,
    own: Program,
    nodes: tuple[Node, ...],
    ids: Tensor,
    blocks: Collection[Matrix],
    memory: int | None,
) -> dict[int, ExpertUse]:
    run = ProgramRun(model, own, ids, memory=memory)
    layers = run.parts[0].machine.layers
    sums = {one: _Sums.of(layers.weights(), model.config, one.sublayer) for one in sorted(blocks)}

    def seen(matrix: Matrix, *inputs: Tensor) -> None:
        mixture = layers.family.spec(FEED_FORWARD, matrix.layer).mixture
        assert mixture is not None
        sums[matrix].add(layers.layer(matrix.layer).get_submodule(mixture.experts), *inputs)

    with progress("experts", len(nodes), "steps") as ran:
        for node in nodes:
            run.step([run.see(part, matrices_in(node, blocks), seen) for part in run.parts])
            stay_below(memory)
            ran(1)
    return {one.layer: found.use for one, found in sums.items()}


@dataclass
class _Sums:
    use: ExpertUse
    logits: Callable[[Tensor], Tensor]  # of the router, (tokens, experts), for its inputs
    routing: Routing
    correction: Tensor | None
    weighs_inputs: bool

    @classmethod
    def of(cls, weights: ModelWeights, config: Any, block: Sublayer) -> _Sums:
        spec = weights.spec(block).mixture
        assert spec is not None
        tensors = weights.router(block, torch.float32)
        router = tensors["router.weight"]
        bias = tensors.get("router.bias")
        experts = len(router)
        zero = partial(torch.zeros, experts, dtype=torch.float64, device=router.device)
        use = ExpertUse(0, zero(), zero(), zero(), zero())

        def logits(inputs: Tensor) -> Tensor:
            return nn.functional.linear(inputs.float(), router, bias)

        return cls(use, logits, spec.routing(config), tensors.get("router.correction"), spec.weighs_inputs)

    def add(self, experts: nn.Module, inputs: Tensor, *routed: Tensor) -> None:
        """What the experts, or the mixture, reads, (tokens, hidden), and where tokens go with which weights, if known.

        Args:
            routed: (tokens, k) each.
        """
        rows = inputs.flatten(0, -2)
        use = self.use
        chosen, weights = routed or route(self.logits(rows), self.routing, self.correction)
        sizes = (self._weighed_sizes if self.weighs_inputs else _sizes)(experts, rows, chosen, weights)
        given = sizes if self.weighs_inputs else sizes * weights.double()
        columns = (use.sent, torch.ones_like(sizes)), (use.weights, weights), (use.sizes, sizes), (use.saliency, given)
        sent, total, size, salient = (
            one.index_add(0, chosen.flatten(), new.double().flatten()) for one, new in columns
        )
        self.use = ExpertUse(use.tokens + len(rows), sent, total, size, salient)

    def _weighed_sizes(self, experts: nn.Module, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """As `_sizes`, where a token is weighed before an expert reads it, and each expert has a copy of all."""
        tokens = torch.arange(len(rows), device=rows.device)[:, None]
        read = rows.new_zeros(len(self.use.sent), *rows.shape)
        read[chosen, tokens] = rows[:, None] * weights[..., None].to(rows.dtype)
        made: Tensor = experts.forward(read.flatten(0, 1)).view(read.shape)
        sizes: Tensor = made[chosen, tokens].double().norm(dim=-1)
        return sizes


def _sizes(experts: nn.Module, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The norms of what experts make of the tokens that they get, (tokens, k), float64."""
    found = torch.zeros_like(weights, dtype=torch.float64)
    for expert in chosen.unique().tolist():
        tokens, place = (chosen == expert).nonzero(as_tuple=True)
        own = torch.full_like(tokens, expert)[:, None]
        made = experts.forward(rows[tokens], own, weights.new_ones(len(tokens), 1))
        found[tokens, place] = made.double().norm(dim=-1)
    return found
