"""Text to calibrate on is none of the text that is measured on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from surgeon.analysis.subject import calibration_entry, load_calibration, load_recorded
from surgeon.checkpoint.texts import open_tokenizer
from surgeon.opened import open_model
from surgeon.quality.data import load_windows


def test_it_is_what_follows(tiny_checkpoint: Path, tiny_text: Path) -> None:
    tokenizer = open_tokenizer(tiny_checkpoint)
    everything = load_windows(tokenizer, str(tiny_text), 32, 320).ids
    measured = load_windows(tokenizer, str(tiny_text), 32, 130).ids
    found = load_calibration(str(tiny_checkpoint), str(tiny_text), 130, 100, 32)
    assert torch.equal(torch.cat([measured, found.ids]), everything[: len(measured) + 3])
    assert (found.source, found.notes) == (str(tiny_text), ())
    assert found.digest != load_calibration(str(tiny_checkpoint), str(tiny_text), 130, 128, 32).digest
    assert found.digest != load_calibration(str(tiny_checkpoint), str(tiny_text), 160, 100, 32).digest


def test_it_may_be_another_text(tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("The lazy dog jumps over the quick brown fox. " * 40)
    found = load_calibration(str(tiny_checkpoint), str(tiny_text), 128, 64, 32, other=str(other))
    expected = load_windows(open_tokenizer(tiny_checkpoint), str(other), 32, 64)
    assert torch.equal(found.ids, expected.ids)
    assert (found.source, found.digest) == (str(other), expected.digest)


def test_a_recipe_names_a_file_by_its_whole_path(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        json.dumps({"words": "some of the words, ", "more": f"{row} others " * 40}) + "\n"
        for row in range(40)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    (tmp_path / "plain.txt").write_text("".join(rows))
    tokenizer = open_tokenizer(tiny_checkpoint)
    for named, whole in (("rows.jsonl:more", "rows.jsonl:more"), ("plain.txt", "plain.txt")):
        windows = load_windows(tokenizer, named, 16, 64)
        record = calibration_entry(windows)
        assert record["data"] == f"{tmp_path.resolve()}/{whole}"
        monkeypatch.chdir("/")
        assert load_recorded(open_model(tiny_checkpoint), record).digest == windows.digest
        monkeypatch.chdir(tmp_path)


def test_too_little_text(tiny_checkpoint: Path, tiny_text: Path) -> None:
    model, text = str(tiny_checkpoint), str(tiny_text)
    everything = load_windows(open_tokenizer(tiny_checkpoint), text, 32, 10**6).ids
    last = load_calibration(model, text, everything.numel() - 64, 1000, 32)
    assert torch.equal(last.ids, everything[-2:])
    assert last.notes == (
        "64 tokens are left to calibrate on, fewer than the 1000 asked for: all are used",
    )
    with pytest.raises(
        ValueError, match="all of them are measured: none are left .* give other text as calib"
    ):
        load_calibration(model, text, everything.numel(), 1000, 32)
    with pytest.raises(ValueError, match="calibration tokens must be at least one window of 32, not 31"):
        load_calibration(model, text, 128, 31, 32)
