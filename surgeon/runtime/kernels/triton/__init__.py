"""Kernels for GPUs, in Triton, which PyTorch's builds for GPUs bring along."""

from __future__ import annotations

from importlib.util import find_spec

from surgeon.runtime.kernels.build import SWITCH, switched_off


def reason_without() -> str | None:
    """Say why ranks on GPUs compute without these kernels; None if they compute with them."""
    if switched_off():
        return f"{SWITCH}=off"
    if find_spec("triton") is None:
        return "triton is not installed"
    return None


def used_on(device: str) -> bool:
    """Tell whether ranks on such a device, "cpu" or "cuda", compute with these kernels."""
    return device == "cuda" and reason_without() is None
