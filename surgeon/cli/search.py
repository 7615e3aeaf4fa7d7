"""`surgeon search`: the best change of a model under a budget, or along one."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Annotated

import typer

from surgeon.cli.grouped import grouped
from surgeon.cli.options import (
    DefaultDataOption,
    DefaultOutputOption,
    MemoryOption,
    ModelArgument,
    SampledOption,
    TextArguments,
    several,
)

_WIDTH, _KEY = 80, 12  # columns of a terminal, and of what stands before a line
_FIXED = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True)
class PredictedUse:
    """What ranks and times are predicted for, in the user's words; a group of options (see grouped.py)."""

    ranks: Annotated[
        int, typer.Option(min=1, help="Tensor-parallel ranks, for tracks and whatever depends on them.")
    ] = 2
    batch: Annotated[int, typer.Option(min=1, help="For a latency, speedup or draft: texts computed together.")] = 1
    prompt: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="For a latency, speedup or draft: tokens of each prompt. Default: 1024, or half of the model's "
            "positions.",
        ),
    ] = None
    new: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="For a latency, speedup or draft: tokens added to each. Default: 512, or a quarter of the model's "
            "positions.",
        ),
    ] = None
    link_delay: Annotated[
        str | None,
        typer.Option(
            help="For a latency, speedup or draft: a link on top, how long a collective takes at least, e.g. 1ms."
        ),
    ] = None


@dataclass(frozen=True)
class SearchQuestion:
    """What is searched for, in the user's words; a group of options (see grouped.py)."""

    space: Annotated[
        list[str] | None,
        several(
            "--space",
            metavar="NAME[:N],...",
            help="What may change, one or several at once: pair (LP; pair:4 groups of 2 to 4), par, ladder, drop, "
            "repeat, order, tracks, desync, fuse, width, rank, experts. docs/searching.md describes them. Default: "
            "pair for a depth, else all common ones that lessen what is asked for.",
        ),
    ] = None
    budget: Annotated[
        list[str] | None,
        several(
            "--budget",
            help="What to come down to: depth=12, syncs, params=0.8x, size=20MB, weight_bytes, "
            "kv_bytes, wire_bytes, latency=12ms@h100-sxm, speedup>=1.3@h100-sxm; and the quality to keep: "
            "divergence<=0.02, perplexity<=1.05x. With both, also the front between them. Without one: how deep is "
            "this model really, and how large?",
        ),
    ] = None
    objective: Annotated[
        list[str] | None,
        several(
            "--objective",
            help="What to make small: divergence, perplexity, accuracy:TASK, or a cost such as depth or size. Several "
            "give a Pareto front, and so does a cost without a limit of quality. Or draft (on this machine; "
            "draft@h100-sxm): the program with which generate --draft is expected to be fastest. Default: divergence.",
        ),
    ] = None
    sampled_acceptance: SampledOption = False
    sampler: Annotated[
        str,
        typer.Option(
            "--sampler",
            help="Who proposes programs: surgeon, from what every edit does alone and from all trials; or one of "
            "Optuna's on the same parameters and constraints: tpe, gp, cmaes, nsga2, random.",
        ),
    ] = "surgeon"
    seed: Annotated[int, typer.Option("--seed", help="For Optuna's samplers.")] = 0


@dataclass(frozen=True)
class LastChoice:
    """How winners are measured again, and healed before, in the user's words; a group of options (see grouped.py)."""

    holdout: Annotated[
        int | None,
        typer.Option(
            "--holdout",
            min=0,
            help="Tokens held out from the search, to measure the winner and the runners-up on again: those that "
            "follow in the data. 0: none. Default: as many as are searched on, or as follow, and of "
            "a short text a tenth.",
        ),
    ] = None
    holdout_data: Annotated[
        str | None, typer.Option("--holdout-data", help="Hold out this text instead, as --data takes it.")
    ] = None
    heal: Annotated[
        int | None,
        typer.Option(
            "--heal",
            min=1,
            metavar="N",
            help="Heal the winner and the runners-up for N steps each before the last choice among them: the best "
            "before need not be the best after. Needs --heal-data.",
        ),
    ] = None
    heal_data: Annotated[
        str | None,
        typer.Option(
            "--heal-data", help="Text to heal on, as --data takes it; none of the text that is searched or judged on."
        ),
    ] = None
    heal_batch: Annotated[int, typer.Option("--heal-batch", min=1, help="For --heal: windows of text in a step.")] = 8


@dataclass(frozen=True)
class SearchWorkers:
    """Who works on a search, in the user's words; a group of options (see grouped.py)."""

    storage: Annotated[
        str | None,
        typer.Option(
            "--storage",
            envvar="SURGEON_STORAGE",
            help="Where the study lies: postgresql://user@host/database for workers on many machines, sqlite:///file "
            "or journal:file for those of one. Default: a journal, study.log, in the output folder.",
        ),
    ] = None
    study: Annotated[
        str | None,
        typer.Option(
            "--study",
            help="The study's name in its storage. Default: search, or with --storage one that follows from the model "
            "and all settings, so that the same command is the same study.",
        ),
    ] = None
    workers: Annotated[
        int, typer.Option("--workers", min=1, help="Processes of this machine to work on it; they divide its cores.")
    ] = 1


@grouped
def search(
    model: ModelArgument,
    data: DefaultDataOption = None,
    output: DefaultOutputOption = "runs/search",
    trials: Annotated[int, typer.Option("--trials", help="How many programs to try in all.", min=1)] = 60,
    *,
    minutes: Annotated[
        float | None,
        typer.Option(
            "--minutes",
            help="Begin no more trials after so many minutes, however many are left; with more minutes the same "
            "command goes on. What single edits do is measured in any case.",
        ),
    ] = None,
    asked: SearchQuestion,
    use: PredictedUse,
    last: LastChoice,
    work: SearchWorkers,
    text: TextArguments,
    using: Annotated[
        list[str] | None,
        several(
            "--using",
            metavar="FOLDER",
            help="What a pass over the same model has found (a folder of surgeon scan, spectrum, similarity or "
            "sensitivity). What was measured on the same text is not measured again.",
        ),
    ] = None,
    memory: MemoryOption = None,
) -> None:
    """Search for the change of a model that does the least to its predictions within a budget, or along one.

    Every change is measured alone first, but for what passes have found (--using); then whole programs are proposed
    from that, measured, and learnt from. Writes recipe.yaml (for surgeon export), trials.csv, terms.csv, search.json
    and pictures; where there is a front, a recipe for each of its points, and the front of each space alone. Winners
    are measured again on text that the search did not see, and with --heal once more when they are healed.
    Interrupted, the same command goes on where it was; with more --trials it adds to them.
    """
    from surgeon.library.search import search as run_search
    from surgeon.words import plural

    options = (
        vars(asked) | {"objective": asked.objective or "divergence"} | vars(use) | vars(last) | vars(work) | vars(text)
    )
    found = run_search(model, data, output, trials, minutes=minutes, **options, using=using or (), memory=memory)
    question = found.question
    winner = found.winner
    trial = found.winner.trial
    pricing = question.budget.pricing
    measured = trial.measured
    edits = (str(edit).replace(" ", _FIXED) for edit in trial.proposal.choice)
    _print("winner", f"{winner.why}: trial {trial.number}")
    _print("program", trial.proposal.key)
    _print("edits", ", ".join(edits) or "none")
    for aspect, dense in zip(pricing.aspects, pricing.dense, strict=True):
        cost = aspect.show(question.price(aspect, trial))
        _print("cost", f"{cost}; the original's is {aspect.quantity.show(dense)}")
    _print("divergence", f"{measured.divergence:.4g} nats per token")
    _print("perplexity", f"{measured.perplexity:.4g}; the original's is {question.original.perplexity:.4g}")
    _print("measured", f"{len(found.trials)} trials; {found.work.line}")
    for line in winner.draft.lines() if winner.draft else []:
        _print("draft", line)
    for refused in found.record.get("refused", ()):
        _print("refused", f"{plural(refused['edits'], 'edit')} of {refused['space']}: {refused['reason']}")
    for curve in found.curves:
        _print("knee", curve.line())
    if "experts" in found.record:
        _print("experts", found.record["experts"])
    for line in winner.comparison.lines() if winner.comparison else []:
        _print("held out", line)
    for line in [*winner.healing.table(), *winner.healing.lines()] if winner.healing else []:
        _print("healing", line)
    for line in winner.missed_unseen(question.budget):
        _print("held out", line)
    typer.echo(f"{'recipe':<{_KEY}}{found.files[0]}")  # whole, to be copied


def _print(key: str, text: str) -> None:
    """A line, or where it is longer than a terminal, several, with the key before the first."""
    lines = textwrap.fill(
        text,
        _WIDTH,
        initial_indent=f"{key:<{_KEY}}",
        subsequent_indent=" " * _KEY,
        break_long_words=False,
        break_on_hyphens=False,
    )
    typer.echo(lines.replace(_FIXED, " "))
