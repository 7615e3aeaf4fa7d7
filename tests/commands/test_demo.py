"""`surgeon demo` from end to end, on a few tokens and stretches of layers."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path

import pytest
import typer

from surgeon.commands import app, demo, scan
from surgeon.commands.app import main
from surgeon.language.recipe import read_recipe
from surgeon.words import WIDTH


@pytest.mark.long
@pytest.mark.thorough
def test_the_whole_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "scan", partial(scan.scan, every=4))
    output = tmp_path / "demo"
    assert main(["demo", "-o", str(output), "--trials", "3"]) == 0
    captured = capsys.readouterr()
    table = captured.out.partition("The demo model on 2 ranks")[2].partition("Divergence is")[0]
    rows = {line.split("  ")[0]: line.split() for line in table.splitlines()}
    dense, ladder = (
        next(rows[name] for name in rows if name.startswith(start)) for start in ("dense", "ladder")
    )
    pairs = next(line.split() for line in table.splitlines() if line.startswith("LP pairs"))
    assert dense[1] == "16"
    assert dense[3:5] == ["0.0000", "32"]
    assert pairs[-6] == "12"
    assert pairs[-3] == "24"
    assert ladder[2] == "16"
    lines = [line for line in (captured.out + captured.err).splitlines() if str(tmp_path) not in line]
    assert max(map(len, lines)) <= 80
    page = (output / "report.html").read_text(encoding="utf-8")
    assert "The winner, trial" in page
    assert f"The page    {output / 'report.html'}" in captured.out
    for picture in ("scan/heatmap-prune.png", "search/search.png"):
        assert (output / picture).exists()
    assert read_recipe(output / "search" / "recipe.yaml").program(16).effective_depth() == 12
    assert "$ surgeon scan demo" in captured.err


def test_a_depth_that_the_model_has_is_refused_before_the_scan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "-o", str(tmp_path / "demo"), "--depth", "16"]) == 1
    assert (
        capsys.readouterr().err == "error: demo has depth 16 already; ask for less than that, not 16\n"
    )


@pytest.mark.parametrize("command", [command for _, command in demo.NEXT])
def test_what_to_try_next_can_be_typed(command: str) -> None:
    name, *arguments = shlex.split(command)
    assert typer.main.get_command(app.app).commands[name].make_context(name, arguments)
    assert len(f"  surgeon {command}") <= WIDTH
