"""Files that are read while others are still being written."""

from __future__ import annotations

from pathlib import Path
from threading import Event

import pytest
import torch

from surgeon.beside import Background, Stopped
from surgeon.checkpoint.awaited import StoredWhenWhole, WholeFiles
from surgeon.checkpoint.forms import PlannedTensor
from surgeon.checkpoint.read import Checkpoint, Stored
from surgeon.checkpoint.write import begin_files, fill_files
from tests.checkpoint.helpers import save_source

NAME = "model.safetensors"


def begun(folder: Path) -> tuple[dict[str, list[PlannedTensor]], Checkpoint]:
    """A folder whose tensor, of ones, is not there yet."""
    save_source(folder)
    planned = PlannedTensor("t", (3, 4), torch.float32, False, lambda: iter([torch.ones(3, 4)]))
    shards = {NAME: [planned]}
    begin_files(folder, shards)
    return shards, Checkpoint(folder)


def test_what_is_read_too_early_is_waited_for(tmp_path: Path) -> None:
    shards, checkpoint = begun(tmp_path)
    files, asked = WholeFiles(), Event()
    tensor = StoredWhenWhole(Stored(checkpoint, "t"), files)

    def read() -> torch.Tensor:
        asked.set()
        return torch.cat([tensor.tensor(), *tensor.rows(2)])

    reading = Background(read)
    assert asked.wait(10)
    fill_files(tmp_path, shards, lambda _: None, lambda path, _: files.add(path.name))
    assert torch.equal(reading.result(), torch.ones(6, 4))


def test_what_will_never_be_whole_is_not_waited_for(tmp_path: Path) -> None:
    _, checkpoint = begun(tmp_path)
    files = WholeFiles()
    reading = Background(StoredWhenWhole(Stored(checkpoint, "t"), files).tensor)
    files.add("another")
    files.close()
    with pytest.raises(Stopped):
        reading.result()


def test_what_is_whole_can_be_read_when_no_more_will_be(tmp_path: Path) -> None:
    shards, checkpoint = begun(tmp_path)
    files = WholeFiles()
    fill_files(tmp_path, shards, lambda _: None)
    files.add(NAME)
    files.close()
    assert torch.equal(StoredWhenWhole(Stored(checkpoint, "t"), files).tensor(), torch.ones(3, 4))
