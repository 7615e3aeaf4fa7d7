"""The `search` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def search(
    model: Annotated[str, typer.Argument(help="A model folder, a hub name, or demo.")],
    budget: Annotated[str, typer.Option(help="The effective depth to come down to, e.g. depth=12.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the results; a search goes on where it was.")],
    data: Annotated[str, typer.Option(help="A text file, a dataset's name (name:config:split), or demo.")] = "demo",
    trials: Annotated[int, typer.Option(help="How many choices of pairs to try in all.", min=1)] = 60,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    tokens: Annotated[int, typer.Option(help="Tokens to measure each choice on.")] = 8192,
    window: Annotated[int | None, typer.Option(help="Tokens in a window  [default: 512, or the model's positions]")] = None,
    separator: Annotated[str | None, typer.Option(help="What divides the text into documents, e.g. '<|endoftext|>'.")] = None,
    memory: Annotated[str | None, typer.Option(help="Limit on the process's memory, e.g. 2GB.")] = None,
) -> None:
    """Search for the best layers to run in pairs (LP) under a budget of depth.

    Tries the paper's contiguous windows first, then what single pairs suggest, then what Optuna's sampler proposes.
    Writes recipe.yaml (for surgeon export), trials.csv, search.json and quality-against-depth.png.
    """
    from transformers import AutoTokenizer

    from surgeon.checkpoint.load import load
    from surgeon.checkpoint.read import Checkpoint, locate
    from surgeon.families import family_of
    from surgeon.memory import parse_size
    from surgeon.progress import progress
    from surgeon.provenance import provenance
    from surgeon.quality.data import load_windows, window_for
    from surgeon.report.depth import draw_quality_against_depth
    from surgeon.search.budget import Budget
    from surgeon.search.objective import divergence_on
    from surgeon.search.results import write_results
    from surgeon.search.study import PairStudy

    wanted = Budget.parse(budget)
    limit = parse_size(memory) if memory else None
    folder = locate(model)
    checkpoint = Checkpoint(folder)
    loaded = load(folder)
    pairs = wanted.pairs_needed(loaded.config.num_hidden_layers)
    text = load_windows(
        AutoTokenizer.from_pretrained(folder), data, window_for(loaded.config, window), tokens, separator
    )
    for note in text.notes:
        typer.echo(f"warning: {note}", err=True)
    weights_hash = checkpoint.weights_hash()
    settings = {
        "weights": weights_hash,
        "data": text.digest,
        "window": text.ids.shape[1],
        "budget": budget,
        "seed": seed,
    }
    record = provenance(model, weights_hash, data=data, separator=separator, settings=settings, budget=budget, seed=seed)
    study = PairStudy(
        output,
        loaded.config.num_hidden_layers,
        family_of(loaded.config).steps_per_layer,
        pairs,
        seed,
        divergence_on(loaded, text, limit),
        settings,
    )
    named = model if not folder.is_dir() or str(folder) != model else str(folder.resolve())
    with progress("search", trials, "trials", len(study.finished())) as ran:
        for _ in study.run(trials):
            write_results(output, named, study, record)
            ran(1)
    write_results(output, named, study, record)
    best, depth = study.best(), float(wanted.depth)
    title = f"{model}: {pairs} LP pairs, {len(study.finished())} trials"
    draw_quality_against_depth(
        output / "quality-against-depth.png", study.profile(), study.finished(), best, depth, title
    )
    typer.echo(f"program     {study.program(best.pairs)}")
    typer.echo(f"depth       {depth:g} of {study.num_layers} layers")
    typer.echo(f"divergence  {best.measured.divergence:.4g} nats per token")
    typer.echo(f"perplexity  {best.measured.perplexity:.4g}, of the original {study.profile()[study.num_layers].perplexity:.4g}")
    typer.echo(f"recipe      {output / 'recipe.yaml'}")
