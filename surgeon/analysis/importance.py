"""How much each KV group of an attention, and each neuron of a feed-forward, matters: what width is cut by.

A KV group is a KV head with all query heads that share it. With X the inputs of a sublayer's output projection W,
(out, in), over the tokens of a text, in the unedited model, a unit's importance is

    activation   the mean over tokens of the size of what the unit gives: of each head's part of x the L2 norm, summed
                 over the group's heads; of a neuron's |x| (Minitron, Muralidharan et al. 2024, section 2.2)
    wanda        the sum over the unit's columns j of W of |W_ij| |X_j| (Wanda, Sun et al. 2023, equation 1)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgeon.analysis.factors.matrices import Matrix
from surgeon.analysis.factors.program_run import EXPERTS, ProgramRun, matrices_in
from surgeon.language.operations.width import USUAL, Criterion
from surgeon.language.program import Node, Program
from surgeon.language.sublayer import ATTENTION, FEED_FORWARD, Sublayer
from surgeon.memory import stay_below
from surgeon.models.edit import as_stored, program_of
from surgeon.models.families import family_of
from surgeon.models.routing import Routing, route
from surgeon.models.weights import FactorSource, ModelWeights, ScoredUnits, TruncatedSVD, UnitsByLayer
from surgeon.processes.journal import Journal
from surgeon.progress import progress
from surgeon.provenance import FORMAT
from surgeon.quality.data import Windows

Part = tuple[str, int]  # a layer's attention or feed-forward: (kind, layer)
Importance = dict[Part, Tensor]  # of each unit, (KV groups,) or (neurons,), float64

WRITES = {ATTENTION: "o", FEED_FORWARD: "down"}
JOURNAL = "importance.jsonl"


def scored_units(
    model: PreTrainedModel, wanted: Mapping[Part, Criterion], windows: Windows, folder: Path | None = None, **more: Any
) -> dict[Part, ScoredUnits]:
    """What says which units are kept where they are chosen by importance; arguments and errors as `unit_importance`."""
    found = unit_importance(model, wanted, windows, folder, **more) if wanted else {}
    return {part: ScoredUnits(values, wanted[part]) for part, values in found.items()}


def most_important(
    model: PreTrainedModel,
    programs: Iterable[Program],
    windows: Windows,
    folder: Path | None = None,
    factors: FactorSource | None = None,
    **more: Any,
) -> FactorSource | None:
    """What says which units programs keep that are measured on a text: those that matter most on it, by Wanda.

    Args:
        factors: that the programs have; by default the plain ones. It comes back where no program is narrowed.
        more: as `unit_importance` takes it, whose errors these are.
    """
    own: Program = vars(model).get("own_program") or program_of(model)
    stored = {(one.parts[0], one.width) for one in own.sublayers()}  # as narrow: there is nothing to choose
    sublayers = (one for program in programs for one in program.sublayers() if one.width is not None)
    narrowed = {one.parts[0] for one in sublayers if (one.parts[0], one.width) not in stored}
    scored = scored_units(model, dict.fromkeys(sorted(narrowed), USUAL), windows, folder, **more)
    if scored:
        return UnitsByLayer(scored, factors or TruncatedSVD(remembers=True))
    return factors


def unit_importance(
    model: PreTrainedModel,
    wanted: Mapping[Part, Criterion],
    windows: Windows,
    folder: Path | None = None,
    *,
    model_hash: str = "",
    memory: int | None = None,
) -> Importance:
    """The importance of the units of some sublayers on a text; what the folder has already is taken from there.

    Args:
        model: in memory or streamed; it is left as it is. One that runs a program of its own is measured in that.
        wanted: by which criterion, for each of them.
        windows: the text.
        folder: where to keep what is found; None to keep nothing.
        memory: a limit in bytes on the memory of the whole process.

    Raises:
        ValueError: if numbers are not finite (naming layer and matrix), the memory limit is too small, the folder holds
            what was found on another text or model, or a sublayer is not run.
        OSError: if the folder cannot be written to, or another process is writing to it.
    """
    identity = {
        "format": FORMAT,
        "model_hash": model_hash,
        "calibration": windows.digest,
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    with as_stored(model) as own, _Kept(folder, identity) as kept:
        left = {part: by for part, by in wanted.items() if (by, part) not in kept.found}
        for part, found in _by_inputs(model, own, windows.ids, left, memory) if left else ():
            kept.add(left[part], part, found)
        return {part: kept.found[by, part] for part, by in wanted.items()}


class _Kept(Journal):
    """What a folder has of a model and a text, by criterion and sublayer."""

    def __init__(self, folder: Path | None, identity: dict[str, Any]) -> None:
        self.found: dict[tuple[str, Part], Tensor] = {}
        super().__init__(None if folder is None else folder / JOURNAL, "ranking of units", identity)

    def add(self, by: Criterion, part: Part, importance: Tensor) -> None:
        self.keep({"by": by, "sublayer": f"{part[0]}{part[1]}", "importance": importance.tolist()})

    def take(self, line: Any) -> None:
        (sublayer,) = Program.parse(line["sublayer"]).sublayers()
        self.found[line["by"], sublayer.parts[0]] = torch.tensor(line["importance"], dtype=torch.float64)


class _Inputs:
    """Sums over the inputs of an output projection, (tokens, units' features).

    Attributes:
        sizes: of the L2 norms of each head's features, or of |x| of each neuron, (heads or neurons,).
        squares: of each feature, (in,).
    """

    def __init__(self, features: int, width: int, device: torch.device) -> None:
        self.width = width
        self.samples = 0
        self.sizes = torch.zeros(features // width, dtype=torch.float64, device=device)
        self.squares = torch.zeros(features, dtype=torch.float64, device=device)

    def add(self, inputs: Tensor) -> None:
        rows = inputs.detach().flatten(0, -2).double()
        self.sizes += rows.unflatten(1, (-1, self.width)).norm(dim=2).sum(0)
        self.squares += rows.square().sum(0)
        self.samples += len(rows)


def _by_inputs(
    model: PreTrainedModel, own: Program, ids: Tensor, wanted: Mapping[Part, Criterion], memory: int | None
) -> Iterator[tuple[Part, Tensor]]:
    """By what output projections get, in one walk through the program, up to the last sublayer that is wanted."""
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
    sums: dict[Matrix, _Inputs] = {}
    run = ProgramRun(model, own, ids, memory=memory)
    weights = run.parts[0].machine.layers.weights()

    def seen(matrix: Matrix, inputs: Tensor) -> None:
        if matrix not in sums:
            sums[matrix] = _Inputs(inputs.shape[-1], weights.unit_width(matrix.sublayer.kind), inputs.device)
        sums[matrix].add(inputs)

    with progress("importance", len(places), "sublayers") as ran:
        for place, node in enumerate(own.nodes[: max(places.values()) + 1]):
            matrices = matrices_in(node, places)
            run.step([run.see(part, matrices, seen) for part in run.parts])
            stay_below(memory)
            for matrix in matrices:
                if places[matrix] == place:  # a layer that occurs again has more inputs there
                    part = matrix.sublayer.parts[0]
                    yield part, _of_inputs(sums.pop(matrix), matrix, weights, wanted[part])
                    ran(1)


def _of_inputs(sums: _Inputs, matrix: Matrix, weights: ModelWeights, by: Criterion) -> Tensor:
    if by == "activation":
        by_head = sums.sizes / sums.samples
    else:
        columns = weights.matrix(matrix.sublayer, matrix.role).whole().abs().double().sum(0)
        by_head = columns.to(sums.squares.device) * sums.squares.sqrt()
    return _by_unit(by_head, matrix.sublayer, weights)


def _by_unit(values: Tensor, sublayer: Sublayer, weights: ModelWeights) -> Tensor:
    """Values of features, heads or neurons, those of a unit one after the other, summed: (units,)."""
    units = weights.units(sublayer)
    if sublayer.kind == ATTENTION:
        count = units.get("kv_heads", units["heads"])
    else:
        count = units["neurons"]
    return values.double().view(count, -1).sum(1)


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
