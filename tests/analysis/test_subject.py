"""A model is loaded whole where it fits, and read layer by layer where it does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from surgeon.analysis import subject
from surgeon.analysis.subject import load_for_analysis, open_subject
from surgeon.machine import resident_bytes
from surgeon.opened import open_model, streamed_layers
from tests.tiny_models import tiny_model


def test_what_does_not_fit_is_streamed(tmp_path: Path) -> None:
    tiny_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    opened = open_model(tmp_path)
    checkpoint = opened.checkpoint
    stored = sum(torch.Size(checkpoint.shape(name)).numel() * 2 for name in checkpoint.names())
    assert opened.bytes_on("cpu") == 2 * stored  # computed in float32
    assert streamed_layers(load_for_analysis(opened)) is None
    with pytest.warns(UserWarning, match=r"weights \(\d+ KB\) do not fit .* read layer by layer"):
        model = load_for_analysis(opened, memory=resident_bytes())
    assert streamed_layers(model) is not None


def test_a_subject_takes_the_limit(tiny_checkpoint: Path, tiny_text: Path) -> None:
    with pytest.warns(UserWarning, match="read layer by layer"):
        opened = open_subject(str(tiny_checkpoint), str(tiny_text), tokens=64, window=32, memory=1 << 20)
    assert streamed_layers(opened.model) is not None


def test_a_gpu_with_room_is_taken_before_anything_is_streamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    asked: list[tuple[str, object]] = []
    monkeypatch.setattr(subject, "load", lambda _, device_map: asked.append(("whole", device_map)))
    monkeypatch.setattr(subject, "load_streamed", lambda _, device: asked.append(("streamed", device)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for free in ((1 << 30, 1 << 30), (0, 1 << 30), (0, 0)):
        monkeypatch.setattr(
            torch.cuda, "mem_get_info", lambda number, free=free: (free[number], 1 << 30)
        )
        if any(free):
            load_for_analysis(open_model(tmp_path))
            continue
        with pytest.warns(UserWarning, match="read layer by layer"):
            load_for_analysis(open_model(tmp_path))
    assert asked == [("whole", "cuda:0"), ("whole", "cuda:1"), ("streamed", "cuda:0")]
