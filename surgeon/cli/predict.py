"""`surgeon predict`: what programs would cost on hardware that is described."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from surgeon.cli.grouped import grouped
from surgeon.cli.options import (
    BatchesOption,
    CompressOption,
    ProgramOption,
    VariantLayersOption,
    parse_counts,
    several,
)
from surgeon.language.operations.declare import VARIANTS, described

if TYPE_CHECKING:
    from surgeon.cost.best import Allowance
    from surgeon.cost.deployment import Deployment

_VARIANTS_LISTED = ", ".join(described(name, variant.note) for name, variant in VARIANTS.items())


@dataclass(frozen=True)
class PredictedPrograms:
    """Which programs are predicted, in the user's words; a group of options (see grouped.py)."""

    compare: Annotated[
        list[str] | None,
        several(
            "--compare",
            help="Predict this too, and compare. Another model or recipe, a program such as "
            f'"A0 F0 [A1 A2] [F1 F2]", or a variant of the model: dense, {_VARIANTS_LISTED}, halves (itself, '
            "computed in two halves, one while the other's reductions are on their way), upper-bound (ranks that never "
            "wait for each other: wrong results, and the best time there can be).",
        ),
    ] = None
    layers: VariantLayersOption = None
    program: ProgramOption = None


@dataclass(frozen=True)
class PredictedLoad:
    """What is asked of the model, in the user's words; a group of options (see grouped.py)."""

    batch: BatchesOption = None
    prompt: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of each prompt. Default: 1024, or half of the model's positions."),
    ] = None
    new: Annotated[
        int | None,
        typer.Option("--new", min=1, help="Tokens to add to each. Default: 512, or a quarter of the positions."),
    ] = None


@dataclass(frozen=True)
class PredictedRanksArguments:
    """How the model is spread over the hardware, in the user's words; a group of options (see grouped.py)."""

    ranks: Annotated[int, typer.Option(min=1, help="How many tensor-parallel ranks share the model.")] = 1
    per_node: Annotated[
        int | None, typer.Option(min=1, help="Ranks in one node. Default: as many as it has devices.")
    ] = None
    link: Annotated[
        str | None, typer.Option(help="Which of the hardware's links connects a node. Default: its first.")
    ] = None
    network: Annotated[
        str | None, typer.Option(help="Which of the hardware's networks connects nodes. Default: its first.")
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
            "--graphs/--no-graphs", help="Whether decoding passes are captured graphs. Default: on GPUs they are."
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
            help="A link as surgeon bench emulates it, on top: how long a collective takes at least, e.g. 1ms."
        ),
    ] = None
    link_bandwidth: Annotated[
        str | None, typer.Option(help="Likewise: bytes per second that a rank can send, e.g. 1GB.")
    ] = None

    def deployment(self) -> Deployment:
        """All of it.

        Raises:
            ValueError: if there is no such way or dtype.
        """
        from surgeon.cost.deployment import Deployment
        from surgeon.runtime.comm.link import parse_link

        return Deployment(
            ranks=self.ranks,
            dtype=None if self.dtype == "auto" else self.dtype,
            link=self.link,
            network=self.network,
            node=self.per_node,
            graphs=self.graphs,
            compress=cast("Any", self.compress),
            low_rank=cast("Any", self.low_rank),
            kv=cast("Any", self.kv),
            emulated=parse_link(self.link_delay, self.link_bandwidth),
        )


@dataclass(frozen=True)
class BestArguments:
    """What may win, in the user's words; a group of options (see grouped.py)."""

    best: Annotated[
        bool,
        typer.Option(
            "--best",
            help="Which of the known programs is fastest on every link, for all ranks and batches of --sweep (by "
            "default ranks up to a node's, batches up to 256), and at which batches each of them pays.",
        ),
    ] = False
    depth: Annotated[
        float | None, typer.Option(min=1, help="With --best: the least effective depth that may be chosen.")
    ] = None
    keep: Annotated[
        float | None, typer.Option(help="With --best: low ranks may leave this share of each matrix's parameters.")
    ] = None
    allow: Annotated[
        list[str] | None,
        several(
            "--allow",
            help="With --best: only these, e.g. lp,ladder; of halves, lp, ladder, ladder-over-lp, fused, tracks:4, "
            "lowrank, lp+lowrank, ladder+lowrank.",
        ),
    ] = None
    by: Annotated[
        str,
        typer.Option(
            metavar="[token|first|rate]",
            help="With --best: what is to be short: a further token, the first one, or all (the rate of tokens).",
        ),
    ] = "token"

    def allowance(self) -> Allowance:
        """What may be chosen.

        Raises:
            ValueError: if there is no such program, or the share is none.
        """
        from surgeon.cost.best import Allowance

        return Allowance(self.depth, self.keep, tuple(self.allow or ()))


@dataclass(frozen=True)
class PredictedDraftsArguments:
    """Which program drafts for the model, in the user's words; a group of options (see grouped.py)."""

    draft: Annotated[
        str | None,
        typer.Option(
            metavar="RECIPE|PROGRAM|VARIANT|FOLDER",
            help="Where it pays that this program over the same weights drafts and the model verifies, as surgeon "
            "generate does it, with the best number of tokens ahead; beside no drafts, and beside the draft alone.",
        ),
    ] = None
    acceptance: Annotated[
        list[str] | None,
        several("--acceptance", help="With --draft: the chance of a drafted token to be right. Default: 0.8."),
    ] = None

    def chances(self) -> list[float]:
        """The acceptances.

        Raises:
            ValueError: if they are no numbers.
        """
        try:
            return [float(part) for part in self.acceptance or ["0.8"]]
        except ValueError:
            given = ",".join(self.acceptance or ())
            raise ValueError(f"--acceptance {given!r} is no list of chances; write e.g. 0.6,0.8") from None


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
        ),
    ],
    programs: PredictedPrograms,
    load: PredictedLoad,
    on: PredictedRanksArguments,
    best: BestArguments,
    drafts: PredictedDraftsArguments,
    over: Annotated[
        list[str] | None,
        several(
            "--sweep",
            help="Predict all combinations, e.g. ranks=1..64,batch=1..256: from the first to the last, doubling. Of "
            "ranks, batch, prompt, new.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Folder for predict.csv, predict.json, predict.png (best.csv and so on with --best, drafts.csv and so "
            "on with --draft).",
        ),
    ] = None,
) -> None:
    """Predict what programs cost on hardware that you do not have.

    Nothing runs, and no weights are needed: shapes come from the configuration, what ranks compute and exchange from
    the runtime's own rules, times from the hardware's figures. Every kernel takes as long as what it computes or what
    it moves, every collective as its latency and bandwidth say, and the program is run on clocks, by the executor that
    runs it on ranks: so what is hidden needs no formula.

    First token: until every text has one. Per token: a decoding pass, the mean over the new tokens. Tokens/s: new
    tokens of all texts. Comm.: the time in which ranks wait for collectives, of all the time; hidden: time of
    collectives behind computing. Launch: waiting for the host, or between kernels. Memory: weights, cache and
    activations of the rank that needs most.
    """
    from surgeon.library.predict import best_programs, predict_drafts
    from surgeon.library.predict import predict as run

    _refuse_together({"--best": best.best}, ("--compare", programs.compare))
    _refuse_together({"--draft": drafts.draft}, ("--compare", programs.compare), ("--best", best.best))
    if drafts.acceptance is not None and drafts.draft is None:
        raise ValueError("--acceptance is for --draft; give --draft, too")
    for name in ("depth", "keep", "allow"):
        if not best.best and getattr(best, name) is not None:
            raise ValueError(f"--{name} is for --best; give --best, too")
    common: dict[str, Any] = {"layers": programs.layers, "prompt": load.prompt, "new": load.new}
    common |= {"ranks": on.deployment(), "sweep": over and ",".join(over), "output": output}
    one: dict[str, Any] = {"program": programs.program, "batch": parse_counts("--batch", load.batch, [1])}
    found: Any
    if best.best:
        found = best_programs(model, hardware, allowance=best.allowance(), by=cast("Any", best.by), **common)
    elif drafts.draft is not None:
        found = predict_drafts(model, hardware, drafts.draft, acceptance=drafts.chances(), **one, **common)
    else:
        found = run(model, hardware, compare=programs.compare or (), **one, **common)
    typer.echo(str(found))
    if output is not None:
        print(f"{output}: {', '.join(path.name for path in found.files)}", file=sys.stderr)


def _refuse_together(modes: dict[str, Any], *others: tuple[str, Any]) -> None:
    """Refuse options that a way of predicting would not look at.

    Raises:
        ValueError: if one of them is given together with it.
    """
    mode = next((name for name, given in modes.items() if given), None)
    ignored = [name for name, given in others if given]
    if mode and ignored:
        raise ValueError(f"{mode} does not look at {' and '.join(ignored)}; leave one of them out")
