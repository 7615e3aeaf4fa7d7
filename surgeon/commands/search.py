"""`surgeon search`, `surgeon.search`: the best change of a model under a budget, or along one."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import typer

from surgeon.commands.command import command, option, several
from surgeon.commands.options import DefaultData, MeasuringFlags, ModelName, Output, SampledAcceptance
from surgeon.words import show_value

if TYPE_CHECKING:
    from surgeon.findings.result import RunResult
    from surgeon.findings.search import SearchResult
    from surgeon.searches.question import Question

_WIDTH = 80  # columns of a terminal
_KEY = 12  # columns of what stands before a line
_FIXED = "\N{NO-BREAK SPACE}"


def _show(call: Callable[[], SearchResult]) -> None:
    from surgeon.words import plural

    found = call()
    question = found.question
    winner = found.winner
    trial = found.winner.trial
    measured = trial.measured
    edits = (str(edit).replace(" ", _FIXED) for edit in trial.choice)
    _print("winner", f"{winner.why}: trial {trial.number}")
    _print("program", trial.key)
    _print("edits", ", ".join(edits) or "none")
    for aspect, dense in question.pricing.dense.items():
        cost = aspect.show(question.pricing.price(aspect, trial.program))
        _print("cost", f"{cost}; the original's is {aspect.quantity.show(dense)}")
    _print("divergence", f"{measured.divergence:.4g} nats per token")
    _print(
        "perplexity", f"{measured.perplexity:.4g}; the original's is {question.original.perplexity:.4g}"
    )
    _print("measured", f"{plural(len(found.trials), 'trial')}; {found.record['work']['sentence']}")
    for line in winner.draft.lines() if winner.draft else []:
        _print("draft", line)
    for refused in found.record.get("refused", ()):
        _print(
            "refused", f"{plural(refused['edits'], 'edit')} of {refused['space']}: {refused['reason']}"
        )
    for curve in found.curves:
        _print("knee", curve.line())
    if "experts" in found.record:
        _print("experts", found.record["experts"])
    for line in winner.comparison.lines() if winner.comparison else []:
        _print("held out", line)
    for line in [*winner.healing.table(), *winner.healing.lines()] if winner.healing else []:
        _print("healing", line)
    for line in winner.missed_unseen(question.settings.of_quality):
        _print("held out", line)
    typer.echo(f"{'recipe':<{_KEY}}{found.files[0]}")  # whole, to be copied


def _print(key: str, text: str) -> None:
    """A line, or several where it is longer than a terminal, with the key before the first."""
    lines = textwrap.fill(
        text,
        _WIDTH,
        initial_indent=f"{key:<{_KEY}}",
        subsequent_indent=" " * _KEY,
        break_long_words=False,
        break_on_hyphens=False,
    )
    typer.echo(lines.replace(_FIXED, " "))


class ProblemFlags(MeasuringFlags, total=False):
    """A search's question, with its text."""

    space: Annotated[
        str | Sequence[str] | None,
        several(
            "What may change: pair (LP; pair:4 groups of 2 to 4), par, ladder, drop, repeat, order, tracks, desync, "
            "fuse, width, rank, experts (docs/searching.md). Default: pair for a depth, else all common ones that "
            "lessen what is asked for.",
            metavar="NAME[:N],...",
        ),
    ]
    budget: Annotated[
        str | Sequence[str] | None,
        several(
            "What to come down to: depth=12, syncs, params=0.8x, size=20MB, weight_bytes, kv_bytes, wire_bytes, "
            "latency=12ms@h100-sxm, speedup>=1.3@h100-sxm; and the quality to keep: divergence<=0.02, "
            "perplexity<=1.05x. With both, also the front between them. Without one: how deep is this model really, "
            "and how large?"
        ),
    ]
    objective: Annotated[
        str | Sequence[str],
        several(
            "What to make small: divergence, perplexity, accuracy:TASK, or a cost such as depth or size. Several give "
            "a Pareto front, and so does a cost without a limit of quality. Or draft (on this machine; "
            "draft@h100-sxm): the program with which generate --draft is expected to be fastest. Default: divergence.",
            default="divergence",
        ),
    ]
    sampled_acceptance: SampledAcceptance
    ranks: Annotated[
        int,
        option("Tensor-parallel ranks, for tracks and whatever depends on them.", least=1, default=2),
    ]
    batch: Annotated[
        int, option("For a latency, speedup or draft: texts computed together.", least=1, default=1)
    ]
    prompt: Annotated[
        int | None,
        option(
            "For a latency, speedup or draft: tokens of each prompt. Default: 1024, or half of the model's positions.",
            least=1,
        ),
    ]
    new: Annotated[
        int | None,
        option(
            "For a latency, speedup or draft: tokens added to each. Default: 512, or a quarter of the positions.",
            least=2,
        ),
    ]
    link_delay: Annotated[
        str | None,
        option(
            "For a latency, speedup or draft: a link on top, how long a collective takes at least, e.g. 1ms."
        ),
    ]
    using: Annotated[
        str | Path | RunResult | Sequence[str | Path | RunResult],
        several(
            "What a pass over the same model has found (a folder of surgeon scan, spectrum, similarity or "
            "sensitivity). What was measured on the same text is not measured again.",
            metavar="FOLDER",
            kind=list[str],
            default=(),
        ),
    ]


class SearchFlags(ProblemFlags, total=False):
    """A search's question, and how it is worked on."""

    minutes: Annotated[
        float | None,
        option(
            "Begin no more trials after so many minutes; with more minutes the same command goes on. What single "
            "edits do is measured in any case."
        ),
    ]
    sampler: Annotated[
        str,
        option(
            "Who proposes programs: surgeon, from what every edit does alone and from all trials; or one of Optuna's "
            "on the same parameters and constraints: tpe, gp, nsga2, random.",
            default="surgeon",
        ),
    ]
    seed: Annotated[int, option("For Optuna's samplers.", least=0, default=0)]
    holdout: Annotated[
        int | None,
        option(
            "Tokens held out from the search, to measure the winner and the runners-up on again: those that follow in "
            "the data. 0: none. Default: as many as are searched on, or as follow, and of a short text a tenth.",
            least=0,
        ),
    ]
    holdout_data: Annotated[
        str | Path | None, option("Hold out this text instead, as --data takes it.", kind=str)
    ]
    heal: Annotated[
        int | None,
        option(
            "Heal the winner and the runners-up for N steps each before the last choice among them: the best before "
            "need not be the best after. Needs --heal-data.",
            least=1,
            metavar="N",
        ),
    ]
    heal_data: Annotated[
        str | Path | None,
        option(
            "Text to heal on, as --data takes it; none of the text that is searched or judged on.",
            kind=str,
        ),
    ]
    heal_batch: Annotated[int, option("For --heal: windows of text in a step.", least=1, default=8)]
    storage: Annotated[
        str | None,
        option(
            "Where the study lies: postgresql://user@host/database for workers on many machines, sqlite:///file or "
            "journal:file for those of one. Default: a journal, study.log, in the output folder.",
            envvar="SURGEON_STORAGE",
        ),
    ]
    study: Annotated[
        str | None,
        option(
            "The study's name in its storage. Default: search, or with --storage one that follows from the model and "
            "all settings, so that the same command is the same study."
        ),
    ]
    workers: Annotated[
        int,
        option("Processes of this machine to work on it; they divide its cores.", least=1, default=1),
    ]


def read_question(arguments: Mapping[str, Any]) -> Question:
    """Read a command's arguments, of which spaces, limits, objectives and passes may be several."""
    from surgeon.commands.command import as_several
    from surgeon.commands.opening import as_folder
    from surgeon.searches.question import Question

    values = {name: value for name, value in arguments.items() if value is not None}
    for name, value in values.items():
        if name in ("space", "budget", "objective"):
            several = as_several(value)
            if not all(isinstance(one, str) for one in several):
                raise ValueError(f"{name} is a text, or several of them, not {show_value(value)}")
            values[name] = ",".join(several)
        elif name in ("data", "output", "holdout_data", "heal_data"):
            values[name] = str(value)
        elif name == "using":
            values[name] = tuple(str(as_folder(one)) for one in as_several(value))
    return Question(**values)


@command(_show)
def search(
    model: ModelName,
    data: DefaultData = None,
    output: Output = "runs/search",
    trials: Annotated[int, option("How many programs to try in all.", least=1)] = 60,
    **asked: Unpack[SearchFlags],
) -> SearchResult:
    """Search for the change of a model that does the least to its predictions within a budget, or along one.

    Every change is measured alone first, but for what passes have found (--using); then whole programs are proposed
    from that, measured, and learnt from. Writes recipe.yaml (for surgeon export), trials.csv, terms.csv, search.json
    and pictures; where there is a front, a recipe for each of its points, and the front of each space alone. Winners
    are measured again on text that the search did not see, and with --heal once more when they are healed.
    Interrupted, the same command goes on where it was; with more --trials it adds to them.

    Raises:
        FileNotFoundError, ValueError: if model, text or storage cannot be used, the budget cannot be had, or the study
            is another one.
        OSError: if the folder or the storage cannot be written to.
        ImportError: if the storage needs a package that is not installed.
    """
    from surgeon.commands.searching import join_search

    minutes = asked.get("minutes")
    if minutes is not None and not minutes > 0:
        raise ValueError(
            f"minutes must be more than 0, not {minutes:g}; give none to try all {trials} programs"
        )
    question = read_question({**asked, "data": data, "output": output, "trials": trials})
    found = join_search(model, question, worker=0)
    assert found is not None
    return found
