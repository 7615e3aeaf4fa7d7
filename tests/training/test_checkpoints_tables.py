"""What is said while a run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from surgeon.training.checkpoints import RunLog
from surgeon.training.run import train
from surgeon.training.settings import TrainSettings
from tests.tiny_models import tiny_model
from tests.training.runs import TEXTS, run, student


def test_progress_says_the_latest_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    step_end = RunLog.on_step_end

    def listening(self: RunLog, *arguments: object, **options: object) -> object:
        said.append(self.note())
        return step_end(self, *arguments, **options)

    monkeypatch.setattr(RunLog, "on_step_end", listening)
    run(tmp_path / "text", steps=3)
    assert [note.split()[::2] for note in said] == [[], ["loss"], ["loss", "perplexity"]]
    said.clear()
    settings = TrainSettings(scope="all", steps=2, batch=4, evaluate_every=1, save_every=1)
    train(student(), TEXTS, settings, tmp_path / "original", lambda: tiny_model("llama", 2))
    assert [note.split()[::2] for note in said] == [[], ["loss", "divergence"]]
