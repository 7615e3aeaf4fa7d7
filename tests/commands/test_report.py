"""`surgeon report` on what the other commands really write."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from surgeon.commands.app import main
from surgeon.findings.page import KINDS
from tests.findings.read_page import Page, map_named

Result = tuple[int, str, str]


@pytest.fixture
def surgeon(capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    """Runs a command; returns exit code, output and errors."""

    def run(*arguments: object) -> Result:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_its_help_names_all_that_it_shows(surgeon: Callable[..., Result]) -> None:
    code, out, _ = surgeon("report", "--help")
    assert code == 0
    assert [name for kind in KINDS if not re.search(rf"\b{(name := kind.COMMAND)}\b", out)] == []


@pytest.mark.thorough
def test_from_the_commands_to_the_page(
    surgeon, tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path
) -> None:  # type: ignore[no-untyped-def]
    text = ("--data", tiny_text, "--tokens", 128, "--window", 32)
    runs = {
        name: tmp_path / name
        for name in ("scan", "similarity", "sensitivity", "spectrum", "search", "fused")
    }
    scanned = ("--operation", "prune", "--operation", "lp", "--operation", "shuffle")
    few = ("--windows-for-jacobians", 1, "--iterations", 3)
    low = ("--ranks", "1/2", "--calibration-tokens", 128)
    commands = [
        ("scan", tiny_checkpoint, *text, "-o", runs["scan"], *scanned),
        ("sensitivity", tiny_checkpoint, *text, "-o", runs["sensitivity"], *few),
        ("similarity", tiny_checkpoint, *text, "-o", runs["similarity"], "--scan", runs["scan"]),
        (
            "spectrum",
            tiny_checkpoint,
            *text,
            "-o",
            runs["spectrum"],
            "--layers",
            "1:3",
            "--weights",
            "q,down",
            *low,
        ),
        ("search", tiny_checkpoint, *text, "-o", runs["search"], "--budget", "depth=3", "--trials", 3),
        ("export", runs["search"] / "recipe.yaml", "-o", runs["fused"]),
    ]
    for command in commands:
        code, _, err = surgeon(*command)
        assert code == 0, err
    output = tmp_path / "page.html"
    output.write_text("an older page")
    code, out, err = surgeon("report", *runs.values(), "-o", output)
    assert (code, err) == (0, "")
    assert out.startswith(str(output))
    page = Page(output.read_text())
    assert page.errors == []
    assert sum(a.get("class") == "run" for _, a in page.tags) == 6
    assert sum(a.get("class") == "chapter" for _, a in page.tags) == 1, (
        "all of them are of the same weights"
    )
    assert_says_what_was_measured(page, runs)


def assert_says_what_was_measured(page: Page, runs: dict[str, Path]) -> None:
    record = json.loads((runs["scan"] / "scan.json").read_text())
    said = page.text("model-1")
    assert record["model_hash"] in said
    base = re.search(r"4 layers and a perplexity of ([\d.,]+)", said)
    assert base is not None
    assert float(base[1].replace(",", "")) == pytest.approx(record["base_perplexity"], rel=6e-4)
    with (runs["scan"] / "cells.csv").open() as file:
        rows = {
            (row["first"], row["last"]): row
            for row in csv.DictReader(file)
            if row["operation"] == "prune"
        }
    cells = map_named(page, "Prune")
    assert len(cells["at"]) == len(rows) == 10
    for index, place in enumerate(cells["at"]):
        row = rows[str(place // 4), str(place % 4)]
        assert cells["fields"][1]["values"][index] == pytest.approx(float(row["divergence"]), rel=6e-4)
    with (runs["search"] / "trials.csv").open() as file:
        trials = list(csv.DictReader(file))
    best = json.loads((runs["search"] / "search.json").read_text())["best"]
    (won,) = [row for row in trials if int(row["trial"]) == best["trial"]]
    assert f"Of 3 trials the winner is trial {best['trial']}" in said
    assert f"at depth 3: {won['edits']}" in said
    for line in (runs["search"] / "recipe.yaml").read_text().splitlines():
        assert " ".join(line.split()) in said
    assert "Not scanned, so nothing is said about it: Merge, Parallel" in said


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _: None, "holds no run of a surgeon command; looked for explore.json, scan.json"),
        (lambda folder: (folder / "scan.json").write_text("{"), "scan.json is not valid JSON"),
        (lambda folder: (folder / "scan.json").write_text("{}"), "has scan.json but no cells.csv"),
    ],
)
def test_errors_take_one_line(surgeon, make, message: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path / "run"
    folder.mkdir()
    make(folder)
    code, out, err = surgeon("report", folder, "-o", tmp_path / "page.html")
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert not (tmp_path / "page.html").exists()


def test_a_folder_that_is_not_there(surgeon, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    code, _, err = surgeon("report", tmp_path / "nothing")
    assert code == 1
    assert "no folder" in err
    code, _, err = surgeon("report")
    assert code == 2
    assert "RUN" in err


def test_only_a_page_is_replaced(surgeon, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    code, _, err = surgeon("report", tmp_path, "-o", notes)
    assert code == 1
    assert err == f"error: a report is an .html file, and {notes} is none; write {tmp_path}/notes.html\n"
    assert notes.read_text() == "mine"
