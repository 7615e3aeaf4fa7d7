"""scripts/bench/drafts.py: what it compares, and what it says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bench.drafts import Run, draft_named, edits, shortcomings, table
from surgeon.opened import open_model
from tests.tiny_models import save_checkpoint


def run(way: str, turn: int, seconds: float, place: str = "1ms", tokens: int = 7) -> Run:
    return Run([[tokens]], 10, seconds, 10, 8, 4, place, 1, way, turn)


FOUND = [
    *(run("dense", turn, seconds) for turn, seconds in ((1, 2.0), (2, 3.0), (3, 4.0))),
    *(run("tracks", turn, seconds) for turn, seconds in ((1, 1.0), (2, 1.5), (3, 8.0))),
    *(run("tracks alone", turn, 100.0, tokens=8) for turn in (1, 2, 3)),
    run("dense", 1, 2.0, "gloo"),
    run("tracks", 1, 2.1, "gloo"),
]


def test_speeds_are_beside_dense_in_the_same_round() -> None:
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table(FOUND)][2:]
    assert [line[2:4] for line in lines] == [
        ["dense", "1.00 (1.00 to 1.00)"],
        ["tracks", "2.00 (0.50 to 2.00)"],
        ["tracks alone", "0.03 (0.02 to 0.04)"],
        ["dense", "1.00 (1.00 to 1.00)"],
        ["tracks", "0.95 (0.95 to 0.95)"],
    ]
    assert [line[-1] for line in lines] == ["0", "0", "3", "0", "0"]
    assert [line[-2] for line in lines][1] == "1.67"  # 10 of 6 passes


def test_what_is_slower_than_it_should_be_is_told() -> None:
    """Not of programs alone, whose text is another one."""
    assert list(shortcomings(FOUND)) == ["gloo, 1, tracks: 0.95", "gloo, the best of one text: 1.00"]
    assert not list(shortcomings(FOUND[:9]))
    looked_up = [run("lookup", turn, 0.5) for turn in (1, 2, 3)]  # is no draft of a program
    assert list(shortcomings([*FOUND[:3], *looked_up])) == ["1ms, the best of one text: 1.00"]


def test_drafts_are_programs_or_recipes_of_them(tmp_path: Path) -> None:
    model = open_model(save_checkpoint(tmp_path / "model", num_layers=6))
    assert [name for name in edits(model, 1) if "tracks" in name] == []
    assert len([name for name in edits(model, 2) if "tracks" in name]) == 2
    assert [name for name in edits(model, 3) if "tracks" in name] == []  # KV heads do not divide
    assert draft_named(model, "few=A0 F0 A5 F5") == ("few", "A0 F0 A5 F5")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"surgeon: 1\nmodel: {tmp_path / 'model'}\noperations:\n  - prune: {{layers: '1:5'}}\n"
    )
    assert draft_named(model, f"few={recipe}") == ("few", "A0 F0 A5 F5")
    with pytest.raises(FileNotFoundError):
        draft_named(model, f"few={tmp_path / 'none.yaml'}")
