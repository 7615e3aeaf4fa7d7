"""`surgeon.explore`: what a model can spare, in some minutes, and commands that go on with it."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from surgeon.library.explored_speed import HERE
from surgeon.library.exploring import UnderWay

import surgeon
from surgeon.cli.app import app, main
from surgeon.cost.hardware_file import MACHINES, load_hardware
from surgeon.language.recipe import read_recipe
from surgeon.library import explore as module
from surgeon.library.explore import explore
from surgeon.library.next_steps import Explored
from surgeon.results.check import Check, Verdict
from surgeon.results.explore import NextStep
from tests.clock import HandClock


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


def explored(**other: Any) -> Explored:
    answers = Check.of([Verdict("export", "lp", "yes"), Verdict("train", "heal edited", "yes")])
    given: dict[str, Any] = {"model": "a model", "data": "my text.txt", "folder": Path("out of it"), "minutes": 2.5}
    given |= {"separator": "<|end|>", "tokens": 1024, "window": 64, "operations": ["prune", "lp"], "every": 2}
    given |= {
        "knee": Path("out of it/knee.yaml"),
        "why": "The best",
        "spaces": ["pair", "drop:layers"],
        "depth": 8.0,
        "ranks": 2,
        "able": 4,
        "drafts": True,
        "hardware": ["my machine.yaml"],
        "memory": "2GB",
        "can_go_on": True,
        "checked": answers,
    }
    return Explored(**given | other)


def test_commands_are_read_as_they_are_printed() -> None:
    steps = explored().steps()
    assert parse(steps) == ["export", "serve", "heal", "eval", "generate", "predict", "scan", "search", "explore"]
    exported, served = (shlex.split(one.command) for one in steps[:2])
    assert exported == ["surgeon", "export", "out of it/knee.yaml", "-o", "out of it/exported"]
    assert served == ["surgeon", "serve", "out of it/exported", "--tp", "2"]
    assert all("--data 'my text.txt' --separator '<|end|>'" in steps[place].command for place in (2, 3, 6, 7, 8))
    assert "--space pair,drop:layers --budget depth=8 " in steps[7].command
    assert "--sweep ranks=1..4,batch=1..64" in steps[5].command
    assert steps[8].command.endswith("--minutes 15 --hardware 'my machine.yaml' --memory 2GB -o 'out of it'")


def test_commands_are_those_that_work() -> None:
    assert parse(explored(knee=None, depth=math.nan).steps()) == ["scan", "explore"]
    assert "explore" not in parse(explored(can_go_on=False).steps())
    assert "generate" not in parse(explored(drafts=False).steps())
    untrained = Check.of([Verdict("export", "lp", "part"), Verdict("train", "heal edited", "no")])
    assert parse(explored(checked=untrained).steps())[:3] == ["export", "serve", "eval"]
    edited = Check.of([Verdict("export", "lp", "no"), Verdict("train", "heal edited", "yes")])
    assert parse(explored(checked=edited).steps())[0] == "eval"
    fine = explored(every=1, data="demo", separator=None, ranks=1).steps()
    assert "--operation all" in fine[6].command
    assert "--data demo:train --eval-data demo " in fine[2].command
    assert "--tp" not in fine[1].command + fine[4].command
    assert "scan" not in parse(explored(operations=[]).steps())


def test_what_cannot_be_explored_is_said_at_once(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no text was given to explore .*; give one of the kind that the model is for"):
        explore(tiny_checkpoint, output=tmp_path / "out")
    with pytest.raises(ValueError, match="minutes must be a number above 0, not -1; an exploration takes about 10"):
        explore(tiny_checkpoint, "demo", tmp_path / "out", minutes=-1)
    with pytest.raises(ValueError, match="there is no hardware 'h1000'"):
        explore(tiny_checkpoint, "demo", tmp_path / "out", hardware="h1000")
    short = tmp_path / "short.txt"
    short.write_text("Too short.")
    with pytest.raises(ValueError, match=r"short.txt has \d+ tokens, and exploring takes 2,048 at least"):
        explore(tiny_checkpoint, short, tmp_path / "short")
    for path in tiny_checkpoint.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ValueError, match="has no tokenizer"):
        explore(tiny_checkpoint, short, tmp_path / "out")


def test_a_folder_goes_on_with_its_own_text_and_time(tiny_checkpoint: Path, tmp_path: Path) -> None:
    model, said, clock = surgeon.open(tiny_checkpoint), list[str](), HandClock()

    def begin(data: str, minutes: float) -> UnderWay:
        return UnderWay.in_folder(tmp_path / "out", model, data, None, minutes, clock.now(), said.append)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("surgeon.library.exploring.time.monotonic", clock.now)
        with suppress(ValueError), begin("short.txt", 2).step("pace", "which is refused"):
            clock.sleep(10)
            raise ValueError("short.txt is too short")
        said.clear()
        first = begin("a.txt", 2)
        first.record["plan"] = {"tokens": 1024}
        with suppress(KeyboardInterrupt), first.step("scan", "some cells"):
            clock.sleep(75)
            raise KeyboardInterrupt
        assert said == ["[0:00 of 2:00] scan: some cells"]
        second = begin("a.txt", 3)
        assert second.left == pytest.approx(180 - 75)
        with second.step("scan", "the others") as did:
            clock.sleep(10)
            did.append("10 cells")
        assert second.steps["scan"] == ("10 cells", 85.0)
        assert (second.run().minutes, second.run().spent) == (3, 85.0)
        with pytest.raises(ValueError, match=r"an exploration with another data: 'a.txt', not 'b.txt'; give another"):
            begin("b.txt", 3)


def test_a_machine_is_measured_where_that_fits_into_the_time(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[Path] = []
    here = load_hardware("cpu-2")
    monkeypatch.setattr(module, "known_here", lambda _: None)
    monkeypatch.setattr(module, "calibrate", lambda _, file, **__: measured.append(file) or here)
    ranks = Check.of([Verdict("ranks", "1 rank", "yes"), Verdict("ranks", "2 ranks", "no")])
    model, said = surgeon.open(tiny_checkpoint), list[str]()

    def machine(minutes: float, share: float, checked: Check = ranks, busy: float = 1.0) -> list[Any]:
        under_way = UnderWay.in_folder(
            tmp_path / f"out-{minutes}", model, "a", None, minutes, time.monotonic(), said.append
        )
        monkeypatch.setattr(UnderWay, "drawing", lambda _, seconds: seconds * busy)
        under_way.record["plan"] = {"tokens": 1024, "run": 1.024}  # 12 s for 12,000 tokens, and 12 s to start
        return module._Exploring(model, "a", None, None, checked, under_way).hardware(share)

    assert machine(2.5, 0.2) == [here]  # 24 s of 142
    assert machine(1.9, 0.2) == []  # of 106
    assert len(said) == 1
    assert machine(1.9, 0.5) == [here]
    assert measured == [tmp_path / "out-2.5" / HERE, tmp_path / "out-1.9" / HERE]
    assert machine(0.5, 0.5) == machine(60, 0.5, busy=3.0) == machine(60, 0.5, Check.of([])) == []
    assert [line.partition(";")[0] for line in said if line.startswith("this machine: ")] == [
        "this machine: there is no time to measure it (about 0:24)",
        "this machine: other work takes much of it",
        "this machine: its ranks do not run this model",
    ]


def test_a_search_begins_anew_where_its_scan_has_grown(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, searched = surgeon.open(tiny_checkpoint), list[tuple[str, list[str]]]()

    def search(_: Any, __: str, folder: Path, *___: Any, using: Sequence[Path], **____: Any) -> Any:
        searched.append((folder.name, [one.name for one in using]))
        best = {"divergence": 0.1, "perplexity": 9.0, "why": "The best"}
        return SimpleNamespace(record={"best": best}, trials=[], recipe_text="surgeon: 1\n")

    monkeypatch.setattr(module, "search", search)
    under_way = UnderWay.in_folder(tmp_path / "out", model, "a", None, 60, time.monotonic(), list[str]().append)
    under_way.record["plan"] = {"tokens": 1024, "window": 64, "run": 0.01, "every": 1}
    (tmp_path / "out" / "scan").mkdir()
    exploring = module._Exploring(model, "a", None, None, Check.of([Verdict("search", "pair", "yes")]), under_way)
    for cells in (10, 10, 25):
        exploring.search(SimpleNamespace(cells=range(cells)))  # type: ignore[arg-type]
    assert searched == [("search", ["scan"]), ("search", ["scan"]), ("search-2", ["scan"])]


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.thorough
def test_the_whole_way(tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path) -> None:
    minutes, output, start = 1.5, tmp_path / "out", time.monotonic()
    output.mkdir()
    shutil.copy(MACHINES / "cpu-2.yaml", output / HERE)  # as if this machine had been measured
    found = explore(tiny_checkpoint, tiny_text, output, minutes=minutes, hardware="l4")
    assert time.monotonic() - start <= 60 * 1.1 * minutes
    assert found.spent <= 60 * 1.1 * minutes
    assert found.scan is not None
    assert set(found.scan.cells["operation"]) == {"shuffle", "prune", "merge", "parallel", "2-parallel", "lp"}
    assert found.similarity is not None
    assert len(found.similarity.proxies) > 0
    assert found.search is not None
    assert str(read_recipe(output / "knee.yaml").program(4)) == found.search.record["best"]["program"]
    assert [one.record["hardware"] for one in found.predictions] == ["cpu-2", "l4"]
    html = (output / "explore.html").read_text()
    assert len(found.page.chapters) == 1
    for one in found.next_steps:
        assert one.command in html.replace("&#39;", "'")
    assert parse(found.next_steps)[:4] == ["export", "serve", "heal", "eval"]
    for one in (found.next_steps[0], found.next_steps[3]):
        assert main(shlex.split(one.command)[1:]) == 0
    again = explore(tiny_checkpoint, tiny_text, output, minutes=minutes, hardware="l4")
    assert again.search is not None
    assert len(again.search.trials) == len(found.search.trials)
    assert json.loads((output / "explore.json").read_text())["next"] == [vars(one) for one in again.next_steps]
