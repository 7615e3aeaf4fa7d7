"""What a notebook calls to put results into a page, and to see them again."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

import surgeon
from surgeon.findings.explore import Exploration
from surgeon.findings.result import read_record
from surgeon.findings.scan import Scan
from surgeon.machine import show_size
from tests.findings.run_folders import make_scan, make_similarity


def test_a_page_of_runs_and_what_it_says(tmp_path: Path) -> None:
    runs = [make_scan(tmp_path / "scan"), make_similarity(tmp_path / "alike")]
    found = surgeon.report(runs, tmp_path / "pages" / "both.html")
    assert str(found) == f"{found.file}: {show_size(found.file.stat().st_size)}"
    assert [chapter.name for chapter in found.chapters] == ["tiny"]
    table = found.table()
    assert set(table["model"]) == {"tiny"}
    assert {"As it is", "Layers never to touch", "Who needs the layer before"} <= set(table["about"])
    alone = surgeon.report(runs[0], tmp_path / "one.html")
    assert set(alone.table()["about"]) < set(table["about"])
    assert all(text in alone.file.read_text() for text in alone.table()["figure"])


def test_the_page_of_an_exploration_has_its_passes(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    scanned = make_scan(tmp_path / "out" / "scan")
    record = read_record(scanned / "scan.json") | {"minutes": 10, "spent": 90.0, "passes": ["scan"]}
    Exploration(record=record).write(tmp_path / "out")
    for given in (tmp_path / "out", [tmp_path / "out", scanned]):
        (chapter,) = surgeon.report(given, tmp_path / "page.html").chapters
        assert [finding.lead for finding in chapter.summary].count("As it is") == 1


def test_a_result_is_read_again_from_its_folder(tmp_path: Path) -> None:
    found = Scan.read(make_scan(tmp_path / "scan", num_layers=4))
    assert len(found.table()) == 20
    assert list(found.pictures()) == ["heatmaps", "heatmap-prune", "heatmap-lp", "curves-lp"]
    assert isinstance(found.plot(), Figure)
    with pytest.raises(ValueError, match="no picture 'heatmap' of this scan; did you mean 'heatmaps'"):
        found.plot("heatmap")
    again = tmp_path / "again"
    again.mkdir()
    found.write(again)
    assert Scan.read(again).cells.equals(found.cells)
    with pytest.raises(
        ValueError, match="holds a scan of another model: tiny with the hash aaaaaaaaaaaa, while this"
    ):
        Scan.read(again, "b" * 64)
