"""What is worth doing with what an exploration has found, as commands to be copied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from surgeon.findings.check import NO, Check
from surgeon.findings.explore import NextStep
from surgeon.findings.scan import Scan
from surgeon.findings.search import SearchRun
from surgeon.quality.data import DEMO
from surgeon.words import plural

_STEPS = 100  # of healing: enough to see what it brings
_LONGER = 6  # times the minutes


@dataclass(frozen=True)
class NextSteps:
    """The commands that go on with an exploration.

    Attributes:
        record: of the exploration: what the user asked for, as they named it.
        folder, knee: of the exploration, and the recipe of the program at the knee in it.
        search: which found that.
        spaces: what it was looked for in.
        ranks: as many as there are devices for here.
        able: the most ranks that the model can be shared by.
        drafts: whether the program at the knee can draft for the model.
        can_go_on: whether more minutes would find more.
    """

    record: dict[str, Any]
    folder: Path
    knee: Path
    checked: Check
    scan: Scan | None
    search: SearchRun | None
    spaces: Sequence[str]
    ranks: int
    able: int
    drafts: bool
    can_go_on: bool

    def all(self) -> Iterator[NextStep]:
        """Those that this model can take, in order."""
        if self.search is not None:
            yield from self._with_the_knee(self.search, quote(str(self.knee)))
        if self.scan is not None:
            yield self._scan_on(self.scan)
        if self.search is not None:
            yield self._search_on(self.search)
        if self.can_go_on:
            hardware = "".join(f" --hardware {quote(one)}" for one in self.record["hardware"])
            yield NextStep(
                "Explore on",
                "More minutes make the text longer, stretches finer and trials more; what is there is kept.",
                f"surgeon explore {self._model} {self._text} --minutes {_LONGER * self.record['minutes']:g}{hardware}"
                f"{self._memory} -o {quote(str(self.folder))}",
            )

    def _with_the_knee(self, search: SearchRun, knee: str) -> Iterator[NextStep]:
        exported = self._at("exported")
        on = f" --tp {self.ranks}" if self.ranks > 1 else ""
        can_be_written = any(one.works != NO for one in self.checked.of_area("export").values())
        if can_be_written:
            yield NextStep(
                "Write the program that was found as a checkpoint",
                f"{search.record['best']['why']}. transformers loads it, vLLM where its form allows; export says "
                "which, and proves it.",
                f"surgeon export {knee} -o {exported}",
            )
            yield NextStep(
                "Serve it",
                "OpenAI's API for that checkpoint, until Ctrl-C.",
                f"surgeon serve {exported}{on}",
            )
        if can_be_written and self.checked.of_area("train")["heal edited"].works != NO:
            is_demo = self.record["data"] == DEMO
            text = f"--data {DEMO}:train --eval-data {DEMO}" if is_demo else self._text
            how = f"--distill logits --steps {_STEPS} --eval-tokens {search.record['tokens']}"
            yield NextStep(
                "Train back what it costs",
                "The edited layers learn what the original predicts; more steps bring back more.",
                f"surgeon heal {knee} {text} {how} -o {self._at('healed')}",
            )
        yield NextStep(
            "Measure it",
            "Perplexity, divergence, and acceptance as a draft, on the text; lm-eval's tasks with --tasks.",
            f"surgeon eval {knee} {self._text}",
        )
        if self.drafts:
            yield NextStep(
                "Or lose nothing: let it draft",
                "The text stays the model's own: the edited program writes ahead, and the model verifies.",
                f"surgeon generate {self._model} --draft {knee}{on} --prompt 'Once upon a time'",
            )
        yield NextStep(
            "Predict it on other hardware",
            "By its shapes alone, on what surgeon predict knows by name or surgeon calibrate has measured.",
            f"surgeon predict {self._model} --hardware h100-sxm --compare {knee} "
            f"--sweep ranks=1..{self.able},batch=1..64",
        )

    def _scan_on(self, scan: Scan) -> NextStep:
        every = scan.record["every"]
        missing = scan.record.get("cells_missing", 0)
        what = "Draw the other maps"
        why = "Ladders, repeats, low ranks, widths: all that a scan knows, on the same text."
        operations = "all"
        if every > 1 or missing:
            what = "Scan every stretch of layers"
            why = "The maps so far have " + ("every stretch" if every == 1 else f"stretches of every {every} layers")
            if missing:
                why += f", but for {plural(missing, 'cell')} for which there was no time"
            why = f"{why}; this goes on in their folder."
            operations = ",".join(scan.record["asked"]["operations"])
        folder = quote(str(scan.files[0].parent))
        return NextStep(
            what,
            why,
            f"surgeon scan {self._model} {self._text} {self._sizes(scan.record)} --operation {operations} --screen "
            f"-o {folder}",
        )

    def _search_on(self, search: SearchRun) -> NextStep:
        trials = search.trials
        depth = f"{float(trials.loc[trials['trial'] == search.record['best']['trial'], 'depth'].iloc[0]):g}"
        using = "".join(f" --using {quote(str(self.folder / one))}" for one in self._passes())
        return NextStep(
            "Search for the best program of that depth",
            "All trials go to one depth, and what was measured so far is used.",
            f"surgeon search {self._model} {self._text} {self._sizes(search.record)} --space {','.join(self.spaces)} "
            f"--budget depth={depth}{using} -o {self._at(f'depth-{depth}')}",
        )

    def _passes(self) -> list[str]:
        """Those that a search can use."""
        return [one for one in self.record["passes"] if Path(one).name in ("scan", "similarity")]

    @property
    def _model(self) -> str:
        return quote(self.record["model"])

    @property
    def _text(self) -> str:
        text = f"--data {quote(self.record['data'])}"
        separator = self.record["separator"]
        if separator is None:
            return text
        return f"{text} --separator {quote(separator)}"

    @property
    def _memory(self) -> str:
        memory = self.record["memory"]
        if memory is None:
            return ""
        return f" --memory {quote(str(memory))}"

    def _sizes(self, record: dict[str, Any]) -> str:
        """The text that a pass was on, and its limit."""
        return f"--tokens {record['tokens']} --window {record['window']}{self._memory}"

    def _at(self, name: str) -> str:
        return quote(str(self.folder / name))
