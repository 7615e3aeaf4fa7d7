"""`surgeon predict`: what programs would cost on hardware that is described."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from surgeon.cli.grouped import grouped
from surgeon.cli.options import CompressOption, ProgramOption, VariantLayersOption, parse_batches
from surgeon.cli.predict_best import BestPrograms, choose, default_axes
from surgeon.cli.predict_racks import RacksArguments, train_on_racks
from surgeon.language.operations.declare import VARIANTS, described

if TYPE_CHECKING:
    from surgeon.cost.candidates import Candidate
    from surgeon.cost.hardware import Hardware
    from surgeon.cost.predict import Deployment
    from surgeon.cost.sweep import SweepCell
    from surgeon.cost.workload import Workload

_VARIANTS_LISTED = ", ".join(described(name, variant.note) for name, variant in VARIANTS.items())
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class PredictedPrograms:
    """Which programs are predicted, in the user's words; a group of options (see grouped.py)."""

    compare: Annotated[
        list[str] | None,
        typer.Option(
            help="Predict this too, and compare; may be repeated. Another model or recipe, a program such as "
            f'"A0 F0 [A1 A2] [F1 F2]", or a variant of the model: dense, {_VARIANTS_LISTED}, upper-bound (ranks that '
            "never wait for each other: wrong results, and the best time there can be).",
            show_default=False,
        ),
    ] = None
    layers: VariantLayersOption = None
    program: ProgramOption = None

    def candidates(self, model: str) -> list[Candidate]:
        """All that is predicted, the model's own program or --program first.

        Raises:
            FileNotFoundError, ValueError: as `open_candidates`; and if the layers are no range.
        """
        from surgeon.cost.candidates import open_candidates

        return open_candidates(model, self.compare or [], self.program, self.stretch)

    @property
    def stretch(self) -> range | None:
        """The layers that may change, if they are said.

        Raises:
            ValueError: if they are no range.
        """
        from surgeon.language.operations.base import parse_range

        return None if self.layers is None else parse_range(self.layers)


@dataclass(frozen=True)
class PredictedLoad:
    """What is asked of the model, in the user's words; a group of options (see grouped.py)."""

    batch: Annotated[str, typer.Option(help="How many texts are computed together; several as 1,8.")] = "1"
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 1024
    new: Annotated[int, typer.Option(min=1, help="Tokens to add to each.")] = 512

    def workload(self) -> Workload:
        """With one text; how many there are `batches` says."""
        from surgeon.cost.workload import Workload

        return Workload(1, self.prompt, self.new)

    def batches(self) -> list[int]:
        """Of --batch.

        Raises:
            ValueError: if it is no list of sizes.
        """
        return parse_batches(self.batch)


@dataclass(frozen=True)
class PredictedRanksArguments:
    """How the model is spread over the hardware, in the user's words; a group of options (see grouped.py)."""

    ranks: Annotated[int, typer.Option(min=1, help="How many tensor-parallel ranks share the model.")] = 1
    per_node: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks in one node. Default: as many as it has devices.", show_default=False),
    ] = None
    link: Annotated[
        str | None,
        typer.Option(help="Which of the hardware's links connects a node. Default: its first.", show_default=False),
    ] = None
    network: Annotated[
        str | None,
        typer.Option(help="Which of the hardware's networks connects nodes. Default: its first.", show_default=False),
    ] = None
    dtype: Annotated[
        str,
        typer.Option(
            metavar="[auto|float32|bfloat16|float16]",
            help="What is computed in; auto: as config.json says, but float32 where kernels are launched one by one.",
        ),
    ] = "auto"
    graphs: Annotated[
        bool | None,
        typer.Option(
            "--graphs/--no-graphs",
            help="Whether decoding passes are captured graphs. Default: on GPUs they are.",
            show_default=False,
        ),
    ] = None
    low_rank: Annotated[
        str,
        typer.Option(
            metavar="[auto|gather|replicate|base]",
            help="How ranks share matrices that are two factors, as surgeon bench takes it; auto: gather or replicate, "
            "whichever is faster for one token.",
        ),
    ] = "auto"
    kv: Annotated[
        str,
        typer.Option(metavar="[full|lowrank]", help="What attentions whose k and v are two factors each keep of them."),
    ] = "full"
    compress: CompressOption = None
    link_delay: Annotated[
        str | None,
        typer.Option(
            help="A link as surgeon bench emulates it, on top: how long a collective takes at least, e.g. 1ms.",
            show_default=False,
        ),
    ] = None
    link_bandwidth: Annotated[
        str | None,
        typer.Option(help="Likewise: bytes per second that a rank can send, e.g. 1GB.", show_default=False),
    ] = None

    def deployment(self, hardware: Hardware, stored: str) -> Deployment:
        """All of it.

        Args:
            stored: the dtype of the model's weights.

        Raises:
            ValueError: if there is no such way, link or dtype.
        """
        from surgeon.cost.predict import Deployment
        from surgeon.runtime.comm.link import parse_link

        return Deployment(
            ranks=self.ranks,
            dtype=hardware.dtype(stored) if _one_of("dtype", self.dtype, DTYPES) == "auto" else self.dtype,
            link=self.link,
            network=self.network,
            node=self.per_node,
            graphs=self.graphs,
            compress=cast("Any", self.compress and _one_of("compress", self.compress, ("int8", "int4"))),
            low_rank=cast("Any", _one_of("low-rank", self.low_rank, ("auto", "gather", "replicate", "base"))),
            kv=cast("Any", _one_of("kv", self.kv, ("full", "lowrank"))),
            emulated=parse_link(self.link_delay, self.link_bandwidth),
        )


@grouped
def predict(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A config.json or a folder with one, a hub name, demo, or a recipe (.yaml). No weights are read.",
        ),
    ],
    *,
    hardware: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE.yaml",
            help="What it would run on: a name such as h100-sxm, or a file as surgeon calibrate writes it.",
            show_default=False,
        ),
    ],
    programs: PredictedPrograms,
    load: PredictedLoad,
    on: PredictedRanksArguments,
    best: BestPrograms,
    training: RacksArguments,
    over: Annotated[
        str | None,
        typer.Option(
            "--sweep",
            help="Predict all combinations, e.g. ranks=1..64,batch=1..256: from the first to the last, doubling. Of "
            "ranks, batch, prompt, new.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Folder for predict.csv, predict.json, predict.png (best.csv, best.json, best.png with --best).",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Predict what programs cost on hardware that you do not have.

    Nothing runs, and no weights are needed: shapes come from the configuration, what ranks compute and exchange from
    the runtime's own rules, times from the hardware's figures. Every kernel takes as long as what it computes or what
    it moves, every collective as its latency and bandwidth say, and the program is run on clocks, so that what is
    hidden behind what follows from the executor's rule.

    First token: until every text has one. Per token: a decoding pass, the mean over the new tokens. Tokens/s: new
    tokens of all texts. Comm.: the time in which ranks wait for collectives, of all the time; hidden: time of
    collectives behind computing. Launch: waiting for the host, or between kernels. Memory: weights, cache and
    activations of the rank that needs most.
    """
    from surgeon.cost.hardware_file import load_hardware
    from surgeon.cost.sweep import parse_sweep

    _refuse_together({"--racks": training.racks, "--best": best.best}, ("--compare", programs.compare))
    _refuse_together({"--racks": training.racks}, ("--sweep", over), ("--output", output), ("--best", best.best))
    machine, candidates = load_hardware(hardware), programs.candidates(model)
    shapes = candidates[0].model.shapes
    if training.racks is not None:
        train_on_racks(training, shapes, machine)
        return
    deployment = on.deployment(machine, shapes.dtype)
    axes = {"batch": load.batches(), **(parse_sweep(over) if over is not None else {})}
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
    if best.best:
        axes = default_axes(machine) if over is None else axes
        known = best.known(candidates[0], programs.stretch)
        choose(best, known, machine, deployment, load.workload(), axes, output)
        return
    best.refuse_alone()
    cells = _cells(candidates, machine, deployment, load.workload(), axes)
    if over is None:
        _refuse(cells, machine)
    heading = _heading(shapes.name, machine, cells)
    _say(cells, heading, swept=over is not None)
    if output is not None:
        _write(output, model, cells, machine, heading, swept=over is not None)


def _refuse_together(modes: dict[str, Any], *others: tuple[str, Any]) -> None:
    """Refuse options that a way of predicting would not look at.

    Raises:
        ValueError: if one of them is given together with it.
    """
    mode = next((name for name, given in modes.items() if given), None)
    ignored = [name for name, given in others if given]
    if mode and ignored:
        raise ValueError(f"{mode} does not look at {' and '.join(ignored)}; leave one of them out")


def _cells(
    candidates: list[Candidate],
    hardware: Hardware,
    deployment: Deployment,
    workload: Workload,
    axes: dict[str, list[int]],
) -> list[SweepCell]:
    """All predictions, with progress."""
    from math import prod

    from surgeon.cost.sweep import sweep
    from surgeon.progress import progress

    total = len(candidates) * prod(map(len, axes.values()))
    with progress("predict", total, "predictions") as advance:
        return sweep(candidates, hardware, deployment, workload, axes, advance)


def _one_of(option: str, word: str, known: tuple[str, ...]) -> str:
    from surgeon.errors import did_you_mean

    if word not in known:
        raise ValueError(f"there is no --{option} {word!r}; {did_you_mean(word, known)}")
    return word


def _refuse(cells: list[SweepCell], hardware: Hardware) -> None:
    """Say of the first that cannot run why, and what would do."""
    from surgeon.cost.sweep import explain_memory

    for cell in cells:
        if cell.prediction is None:
            raise ValueError(cell.refused)
        if cell.refused:
            raise ValueError(explain_memory(cell, hardware))


def _heading(name: str, hardware: Hardware, cells: list[SweepCell]) -> str:
    """What all predictions have in common."""
    from surgeon.reports.predict import words_of

    deployments, loads = [cell.deployment for cell in cells], [cell.workload for cell in cells]
    ranks, common = {one.ranks for one in deployments}, deployments[0]
    words = [words_of("ranks", ranks.pop())] if len(ranks) == 1 else []
    most = max(one.ranks for one in deployments)
    if most > 1:
        words.append(common.link or next(iter(hardware.links), "no link"))
    if most > (common.node or hardware.devices) and hardware.networks:
        words.append(common.network or next(iter(hardware.networks)))
    words += [str(common.dtype), *([common.compress] if common.compress else [])]
    for axis in ("prompt", "new"):
        values = {getattr(one, axis) for one in loads}
        words += [words_of(axis, values.pop())] if len(values) == 1 else []
    return f"{name} on {hardware.name}: {', '.join(words)}"


def _say(cells: list[SweepCell], heading: str, swept: bool) -> None:
    from surgeon.reports.predict import describe_predictions, describe_sweep, prediction_table

    table = prediction_table(cells)
    typer.echo(f"{heading}\n\n{describe_sweep(table) if swept else describe_predictions(table)}")


def _write(folder: Path, model: str, cells: list[SweepCell], hardware: Hardware, heading: str, swept: bool) -> None:
    from dataclasses import asdict

    from surgeon.cost.hardware_file import write_hardware
    from surgeon.processes.files import write_json, write_table
    from surgeon.provenance import provenance
    from surgeon.reports.predict import draw_predictions, draw_sweep, prediction_table

    table = prediction_table(cells)
    programs = {
        cell.candidate.name: {"program": cell.prediction.plan.program, "model": cell.candidate.model.label}
        for cell in reversed(cells)
        if cell.prediction is not None
    }
    deployment = asdict(cells[0].deployment) | {"connected": True}
    settings: dict[str, Any] = {"heading": heading, "swept": swept, "deployment": deployment, "programs": programs}
    record = provenance(model, "", **settings, hardware=hardware.name, hardware_file=write_hardware(hardware))
    write_table(folder / "predict.csv", table)
    write_json(folder / "predict.json", record)
    (draw_sweep if swept else draw_predictions)(table, folder / "predict.png", heading)
    print(f"{folder}: predict.csv, predict.json, predict.png", file=sys.stderr)
