"""The importance of KV groups, neurons and experts on a text, for cutting width and experts.

A KV group is a KV head with all query heads that share it. With X the inputs of a sublayer's output projection W, (out,
in), over the tokens of a text, in the unedited model, a unit's importance is

    activation   the mean over tokens of the size of what the unit gives: of each head's part of x the L2 norm, summed
                 over the group's heads; of a neuron's |x| (Minitron, Muralidharan et al. 2024, section 2.2)
    wanda        the sum over the unit's columns j of W of |W_ij| |X_j| (Wanda, Sun et al. 2023, equation 1)

With w_e(x) the weight that the router gives expert e for a token x (0 where it is not chosen) and f_e(x) the expert's
output, a mixture's expert has

    load        the share of tokens that are sent to the expert; those of a mixture come to top-k together
    weight      the mean of w_e(x) over these tokens
    size        the mean of ||f_e(x)|| over them
    saliency    the mean of w_e(x) ||f_e(x)|| over them (REAP, Lasby et al. 2025, section 4): the loss of the layer's
                output without the expert

Where weights are multiplied with the expert's input, f_e(w_e(x) x) is its output, and size and saliency are the mean of
its norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgeon.analysis.factors.matrices import Matrix
from surgeon.analysis.factors.program_run import EXPERTS, InputSums, ProgramRun, matrices_in
from surgeon.language.operations.width import Criterion
from surgeon.language.program import Program
from surgeon.language.sublayer import ATTENTION, FEED_FORWARD, Sublayer
from surgeon.machine import stay_below
from surgeon.models.edit import as_stored
from surgeon.models.families import family_of
from surgeon.models.routing import Routing, route
from surgeon.models.weights import (
    Tensors,
)
from surgeon.processes.journal import Journal
from surgeon.progress import progress
from surgeon.quality.data import Windows
from surgeon.version import FORMAT

Part = tuple[str, int]  # a layer's attention or feed-forward: (kind, layer)
Importance = dict[Part, Tensor]  # of each unit, (KV groups,) or (neurons,), float64

WRITES = {ATTENTION: "o", FEED_FORWARD: "down"}
JOURNAL = "importance.jsonl"


def unit_importance(
    model: PreTrainedModel,
    wanted: Mapping[Part, Criterion],
    windows: Windows,
    folder: Path | None = None,
    *,
    model_hash: str = "",
    memory: int | None = None,
) -> Importance:
    """Measure the importance of the units of some sublayers on a text, or take it from the folder."""
    if not wanted:
        return {}
    identity = {
        "format": FORMAT,
        "model_hash": model_hash,
        "calibration": windows.digest,
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    path = None if folder is None else folder / JOURNAL
    with as_stored(model) as own, _Kept(path, "ranking of units", identity) as kept:
        left = {part: by for part, by in wanted.items() if (by, part) not in kept.found}
        for part, found in _by_inputs(model, own, windows.ids, left, memory) if left else ():
            sublayer = f"{part[0]}{part[1]}"
            kept.keep({"by": left[part], "sublayer": sublayer, "importance": found.tolist()})
        return {part: kept.found[by, part] for part, by in wanted.items()}


@dataclass(eq=False)
class _Kept(Journal):
    """A folder's findings on a model and a text, by criterion and sublayer."""

    found: dict[tuple[str, Part], Tensor] = field(default_factory=dict, init=False)

    def take(self, line: Any) -> None:
        (sublayer,) = Program.parse(line["sublayer"]).sublayers()
        self.found[line["by"], sublayer.parts[0]] = torch.tensor(line["importance"], dtype=torch.float64)


def _by_inputs(
    model: PreTrainedModel,
    own: Program,
    ids: Tensor,
    wanted: Mapping[Part, Criterion],
    memory: int | None,
) -> Iterator[tuple[Part, Tensor]]:
    """By the inputs of output projections, in one walk through the program, up to the last sublayer that is wanted."""
    places = {
        Matrix(replace(sublayer, piece=None), WRITES[sublayer.kind]): place
        for place, node in enumerate(own.nodes)
        for sublayer in Program((node,)).sublayers()
        if len(sublayer.layers) == 1 and sublayer.parts[0] in wanted
    }
    lost = wanted.keys() - {matrix.sublayer.parts[0] for matrix in places}
    if lost:
        kind, layer = min(lost)
        raise ValueError(
            f"the model does not run {kind}{layer} whole, so that its units cannot be told apart by a text"
        )
    sums: dict[Matrix, InputSums] = {}
    run = ProgramRun(model, own, ids, memory=memory)
    weights = run.parts[0].machine.layers.weights()
    with progress("importance", len(places), "sublayers") as ran:
        for place, node in enumerate(own.nodes[: max(places.values()) + 1]):
            matrices = matrices_in(node, places)
            run.sum_inputs(
                matrices,
                sums,
                lambda one, x: InputSums(
                    x.shape[-1], x.device, width=weights.unit_width(one.sublayer.kind)
                ),
            )
            stay_below(memory)
            for matrix in matrices:
                if places[matrix] != place:  # a layer that occurs again has more inputs there
                    continue
                part = matrix.sublayer.parts[0]
                inputs = sums.pop(matrix)
                if wanted[part] == "activation":
                    values = inputs.sizes / inputs.samples
                else:
                    columns = weights.matrix(matrix.sublayer, matrix.role).whole().abs().double().sum(0)
                    values = columns.to(inputs.squares.device) * inputs.squares.sqrt()
                units = weights.units(matrix.sublayer)
                if matrix.sublayer.kind == ATTENTION:
                    count = units.get("kv_heads", units["heads"])
                else:
                    count = units["neurons"]
                # Features, heads or neurons of a unit follow each other.
                yield part, values.double().view(count, -1).sum(1)
                ran(1)


@dataclass(eq=False)
class ExpertUse:
    """The use of one mixture's experts, as sums over the tokens of a text.

    Attributes:
        tensors: of the router.
        sent: how many tokens each expert gets, (experts,), float64.
        weights: the sum of their weights, (experts,).
        sizes: the sum of the norms of its outputs, (experts,).
        saliency: the sum of the products of both, (experts,).
    """

    experts: nn.Module
    tensors: Tensors
    routing: Routing
    weighs_inputs: bool
    tokens: int = 0

    def __post_init__(self) -> None:
        router = self.tensors["router.weight"]
        self._sums = torch.zeros(4, len(router), dtype=torch.float64, device=router.device)
        self.sent, self.weights, self.sizes, self.saliency = self._sums

    def add(self, inputs: Tensor, *routed: Tensor) -> None:
        """Take in inputs of the experts, or the mixture, and the tokens' experts and weights, (tokens, k), if known."""
        rows = inputs.flatten(0, -2)
        if routed:
            chosen, weights = routed
        else:
            tensors = self.tensors
            logits = nn.functional.linear(
                rows.float(), tensors["router.weight"], tensors.get("router.bias")
            )
            chosen, weights = route(logits, self.routing, tensors.get("router.correction"))
        # Norms of the experts' outputs for their tokens, (tokens, k), float64, and these as they are weighed.
        if self.weighs_inputs:
            # A token is weighed before an expert reads it, and each expert has a copy of all.
            tokens = torch.arange(len(rows), device=rows.device)[:, None]
            read = rows.new_zeros(len(self.sent), *rows.shape)
            read[chosen, tokens] = rows[:, None] * weights[..., None].to(rows.dtype)
            made: Tensor = self.experts.forward(read.flatten(0, 1)).view(read.shape)
            sizes = given = made[chosen, tokens].double().norm(dim=-1)
        else:
            sizes = torch.zeros_like(weights, dtype=torch.float64)
            for expert in chosen.unique().tolist():
                own, place = (chosen == expert).nonzero(as_tuple=True)
                alone = torch.full_like(own, expert)[:, None]
                made = self.experts.forward(rows[own], alone, weights.new_ones(len(own), 1))
                sizes[own, place] = made.double().norm(dim=-1)
            given = sizes * weights.double()
        new = torch.stack([torch.ones_like(sizes), weights.double(), sizes, given])
        self._sums.index_add_(1, chosen.flatten(), new.flatten(1))
        self.tokens += len(rows)

    def mean(self, sums: Tensor) -> Tensor:
        """Over the tokens that each expert gets; 0 where it gets none."""
        return torch.where(self.sent > 0, sums / self.sent.clamp_min(1), 0.0)

    def order(self) -> list[int]:
        """The experts, the most salient first (REAP); of equal ones the first."""
        return self.mean(self.saliency).argsort(descending=True, stable=True).tolist()


def expert_use(
    model: PreTrainedModel,
    windows: Windows,
    layers: Iterable[int] | None = None,
    memory: int | None = None,
) -> dict[int, ExpertUse]:
    """Measure the use of the experts of a model's mixtures on a text, by layer, in one walk through the model."""
    family = family_of(model.config)
    asked = range(int(model.config.num_hidden_layers)) if layers is None else layers
    wanted = {layer for layer in asked if family.spec(FEED_FORWARD, layer).mixture is not None}
    with as_stored(model) as own:
        places = {
            one: place for place, node in enumerate(own.nodes) for one in Program((node,)).sublayers()
        }
        blocks = {Matrix(Sublayer(FEED_FORWARD, (layer,)), EXPERTS) for layer in wanted}
        lost = sorted(one.layer for one in blocks if one.sublayer not in places)
        if lost:
            raise ValueError(
                f"the model does not run F{lost[0]}, so that nothing is known of its experts"
            )
        nodes = own.nodes[: max((1 + places[one.sublayer] for one in blocks), default=0)]
        if not nodes:
            return {}
        sums: dict[Matrix, ExpertUse] = {}
        run = ProgramRun(model, own, windows.ids, memory=memory)
        layers = run.parts[0].machine.layers
        weights = layers.weights()

        def new(block: Matrix, _: Tensor) -> ExpertUse:
            spec = weights.spec(block.sublayer).mixture
            assert spec is not None
            experts = layers.layer(block.layer).get_submodule(spec.experts)
            routing = spec.routing(model.config)
            return ExpertUse(
                experts, weights.router(block.sublayer, torch.float32), routing, spec.weighs_inputs
            )

        with progress("experts", len(nodes), "steps") as ran:
            for node in nodes:
                run.sum_inputs(matrices_in(node, blocks), sums, new)
                stay_below(memory)
                ran(1)
        return {one.layer: sums[one] for one in sorted(sums)}


def use_table(found: Mapping[int, ExpertUse]) -> pd.DataFrame:
    """`experts` as `surgeon.findings.scan.Scan` has them."""
    uses = []
    for layer, use in found.items():
        columns = {
            "load": use.sent / use.tokens,
            "weight": use.mean(use.weights),
            "size": use.mean(use.sizes),
        }
        columns["saliency"] = use.mean(use.saliency)
        experts = range(len(use.sent))
        uses.append(
            pd.DataFrame({"layer": layer, "expert": experts, **{k: v.cpu() for k, v in columns.items()}})
        )
    if uses:
        return pd.concat(uses, ignore_index=True)
    return pd.DataFrame()
