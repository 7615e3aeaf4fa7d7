"""An exploration under way, as `surgeon.explore` begins it.

It goes in rounds of fixed sizes, each on more text and with finer stretches than the one before, until the minutes are
over. The page is written behind each round, and at the end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple, TypeVar

import pandas as pd
import torch

from surgeon.analysis.scan import SCANNED
from surgeon.analysis.scan import rounds as rounds_of
from surgeon.commands.check import RANKS, check
from surgeon.commands.report import report
from surgeon.commands.scan import scan
from surgeon.commands.search import search
from surgeon.commands.similarity import similarity
from surgeon.findings.check import NO, Check
from surgeon.findings.explore import Exploration, NextStep
from surgeon.findings.result import RunResult
from surgeon.findings.scan import Scan
from surgeon.findings.search import SearchResult
from surgeon.findings.similarity import Similarity
from surgeon.machine import usable_cores
from surgeon.opened import Model
from surgeon.processes.files import make_folder, write_text
from surgeon.progress import TimeOver, clock, time_limit
from surgeon.quality.data import load_windows, window_for
from surgeon.quality.sources import DEMO
from surgeon.words import plural

Found = TypeVar("Found", bound=RunResult)

MAPS = (*SCANNED, "lp")
SPACES = {"pair": "pair", "drop": "drop:layers"}  # by what a check calls it
PAGE = "explore.html"
KNEE = "knee.yaml"
STEPS = 100  # of healing: enough to see what it brings
LONGER = 6  # times the minutes, to explore on
_OF_EDITS = 2  # layers: the coarsest grid of a scan that has stretches as short as edits
_TRYING = 0.6  # of the time that is left, for trials; winners are measured again behind them
_DRAWING = 10.0  # seconds kept for the last page, but no more than a tenth of the time

# Of a round: tokens of the text, in how many places stretches begin at least, trials for each layer.
SIZES = ((256, 3, 1), (1024, 6, 2), (2048, 12, 4), (4096, 24, 8), (8192, math.inf, 8))
WINDOWS = 16
SHORTEST = 64  # that a text is cut into; tokens of the shortest window


class ExploreRound(NamedTuple):
    """The sizes of a round.

    Attributes:
        tokens: of the text, in windows of `window`; a search holds out as many.
        every: stretches of layers begin at its multiples, and their lengths are such.
        trials: of the search, at most.
    """

    name: str
    tokens: int
    window: int
    every: int
    trials: int


def plan_rounds(layers: int, window: int, text: int) -> list[ExploreRound]:
    """Plan the rounds for a model of so many layers and a text of so many tokens, the smallest first."""
    rounds = []
    for count, (tokens, places, trials) in enumerate(SIZES, start=1):
        most = min(tokens, text // 2)
        longest = min(window, max(SHORTEST, most // WINDOWS))
        # A power of 2, so that finer grids hold coarser ones.
        every = 1 << int(math.log2(max(1.0, layers / places)))
        rounds.append(
            ExploreRound(f"round-{count}", most // longest * longest, longest, every, trials * layers)
        )
    return rounds


def rounds_for(model: Model, data: str, separator: str | None) -> list[ExploreRound]:
    """Plan the rounds that a text is long enough for."""
    least = 2 * SIZES[0][0]
    most = 2 * SIZES[-1][0]
    there = load_windows(model.tokenizer, data, 2, most, separator, at_most=True).ids.numel()
    if there < least:
        raise ValueError(
            f"{data} has {there:,} tokens, and exploring takes {least:,} at least: half of them to measure on, and "
            "half held out to judge by; give a longer text"
        )
    return plan_rounds(model.num_layers, window_for(model.config, None), there)


@dataclass
class Exploring:
    """An exploration under way.

    Attributes:
        record: as in explore.json; `passes` are those of the page, `done` all that came to their end.
        begun, before: when this call began, by `time.monotonic`, and seconds of earlier calls.
        steps: by name, their results and seconds, in all calls.
    """

    model: Model
    data: str
    checked: Check
    folder: Path
    rounds: list[ExploreRound]
    record: dict[str, Any]
    say: Callable[[str], Any]
    begun: float
    before: float = 0.0
    steps: dict[str, tuple[str, float]] = field(default_factory=dict)

    def resume(self) -> None:
        """Take in the folder's steps, which must be of the same model and text."""
        make_folder(self.folder)
        self.record["done"] = []
        if not (self.folder / Exploration.RECORD).is_file():
            self.steps["check"] = self.checked.described["model"], time.monotonic() - self.begun
            return
        earlier = Exploration.read(self.folder, self.model.hash)
        for name in ("data", "separator"):
            if earlier.record.get(name) != self.record[name]:
                raise ValueError(
                    f"{self.folder} holds an exploration with another {name}: {earlier.record.get(name)!r}, not "
                    f"{self.record[name]!r}; give another output folder"
                )
        self.record["done"] = [*earlier.record.get("done", ())]
        rows = earlier.steps.to_dict("records")
        self.steps = {str(row["step"]): (str(row["did"]), float(row["seconds"])) for row in rows}
        self.before = earlier.seconds_spent

    def run(self) -> Exploration:
        """Measure round by round until the time is over, with a page behind each."""
        found = None
        for one in self.rounds:
            if self.measure(one):
                found = self.draw()
        return found or self.draw()

    @property
    def seconds_spent(self) -> float:
        return self.before + time.monotonic() - self.begun

    @property
    def seconds_left(self) -> float:
        """Seconds until the last page has to be drawn; below 0 where it took longer."""
        whole = 60 * float(self.record["minutes"])
        return whole - self.seconds_spent - min(_DRAWING, whole / 10)

    def _works(self, area: str, names: Sequence[str]) -> list[str]:
        verdicts = self.checked.of_area(area)
        return [name for name in names if name in verdicts and verdicts[name].works != NO]

    @property
    def maps(self) -> list[str]:
        return self._works("scan", MAPS)

    @property
    def spaces(self) -> list[str]:
        return [SPACES[name] for name in self._works("search", [*SPACES])]

    def measure(self, one: ExploreRound) -> bool:
        """Do the rest of a round, until the time is over; returns whether there was any."""
        begun = False
        for name, what, work in self._passes(one):
            if f"{one.name}/{name}" not in self.record["done"] and self.seconds_left > 0:
                begun = True
                said = f"{what}, {one.tokens:,} tokens"
                self.say(
                    f"[{clock(self.seconds_spent)} of {clock(60 * self.record['minutes'])}] {name}: {said}"
                )
                start = time.monotonic()
                row = f"{name} {one.name.removeprefix('round-')}"
                did = "the time was over before its end"
                try:
                    with time_limit(self.seconds_left):
                        found = work(self.folder / one.name / name)
                    did = f"{said}: {_figures(found)}"
                    if not found.record.get("cells_missing"):
                        self.record["done"].append(f"{one.name}/{name}")
                except TimeOver:
                    pass
                finally:
                    self.steps[row] = did, self.steps.get(row, ("", 0.0))[1] + time.monotonic() - start
                    self._so_far().write(self.folder)
        return begun

    def _passes(self, one: ExploreRound) -> Iterator[tuple[str, str, Callable[[Path], RunResult]]]:
        """The passes of a round that work with the model: name, purpose, the call that makes it in a folder."""
        text: dict[str, Any] = {"tokens": one.tokens, "window": one.window}
        text |= {"separator": self.record["separator"], "memory": self.record["memory"]}

        def earlier(*names: str) -> list[Path]:
            return [
                self.folder / one.name / name
                for name in names
                if f"{one.name}/{name}" in self.record["done"]
            ]

        if self.maps:
            grid = "every stretch" if one.every == 1 else f"stretches of every {one.every} layers"
            maps: dict[str, Any] = {"operations": self.maps, "every": one.every}
            maps["screen"] = len(rounds_of(one.tokens // one.window)) > 1
            yield "scan", grid, lambda at: scan(self.model, self.data, at, **maps, **text)
        if self._works("scan", ["similarity"]):
            using = next(iter(earlier("scan")), None)
            what = "what each layer owes to the one before"
            yield (
                "similarity",
                what,
                lambda at: similarity(self.model, self.data, at, scan=using, **text),
            )
        if self.spaces:
            names = ("scan", "similarity") if one.every <= _OF_EDITS else ("similarity",)
            asked: dict[str, Any] = {"space": self.spaces, "using": earlier(*names)}
            asked["minutes"] = max(1.0, _TRYING * self.seconds_left) / 60
            what = "the depth at which quality breaks off"
            yield (
                "search",
                what,
                lambda at: search(self.model, self.data, at, one.trials, **asked, **text),
            )

    def _so_far(self, **found: Any) -> Exploration:
        rows = [(name, did, round(seconds, 1)) for name, (did, seconds) in self.steps.items()]
        steps = pd.DataFrame(rows, columns=["step", "did", "seconds"])
        return Exploration(steps, record=self.record | {"spent": round(self.seconds_spent, 1)}, **found)

    def draw(self) -> Exploration:
        scanned = self._scan()
        similar = self._last(Similarity)
        found = self._last(SearchResult)
        if found is not None:
            write_text(self.folder / KNEE, found.recipe_text)
        passes = {"scan": scanned, "similarity": similar, "search": found}
        late = "the time was over before its end; with more --minutes the same command goes on"
        reasons = dict.fromkeys(passes, late)
        if not self.maps:
            reasons["scan"] = "no map works with this model (surgeon check says why)"
        if not self._works("scan", ["similarity"]):
            reasons["similarity"] = "it does not work with this model (surgeon check says why)"
        if not self.spaces:
            reasons["search"] = "layers can neither be paired nor left out (surgeon check)"
        measured = [one for one in passes.values() if one is not None]
        shown = [one.files[0].parent for one in measured]
        self.record["passes"] = [str(folder.relative_to(self.folder)) for folder in shown]
        self.record["plan"] = {
            name: measured[-1].record[name] for name in ("tokens", "window") if measured
        }
        self.record["left_out"] = [
            f"{name}: {reasons[name]}" for name, one in passes.items() if one is None
        ]
        self.record["next"] = [vars(one) for one in self.next_steps(scanned, found)]
        self._so_far().write(self.folder)
        page = report(self.folder, self.folder / PAGE)
        return self._so_far(checked=self.checked, page=page, files=(page.file,), **passes)

    def _scan(self) -> Scan | None:
        """The scan with the most cells; the last one may be unfinished."""
        folders = sorted(self.folder.glob("round-*/scan"))
        found = [Scan.read(one, self.model.hash) for one in folders if (one / Scan.RECORD).is_file()]
        return max(reversed(found), key=lambda one: len(one.cells), default=None)

    def _last(self, kind: type[Found]) -> Found | None:
        done = [one for one in self.record["done"] if one.endswith(f"/{kind.COMMAND}")]
        if done:
            return kind.read(self.folder / done[-1], self.model.hash)
        return None

    def next_steps(self, scanned: Scan | None, found: SearchResult | None) -> Iterator[NextStep]:
        """The commands that go on from here and that this model can take, in order."""
        model = quote(self.record["model"])
        text = f"--data {quote(self.record['data'])}"
        if self.record["separator"] is not None:
            text += f" --separator {quote(self.record['separator'])}"
        memory = ""
        if self.record["memory"] is not None:
            memory = f" --memory {quote(str(self.record['memory']))}"
        if found is not None:
            yield from self._with_the_knee(found, model, text)
        if scanned is not None:
            base = f"surgeon scan {model} {text} {_sizes(scanned)}{memory}"
            every = scanned.record["every"]
            missing = scanned.record.get("cells_missing", 0)
            base += f" --screen -o {quote(str(scanned.files[0].parent))} --operation "
            if every == 1 and not missing:
                why = "Ladders, repeats, low ranks, widths: all that a scan knows, on the same text."
                yield NextStep("Draw the other maps", why, f"{base}all")
            else:
                why = "The maps so far have " + (
                    "every stretch" if every == 1 else f"stretches of every {every} layers"
                )
                if missing:
                    why += f", but for {plural(missing, 'cell')} for which there was no time"
                asked = ",".join(scanned.record["asked"]["operations"])
                yield NextStep(
                    "Scan every stretch of layers",
                    f"{why}; this goes on in their folder.",
                    f"{base}{asked}",
                )
        if found is not None:
            trials = found.trials.set_index("trial")
            depth = f"{float(trials['depth'][found.record['best']['trial']]):g}"
            passes = [one for one in self.record["passes"] if Path(one).name in ("scan", "similarity")]
            using = "".join(f" --using {self._at(one)}" for one in passes)
            yield NextStep(
                "Search for the best program of that depth",
                "All trials go to one depth, and what was measured so far is used.",
                f"surgeon search {model} {text} {_sizes(found)}{memory} --space {','.join(self.spaces)} "
                f"--budget depth={depth}{using} -o {self._at(f'depth-{depth}')}",
            )
        if f"{self.rounds[-1].name}/search" not in self.record["done"]:
            yield NextStep(
                "Explore on",
                "More minutes make the text longer, stretches finer and trials more; what is there is kept.",
                f"surgeon explore {model} {text} --minutes {LONGER * self.record['minutes']:g}{memory} "
                f"-o {quote(str(self.folder))}",
            )

    def _with_the_knee(self, found: SearchResult, model: str, text: str) -> Iterator[NextStep]:
        knee = self._at(KNEE)
        exported = self._at("exported")
        able = [count for count in RANKS if self._works("ranks", [plural(count, "rank")])]
        devices = torch.cuda.device_count() or usable_cores()
        ranks = max((count for count in able if count <= devices), default=1)
        on = ""
        if ranks > 1:
            on = f" --tp {ranks}"
        can_be_written = any(one.works != NO for one in self.checked.of_area("export").values())
        if can_be_written:
            yield NextStep(
                "Write the program that was found as a checkpoint",
                f"{found.record['best']['why']}. transformers loads it, vLLM where its form allows; export says "
                "which, and proves it.",
                f"surgeon export {knee} -o {exported}",
            )
            yield NextStep(
                "Serve it",
                "OpenAI's API for that checkpoint, until Ctrl-C.",
                f"surgeon serve {exported}{on}",
            )
        if can_be_written and self._works("train", ["heal edited"]):
            on_text = text
            if self.record["data"] == DEMO:
                on_text = f"--data {DEMO}:train --eval-data {DEMO}"
            yield NextStep(
                "Train back what it costs",
                "The edited layers learn what the original predicts; more steps bring back more.",
                f"surgeon heal {knee} {on_text} --distill logits --steps {STEPS} "
                f"--eval-tokens {found.record['tokens']} -o {self._at('healed')}",
            )
        yield NextStep(
            "Measure it",
            "Perplexity, divergence, and acceptance as a draft, on the text; lm-eval's tasks with --tasks.",
            f"surgeon eval {knee} {text}",
        )
        drafting = check(self.model, ranks=[ranks], draft=self.folder / KNEE).of_area("ranks")
        if "draft" in drafting and drafting["draft"].works != NO:
            yield NextStep(
                "Or lose nothing: let it draft",
                "The text stays the model's own: the edited program writes ahead, and the model verifies.",
                f"surgeon generate {model} --draft {knee}{on} --prompt 'Once upon a time'",
            )
        yield NextStep(
            "Predict it on other hardware",
            "By its shapes alone, on what surgeon predict knows by name or surgeon calibrate has measured.",
            f"surgeon predict {model} --hardware h100-sxm --compare {knee} "
            f"--sweep ranks=1..{max(able, default=1)},batch=1..64",
        )

    def _at(self, name: str) -> str:
        return quote(str(self.folder / name))


def _sizes(found: RunResult) -> str:
    return f"--tokens {found.record['tokens']} --window {found.record['window']}"


def _figures(found: RunResult) -> str:
    return "; ".join(f"{one.figure} {one.label}" for one in found.summary() if one.figure) or "done"
