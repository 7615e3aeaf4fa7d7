"""What a search's folder tells of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from surgeon.findings.search import SearchResult
from surgeon.searches.results import lost_trials

PLACE = "journal:study.log"


@pytest.mark.parametrize(("finished", "lost"), [(0, True), (4, True), (6, False), (9, False)])
def test_trials_that_a_storage_has_lost_are_told_of(tmp_path: Path, finished: int, lost: bool) -> None:
    assert lost_trials(tmp_path, "search", PLACE, finished) == []
    (tmp_path / SearchResult.RECORD).write_text(json.dumps({"study": "search", "trials": 6}))
    said = (
        f"{PLACE} has {finished} of the 6 trials that search.json tells of; the others are tried again"
    )
    assert lost_trials(tmp_path, "search", PLACE, finished) == ([said] if lost else [])
    assert lost_trials(tmp_path, "another", PLACE, finished) == []
    (tmp_path / SearchResult.RECORD).write_text('{"study": "sea')
    assert lost_trials(tmp_path, "search", PLACE, finished) == []
