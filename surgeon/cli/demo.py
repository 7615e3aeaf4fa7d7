"""`surgeon demo`: the whole way from a trained model to a faster one, on the model that ships with the package."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from surgeon.cli.export import export
from surgeon.cli.generate import generate
from surgeon.cli.scan import scan
from surgeon.cli.search import search

if TYPE_CHECKING:
    from surgeon.searches.trial import MeasuredProgram

RANKS = 2
NEW_TOKENS = 64
PROMPT_TOKENS = 8  # where speed is measured, of random tokens
ROUNDS = 3
PROMPT = "def close(self):"
LADDER = 'surgeon: 1\nmodel: demo\noperations:\n  - ladder: {layers: "8:16"}\nexpect: {effective_depth: 16}\n'


def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for everything the demo makes.")] = Path(
        "demo-output"
    ),
    depth: Annotated[int, typer.Option(help="Effective depth to search for; the demo model has 16 layers.")] = 12,
    tokens: Annotated[int, typer.Option(help="Tokens to measure on.")] = 2048,
    trials: Annotated[int, typer.Option(min=1, help="Trials of the search.")] = 40,
) -> None:
    """Scan, search, export and generate on two ranks, with a small model that ships with surgeon.

    Needs no network, and some minutes on two cores. Every command is shown before it runs, so that it can be typed
    again for another model. Interrupted, the same command goes on where it was.
    """
    from surgeon.language.recipe import read_recipe

    measuring = f"--data demo --tokens {tokens}"
    found, fused, late = output / "search" / "recipe.yaml", output / "lp", output / "ladder"
    _announce("which stretches of layers can it spare?", f"scan demo {measuring} -o {_quoted(output / 'scan')}")
    scan("demo", "demo", output / "scan", tokens=tokens)
    _announce(
        f"which layers should run in pairs, for a depth of {depth}?",
        f"search demo --budget depth={depth} {measuring} --trials {trials} -o {_quoted(output / 'search')}",
    )
    search("demo", "demo", output / "search", budget=f"depth={depth}", trials=trials, tokens=tokens)
    _announce("write what was found as a checkpoint", f"export {_quoted(found)} -o {_quoted(fused)} --overwrite")
    export(found, fused, overwrite=True)
    recipe = output / "ladder.yaml"
    recipe.write_text(LADDER, encoding="utf-8")
    _announce("and a ladder over the upper half", f"export {_quoted(recipe)} -o {_quoted(late)} --overwrite")
    export(recipe, late, overwrite=True)
    _announce(
        "let it write, on two ranks",
        f"generate {_quoted(fused)} --prompt {shlex.quote(PROMPT)} --max-new-tokens {NEW_TOKENS} --tp {RANKS}",
    )
    generate(str(fused), [PROMPT], max_new_tokens=NEW_TOKENS, tp=RANKS)
    print("\nhow fast is what, in comparison?", file=sys.stderr, flush=True)
    pairs = " ".join(operation.layers_text for operation in read_recipe(found).operations)
    variants = [
        Contender("dense", None, "demo"),
        Contender(f"LP pairs {pairs}", found, str(fused)),
        Contender("ladder 8:16", recipe, str(late)),
    ]
    _print_table(variants, _measure(variants, tokens), _speeds(variants))
    print("Pictures:")
    for picture in sorted(output.glob("*/*.png")):
        print(f"  {picture}")


@dataclass(frozen=True)
class Contender:
    """One row of the table: what is done, the recipe that does it (None: nothing), and the checkpoint to run."""

    name: str
    recipe: Path | None
    model: str


def _announce(purpose: str, command: str) -> None:
    print(f"\n{purpose}\n$ surgeon {command}", file=sys.stderr, flush=True)


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def _measure(variants: list[Contender], tokens: int) -> list[MeasuredProgram]:
    """Perplexity and divergence of every variant, on the text that the scan and the search were measured on."""
    from surgeon.analysis.subject import open_subject
    from surgeon.opened import open_edited
    from surgeon.searches.evaluate import Evaluator

    subject = open_subject("demo", "demo", tokens=tokens)
    programs = [open_edited(variant.recipe or "demo").program for variant in variants]
    measured = Evaluator(subject.model, subject.windows).measure(programs)
    return [measured[program] for program in programs]


def _speeds(variants: list[Contender]) -> dict[str, list[tuple[float, float, int]]]:
    """By way of communicating, for every variant: effective depth, tokens/s, all-reduces per token, on two ranks.

    The fastest of some interleaved rounds counts: what else runs on the machine can only slow a round down.
    """
    from surgeon.benchmarks.measure import RankBench
    from surgeon.cost.workload import Workload
    from surgeon.language.program import Program
    from surgeon.runtime.plan.checks import make_plan
    from surgeon.runtime.worker.options import RankOptions, choose_device
    from surgeon.runtime.worker.ranks import Ranks

    device = choose_device("auto", RANKS)
    load = Workload(batch=1, prompt=PROMPT_TOKENS, new=NEW_TOKENS)
    plans = {variant.name: make_plan(variant.model, RANKS, load.length, device=device) for variant in variants}
    depths = [Program.parse(plan.program).effective_depth() for plan in plans.values()]
    speeds: dict[str, list[tuple[float, float, int]]] = {}
    for way in dict.fromkeys((RankOptions(RANKS, device).collectives, "gloo")):
        with Ranks(RankOptions(RANKS, device, way)) as ranks:
            results = RankBench.load(ranks, plans).measure([load], ROUNDS, lambda _: None)
        speeds[way] = []
        for depth, result in zip(depths, results, strict=True):
            fastest = min(result.rounds, key=lambda one: one.per_token)
            assert fastest.decode_pass is not None
            speeds[way].append((depth, 1 / fastest.per_token, fastest.decode_pass.layers.all_reduces))
    return speeds


def _print_table(
    variants: list[Contender], measured: list[MeasuredProgram], speeds: dict[str, list[tuple[float, float, int]]]
) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("program", min_width=18)
    for heading in ("depth", "perplexity", "divergence", "syncs/token", *(f"tok/s\n{way}" for way in speeds)):
        table.add_column(heading, justify="right", vertical="bottom")
    for row, (variant, quality) in enumerate(zip(variants, measured, strict=True)):
        depth, _, syncs = next(iter(speeds.values()))[row]
        rates = [f"{figures[row][1]:.0f}" for figures in speeds.values()]
        table.add_row(
            variant.name, f"{depth:g}", f"{quality.perplexity:.2f}", f"{quality.divergence:.4f}", str(syncs), *rates
        )
    print("\nThe demo model on two ranks")
    Console(width=80, highlight=False).print(table)
    print()
