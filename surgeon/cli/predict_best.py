"""`surgeon predict --best`: which of the known programs wins where, and where each pays."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

if TYPE_CHECKING:
    from surgeon.cost.best import Choice
    from surgeon.cost.candidates import Candidate
    from surgeon.cost.hardware import Hardware
    from surgeon.cost.predict import Deployment
    from surgeon.cost.workload import Workload

SHORT = {"token": "time per token", "first": "time to the first token", "rate": "tokens per second"}


@dataclass(frozen=True)
class BestPrograms:
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
        float | None,
        typer.Option(min=1, help="With --best: the least effective depth that may be chosen.", show_default=False),
    ] = None
    keep: Annotated[
        float | None,
        typer.Option(
            help="With --best: low ranks may leave this share of each matrix's parameters.", show_default=False
        ),
    ] = None
    allow: Annotated[
        str | None,
        typer.Option(
            help="With --best: only these, e.g. lp,ladder; of lp, ladder, ladder-over-lp, fused, tracks:4, lowrank, "
            "lp+lowrank, ladder+lowrank.",
            show_default=False,
        ),
    ] = None
    by: Annotated[
        str,
        typer.Option(
            metavar="[token|first|rate]",
            help="With --best: what is to be short: a further token, the first one, or all (the rate of tokens).",
        ),
    ] = "token"

    def known(self, first: Candidate, layers: range | None) -> list[Candidate]:
        """The programs of a model that may be chosen, the dense one first.

        Raises:
            ValueError: as `known_programs`.
        """
        from surgeon.cost.best import Allowance, known_programs

        allowed = tuple(name.strip() for name in self.allow.split(",")) if self.allow else ()
        return known_programs(first.model, Allowance(self.depth, self.keep, allowed), layers)

    def refuse_alone(self) -> None:
        """Say that an option of this group is of no use without --best.

        Raises:
            ValueError: if one is given.
        """
        for name in ("depth", "keep", "allow"):
            if getattr(self, name) is not None:
                raise ValueError(f"--{name} is for --best; give --best, too")


def choose(
    asked: BestPrograms,
    known: Sequence[Candidate],
    hardware: Hardware,
    deployment: Deployment,
    workload: Workload,
    axes: Mapping[str, Sequence[int]],
    output: Path | None,
) -> None:
    """Predict, print, and write what is asked for.

    Raises:
        ValueError: if there is no such measure.
    """
    from surgeon.cost.best import METRICS, reaches, survey
    from surgeon.errors import did_you_mean
    from surgeon.progress import progress
    from surgeon.reports.best import describe_choices, describe_reaches

    if asked.by not in METRICS:
        raise ValueError(f"there is no --by {asked.by!r}; {did_you_mean(asked.by, METRICS)}")
    heading = (
        f"{known[0].model.label} on {hardware.name}: {deployment.dtype}, prompt {workload.prompt}, {workload.new} new, "
        f"by {SHORT[asked.by]}"
    )
    total = len(known) * (1 if deployment.link else max(1, len(hardware.links)))
    for values in axes.values():
        total *= len(values)
    with progress("predict", total, "predictions") as advance:
        found = survey(known, hardware, deployment, workload, axes, cast("Any", asked.by), advance)
    typer.echo(f"{heading}\n\nFastest, and times as fast as the dense model\n\n{describe_choices(found)}\n")
    typer.echo(f"The batches at which a program pays\n\n{describe_reaches(reaches(found))}")
    if output is not None:
        _write(output, found, heading, known)


def default_axes(hardware: Hardware) -> dict[str, list[int]]:
    """Ranks up to a node's, batches up to 256."""
    from surgeon.cost.sweep import parse_sweep

    return parse_sweep(f"ranks=1..{hardware.devices},batch=1..256")


def _write(folder: Path, found: Sequence[Choice], heading: str, known: Sequence[Candidate]) -> None:
    from surgeon.processes.files import write_json, write_table
    from surgeon.provenance import provenance
    from surgeon.reports.best import choice_table, draw_choices

    programs = {one.name: str(one.program(2)) for one in known}
    write_table(folder / "best.csv", choice_table(found))
    write_json(
        folder / "best.json", provenance(known[0].model.label, "", heading=heading, programs_on_2_ranks=programs)
    )
    draw_choices(found, folder / "best.png", heading)
    print(f"{folder}: best.csv, best.json, best.png", file=sys.stderr)
