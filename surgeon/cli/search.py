"""The `search` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def search(
    model: Annotated[str, typer.Argument(help="A model folder, a hub name, or demo.")],
    budget: Annotated[str, typer.Option(help="The effective depth to come down to, e.g. depth=12.")],
    data: Annotated[str, typer.Option(help="A text file, a dataset's name (name:config:split), or demo.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder for the results; a search goes on where it was.")
    ],
    trials: Annotated[int, typer.Option(help="How many choices of pairs to try in all.", min=1)] = 60,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    tokens: Annotated[int, typer.Option(help="Tokens to measure each choice on.")] = 8192,
    window: Annotated[
        int | None, typer.Option(help="Tokens in a window  [default: 512, or the model's positions]")
    ] = None,
    separator: Annotated[
        str | None, typer.Option(help="What divides the text into documents, e.g. '<|endoftext|>'.")
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Limit on the process's memory, e.g. 2GB.")] = None,
) -> None:
    """Search for the best layers to run in pairs (LP) under a budget of depth.

    Tries the paper's contiguous windows first, then what single pairs suggest, then what Optuna's sampler proposes.
    Writes recipe.yaml (for surgeon export), trials.csv, search.json and quality-against-depth.png.
    """
    from surgeon.analysis.subject import open_subject
    from surgeon.families import family_of
    from surgeon.memory import parse_size
    from surgeon.progress import progress
    from surgeon.report.depth import draw_quality_against_depth
    from surgeon.search.budget import Budget
    from surgeon.search.objective import divergence_on
    from surgeon.search.results import write_results
    from surgeon.search.study import PairStudy

    wanted = Budget.parse(budget)
    limit = None if memory is None else parse_size(memory)
    subject = open_subject(model, data, tokens, window, separator)
    for note in subject.windows.notes:
        typer.echo(f"warning: {note}", err=True)
    num_layers = subject.model.config.num_hidden_layers
    study = PairStudy(
        output,
        num_layers,
        family_of(subject.model.config).steps_per_layer,
        wanted.pairs_needed(num_layers),
        seed,
        divergence_on(subject.model, subject.windows, limit),
        settings={"weights": subject.weights_hash, "data": subject.windows.digest, "budget": budget, "seed": seed},
    )
    record = subject.provenance(seed=seed, budget=budget)
    with progress("search", trials, "trials", len(study.finished())) as ran:
        for _ in study.run(trials):
            write_results(output, subject.reference, study, record)
            ran(1)
    write_results(output, subject.reference, study, record)
    best, depth = study.best(), float(wanted.depth)
    draw_quality_against_depth(
        output / "quality-against-depth.png",
        study.profile(),
        study.finished(),
        best,
        depth,
        f"{subject.label}: the best {study.count} pairs, {len(study.finished())} trials",
    )
    original = study.profile()[num_layers].perplexity
    typer.echo(f"program     {study.program(best.pairs)}")
    typer.echo(f"depth       {depth:g} of {num_layers} layers")
    typer.echo(f"divergence  {best.measured.divergence:.4g} nats per token")
    typer.echo(f"perplexity  {best.measured.perplexity:.4g}; the original's is {original:.4g}")
    typer.echo(f"recipe      {output / 'recipe.yaml'}")
