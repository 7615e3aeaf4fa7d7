"""What belongs to a checkpoint: whatever is missing, cut, or another one is named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from surgeon.training.checkpoints import (
    MANIFEST_FILE,
    checkpoints_of,
    fault_of,
    newest_checkpoint,
    write_manifest,
)

FILES = {
    "adapter_config.json": b"{}",
    "adapter_model.safetensors": b"w" * 300,
    "optimizer_0/part.distcp": bytes(2 << 20),  # too large to be hashed
    "rng_state_0.pth": b"r" * 20,
    "rng_state_1.pth": b"r" * 20,
    "scheduler.pt": b"s" * 30,
    "trainer_state.json": b'{"global_step": 4}',
    "training.csv": b"step\n4\n",
}
DAMAGES: dict[str, Callable[[Path], object]] = {
    "gone": lambda path: path.unlink(),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
}


def checkpoint(folder: Path) -> Path:
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    write_manifest(folder)
    return folder


@pytest.mark.parametrize("how", DAMAGES)
def test_every_file_that_is_not_as_it_was_is_named(tmp_path: Path, how: str) -> None:
    for name in [*FILES, MANIFEST_FILE]:
        folder = checkpoint(tmp_path / "checkpoint-4")
        assert fault_of(folder) is None
        DAMAGES[how](folder / name)
        fault = fault_of(folder)
        assert fault is not None
        assert name in fault
        shutil.rmtree(folder)


def test_a_small_file_of_the_same_size_is_known_by_its_hash(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint-4")
    (folder / "scheduler.pt").write_bytes(b"t" * 30)
    assert fault_of(folder) == "scheduler.pt has another content than was written"


def test_the_last_whole_one_is_gone_on_from(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    for step in (2, 4, 12):
        checkpoint(tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-12" / "scheduler.pt").unlink()
    with pytest.warns(
        UserWarning, match=r"checkpoint-12: scheduler\.pt is missing; the run goes on from checkpoint-4"
    ):
        assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-4"
    for each in checkpoints_of(tmp_path).values():
        (each / "adapter_model.safetensors").write_bytes(b"")
    message = r"-12: adapter_model\.safetensors has 0 bytes, not the 300 that were written, and .* whole .* before it"
    with pytest.raises(ValueError, match=message):
        newest_checkpoint(tmp_path)
