"""The name of what computes beside matrix products: kernels of ours, or PyTorch's operations, and why these."""

from __future__ import annotations

import warnings

from surgeon.runtime.kernels.build import SWITCH, built, switched_off
from surgeon.runtime.kernels.triton import missing

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
        return missing()
    if dtype != "float32":
        return f"those for CPUs compute in float32, not in {dtype}"
    if switched_off():
        return f"{SWITCH}=off"
    return built().problem
