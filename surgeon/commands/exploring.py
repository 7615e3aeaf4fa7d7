"""An exploration under way, as `surgeon.explore` begins it.

It goes in rounds of fixed sizes, each on more text and with finer stretches than the one before, until the minutes are
over. The page has what there is after the first pass, and again whenever there is much more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from surgeon.analysis.cells import SCANNED
from surgeon.analysis.scan import rounds as rounds_of
from surgeon.commands.calibrate import calibrate
from surgeon.commands.check import RANKS, check
from surgeon.commands.next_steps import NextSteps
from surgeon.commands.predict import predict
from surgeon.commands.report import ReportPage, report
from surgeon.commands.scan import scan
from surgeon.commands.search import search
from surgeon.commands.similarity import similarity
from surgeon.cost.hardware import Hardware
from surgeon.cost.hardware_file import hardware_of, load_hardware
from surgeon.findings.check import NO, Check
from surgeon.findings.explore import BUSY, Exploration
from surgeon.findings.prediction import Predictions
from surgeon.findings.result import RunResult
from surgeon.findings.scan import Scan
from surgeon.findings.search import SearchRun
from surgeon.findings.similarity import Similarity
from surgeon.opened import Model
from surgeon.processes.files import make_folder, write_text
from surgeon.progress import TimeOver, clock, time_limit
from surgeon.quality.data import load_windows, window_for
from surgeon.threads import usable_cores
from surgeon.words import known, number, plural

MAPS = (*SCANNED, "lp")
SPACES = {"pair": "pair", "drop": "drop:layers"}  # what a knee is looked for in, by what a check calls it
PAGE = "explore.html"
KNEE = "knee.yaml"
HERE = "this-machine.yaml"
BATCHES = (1, 8)  # that are predicted
_OF_EDITS = 2  # layers: the coarsest grid of a scan that has stretches as short as edits
_TRYING = 0.6  # of the time that is left, for trials; winners are measured again behind them
_DRAWING = 6.0  # seconds that a page takes, on processors that are free, until one was drawn
_DRAWN = 0.1  # of the time, at most, for that first page
_SELDOM = 5  # times as long as a page takes, until there is another one
_MEASURING = 0.3  # of the time that is left, for measuring this machine
_PROBE = 0.2  # seconds, to see how much of the processors is free

# Of a round: tokens of the text, in how many places stretches begin at least, trials for each layer.
SIZES = ((256, 3, 1), (1024, 6, 2), (2048, 12, 4), (4096, 24, 8), (8192, math.inf, 8))
WINDOWS = 16
SHORTEST = 64  # that a text is cut into; tokens of the shortest window


@dataclass(frozen=True)
class ExploreRound:
    """What a round measures on.

    Attributes:
        tokens: of the text, in windows of `window`; a search holds out as many.
        every: stretches of layers begin at its multiples, and their lengths are such.
        trials: of the search, at most.
    """

    number: int
    tokens: int
    window: int
    every: int
    trials: int

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"round-{self.number}"


def plan_rounds(layers: int, window: int, text: int) -> list[ExploreRound]:
    """The rounds for a model of so many layers, the smallest first.

    Args:
        window: the longest that the model may get.
        text: tokens that there are.
    """
    rounds = []
    for count, (tokens, places, trials) in enumerate(SIZES, start=1):
        most = min(tokens, text // 2)
        longest = min(window, max(SHORTEST, most // WINDOWS))
        every = 1 << int(math.log2(max(1.0, layers / places)))  # a power of 2, so that finer grids hold coarser ones
        rounds.append(ExploreRound(count, most // longest * longest, longest, every, trials * layers))
    return rounds


def rounds_for(model: Model, data: str, separator: str | None) -> list[ExploreRound]:
    """The rounds that a text is long enough for.

    Raises:
        ValueError: if it is too short for the first.
    """
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
        record: as in explore.json; `passes` are those that the page shows, `done` all that came to their end.
        steps: by name, what was done and the seconds that it took, in all calls.
        begun: when this call began, by `time.monotonic`.
        before: seconds that earlier calls took.
        drawing: seconds that the page takes.
        undrawn: seconds that was measured for what it does not have.
    """

    model: Model
    data: str
    checked: Check
    folder: Path
    rounds: list[ExploreRound]
    record: dict[str, Any]
    machines: list[Hardware]
    say: Callable[[str], Any]
    begun: float
    steps: dict[str, tuple[str, float]] = field(default_factory=dict)
    before: float = 0.0
    drawing: float = 0.0
    undrawn: float = math.inf
    left_out: dict[str, str] = field(default_factory=dict)
    predictions: list[Predictions] = field(default_factory=list)
    drafts: dict[str, bool] = field(default_factory=dict)  # by recipe: whether its program can draft
    page: ReportPage = field(init=False)

    def go_on_with_the_folder(self) -> None:
        """Take in what the folder has.

        Raises:
            ValueError: if that is of something else.
        """
        make_folder(self.folder)
        self.record |= {"done": [], "free": 1.0}
        self._watch_other_work()
        self.drawing = min(_DRAWING / self.record["free"], _DRAWN * 60 * float(self.record["minutes"]))
        if not (self.folder / Exploration.RECORD).is_file():
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
        self.before = earlier.spent

    @property
    def spent(self) -> float:
        """Seconds."""
        return self.before + time.monotonic() - self.begun

    @property
    def left(self) -> float:
        """Seconds until pictures and the page have to be drawn; below 0 where it took longer."""
        return 60 * float(self.record["minutes"]) - self.spent - 2 * self.drawing

    def _works(self, area: str, names: Sequence[str]) -> list[str]:
        verdicts = self.checked.of_area(area)
        return [name for name in names if name in verdicts and verdicts[name].works != NO]

    @property
    def maps(self) -> list[str]:
        """Of the scan, those that work with the model."""
        return self._works("scan", MAPS)

    @property
    def spaces(self) -> list[str]:
        """Of the search, those that work with the model."""
        return [SPACES[name] for name in self._works("search", [*SPACES])]

    def measure(self, one: ExploreRound) -> None:
        """Do what is not done yet of a round, until the time is over."""
        folder = self.folder / one.name
        text: dict[str, Any] = {"tokens": one.tokens, "window": one.window}
        text |= {"separator": self.record["separator"], "memory": self.record["memory"]}
        size = f"{one.tokens:,} tokens"
        if self.maps:
            screened = len(rounds_of(one.tokens // one.window)) > 1
            if one.every == 1:
                grid = "every stretch"
            else:
                grid = f"stretches of every {one.every} layers"
            asked: dict[str, Any] = {"operations": self.maps, "every": one.every, "screen": screened}
            self._do(one, "scan", f"{grid}, {size}", lambda at: scan(self.model, self.data, at, **asked, **text))
        if self._works("scan", ["similarity"]):
            using = folder / "scan" if f"{one.name}/scan" in self.record["done"] else None
            self._do(
                one,
                "similarity",
                f"what each layer owes to the one before, {size}",
                lambda at: similarity(self.model, self.data, at, scan=using, **text),
            )
        if self.spaces:
            names = ("scan", "similarity") if one.every <= _OF_EDITS else ("similarity",)
            passes = [folder / name for name in names if f"{one.name}/{name}" in self.record["done"]]
            self._do(
                one,
                "search",
                f"the depth at which quality breaks off, {size}",
                lambda at: search(
                    self.model,
                    self.data,
                    at,
                    one.trials,
                    space=self.spaces,
                    using=passes,
                    minutes=max(1.0, _TRYING * self.left) / 60,
                    **text,
                ),
            )
        if one.number == 2 and self.left > 0:
            self._measure_machine()

    def _do(self, one: ExploreRound, name: str, what: str, work: Callable[[Path], RunResult]) -> None:
        """Do a pass of a round, unless it is done or the time is over, and draw what there is now and then."""
        step = f"{one.name}/{name}"
        if step in self.record["done"] or self.left <= 0:
            return
        self._watch_other_work()
        did = "the time was over before its end"
        start = self._begin(name, what)
        try:
            with time_limit(self.left):
                found = work(self.folder / step)
            did = f"{_in_words(found)}, {what}"
            if not found.record.get("cells_missing"):
                self.record["done"].append(step)
        except TimeOver:
            pass
        finally:
            self._end(f"{name} {one.number}", did, start)
        self.undrawn += time.monotonic() - start
        if self.undrawn >= _SELDOM * self.drawing:
            self.draw()

    def _watch_other_work(self) -> None:
        """Note how much of the processors other work leaves, and say it once where that is little."""
        free = _free_share()
        if free < BUSY <= self.record["free"]:
            self.say(f"other work slows this machine: {free:.0%} of its processors are free; going on with these")
        self.record["free"] = min(self.record["free"], round(free, 2))

    def _begin(self, name: str, what: str) -> float:
        self.say(f"[{clock(self.spent)} of {clock(60 * self.record['minutes'])}] {name}: {what}")
        return time.monotonic()

    def _end(self, name: str, did: str, start: float) -> None:
        """Note what a step did, and its time, also of one that is interrupted."""
        self.steps[name] = did, self.steps.get(name, ("", 0.0))[1] + time.monotonic() - start
        self._run().write(self.folder)

    def _run(self) -> Exploration:
        """What there is, as of now."""
        rows = [(name, did, round(seconds, 1)) for name, (did, seconds) in self.steps.items()]
        left_out = [f"{name}: {why}" for name, why in self.left_out.items()]
        record = self.record | {"spent": round(self.spent, 1), "left_out": left_out}
        return Exploration(pd.DataFrame(rows, columns=["step", "did", "seconds"]), record=record)

    def _measure_machine(self) -> None:
        """Measure this machine, unless its figures are known, where there is time for it."""
        ranks = [count for count in (1, 2) if self._works("ranks", [plural(count, "rank")])]
        if self._here() is not None or 1 not in ranks:
            return
        did = "a part of the time was not enough to measure it"
        start = self._begin("machine", "what it can do")
        try:
            with time_limit(_MEASURING * self.left):
                calibrate(self.model, self.folder / HERE, ranks=ranks, rounds=1)
            did = f"measured on up to {plural(max(ranks), 'rank')}: {self.folder / HERE}"
        except TimeOver:
            pass
        except ValueError as error:  # the little that was measured makes no hardware, or ranks are none here
            did = f"it could not be measured: {error}"
        finally:
            self._end("machine", did, start)

    def _here(self) -> Hardware | None:
        """This machine, if it has GPUs that are described here or was measured."""
        if torch.cuda.is_available() and (name := hardware_of(torch.cuda.get_device_name())):
            return load_hardware(name)
        if (self.folder / HERE).is_file():
            return load_hardware(self.folder / HERE)
        return None

    def _last(self, name: str) -> Path | None:
        """The folder of a pass, as its last round has left it."""
        done = [one for one in self.record["done"] if one.endswith(f"/{name}")]
        if not done:
            return None
        last: str = done[-1]
        return self.folder / last

    def _scan(self) -> Scan | None:
        """The scan with the most cells, of which the last one may be without an end."""
        folders = sorted(self.folder.glob("round-*/scan"))
        found = [Scan.read(one, self.model.hash) for one in folders if (one / Scan.RECORD).is_file()]
        return max(reversed(found), key=lambda one: len(one.cells), default=None)

    def _similarity(self) -> Similarity | None:
        folder = self._last("similarity")
        if folder is None:
            return None
        return Similarity.read(folder, self.model.hash)

    def _search(self) -> SearchRun | None:
        folder = self._last("search")
        if folder is None:
            return None
        return SearchRun.read(folder, self.model.hash)

    def draw(self) -> None:
        """Put all that there is on the page, with what to do next."""
        start = time.monotonic()
        scanned = self._scan()
        similar = self._similarity()
        found = self._search()
        if found is not None:
            write_text(self.folder / KNEE, found.recipe_text)
        self._predict(None if found is None else self.folder / KNEE)
        self._leave_out(scanned, similar, found)
        passes = [one.files[0].parent for one in (scanned, similar, found, *self.predictions) if one is not None]
        self.record["passes"] = [str(one.relative_to(self.folder)) for one in passes]
        measured = [one.record for one in (found, scanned, similar) if one is not None]
        self.record["plan"] = {"tokens": measured[0]["tokens"], "window": measured[0]["window"]} if measured else {}
        self.record["next"] = [vars(one) for one in self._next(scanned, found).all()]
        self._run().write(self.folder)
        self.page = report(self.folder, self.folder / PAGE)
        self.undrawn = 0.0
        self.drawing = time.monotonic() - start

    def _next(self, scanned: Scan | None, found: SearchRun | None) -> NextSteps:
        """What is worth doing next."""
        able = [count for count in RANKS if self._works("ranks", [plural(count, "rank")])]
        devices = torch.cuda.device_count() or usable_cores()
        ranks = max((count for count in able if count <= devices), default=1)
        knee = self.folder / KNEE
        if found is not None and found.recipe_text not in self.drafts:
            drafting = check(self.model, ranks=[ranks], draft=knee).of_area("ranks")
            self.drafts[found.recipe_text] = "draft" in drafting and drafting["draft"].works != NO
        return NextSteps(
            self.record,
            self.folder,
            knee,
            self.checked,
            scanned,
            found,
            self.spaces,
            ranks,
            max(able, default=1),
            drafts=found is not None and self.drafts[found.recipe_text],
            can_go_on=f"{self.rounds[-1].name}/search" not in self.record["done"],
        )

    def _predict(self, knee: Path | None) -> None:
        """What the model and the program at the knee would cost on this machine, and on what was asked for."""
        here = self._here()
        machines = {one.name: one for one in [*([] if here is None else [here]), *self.machines]}
        self.predictions = []
        for machine in machines.values():
            start = time.monotonic()
            folder = self.folder / "predict" / machine.name
            most = 2 if machine.name == Path(HERE).stem else machine.devices
            axes = {"ranks": [count for count in RANKS if count <= most], "batch": BATCHES}
            try:
                made = predict(self.model, machine, compare=[] if knee is None else [knee], sweep=axes, output=folder)
            except ValueError as error:  # of what cannot be predicted of any program of this model
                self.left_out[f"predictions on {machine.name}"] = str(error)
                continue
            # Predictions read no weights; here they are known, and the page has it with what was measured of them.
            made = replace(made, record=made.record | {"model_hash": self.model.hash})
            made.write(folder)
            self.predictions.append(made)
            self.steps[f"on {machine.name}"] = _fastest(made), time.monotonic() - start

    def _leave_out(self, scanned: Scan | None, similar: Similarity | None, found: SearchRun | None) -> None:
        """Note what there is nothing of, and why."""
        late = "the time was over before its end; with more --minutes the same command goes on"
        compares = self._works("scan", ["similarity"])
        reasons = {
            "scan": (scanned, late if self.maps else "no map works with this model (surgeon check says why)"),
            "similarity": (similar, late if compares else "it does not work with this model (surgeon check says why)"),
            "search": (found, late if self.spaces else "layers can neither be paired nor left out (surgeon check)"),
            "this machine": (self._here(), "its speed is not known; surgeon calibrate measures it"),
        }
        self.left_out = {name: why for name, (there, why) in reasons.items() if there is None} | {
            name: why for name, why in self.left_out.items() if name not in reasons
        }

    def end(self) -> Exploration:
        """What was found, which the page has."""
        run = self._run()
        return Exploration(
            run.steps,
            checked=self.checked,
            scan=self._scan(),
            similarity=self._similarity(),
            search=self._search(),
            predictions=self.predictions,
            page=self.page,
            record=run.record,
            files=(self.folder / PAGE, *run.files),
        )


def _free_share() -> float:
    """The share of the processors that torch computes with which is free for this process, as tried for a moment."""
    matrix = torch.ones(512, 512)
    start = time.monotonic()
    used = time.process_time()
    while (seconds := time.monotonic() - start) < _PROBE:
        torch.mm(matrix, matrix)
    return min(1.0, max(0.01, (time.process_time() - used) / seconds / torch.get_num_threads()))


def _in_words(found: RunResult) -> str:
    """What a pass gave."""
    if isinstance(found, Scan):
        missing = found.record.get("cells_missing", 0)
        left = f" ({missing:,} left when the time was over)" if missing else ""
        return f"{plural(len(found.cells), 'cell')}{left}, base perplexity {number(found.base_perplexity)}"
    if isinstance(found, SearchRun):
        best = found.record["best"]
        quality = f"divergence {known(best, 'divergence')}, perplexity {number(best['perplexity'])}"
        return f"{plural(len(found.trials), 'trial')}; {best['why'][:1].lower()}{best['why'][1:]}: {quality}"
    return "CKA, block influence and angles"


def _fastest(predicted: Predictions) -> str:
    """Where the compared program wins most, or how fast the model is where there is none."""
    table = predicted.speeds[predicted.speeds["fits"] == 1]
    if table.empty:
        return "nothing fits into its memory"
    compared = table[table["program"] != predicted.speeds["program"].iloc[0]]
    by = "tokens_per_second" if compared.empty else "tokens_per_second_speedup"
    best = (table if compared.empty else compared).sort_values(by, ascending=False).iloc[0]
    where = f"on {plural(int(best['ranks']), 'rank')} with batch {int(best['batch'])}"
    if compared.empty:
        return f"{number(float(best[by]), 3)} tokens/s {where}"
    return f"{best['program']}: {number(float(best[by]), 3)} times the model's tokens/s {where}"
