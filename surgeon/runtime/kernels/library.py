"""The compiled library's functions, their arguments, and notes of calls, to be made again at once.

A call that is noted becomes a line of a table that C++ goes through (replay.h): the address of a function that takes
its arguments from there, and the arguments. Data at the addresses among them may change, the addresses may not.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from ctypes import CDLL, c_float, c_int64, c_void_p, cast
from typing import Any

import torch
from torch import Tensor

from surgeon.runtime.kernels.build import SWITCH, load_kernels, switched_off
from surgeon.runtime.kernels.triton import reason_without

KINDS = {"p": c_void_p, "n": c_int64, "f": c_float}
# What functions take, in order: pointers, numbers, floats.
RECORDABLE = {
    "product": "pnnppnnp",
    "rms_norm": "ppfnnp",
    "place": "pnnnnpfppnpn",
    "mean_squares": "pnnnnp",
    "gated_silu": "pnnp",
    "gated_tanh_gelu": "pnnp",
    "route": "pnnpnnnfnnnpp",
    "mixture": "pnnppnnnpnnnffp",
    "keep": "pnnnnppn",
    "attend": "pnnnnnpnppffpp",
    "add": "ppnp",
    "scale": "pfnp",
    "copy_rows": "pnnnpn",
    "softcap": "pfnn",
    "take_rows": "pnnnpnp",
    "take_packed_rows": "pnnnpnp",
    "start_exchange": "ppn",
    "finish_sum": "pnnp",
    "finish_gather": "pnnp",
}
OTHERS = {
    "set_threads": "n",
    "attend_text": "pnnnnnpnpnnnnffpp",
    "highest": "pnnpp",
    "replay": "pnp",
}
ARGUMENTS = 16  # that a line of a table has room for, as in replay.h

Call = tuple[str, tuple[Any, ...]]


# The `Recording` that takes in a thread's calls, if any.
NOTES: ContextVar[Any] = ContextVar("notes", default=None)


@contextmanager
def note_calls(notes: Any) -> Iterator[None]:
    """Have this thread's calls noted besides being made; nowhere for None."""
    before = NOTES.set(notes)
    try:
        yield
    finally:
        NOTES.reset(before)


class Library:
    """The compiled functions."""

    def __init__(self, library: CDLL) -> None:
        self._functions = {name: getattr(library, name) for name in RECORDABLE | OTHERS}
        for name, arguments in (RECORDABLE | OTHERS).items():
            self._functions[name].argtypes = [KINDS[kind] for kind in arguments]
            self._functions[name].restype = None
        self._recorded = {
            name: cast(getattr(library, f"recorded_{name}"), c_void_p).value or 0 for name in RECORDABLE
        }

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


def _word(kind: str, argument: Any) -> int:
    if kind == "f":
        return int.from_bytes(struct.pack("<f", argument), "little")
    if argument is None:
        return 0
    return int(argument)


LOST = {
    "cpu": "which take more than twice as long",
    "cuda": "which copy the keys and values of all texts side by side, and are nearly twice as many launches",
}  # where there are no kernels


def kernels_used(device: str, dtype: str) -> str:
    """Name the kernels in records and logs: "Triton", "C++", or "none" and the reason."""
    problem = _problem(device, dtype)
    if problem is None:
        if device == "cpu":
            return "C++"
        return "Triton"
    return f"none ({problem})"


def warn_without_kernels(device: str, dtype: str) -> None:
    """Warn if the kernels are wanted and cannot be had."""
    problem = _problem(device, dtype)
    if problem is not None and not switched_off() and (device == "cuda" or dtype == "float32"):
        warnings.warn(
            f"texts are continued by PyTorch's own operations, {LOST[device]}: {problem}; {SWITCH}=off silences this",
            stacklevel=2,
        )


def _problem(device: str, dtype: str) -> str | None:
    if device == "cuda":
        return reason_without()
    if dtype != "float32":
        return f"those for CPUs compute in float32, not in {dtype}"
    if switched_off():
        return f"{SWITCH}=off"
    return load_kernels().problem
