"""How much each KV group of an attention, and each neuron of a feed-forward, matters: what width is cut by.

A KV group is a KV head with all query heads that share it. With X the inputs of a sublayer's output projection W,
(out, in), over the tokens of a text, in the unedited model, a unit's importance is

    activation   the mean over tokens of the size of what the unit gives: of each head's part of x the L2 norm, summed
                 over the group's heads; of a neuron's |x| (Minitron, Muralidharan et al. 2024, section 2.2)
    wanda        the sum over the unit's columns j of W of |W_ij| |X_j| (Wanda, Sun et al. 2023, equation 1)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from surgeon.analysis.factors.matrices import Matrix
from surgeon.analysis.factors.program_run import ProgramRun, matrices_in
from surgeon.language.operations.width import USUAL, Criterion
from surgeon.language.program import Program
from surgeon.language.sublayer import ATTENTION, FEED_FORWARD, Sublayer
from surgeon.memory import stay_below
from surgeon.models.edit import as_stored, program_of
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
