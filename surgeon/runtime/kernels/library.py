"""The compiled library's functions, what they are called with, and how calls are noted, to be made again at once.

A call that is noted becomes a line of a table that C++ goes through (replay.h): the address of a function that takes
its arguments from there, and the arguments. What lies at the addresses among them may change, the addresses may not.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from ctypes import CDLL, c_float, c_int64, c_void_p, cast
from typing import Any

import torch
from torch import Tensor

POINTER = c_void_p
SIZE = c_int64
NUMBER = c_float
RECORDABLE: dict[str, list[Any]] = {
    "product": [POINTER, SIZE, SIZE, POINTER, POINTER, SIZE, SIZE, POINTER],
    "rms_norm": [POINTER, POINTER, NUMBER, SIZE, SIZE, POINTER],
    "place": [POINTER, SIZE, SIZE, SIZE, SIZE, POINTER, NUMBER, POINTER, POINTER, SIZE, POINTER, SIZE],
    "mean_squares": [POINTER] + [SIZE] * 4 + [POINTER],
    "gated_silu": [POINTER, SIZE, SIZE, POINTER],
    "gated_tanh_gelu": [POINTER, SIZE, SIZE, POINTER],
    "route": [POINTER, SIZE, SIZE, POINTER] + [SIZE] * 3 + [NUMBER] + [SIZE] * 3 + [POINTER, POINTER],
    "mixture": [POINTER, SIZE, SIZE, POINTER, POINTER] + [SIZE] * 3 + [POINTER] + [SIZE] * 3 + [NUMBER] * 2 + [POINTER],
    "keep": [POINTER, SIZE, SIZE, SIZE, SIZE, POINTER, POINTER, SIZE],
    "attend": [POINTER] + [SIZE] * 5 + [POINTER, SIZE, POINTER, POINTER] + [NUMBER] * 2 + [POINTER] * 2,
    "add": [POINTER, POINTER, SIZE, POINTER],
    "scale": [POINTER, NUMBER, SIZE, POINTER],
    "copy_rows": [POINTER, SIZE, SIZE, SIZE, POINTER, SIZE],
    "softcap": [POINTER, NUMBER, SIZE, SIZE],
    "take_rows": [POINTER, SIZE, SIZE, SIZE, POINTER, SIZE, POINTER],
    "take_packed_rows": [POINTER, SIZE, SIZE, SIZE, POINTER, SIZE, POINTER],
    "start_exchange": [POINTER, POINTER, SIZE],
    "finish_sum": [POINTER, SIZE, SIZE, POINTER],
    "finish_gather": [POINTER, SIZE, SIZE, POINTER],
}
OTHERS: dict[str, list[Any]] = {
    "set_threads": [SIZE],
    "attend_text": [POINTER] + [SIZE] * 5 + [POINTER, SIZE, POINTER] + [SIZE] * 4 + [NUMBER] * 2 + [POINTER] * 2,
    "highest": [POINTER, SIZE, SIZE, POINTER, POINTER],
    "replay": [POINTER, SIZE, POINTER],
}
ARGUMENTS = 16  # that a line of a table has room for, as in replay.h

Call = tuple[str, tuple[Any, ...]]


NOTES: ContextVar[Any] = ContextVar("notes", default=None)  # the `Recording` that takes in a thread's calls, if any


@contextmanager
def noting(notes: Any) -> Iterator[None]:
    """Have this thread's calls noted besides being made; nowhere for None."""
    before = NOTES.set(notes)
    try:
        yield
    finally:
        NOTES.reset(before)


class Library:
    """The functions."""

    def __init__(self, library: CDLL) -> None:
        self._functions = {name: getattr(library, name) for name in RECORDABLE | OTHERS}
        for name, arguments in (RECORDABLE | OTHERS).items():
            self._functions[name].argtypes = arguments
            self._functions[name].restype = None
        self._recorded = {name: cast(getattr(library, f"recorded_{name}"), c_void_p).value or 0 for name in RECORDABLE}

    def call(self, name: str, *arguments: Any) -> None:
        self._functions[name](*arguments)
        if (notes := NOTES.get()) is not None:
            notes.note(name, *arguments)

    def table(self, calls: Sequence[Call]) -> Tensor:
        """The calls as C++ goes through them, (calls, 1 + ARGUMENTS), int64."""
        lines = list[list[int]]()
        for name, arguments in calls:
            words = [_word(kind, one) for kind, one in zip(RECORDABLE[name], arguments, strict=True)]
            lines.append([self._recorded[name], *words, *[0] * (ARGUMENTS - len(words))])
        return torch.tensor(lines, dtype=torch.int64).view(-1, 1 + ARGUMENTS)


def _word(kind: Any, argument: Any) -> int:
    if kind is NUMBER:
        return int.from_bytes(struct.pack("<f", argument), "little")
    if argument is None:
        return 0
    return int(argument)
