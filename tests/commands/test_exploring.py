"""`surgeon.explore`: what a model can spare, in some minutes, and commands that go on with it."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import typer

import surgeon
from surgeon.commands import exploring as module
from surgeon.commands.app import app, main
from surgeon.commands.explore import explore
from surgeon.commands.exploring import plan_rounds
from surgeon.findings.check import Check, Verdict
from surgeon.findings.explore import Exploration, NextStep
from surgeon.findings.scan import Scan
from surgeon.language.recipe import read_recipe
from surgeon.opened import provenance
from surgeon.progress import TimeOver


def parse(commands: Sequence[NextStep]) -> list[str]:
    """Have the command line read each as it is printed, without running it; returns the names of commands."""
    group: Any = typer.main.get_command(app)
    names = []
    for one in commands:
        program, name, *arguments = shlex.split(one.command)
        assert program == "surgeon"
        group.commands[name].make_context(name, arguments)
        names.append(name)
    return names


class Steps:
    """The next steps of an exploration that has found everything, but for what is said."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.drafts = "yes"
        patched.setattr(module, "usable_cores", lambda: 2)
        patched.setattr(module.torch.cuda, "device_count", lambda: 0)
        patched.setattr(
            module, "check", lambda *_, **__: Check.of([Verdict("ranks", "draft", self.drafts)])
        )

    def __call__(self, **other: Any) -> list[NextStep]:
        answers = [Verdict("export", "lp", "yes"), Verdict("train", "heal edited", "yes")]
        answers = other.pop("answers", answers)
        answers += [Verdict("search", "pair", "yes"), Verdict("search", "drop", "yes")]
        answers += [
            Verdict("ranks", name, "yes")
            for name in ("1 rank", "2 ranks", "4 ranks")[: other.pop("able", 3)]
        ]
        record = {
            "model": "a model",
            "data": "my text.txt",
            "separator": "<|end|>",
            "minutes": 2.5,
            "memory": "2GB",
        }
        record |= {"done": [], "next": []}
        record |= {"passes": ["round-2/scan", "round-2/similarity", "round-2/search"]}
        text = {"tokens": 1024, "window": 64}
        scanned: Any = SimpleNamespace(
            record=text | {"every": 2, "asked": {"operations": ["prune", "lp"]}} | other.pop("scan", {}),
            files=(Path("out of it/round-2/scan/scan.json"),),
        )
        searched: Any = SimpleNamespace(
            record=text | {"best": {"trial": 3, "why": "The best"}},
            trials=pd.DataFrame({"trial": [1, 3], "depth": [10.0, 8.0]}),
        )
        model: Any = None
        exploring = module.Exploring(
            model,
            "my text.txt",
            Check.of(answers),
            Path("out of it"),
            plan_rounds(8, 64, 1 << 20),
            record | other.pop("record", {}),
            print,
            0.0,
        )
        found = {"scanned": scanned, "found": searched} | other
        return [*exploring.next_steps(**found)]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(monkeypatch)


def test_commands_are_read_as_they_are_printed(steps: Steps) -> None:
    found = steps()
    goes_on = ["scan", "search", "explore"]
    assert parse(found) == ["export", "serve", "heal", "eval", "generate", "predict", *goes_on]
    exported, served = (shlex.split(one.command) for one in found[:2])
    assert exported == ["surgeon", "export", "out of it/knee.yaml", "-o", "out of it/exported"]
    assert served == ["surgeon", "serve", "out of it/exported", "--tp", "2"]
    assert all(
        "--data 'my text.txt' --separator '<|end|>'" in found[place].command for place in (2, 3, 6, 7, 8)
    )
    assert "--screen -o 'out of it/round-2/scan' --operation prune,lp" in found[6].command
    assert "--using 'out of it/round-2/scan' --using 'out of it/round-2/similarity'" in found[7].command
    assert "--space pair,drop:layers --budget depth=8 " in found[7].command
    assert "--sweep ranks=1..4,batch=1..64" in found[5].command
    assert found[8].command.endswith("--minutes 15 --memory 2GB -o 'out of it'")


def test_commands_are_those_that_work(steps: Steps) -> None:
    assert parse(steps(found=None)) == ["scan", "explore"]
    assert parse(steps(found=None, scanned=None)) == ["explore"]
    assert "explore" not in parse(steps(record={"done": ["round-5/search"]}))
    steps.drafts = "no"
    assert "generate" not in parse(steps())
    steps.drafts = "yes"
    untrained = [Verdict("export", "lp", "part"), Verdict("train", "heal edited", "no")]
    assert parse(steps(answers=untrained))[:3] == ["export", "serve", "eval"]
    edited = [Verdict("export", "lp", "no"), Verdict("train", "heal edited", "yes")]
    assert parse(steps(answers=edited))[0] == "eval"
    fine = steps(scan={"every": 1}, record={"data": "demo", "separator": None}, able=1)
    assert "--operation all" in fine[6].command
    assert "--data demo:train --eval-data demo " in fine[2].command
    assert "--tp" not in fine[1].command + fine[4].command
    assert "without 3 cells" not in fine[6].why
    cut = steps(scan={"every": 1, "cells_missing": 3})
    assert "every stretch, but for 3 cells for which there was no time" in cut[6].why
    assert "--operation prune,lp" in cut[6].command


def test_what_cannot_be_explored_is_said_at_once(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="no text was given to explore .*; give one of the kind that the model is for"
    ):
        explore(tiny_checkpoint, output=tmp_path / "out")
    with pytest.raises(
        ValueError, match="minutes must be a number above 0, not -1; an exploration takes about 10"
    ):
        explore(tiny_checkpoint, "demo", tmp_path / "out", minutes=-1)
    short = tmp_path / "short.txt"
    short.write_text("Too short.")
    with pytest.raises(ValueError, match=r"short.txt has \d+ tokens, and exploring takes 512 at least"):
        explore(tiny_checkpoint, short, tmp_path / "short")
    for path in tiny_checkpoint.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ValueError, match="has no tokenizer"):
        explore(tiny_checkpoint, short, tmp_path / "out")


@pytest.mark.parametrize(
    ("layers", "grids"),
    [(1, [1, 1, 1, 1, 1]), (12, [4, 2, 1, 1, 1]), (30, [8, 4, 2, 1, 1]), (80, [16, 8, 4, 2, 1])],
)
def test_rounds_begin_with_little_and_grow(layers: int, grids: list[int]) -> None:
    rounds = plan_rounds(layers, 512, 1 << 20)
    assert [one.tokens for one in rounds] == [256, 1024, 2048, 4096, 8192]
    assert [one.window for one in rounds] == [64, 64, 128, 256, 512]
    assert [one.every for one in rounds] == grids
    assert [one.trials for one in rounds] == [times * layers for times in (1, 2, 4, 8, 8)]
    assert all(one.tokens % one.window == 0 for one in rounds)


def test_rounds_leave_as_much_text_as_they_measure_on() -> None:
    assert [(one.tokens, one.window) for one in plan_rounds(4, 512, 3000)] == [
        (256, 64),
        (1024, 64),
        *3 * [(1488, 93)],
    ]
    assert {one.window for one in plan_rounds(4, 48, 1 << 20)} == {48}


class Passes:
    """Stand-ins for the passes of an exploration, which take so many seconds by a clock of their own.

    Attributes:
        ran: by which rounds, in order.
        ends: names of passes that go on until the time is over.
    """

    def __init__(
        self, patched: pytest.MonkeyPatch, folder: Path, model: Path, minutes: float, seconds: float
    ) -> None:
        self.ran: list[str] = []
        self.ends: set[str] = set()
        self.seconds, self.now, self.limits = seconds, 0.0, list[float]()
        self.drawn = 0
        patched.setattr(
            module, "time", SimpleNamespace(monotonic=lambda: self.now, process_time=lambda: 0.0)
        )
        patched.setattr(module, "_figures", str)
        patched.setattr(module, "time_limit", self._limit)
        for name in ("scan", "similarity", "search"):
            patched.setattr(module, name, self._pass(name))
        patched.setattr(module.Exploring, "draw", self._drawing())
        opened = surgeon.open(model)
        answers = [
            Verdict("scan", "lp", "yes"),
            Verdict("scan", "similarity", "yes"),
            Verdict("search", "pair", "yes"),
        ]
        checked = Check.of(answers, facts={"model": "tiny: four layers"})
        record = {"model": "tiny", "model_hash": opened.hash, "format": provenance("", "")["format"]}
        record |= {"command": "surgeon explore", "data": "a.txt", "separator": None, "memory": None}
        rounds = plan_rounds(opened.num_layers, 64, 1 << 20)
        self.said: list[str] = []
        self.exploring = module.Exploring(
            opened,
            "a.txt",
            checked,
            folder,
            rounds,
            record | {"minutes": minutes},
            self.said.append,
            0.0,
        )
        self.exploring.resume()

    def _limit(self, seconds: float) -> Any:
        self.limits.append(seconds)
        return nullcontext()

    def _pass(self, name: str) -> Any:
        def work(_: Any, __: str, folder: Path, *___: Any, **____: Any) -> Any:
            self.ran.append(f"{folder.parent.name}/{name}")
            if name in self.ends:
                self.now += self.limits[-1]
                raise TimeOver
            self.now += self.seconds
            return SimpleNamespace(record={})

        return work

    def _drawing(self) -> Any:
        def draw(_: Any) -> str:
            self.now += 2.0
            self.drawn += 1
            return "the page"

        return draw

    def go(self) -> list[str]:
        """Explore; returns what ran."""
        self.ran = []
        self.drawn = 0
        assert self.exploring.run() == "the page"
        return self.ran


ROUND = ["scan", "similarity", "search"]


def names(count: int, first: int = 1) -> list[str]:
    return [f"round-{number}/{name}" for number in range(first, first + count) for name in ROUND]


def test_rounds_go_on_until_the_time_is_over(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = Passes(monkeypatch, tmp_path / "out", tiny_checkpoint, minutes=60, seconds=10)
    assert passes.go() == names(5)
    assert passes.drawn == 5
    short = Passes(monkeypatch, tmp_path / "short", tiny_checkpoint, minutes=1, seconds=10)
    short.ends = {"search"}
    assert short.go() == [*names(1)]
    assert short.now == pytest.approx(60 - 6 + 2)  # a tenth is kept for the page, which took 2 seconds
    assert short.drawn == 1
    assert short.exploring.record["done"] == names(1)[:2]
    assert short.exploring.steps["search 1"][0] == "the time was over before its end"


def test_a_slow_model_is_begun_however_little_the_time(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Passes(monkeypatch, tmp_path / "out", tiny_checkpoint, minutes=0.5, seconds=1000)
    assert slow.go() == ["round-1/scan"]
    assert slow.said == ["[0:00 of 0:30] scan: every stretch, 256 tokens"]


def test_the_same_command_goes_on(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Passes(monkeypatch, tmp_path / "out", tiny_checkpoint, minutes=1, seconds=10)
    first.ends = {"search"}
    first.go()
    spent = first.exploring.seconds_spent
    assert Passes(monkeypatch, tmp_path / "out", tiny_checkpoint, minutes=1, seconds=10).go() == []
    again = Passes(monkeypatch, tmp_path / "out", tiny_checkpoint, minutes=2, seconds=10)
    assert again.exploring.before == pytest.approx(spent, abs=3)
    assert again.go()[:2] == ["round-1/search", "round-2/scan"]
    assert again.exploring.steps["search 1"][1] > 10
    record = json.loads((tmp_path / "out" / "explore.json").read_text())
    (tmp_path / "out" / "explore.json").write_text(json.dumps(record | {"data": "b.txt"}))
    with pytest.raises(
        ValueError, match=r"an exploration with another data: 'b.txt', not 'a.txt'; give another"
    ):
        Passes(monkeypatch, tmp_path / "out", tiny_checkpoint, minutes=2, seconds=10)


def test_an_interruption_keeps_what_was_found(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = Passes(monkeypatch, tmp_path / "out", tiny_checkpoint, minutes=60, seconds=10)

    def interrupted(*_: Any, **__: Any) -> Any:
        passes.now += 7
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "search", interrupted)
    with pytest.raises(KeyboardInterrupt):
        passes.go()
    kept = Exploration.read(tmp_path / "out")
    assert kept.record["done"] == names(1)[:2]
    assert kept.steps.set_index("step")["seconds"]["search 1"] == 7


def test_the_page_has_the_scan_with_most_cells(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exploring = Passes(monkeypatch, tmp_path, tiny_checkpoint, minutes=1, seconds=1).exploring
    cells = {"round-1": 10, "round-2": 36, "round-3": 30}
    for name in cells:
        (tmp_path / name / "scan").mkdir(parents=True)
        (tmp_path / name / "scan" / Scan.RECORD).touch()

    def read(folder: Path, _: str) -> Any:
        return SimpleNamespace(cells=range(cells[folder.parent.name]), name=folder.parent.name)

    monkeypatch.setattr(module.Scan, "read", read)
    assert exploring._scan().name == "round-2"
    cells["round-3"] = 36
    assert exploring._scan().name == "round-3"


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.thorough
def test_the_whole_way(tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path) -> None:
    minutes, output, start = 1.5, tmp_path / "out", time.monotonic()
    found = explore(tiny_checkpoint, tiny_text, output, minutes=minutes)
    assert time.monotonic() - start <= 60 * 1.1 * minutes
    assert found.seconds_spent <= 60 * 1.1 * minutes
    assert found.scan is not None
    assert set(found.scan.cells["operation"]) == {
        "shuffle",
        "prune",
        "merge",
        "parallel",
        "2-parallel",
        "lp",
    }
    assert found.similarity is not None
    assert len(found.similarity.proxies) > 0
    assert found.search is not None
    assert str(read_recipe(output / "knee.yaml").program(4)) == found.search.record["best"]["program"]
    html = (output / "explore.html").read_text()
    assert len(found.page.chapters) == 1
    for one in found.next_steps:
        assert one.command in html.replace("&#39;", "'")
    assert parse(found.next_steps)[:4] == ["export", "serve", "heal", "eval"]
    for one in (found.next_steps[0], found.next_steps[3]):
        assert main(shlex.split(one.command)[1:]) == 0
    again = explore(tiny_checkpoint, tiny_text, output, minutes=minutes)
    assert again.search is not None
    assert len(again.search.trials) == len(found.search.trials)
    assert json.loads((output / "explore.json").read_text())["next"] == [
        vars(one) for one in again.next_steps
    ]
