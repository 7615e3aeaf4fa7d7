"""`surgeon search`: the best layers to run in pairs, for a wanted depth or speed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surgeon.cli.grouped import grouped
from surgeon.cli.opening import open_measured
from surgeon.cli.options import DataOption, MemoryOption, ModelArgument, OutputOption, TextArguments

if TYPE_CHECKING:
    from surgeon.analysis.subject import Subject
    from surgeon.search.budget import Price
    from surgeon.search.study import PairStudy


@dataclass(frozen=True)
class PredictedUse:
    """What a budget of time is predicted for, in the user's words; a group of options (see grouped.py)."""

    ranks: Annotated[int, typer.Option(min=1, help="For a latency or speedup: tensor-parallel ranks.")] = 2
    batch: Annotated[int, typer.Option(min=1, help="For a latency or speedup: texts computed together.")] = 1
    prompt: Annotated[int, typer.Option(min=1, help="For a latency or speedup: tokens of each prompt.")] = 1024
    new: Annotated[int, typer.Option(min=2, help="For a latency or speedup: tokens added to each.")] = 512

    def price(self, config: Any, model: str, hardware: str | None) -> Price:
        """What pairs cost on a hardware; nothing where the budget needs none.

        Raises:
            FileNotFoundError, ValueError: if there is no such hardware, or the model does not fit these ranks.
        """
        from surgeon.cost.hardware_file import load_hardware
        from surgeon.cost.predict import Deployment, Workload
        from surgeon.cost.shapes import ModelShapes
        from surgeon.search.price import predicted_price

        if hardware is None:
            return lambda _: 0.0
        machine, shapes = load_hardware(hardware), ModelShapes.of(Path(model).name, config)
        workload = Workload(self.batch, self.prompt, self.new)
        return predicted_price(shapes, machine, workload, Deployment(self.ranks, machine.dtype(shapes.dtype)))


@grouped
def search(
    model: ModelArgument,
    budget: Annotated[
        str,
        typer.Option(
            "--budget",
            help="What to come down to: an effective depth, depth=12; or a time per token, latency=12ms@h100-sxm, or "
            "times as fast as the unedited model, speedup>=1.3@h100-sxm, as surgeon predict has it on that hardware.",
            show_default=False,
        ),
    ],
    data: DataOption,
    output: OutputOption,
    trials: Annotated[int, typer.Option("--trials", help="How many choices of pairs to try in all.", min=1)] = 60,
    seed: Annotated[int, typer.Option("--seed", help="Seed of everything random.")] = 0,
    *,
    use: PredictedUse,
    text: TextArguments,
    memory: MemoryOption = None,
) -> None:
    """Search for the best layers to run in pairs (LP) under a budget of depth or predicted time.

    Tries the paper's contiguous windows first, then what single pairs suggest, then what Optuna's sampler proposes.
    Writes recipe.yaml (for surgeon export), trials.csv, search.json and quality-against-depth.png. Interrupted, the
    same command goes on where it was; with more --trials it adds to them.
    """
    from surgeon.checkpoint.config_only import read_config_only
    from surgeon.progress import progress
    from surgeon.report.depth import draw_quality_against_depth
    from surgeon.search.budget import parse_budget
    from surgeon.search.results import write_results

    wanted = parse_budget(budget)
    config = read_config_only(model).config  # what cannot be had is said before a large model is loaded
    num_layers = config.num_hidden_layers
    pairs = wanted.pairs_needed(num_layers, use.price(config, model, wanted.hardware))
    subject = open_measured(model, data, text, memory)
    asked = {"budget": budget, "seed": seed, **({} if wanted.hardware is None else asdict(use))}
    study = _study(subject, output, pairs, asked)
    record = subject.provenance(**asked)
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
        float(num_layers - pairs),
        f"{subject.label}: the best {study.count} pairs, {len(study.finished())} trials",
    )
    _say(study, output)


def _study(subject: Subject, output: Path, pairs: int, asked: dict[str, Any]) -> PairStudy:
    """The study in a folder, new or gone on with.

    Args:
        asked: what the user has said of it, the seed among it.

    Raises:
        ValueError: if the folder holds another one.
    """
    from surgeon.families import family_of
    from surgeon.provenance import FORMAT
    from surgeon.search.objective import divergence_on
    from surgeon.search.study import PairStudy

    config = subject.model.config
    return PairStudy(
        output,
        config.num_hidden_layers,
        family_of(config).steps_per_layer,
        pairs,
        asked["seed"],
        divergence_on(subject.model, subject.windows, subject.memory, output),
        settings={"format": FORMAT, "model_hash": subject.model_hash, "data": subject.windows.digest, **asked},
    )


def _say(study: PairStudy, output: Path) -> None:
    """Print what was found, a few lines."""
    best, original = study.best(), study.profile()[study.num_layers].perplexity
    typer.echo(f"program     {study.program(best.pairs)}")
    typer.echo(f"depth       {study.num_layers - study.count:g} of {study.num_layers} layers")
    typer.echo(f"divergence  {best.measured.divergence:.4g} nats per token")
    typer.echo(f"perplexity  {best.measured.perplexity:.4g}; the original's is {original:.4g}")
    typer.echo(f"recipe      {output / 'recipe.yaml'}")
