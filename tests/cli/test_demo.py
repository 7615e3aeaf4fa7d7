"""`surgeon demo` from end to end, on a few tokens and stretches of layers."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from surgeon.cli import demo
from surgeon.cli.app import main
from surgeon.language.recipe import read_recipe


@pytest.mark.long
@pytest.mark.thorough
def test_the_whole_way(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "scan", partial(demo.scan, every=4))
    monkeypatch.setattr(demo, "ROUNDS", 1)
    monkeypatch.setattr(demo, "NEW_TOKENS", 16)
    output = tmp_path / "demo"
    assert main(["demo", "-o", str(output), "--tokens", "512", "--trials", "3"]) == 0
    captured = capsys.readouterr()
    rows = {line.split("  ")[0]: line.split() for line in captured.out.splitlines()}
    dense, ladder = (next(rows[name] for name in rows if name.startswith(start)) for start in ("dense", "ladder"))
    # The name of scattered pairs takes several lines, and its numbers stand on the last of them.
    pairs = captured.out.partition("\nLP pairs")[2].partition("\nladder")[0].split()
    assert dense[1] == "16"
    assert dense[3:5] == ["0.0000", "32"]
    assert "12" in pairs
    assert "24" in pairs
    assert ladder[2] == "16"
    table = captured.out.partition("The demo model on two ranks")[2].partition("Pictures")[0]
    assert max(map(len, table.splitlines())) <= 80
    for picture in ("scan/heatmap-prune.png", "search/search.png"):
        assert (output / picture).exists()
        assert str(output / picture) in captured.out
    assert read_recipe(output / "search" / "recipe.yaml").program(16).effective_depth() == 12
    assert "$ surgeon scan demo" in captured.err
