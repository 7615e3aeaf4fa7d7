"""Compiles the kernels for this machine's processor at their first use, and keeps the library in the user's cache.

It takes some seconds once. The library is named by the hash of the sources, the flags, the compiler and the processor.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from contextlib import suppress
from ctypes import CDLL
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from surgeon.machine import cache_folder
from surgeon.processes.files import whole_file

SWITCH = "SURGEON_KERNELS"  # in the environment: "off" for PyTorch's own operations
COMPILERS = ("c++", "g++", "clang++")  # in this order, unless CXX names one
SOURCES = Path(__file__).parent
MAIN = "kernels.cpp"
TARGET = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
FLAGS = ("-std=c++17", "-O3", TARGET, "-pthread", "-fPIC", "-fvisibility=hidden")
SECONDS = 120  # that a compiler may take


class Built(NamedTuple):
    """The library, or why there is none; neither where the user wants none."""

    library: CDLL | None
    problem: str | None = None


def switched_off() -> bool:
    """Tell whether the user wants PyTorch's own operations everywhere."""
    return os.environ.get(SWITCH, "").lower() in ("off", "0")


@cache
def load_kernels() -> Built:
    """Load the kernels, compiled now if they are not in the cache; the same for the whole process."""
    if switched_off():
        return Built(None)
    compiler = find_compiler()
    if compiler is None:
        return Built(None, f"there is no C++ compiler ({os.environ.get('CXX') or ', '.join(COMPILERS)})")
    try:
        return Built(_load(compiler))
    except subprocess.SubprocessError as error:
        said = getattr(error, "stderr", None) or str(error)
        lines = [line for line in said.splitlines() if "error" in line] or said.splitlines()
        line = (lines or [str(error)])[0].strip()
        return Built(None, f"{compiler} did not compile them: {line}")
    except OSError as error:
        return Built(None, f"they could not be loaded: {error}")


def find_compiler() -> str | None:
    """Find the path of a C++ compiler, if there is one."""
    wanted = os.environ.get("CXX")
    found = (shutil.which(name) for name in ([wanted] if wanted else COMPILERS))
    return next((path for path in found if path is not None), None)


def _load(compiler: str) -> CDLL:
    path = cache_folder("kernels") / f"{_identity(compiler)}.so"
    if path.is_file():
        with suppress(OSError):  # it is no library; whatever it is, a new one takes its place
            return CDLL(str(path))
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / path.name
        _run([compiler, *FLAGS, "-shared", str(SOURCES / MAIN), "-o", str(made)])
        return CDLL(str(path if _keep(made, path) else made))


def _identity(compiler: str) -> str:
    found = hashlib.sha256()
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        found.update(source.name.encode() + source.read_bytes())
    version = _run([compiler, "--version"])
    # Features of the processor, as far as Linux says; homes are shared by machines that differ.
    processor = [platform.processor()]
    described = Path("/proc/cpuinfo")
    if described.is_file():
        named = ("flags", "Features", "model name")
        lines = described.read_text().splitlines()
        processor = sorted({line for line in lines if line.split(":")[0].strip() in named})
    found.update(repr((version, FLAGS, compiler, platform.machine(), processor)).encode())
    return found.hexdigest()[:32]


def _run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, check=True, timeout=SECONDS, text=True).stdout


def _keep(made: Path, path: Path) -> bool:
    """Put a library into the cache; where there is no room for it, it is made again next time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path, durable=True) as beside:  # a process dies of a library that is cut off
            beside.write_bytes(made.read_bytes())
    except OSError:
        return False
    return True


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
