"""Tokens on the disk: made once, as far as they are needed, and whole whatever happens."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from surgeon.quality.data import Tokens, Windows, digest_of
from surgeon.quality.sources import Reading
from surgeon.training import token_store
from surgeon.training.texts import TrainingText, require_apart
from surgeon.training.token_store import TextSource, rows_digest
from tests.tiny_models import tiny_tokenizer


class Numbers(TextSource):
    """Documents of the numbers 0, 1, ...; it counts what it was asked for, and may fail."""

    def __init__(self, window: int = 8, fails_at: int | None = None) -> None:
        super().__init__(tiny_tokenizer(), "demo", window, "joined")
        self.fails_at = fails_at
        self.given = 0

    def tokens(self, reading: Reading) -> Iterator[list[Tokens]]:
        for number in range(100):
            if number == self.fails_at:
                raise OSError("the stream ended in an error; try again")
            self.given += 1
            reading.left_out["null_rows"] += 1
            yield [Tokens(np.arange(5 * number, 5 * number + 5, dtype=np.int32))]


def at(folder: Path, source: TextSource) -> TextSource:
    """The source with its windows in a folder."""
    source.folder = folder
    return source


WINDOWS = torch.arange(496).view(62, 8)


def test_it_is_made_once_as_far_as_it_is_needed(tmp_path: Path) -> None:
    for asked, wanted, given in (
        (10, 10, 16),
        (10, 10, 0),
        (20, 20, 32),
        (15, 15, 0),
        (1 << 40, 62, 100),
        (70, 62, 0),
    ):
        source = Numbers()
        rows, known = at(tmp_path, source).windows(asked)
        assert source.given == given
        assert torch.equal(rows.with_format("torch")[:]["input_ids"], WINDOWS[:wanted])
    assert known["left_out"] == {"null_rows": 100}
    assert len(at(tmp_path, Numbers(4)).windows(1)[0]) == 1
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 2


def test_digests_and_what_is_shared(tmp_path: Path) -> None:
    rows, _ = at(tmp_path, Numbers()).windows(30)
    assert rows_digest(rows, 8) == digest_of(WINDOWS[:30])
    assert rows_digest(rows.select(range(13)), 8) == digest_of(WINDOWS[:13])
    others = Windows(WINDOWS[28:32], "others", "a")
    require_apart(TrainingText(rows.select(range(28)), "numbers", "b"), others)
    with pytest.raises(
        ValueError, match="windows of the held-out text others are in the training text numbers, too"
    ):
        require_apart(TrainingText(rows, "numbers", "b"), others)


def test_a_text_that_breaks_is_read_again(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="ended in an error; try again"):
        at(tmp_path, Numbers(fails_at=40)).windows(1 << 40)
    rows, _ = at(tmp_path, Numbers()).windows(1 << 40)
    assert torch.equal(rows.with_format("torch")[:]["input_ids"], WINDOWS)


@pytest.mark.parametrize("name", ["as_table", "write_json"])
def test_killed_it_leaves_nothing_half_written(tmp_path: Path, name: str) -> None:
    pid = os.fork()
    if pid == 0:
        calls = iter(range(20))
        write = getattr(token_store, name)
        dies = 10 if name == "as_table" else 0
        setattr(
            token_store,
            name,
            lambda *rest: os.kill(os.getpid(), 9) if next(calls) == dies else write(*rest),
        )
        at(tmp_path, Numbers()).windows(1 << 40)
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    rows, _ = at(tmp_path, Numbers()).windows(1 << 40)
    assert torch.equal(rows.with_format("torch")[:]["input_ids"], WINDOWS)
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1
