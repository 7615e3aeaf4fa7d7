"""`surgeon.search`, and what a further worker of a search runs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import surgeon
from surgeon.commands import searching
from surgeon.commands.app import main
from surgeon.searches.workers import GIVEN

TEXT: dict[str, Any] = {"tokens": 128, "window": 32}


def test_a_search_is_what_its_command_writes(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {"budget": "depth=3", "trials": 3}
    found = surgeon.search(surgeon.open(tiny_checkpoint), tiny_text, tmp_path / "ours", **asked, **TEXT)
    command = [
        "search",
        str(tiny_checkpoint),
        "--data",
        str(tiny_text),
        "--budget",
        "depth=3",
        "--trials",
        "3",
    ]
    assert main([*command, "--tokens", "128", "--window", "32", "-o", str(tmp_path / "theirs")]) == 0
    assert (tmp_path / "ours/trials.csv").read_bytes() == (tmp_path / "theirs/trials.csv").read_bytes()
    assert (tmp_path / "theirs/recipe.yaml").read_text().endswith(found.recipe.to_yaml())
    assert str(found.recipe.program(4)) == str(found.program) == found.winner.trial.key
    assert len(found.table()) == len(found.trials) == 3
    runners_up = [one.trial for one in found.winner.comparison.runners_up]
    assert runners_up
    assert found.winner.trial not in runners_up
    assert all(path.is_file() for path in found.files)
    assert (len(found.front), len(found.curves)) == (0, 0)
    assert found.plot().axes
    assert str(surgeon.export(found.recipe, tmp_path / "made").program) == str(found.program)


@pytest.mark.thorough
def test_units_that_are_searched_are_those_of_the_recipe(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path
) -> None:
    """Chosen by the text of the search, also on held-out text and before healing."""
    text = tmp_path / "other.txt"
    text.write_text("A text to heal on, which is another one. " * 200)
    asked: dict[str, Any] = {
        "space": "width,pair",
        "budget": "params=0.8x",
        "trials": 3,
        "heal": 1,
        "heal_batch": 1,
    }
    found = surgeon.search(tiny_checkpoint, tiny_text, tmp_path / "out", heal_data=text, **asked, **TEXT)
    assert "#" in str(found.program)
    measured = surgeon.evaluate(found.recipe, tiny_text, **TEXT).text
    assert measured is not None
    trial = found.winner.trial.measured
    assert measured.divergence == pytest.approx(trial.divergence, rel=1e-5)
    assert measured.perplexity == pytest.approx(trial.perplexity, rel=1e-5)
    by_weights = surgeon.evaluate(tiny_checkpoint, tiny_text, program=found.program, **TEXT).text
    assert by_weights is not None
    assert by_weights.divergence != pytest.approx(trial.divergence, rel=1e-5)
    assert found.winner.healing is not None
    assert str(surgeon.export(found.recipe, tmp_path / "made").program) == str(found.program)


def ended(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> object:
    """What a worker ends with, not in the main thread, whose signals it would take."""
    monkeypatch.setenv(GIVEN, json.dumps([1, given]))
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(searching.run_worker()))
    thread.start()
    thread.join()
    return found[0]


def test_a_worker_joins_a_search_by_what_the_first_one_gives_it(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = []

    @contextmanager
    def noted(_: int, __: tuple[str, ...], what: dict[str, Any], ___: Path) -> Iterator[None]:
        given.append(what)
        yield

    monkeypatch.setattr(searching, "worker_processes", noted)
    options: dict[str, Any] = {"budget": "depth=3", "trials": 2, "holdout": 0, "workers": 2}
    found = surgeon.search(tiny_checkpoint, tiny_text, tmp_path, **options, **TEXT)
    options["trials"] = 3
    (what,) = given
    what["question"]["trials"] = 3
    assert ended(what, monkeypatch) == 0
    more = surgeon.search(tiny_checkpoint, tiny_text, tmp_path, **options, **TEXT)
    assert (len(found.trials), len(more.trials)) == (2, 3)
    before, ran = (one.record["work"]["sublayers"] for one in (found, more))
    assert (before["trials"], ran["trials"]) == (0, 8), (
        "single edits are known; the worker ran one of them"
    )
    assert ran["single_edits"] == before["single_edits"] > 0
    assert more.record["sublayers_run"] == round(sum(ran.values()), 1)
    what["model"] = str(tmp_path / "nowhere")
    assert str(ended(what, monkeypatch)).startswith(
        f"error: there is no model folder {tmp_path / 'nowhere'}"
    )
