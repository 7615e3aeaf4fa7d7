"""Errors of disks say which file they are of."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from surgeon.processes.files import full_place, name_file


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (OSError(errno.ENOSPC, "No space left"), "study.log"),
        (OSError(errno.EIO, "Input/output error"), "study.log"),
        (OSError(errno.ENOSPC, "No space left", "another"), "another"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "study.log"),
    ],
)
def test_an_error_without_a_file_gets_one(error: Exception, name: str) -> None:
    with pytest.raises(OSError, match=f"'{name}'") as raised, name_file(Path("study.log")):
        raise error
    assert raised.value.filename == name


@pytest.mark.parametrize("error", [ValueError("rank 0"), OSError("in words")])
def test_other_errors_stay_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, name_file("study.log"):
        raise error
    assert raised.value is error
    assert getattr(error, "filename", None) is None


def test_the_place_is_that_of_the_error_that_says_it() -> None:
    outer = RuntimeError("could not write the study")
    outer.__cause__ = OSError(errno.ENOSPC, "No space left", b"study.db")
    assert full_place(outer) == "study.db"
    assert full_place(RuntimeError("disk is full")) is None
