"""What is worth doing with what an exploration has found, as commands to be copied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from surgeon.quality.data import DEMO
from surgeon.results.check import NO, Check
from surgeon.results.explore import NextStep

_STEPS = 100  # of healing: enough to see what it brings
_LONGER = 6  # times the minutes


@dataclass(frozen=True)
class Explored:
    """What commands go by.

    Attributes:
        model, data, folder: as the user named them.
        separator: between documents, if one was given.
        tokens, window: of the text that was measured on.
        operations: the maps of the scan; none if there is none.
        every: the grid of its stretches.
        knee: the recipe of the program at the knee, if one was found.
        spaces: what it was looked for in.
        why: what it is the best of.
        depth: its effective depth.
        ranks: as many as there are devices for here.
        able: the most ranks that the model can be shared by.
        drafts: whether the program at the knee can draft for the model.
        hardware: what was asked for beside what is here.
        memory: the most that the process may take, if that was said.
        can_go_on: whether more minutes would find more.
    """

    model: str
    data: str
    folder: Path
    minutes: float
    separator: str | None
    tokens: int
    window: int
    operations: Sequence[str]
    every: int
    knee: Path | None
    spaces: Sequence[str]
    why: str
    depth: float
    ranks: int
    able: int
    drafts: bool
    hardware: Sequence[str]
    memory: str | None
    can_go_on: bool
    checked: Check

    def steps(self) -> list[NextStep]:
        """The steps that this model can take, in order."""
        return [*([] if self.knee is None else self._with_the_knee(quote(str(self.knee)))), *self._more()]

    def _with_the_knee(self, knee: str) -> Iterator[NextStep]:
        exported, on = self._at("exported"), f" --tp {self.ranks}" if self.ranks > 1 else ""
        can_be_written = any(one.works != NO for one in self.checked.of_area("export").values())
        if can_be_written:
            yield NextStep(
                "Write the program that was found as a checkpoint",
                f"{self.why}. transformers loads it, vLLM where its form allows; export says which, and proves it.",
                f"surgeon export {knee} -o {exported}",
            )
            yield NextStep(
                "Serve it",
                "OpenAI's API for that checkpoint, until Ctrl-C.",
                f"surgeon serve {exported}{on}",
            )
        if can_be_written and self.checked.of_area("train")["heal edited"].works != NO:
            text = f"--data {DEMO}:train --eval-data {DEMO}" if self.data == DEMO else self._text
            how = f"--distill logits --steps {_STEPS} --eval-tokens {self.tokens}"
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
                f"surgeon generate {quote(self.model)} --draft {knee}{on} --prompt 'Once upon a time'",
            )
        yield NextStep(
            "Predict it on other hardware",
            "By its shapes alone, on what surgeon predict knows by name or surgeon calibrate has measured.",
            f"surgeon predict {quote(self.model)} --hardware h100-sxm --compare {knee} "
            f"--sweep ranks=1..{self.able},batch=1..64",
        )

    def _more(self) -> Iterator[NextStep]:
        limit = "" if self.memory is None else f" --memory {quote(self.memory)}"
        model, sizes = quote(self.model), f"--tokens {self.tokens} --window {self.window}{limit}"
        if self.operations:
            same = "".join(f" --operation {name}" for name in self.operations) if self.every > 1 else " --operation all"
            yield NextStep(
                "Scan every stretch of layers" if self.every > 1 else "Draw the other maps",
                f"The maps so far have stretches of every {self.every} layers; this goes on in their folder."
                if self.every > 1
                else "Ladders, repeats, low ranks, widths: all that a scan knows, on the same text.",
                f"surgeon scan {model} {self._text} {sizes}{same} --screen -o {self._at('scan')}",
            )
        if self.knee is not None:
            depth = f"{self.depth:g}"
            passes = [self._at(name) for name in ("scan", "similarity") if (self.folder / name).is_dir()]
            using = "".join(f" --using {name}" for name in passes)
            yield NextStep(
                "Search for the best program of that depth",
                "All trials go to one depth, and what was measured so far is used.",
                f"surgeon search {model} {self._text} {sizes} --space {','.join(self.spaces)} "
                f"--budget depth={depth}{using} -o {self._at(f'depth-{depth}')}",
            )
        if self.can_go_on:
            on = "".join(f" --hardware {quote(one)}" for one in self.hardware)
            yield NextStep(
                "Explore on",
                "More minutes make stretches finer and trials more; what is there is kept.",
                f"surgeon explore {model} {self._text} --minutes {_LONGER * self.minutes:g}{on}{limit} "
                f"-o {quote(str(self.folder))}",
            )

    @property
    def _text(self) -> str:
        apart = "" if self.separator is None else f" --separator {quote(self.separator)}"
        return f"--data {quote(self.data)}{apart}"

    def _at(self, name: str) -> str:
        return quote(str(self.folder / name))
