"""`surgeon search`: the best layers to run in pairs, for a wanted depth."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from surgeon.cli.grouped import grouped
from surgeon.cli.opening import open_measured
from surgeon.cli.options import DataOption, MemoryOption, ModelArgument, OutputOption, TextArguments

if TYPE_CHECKING:
    from surgeon.search.study import PairStudy


@grouped
def search(
    model: ModelArgument,
    budget: Annotated[
        str,
        typer.Option("--budget", help="The effective depth to come down to, e.g. depth=12.", show_default=False),
    ],
    data: DataOption,
    output: OutputOption,
    trials: Annotated[int, typer.Option("--trials", help="How many choices of pairs to try in all.", min=1)] = 60,
    seed: Annotated[int, typer.Option("--seed", help="Seed of everything random.")] = 0,
    *,
    text: TextArguments,
    memory: MemoryOption = None,
) -> None:
    """Search for the best layers to run in pairs (LP) under a budget of depth.

    Tries the paper's contiguous windows first, then what single pairs suggest, then what Optuna's sampler proposes.
    Writes recipe.yaml (for surgeon export), trials.csv, search.json and quality-against-depth.png. Interrupted, the
    same command goes on where it was; with more --trials it adds to them.
    """
    from surgeon.families import family_of
    from surgeon.progress import progress
    from surgeon.provenance import FORMAT
    from surgeon.report.depth import draw_quality_against_depth
    from surgeon.search.budget import Budget
    from surgeon.search.objective import divergence_on
    from surgeon.search.results import write_results
    from surgeon.search.study import PairStudy

    wanted = Budget.parse(budget)
    subject = open_measured(model, data, text, memory)
    num_layers = subject.model.config.num_hidden_layers
    study = PairStudy(
        output,
        num_layers,
        family_of(subject.model.config).steps_per_layer,
        wanted.pairs_needed(num_layers),
        seed,
        divergence_on(subject.model, subject.windows, subject.memory, output),
        settings={
            "format": FORMAT,
            "model_hash": subject.model_hash,
            "data": subject.windows.digest,
            "budget": budget,
            "seed": seed,
        },
    )
    record = subject.provenance(seed=seed, budget=budget)
    with progress("search", trials, "trials", len(study.finished())) as ran:
        for _ in study.run(trials):
            write_results(output, subject.reference, study, record)
            ran(1)
    write_results(output, subject.reference, study, record)
    draw_quality_against_depth(
        output / "quality-against-depth.png",
        study.profile(),
        study.finished(),
        study.best(),
        float(wanted.depth),
        f"{subject.label}: the best {study.count} pairs, {len(study.finished())} trials",
    )
    _say(study, wanted.depth, output)


def _say(study: PairStudy, depth: int, output: Path) -> None:
    """Print what was found, a few lines."""
    best, original = study.best(), study.profile()[study.num_layers].perplexity
    typer.echo(f"program     {study.program(best.pairs)}")
    typer.echo(f"depth       {depth:g} of {study.num_layers} layers")
    typer.echo(f"divergence  {best.measured.divergence:.4g} nats per token")
    typer.echo(f"perplexity  {best.measured.perplexity:.4g}; the original's is {original:.4g}")
    typer.echo(f"recipe      {output / 'recipe.yaml'}")
