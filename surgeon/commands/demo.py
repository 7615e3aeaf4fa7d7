"""`surgeon demo`: the whole way from a trained model to a faster one, on the one that ships with surgeon or another."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

from surgeon.commands.command import command, option
from surgeon.words import WIDTH, plural

if TYPE_CHECKING:
    from surgeon.opened import Model

DEMO = "demo"
PROMPT = "def close(self):"
RANKS = 2
PROMPT_TOKENS = 8  # where speed is measured, of random tokens
LADDER = "surgeon: 1\nmodel: {}\noperations:\n  - ladder: {{layers: '{}'}}\n"
OF_OTHERS: dict[str, Any] = {"operations": "prune,lp", "every": 2}  # in the scan of another model
NEXT = (
    (
        "what it can spare, within ten minutes, on one page with what to do next",
        "explore MODEL --data text.txt",
    ),
    (
        "which of its layers to run in pairs, for four fifths of its depth",
        'search MODEL --data text.txt --budget "depth<=0.8x" -o runs/search',
    ),
    (
        "the faster model as a checkpoint, for surgeon serve, transformers, vLLM",
        "export runs/search/recipe.yaml -o runs/faster",
    ),
)


@dataclass(frozen=True)
class Effort:
    """Tokens of text, in windows of some length (None: the default); trials; and the size of the speed measurements."""

    tokens: int
    window: int | None
    trials: int
    new_tokens: int
    rounds: int

    @property
    def text(self) -> str:
        text = f"--data demo --tokens {self.tokens}"
        if self.window is not None:
            text += f" --window {self.window}"
        return text


QUICK = Effort(tokens=512, window=128, trials=12, new_tokens=16, rounds=2)
OTHER = replace(QUICK, tokens=256, window=64)
FULL = Effort(tokens=2048, window=None, trials=40, new_tokens=64, rounds=3)


@command(lambda call: call())
def demo(
    output: Annotated[
        Path | None,
        option(
            "Folder for everything the demo makes. Default: quick or full in demo-output, another model's by its name.",
            "--output",
            "-o",
        ),
    ] = None,
    model: Annotated[
        str,
        option(
            "Another model, a folder, a .gguf file or a hub name; takes as long as its size makes it."
        ),
    ] = DEMO,
    depth: Annotated[
        int | None,
        option(
            "Effective depth to search for. Default: four fifths of the layers; 12 of the demo model's 16.",
            least=1,
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        option(
            f"Tokens to measure on. Default: {QUICK.tokens}, or {OTHER.tokens} of another model, or {FULL.tokens} with "
            "--full."
        ),
    ] = None,
    trials: Annotated[
        int | None,
        option(f"Trials of the search. Default: {QUICK.trials}, or {FULL.trials} with --full.", least=1),
    ] = None,
    full: Annotated[
        bool, option("Measure on more text and for longer; takes four times as long.")
    ] = False,
) -> None:
    """Scan, search, export and generate on several ranks, with a small model that ships with surgeon, or another.

    Needs no network, and about a minute on two cores. Every command is shown before it runs, so that it can be typed
    again for another model. Interrupted, the same command goes on where it was.
    """
    from surgeon.commands.report import report
    from surgeon.language.recipe import read_recipe
    from surgeon.opened import open_model

    opened = open_model(model)
    layers = opened.num_layers
    if depth is not None and depth >= layers:
        raise ValueError(
            f"{opened.label} has depth {layers} already; ask for less than that, not {depth}"
        )
    name = "quick"
    effort = QUICK
    if opened.name != DEMO:
        effort = OTHER
    if full:
        name = "full"
        effort = FULL
    if opened.name != DEMO:
        name = f"{opened.label}-{name}"
    wanted = {"tokens": tokens, "trials": trials}
    effort = replace(effort, **{name: value for name, value in wanted.items() if value is not None})
    steps = DemoSteps(output or Path("demo-output") / name, effort, opened)
    steps.scan()
    found = steps.search(layers * 4 // 5 if depth is None else depth)
    ladder = steps.folder / "ladder.yaml"
    late = f"{layers // 2}:{layers}"
    ladder.write_text(LADDER.format(json.dumps(opened.reference), late), encoding="utf-8")
    fused = steps.export("3. Write what was found as a checkpoint", found, "lp")
    laddered = steps.export("   And a ladder over the upper half", ladder, "ladder")
    steps.generate(fused)
    pairs = "LP pairs " + " ".join(one.layers_text for one in read_recipe(found).operations)
    steps.compare(
        [("dense", None, opened.name), (pairs, found, fused), (f"ladder {late}", ladder, laddered)]
    )
    runs = [steps.folder / name for name in ("scan", "search", "lp", "ladder")]
    page = report(runs, steps.folder / "report.html")
    print(
        f"\nThe page    {page.file}\nPictures    {steps.folder}/*/*.png\n\nWith a model of your own, next:"
    )
    for purpose, typed in NEXT:
        print(f"\n  # {purpose}\n  surgeon {typed}")


@dataclass(frozen=True)
class DemoSteps:
    """The demo's steps; each shows its command, runs it, and prints the result."""

    folder: Path
    effort: Effort
    model: Model

    def scan(self) -> None:
        from surgeon.commands.scan import scan

        output = self.folder / "scan"
        effort = self.effort
        chosen: dict[str, Any] = {}
        typed = ""
        if self.model.name != DEMO:
            chosen = OF_OTHERS
            typed = " --operation {operations} --every {every}".format(**chosen)
        _announce(
            "1. Which stretches of layers can it spare?",
            f"scan {quote(self.model.name)} {effort.text}{typed} -o {quote(str(output))}",
        )
        found = scan(self.model, DEMO, output, tokens=effort.tokens, window=effort.window, **chosen)
        for finding in found.summary():
            _say(f"{finding.lead}: {finding.text}")
        print(output / "heatmaps.png")

    def search(self, depth: int) -> Path:
        from surgeon.commands.search import search

        output = self.folder / "search"
        effort = self.effort
        budget = f"depth={depth}"
        _announce(
            f"2. Which layers should run in pairs, for a depth of {depth}?",
            f"search {quote(self.model.name)} --budget {budget} {effort.text} --trials {effort.trials} "
            f"-o {quote(str(output))}",
        )
        found = search(
            self.model,
            DEMO,
            output,
            effort.trials,
            budget=budget,
            tokens=effort.tokens,
            window=effort.window,
        )
        for finding in found.summary():
            _say(finding.text)
        print(output / "recipe.yaml")
        return output / "recipe.yaml"

    def export(self, purpose: str, recipe: Path, name: str) -> Path:
        from surgeon.commands.export import export

        output = self.folder / name
        _announce(purpose, f"export {quote(str(recipe))} -o {quote(str(output))} --overwrite")
        found = export(recipe, output, overwrite=True)
        _say(f"{found.form} form: {found.reason}.")
        _say(str(found))
        print(output, flush=True)
        return output

    def generate(self, model: Path) -> None:
        from surgeon.commands.generate import generate

        new = self.effort.new_tokens * 2
        _announce(
            f"4. Let it write, on {plural(RANKS, 'rank')}",
            f"generate {quote(str(model))} --prompt {quote(PROMPT)} --max-new-tokens {new} --tp {RANKS}",
        )

        def show(_: Any, event: Any) -> None:
            print(event.text, end="", flush=True)

        print(PROMPT, end="")
        found = generate(model, PROMPT, max_new_tokens=new, ranks=RANKS, on_event=show)
        print("\n")
        for line in str(found).splitlines():
            _say(line, " " * 9)

    def compare(self, contenders: Sequence[tuple[str, Path | None, str | Path]]) -> None:
        """Print quality and speed of each: a name, a recipe (None: unchanged), and a model to run."""
        from surgeon.analysis.subject import open_subject
        from surgeon.commands.bench import bench
        from surgeon.findings.result import Table
        from surgeon.opened import open_edited
        from surgeon.runtime.worker.rank import RankOptions
        from surgeon.searches.evaluate import Evaluator

        effort = self.effort
        subject = open_subject(self.model, DEMO, tokens=effort.tokens, window=effort.window)
        programs = [open_edited(recipe or self.model).program for _, recipe, _ in contenders]
        measured = Evaluator(subject.model, subject.windows).measure(programs)
        rows = []
        for (name, _, _), program in zip(contenders, programs, strict=True):
            quality = measured[program]
            numbers = (
                f"{quality.perplexity:.2f}",
                f"{quality.divergence:.4f}",
                str(program.sync_points(RANKS)),
            )
            rows.append([name, f"{program.effective_depth():g}", *numbers])
        head = ["program", "depth", "perplexity", "divergence", "syncs"]
        others = [model for _, _, model in contenders[1:]]
        compared = " ".join(f"--compare {quote(str(one))}" for one in others)
        load: Any = {"prompt": PROMPT_TOKENS, "new": effort.new_tokens, "rounds": effort.rounds}
        options = " ".join(f"--{name} {value}" for name, value in load.items())
        for purpose, wanted in (
            ("5. How fast is each, over the fastest connection", "auto"),
            ("   And over a slow one", "gloo"),
        ):
            ranks = RankOptions(RANKS, "auto", wanted)
            way = ranks.collectives
            _announce(
                f"{purpose}, {way}?",
                f"bench {quote(self.model.name)} {compared} --tp {RANKS} {options} --collectives {way}",
            )
            head.append(f"tokens/s, {way}")
            results = bench(self.model, compare=others, ranks=ranks, **load).results
            # The fastest rounds, which others disturbed least.
            for row, result in zip(rows, results, strict=True):
                row.append(f"{1 / min(one.per_token for one in result.rounds):.0f}")
        note = (
            "Divergence is KL(original || changed) in nats per token; syncs are all-reduces of a token. The slower "
            "these are, the more it is worth to have fewer of them."
        )
        what = self.model.label
        if self.model.name == DEMO:
            what = "The demo model"
        print(f"\n{Table(f'{what} on {RANKS} ranks', head, rows, note)}")


def _announce(purpose: str, command: str) -> None:
    lines = textwrap.wrap(
        f"$ surgeon {command}", WIDTH - 2, subsequent_indent="    ", break_on_hyphens=False
    )
    print(f"\n{purpose}\n" + " \\\n".join(lines), file=sys.stderr, flush=True)


def _say(text: str, indent: str = "") -> None:
    print(textwrap.fill(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False), flush=True)
