"""`surgeon.explore`: what a model can spare, within some minutes, on one page with what to do next."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import torch

from surgeon.analysis.cells import SCANNED, select
from surgeon.analysis.engine.sharing import SharedPlan, share
from surgeon.analysis.pace import measure_pace
from surgeon.analysis.scan import ScanWork
from surgeon.analysis.subject import Subject, load_for_analysis
from surgeon.cost.hardware import Hardware
from surgeon.cost.hardware_file import load_hardware
from surgeon.library.calibrate import calibrate
from surgeon.library.check import RANKS, check
from surgeon.library.explored_speed import CALIBRATED, HERE, PASSES, STARTING, fastest, known_here, predict_on
from surgeon.library.exploring import UnderWay
from surgeon.library.next_steps import Explored
from surgeon.library.opening import as_folder, as_list
from surgeon.library.predict import Predictions
from surgeon.library.report import ReportPage, report
from surgeon.library.run_sizes import (
    DRAWING,
    OPENINGS,
    SIMILARITY,
    TOKENS,
    WINDOWS,
    cells,
    choose_sizes,
    coarse,
    finer,
    require_text,
    search_runs,
)
from surgeon.library.scan import scan
from surgeon.library.search import search
from surgeon.library.similarity import similarity
from surgeon.memory import parse_size
from surgeon.models.edit import as_stored
from surgeon.opened import Model, open_model
from surgeon.processes.files import write_text
from surgeon.progress import clock
from surgeon.quality.data import DEMO, load_windows, window_for
from surgeon.results.check import NO, Check
from surgeon.results.explore import ExploreRun, NextStep
from surgeon.results.scan import Scan
from surgeon.results.search import SearchRun
from surgeon.results.similarity import Similarity
from surgeon.searches.search import BATCH
from surgeon.threads import usable_cores
from surgeon.words import hanging, known, number, plural

MAPS = (*SCANNED, "lp")
SPACES = {"pair": "pair", "drop": "drop:layers"}  # what a knee is looked for in, by what a check calls it
PAGE, KNEE = "explore.html", "knee.yaml"
_OF_EDITS = 2  # layers: the coarsest grid of a scan that has stretches as short as edits
_TRIALS = 8  # for each layer, where there is time
_SHORTEST = 2  # tokens of the windows that a text is counted in
_SHARE = 0.2  # of the time that is left, which a calibration may take before there is a search
_LAST_SHARE = 0.5  # and behind it
_BUSY = 2.0  # times as slow as an idle machine: figures of it would be of other work
_LAST = 4  # runs of the model on held-out text when a search ends
_LAST_LAYER = 0.7  # and of each layer
_LAST_DRAWING = 8.0  # seconds, of the search's pictures and the page


@dataclass(frozen=True, repr=False)
class Exploration(ExploreRun):
    """What an exploration has found.

    Attributes:
        checked: what would work with the model.
        scan, similarity, search: what the passes have found; None where one cannot be done, which `left_out` says.
        predictions: what the program at the knee would cost, on the hardware found and on what was asked for.
        page: all of it.
    """

    _: KW_ONLY
    checked: Check
    scan: Scan | None
    similarity: Similarity | None
    search: SearchRun | None
    predictions: Sequence[Predictions]
    page: ReportPage


def explore(
    model: str | Path | Model,
    data: str | Path | None = None,
    output: str | Path = "runs/explore",
    *,
    minutes: float = 10,
    hardware: str | Path | Sequence[str | Path] = (),
    separator: str | None = None,
    memory: int | str | None = None,
    say: Callable[[str], Any] | None = None,
) -> Exploration:
    """Check, scan and search a model within some minutes; what the folder has already is gone on with.

    First it is measured how long the model takes here. That settles how much text, which stretches of layers and how
    many trials there is time for: a screened scan, similarity, a search for the depth at which quality breaks off (the
    knee), and predictions for the hardware found.

    Args:
        model: a folder, a hub name, "demo", or a model that is open.
        data: a text file, a table or a dataset (docs/texts.md), or "demo".
        output: folder for the page (explore.html), the recipe of the program at the knee (knee.yaml), explore.csv,
            explore.json, and a folder for each pass.
        minutes: that all of it may take, with what earlier calls on the folder took.
        hardware: what else is predicted for: names such as "h100-sxm", or files as `calibrate` writes them.
        separator: between documents of the text.
        memory: the most that the process may take, in bytes or as text ("2GB").
        say: gets a line about each step as it begins; by default it goes to standard error.

    Raises:
        FileNotFoundError, ValueError: if the model, the text or a hardware cannot be used, no text is given, the
            minutes are too few (with those that would do), or the folder holds an exploration of something else.
        OSError: if the folder cannot be written to.
    """
    if not 0 < minutes < math.inf:
        raise ValueError(f"minutes must be a number above 0, not {minutes:g}; an exploration takes about 10")
    opened, begun = open_model(model), time.monotonic()
    source = _text(opened, data)
    asked = [load_hardware(one) for one in as_list(hardware)]
    checked = check(opened)
    if checked.refused is not None:
        raise ValueError(checked.refused)
    under_way = UnderWay.in_folder(Path(output), opened, source, separator, minutes, begun, say or _say)
    under_way.steps["check"] = checked.described["model"], time.monotonic() - begun
    exploring = _Exploring(opened, source, separator, memory, checked, under_way, as_list(hardware))
    exploring.plan()
    scanned = exploring.scan()
    similar = exploring.similarity()
    here = exploring.hardware(_SHARE)
    found = exploring.search(scanned)
    if not here and not any(line.startswith("this machine") for line in under_way.record["left_out"]):
        here = exploring.hardware(_LAST_SHARE)
    predictions = exploring.predict({one.name: one for one in (*here, *asked)}.values(), found)
    return exploring.end(scanned, similar, found, predictions)


def _say(line: str) -> None:
    print(hanging("", line), file=sys.stderr, flush=True)


def _text(model: Model, data: str | Path | None) -> str:
    """The text to explore on.

    Raises:
        ValueError: if none is given; what a model can spare is another thing on every kind of text.
    """
    if data is None and model.name != DEMO:
        raise ValueError(
            f"no text was given to explore {model.name} on; give one of the kind that the model is for, a few pages or "
            "more: a UTF-8 file, a .jsonl or .parquet file, a dataset's name, or demo (Python source files)"
        )
    return DEMO if data is None else str(data)


@dataclass(frozen=True)
class _Exploring:
    """The steps of an exploration; each looks up what the folder has of it, and how much time is left."""

    model: Model
    data: str
    separator: str | None
    memory: int | str | None
    checked: Check
    under_way: UnderWay
    asked: Sequence[str] = ()  # hardware

    @property
    def folder(self) -> Path:
        return self.under_way.folder

    @property
    def planned(self) -> dict[str, Any]:
        """What was settled so far, in the record."""
        settled: dict[str, Any] = self.under_way.record.setdefault("plan", {})
        return settled

    @property
    def text(self) -> dict[str, Any]:
        """As all passes take it."""
        sizes = {name: self.planned[name] for name in ("tokens", "window")}
        return sizes | {"separator": self.separator, "memory": self.memory}

    @property
    def run_seconds(self) -> float:
        """Of one run of the model over the text."""
        return float(self.planned["run"])

    def _works(self, area: str, names: Sequence[str]) -> list[str]:
        verdicts = self.checked.of_area(area)
        return [name for name in names if name in verdicts and verdicts[name].works != NO]

    @property
    def maps(self) -> list[str]:
        """Of the scan, those that work with the model."""
        return self._works("scan", MAPS)

    def plan(self) -> None:
        """Measure how long the model takes, and settle how much there is time for; once in a folder."""
        if "tokens" in self.planned:
            return
        tokenizer, separator, left = self.model.tokenizer, self.separator, self.under_way.left
        with self.under_way.step("pace", "how long the model takes here") as did:
            counted = load_windows(tokenizer, self.data, _SHORTEST, 2 * TOKENS[0], separator, at_most=True)
            there = counted.ids.numel()
            require_text(self.data, there)
            longest = window_for(self.model.config, None)
            windows = load_windows(
                tokenizer, self.data, min(longest, there // 2 // WINDOWS), TOKENS[0], separator, at_most=True
            )
            start, limit = time.monotonic(), parse_size(self.memory) if isinstance(self.memory, str) else self.memory
            subject = Subject(self.model, load_for_analysis(self.model, limit), windows, limit)
            loading = time.monotonic() - start
            pace = measure_pace(subject, min(1.0, left / 100), left / 50)
            sizes = choose_sizes(
                pace,
                {every: self._scanned(subject, every) for every in coarse(self.model.num_layers)},
                layers=self.model.num_layers,
                window=longest,
                text=there,
                seconds=self.under_way.left,
                beside=OPENINGS * loading + self.under_way.drawing(DRAWING),
                name=self.model.label,
            )
            run = sizes.tokens * pace.own
            self.planned.update(vars(sizes), loading=round(loading, 3), run=run, pace=vars(pace))
            did.append(f"one run over {sizes.tokens:,} tokens takes {number(run, 3)} s, loading {number(loading, 3)} s")
        self.under_way.say(
            f"within {self.under_way.record['minutes']:g} minutes: {sizes.tokens:,} tokens in windows of "
            f"{sizes.window}, {plural(cells(self.maps, self.model.num_layers, sizes.every), 'cell')} first"
        )

    def _scanned(self, subject: Subject, every: int) -> SharedPlan:
        """What the scan on a grid runs."""
        with as_stored(subject.model) as own:
            if not self.maps:
                return share([own])
            return ScanWork.of(subject.model, own, [select(self.maps, self.model.num_layers, every=every)], 0).plan

    def scan(self) -> Scan | None:
        """The heatmaps, on the first grid, and on a finer one if there is time."""
        if not self.maps:
            self.under_way.leave_out("scan: no map works with this model (surgeon check says why)")
            return None
        found = self._scan()
        every, count = self.planned["every"], len(found.cells)
        seconds = self.under_way.steps["scan"][1]
        later = self._similarity_seconds + self._search_seconds
        grid = finer(self.maps, self.model.num_layers, every, seconds / count, self.under_way.left - later)
        if grid == every:
            return found
        self.planned["every"] = grid
        return self._scan()

    def _scan(self) -> Scan:
        every, folder = self.planned["every"], self.folder / "scan"
        if self.planned.get("scanned") == every:
            return Scan.read(folder, self.model.hash)
        count = cells(self.maps, self.model.num_layers, every)
        grid = "every stretch" if every == 1 else f"stretches of every {every} layers"
        with self.under_way.step("scan", f"{plural(count, 'cell')} of {plural(len(self.maps), 'map')}, {grid}") as did:
            given: dict[str, Any] = {"operations": self.maps, "every": every, "screen": True}
            found = scan(self.model, self.data, folder, **given, **self.text)
            base = number(found.base_perplexity)
            did.append(f"{plural(count, 'cell')} of {', '.join(self.maps)}, {grid}; base perplexity {base}")
            self.planned["scanned"] = every
        return found

    @property
    def _similarity_seconds(self) -> float:
        return SIMILARITY * self.run_seconds + float(self.planned["loading"])

    @property
    def _search_seconds(self) -> float:
        """That the rest takes at least."""
        runs = search_runs(self.model.num_layers) if self._works("search", [*SPACES]) else 0
        return runs * self.run_seconds + float(self.planned["loading"]) + self.under_way.drawing(_LAST_DRAWING)

    def similarity(self) -> Similarity | None:
        """CKA and angles, with how well they predict the scan."""
        if not self._works("scan", ["similarity"]):
            self.under_way.leave_out("similarity: it does not work with this model (surgeon check says why)")
            return None
        folder, scanned = self.folder / "similarity", self.planned.get("scanned", 0)
        if self.planned.get("compared") == scanned:
            return Similarity.read(folder, self.model.hash)
        layers = plural(self.model.num_layers, "layer")
        with self.under_way.step("similarity", f"what each of {layers} owes to the one before") as did:
            using = self.folder / "scan" if scanned else None
            found = similarity(self.model, self.data, folder, scan=using, **self.text)
            did.append(f"CKA, block influence and angles of {layers}")
            self.planned["compared"] = scanned
        return found

    def hardware(self, share: float) -> list[Hardware]:
        """This machine, if it is described, or a share of the time is enough to measure it."""
        if (known := known_here(self.folder / HERE)) is not None:
            return [known]
        ranks = [count for count in CALIBRATED if self._works("ranks", [plural(count, "rank")])]
        seconds = self.under_way.drawing(STARTING) + len(ranks) * PASSES * self.run_seconds / self.planned["tokens"]
        why = f"there is no time to measure it (about {clock(seconds)}); surgeon calibrate does"
        if 1 not in ranks:
            why = "its ranks do not run this model; surgeon check says why"
        elif self.under_way.drawing(1.0) > _BUSY:
            why = "other work takes much of it; surgeon calibrate measures it when that is over"
        elif seconds < share * (self.under_way.left - self.under_way.drawing(_LAST_DRAWING)):
            with self.under_way.step("hardware", "this machine, at the model's shapes") as did:
                try:
                    found = calibrate(self.model, self.folder / HERE, ranks=ranks, rounds=1)
                    did.append(f"this machine, on up to {plural(max(ranks), 'rank')}: {self.folder / HERE}")
                    return [found]
                except ValueError as error:  # the little that was measured makes no hardware, or ranks are none here
                    why = f"it could not be measured: {error}"
        if share == _LAST_SHARE or why.startswith("it could"):
            self.under_way.leave_out(f"this machine: {why}")
        return []

    def search(self, scanned: Scan | None) -> SearchRun | None:
        """The knee, by as many trials as there is time for."""
        if not self._spaces:
            self.under_way.leave_out("search: layers can neither be paired nor left out (surgeon check says why)")
            return None
        used = scanned if self.planned["every"] <= _OF_EDITS else None
        folder, layers = self._search_folder(used), self.model.num_layers
        last = (_LAST + _LAST_LAYER * layers) * self.run_seconds + self.under_way.drawing(_LAST_DRAWING)
        seconds = self.under_way.left - last
        there = [one for one in self._search_folders if (one / SearchRun.RECORD).is_file()]
        if there and seconds < self.run_seconds * BATCH:
            return SearchRun.read(there[-1], self.model.hash)
        of_edits = [] if used is None else ["scan"]
        passes = [self.folder / name for name in (*of_edits, "similarity") if (self.folder / name).is_dir()]
        what = f"the depth at which quality breaks off, {clock(max(0.0, seconds))} for trials"
        with self.under_way.step("search", what) as did:
            given: dict[str, Any] = {"space": self._spaces, "using": passes, "minutes": max(seconds, 1.0) / 60}
            found = search(self.model, self.data, folder, self._trials, **given, **self.text)
            best = found.record["best"]
            quality = f"divergence {known(best, 'divergence')}, perplexity {number(best['perplexity'])}"
            did.append(f"{plural(len(found.trials), 'trial')}; {best['why'][:1].lower()}{best['why'][1:]}: {quality}")
            write_text(self.folder / KNEE, found.recipe_text)
        return found

    @property
    def _spaces(self) -> list[str]:
        """Those that work with the model."""
        return [SPACES[name] for name in self._works("search", [*SPACES])]

    @property
    def _trials(self) -> int:
        """The most that a search tries."""
        return _TRIALS * self.model.num_layers

    def _search_folder(self, used: Scan | None) -> Path:
        """Another one where the scan has grown, by which a search goes from its first trial on."""
        searched, cells = self.planned.setdefault("searched", {}), str(0 if used is None else len(used.cells))
        name: str = searched.setdefault(cells, f"search-{len(searched) + 1}" if searched else "search")
        return self.folder / name

    @property
    def _search_folders(self) -> list[Path]:
        """Of all searches so far, the last one last."""
        return [self.folder / name for name in self.planned.get("searched", {}).values()]

    def predict(self, machines: Iterable[Hardware], found: SearchRun | None) -> list[Predictions]:
        """What the model and the program at the knee would cost on each machine."""
        predictions, knee = list[Predictions](), None if found is None else self.folder / KNEE
        for machine in machines:
            with self.under_way.step(f"on {machine.name}", "what that takes there") as did:
                try:
                    predictions.append(predict_on(machine, self.model, knee, self.folder / "predict" / machine.name))
                    did.append(fastest(predictions[-1]))
                except ValueError as error:  # of what cannot be predicted of any program of this model
                    self.under_way.leave_out(f"predictions on {machine.name}: {error}")
        return predictions

    def next(self, found: SearchRun | None) -> list[NextStep]:
        """What is worth doing next, as far as it works with this model."""
        knee = None if found is None else self.folder / KNEE
        devices = torch.cuda.device_count() or usable_cores()
        able = [count for count in RANKS if self._works("ranks", [plural(count, "rank")])]
        most = max((count for count in able if count <= devices), default=1)
        drafting = {} if knee is None else check(self.model, ranks=[most], draft=knee).of_area("ranks")
        explored = Explored(
            model=self.model.name,
            data=self.data,
            folder=self.folder,
            minutes=float(self.under_way.record["minutes"]),
            tokens=self.planned["tokens"],
            window=self.planned["window"],
            separator=self.separator,
            operations=self.maps,
            every=self.planned["every"],
            knee=knee,
            spaces=self._spaces,
            why="" if found is None else str(found.record["best"]["why"]),
            depth=math.nan if found is None else _depth(found),
            ranks=most,
            able=max(able, default=1),
            hardware=self.asked,
            memory=None if self.memory is None else str(self.memory),
            can_go_on=self.planned["every"] > 1 or (found is not None and len(found.trials) < self._trials),
            drafts="draft" in drafting and drafting["draft"].works != NO,
            checked=self.checked,
        )
        return explored.steps()

    def end(
        self, scanned: Scan | None, similar: Similarity | None, found: SearchRun | None, predicted: list[Predictions]
    ) -> Exploration:
        """Put all of it on a page, with what to do next."""
        under_way, page = self.under_way, self.folder / PAGE
        passes = [as_folder(one) for one in (scanned, similar, found, *predicted) if one is not None]
        under_way.record["passes"] = [str(one.relative_to(self.folder)) for one in passes]
        under_way.record["next"] = [vars(one) for one in self.next(found)]
        with under_way.step("page", "all of it, with what to do next") as did:
            did.append("all of it, with what to do next")
            under_way.keep()
            written = report(self.folder, page)
        run = under_way.run()
        knee = () if found is None else (self.folder / KNEE,)
        return Exploration(
            run.steps,
            checked=self.checked,
            scan=scanned,
            similarity=similar,
            search=found,
            predictions=predicted,
            page=written,
            record=run.record,
            files=(page, *knee, *run.files),
        )


def _depth(found: SearchRun) -> float:
    """The effective depth of the winner."""
    trials = found.trials
    return float(trials.loc[trials["trial"] == found.record["best"]["trial"], "depth"].iloc[0])
