"""Where compiled kernels come from and are kept, and what is said where there are none."""

from __future__ import annotations

import shutil
import subprocess
import sys
from ctypes import CDLL
from pathlib import Path

import pytest

from surgeon.machine import cache_folder
from surgeon.runtime.kernels import build
from surgeon.runtime.kernels.build import SWITCH, find_compiler, kernels_used, warn_without_kernels

COMPILER = find_compiler()
SOURCE = 'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }'
build_again = build.load_kernels.__wrapped__  # what a process would find that starts now
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler here")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache and an environment of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in (SWITCH, "CXX"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def small_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source that compiles quickly, in place of the kernels."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / build.MAIN).write_text(SOURCE)
    monkeypatch.setattr(build, "SOURCES", folder)
    return folder / build.MAIN


def made_by(compiler: Path, text: str) -> None:
    """A compiler of the test's own."""
    compiler.write_text(f"#!/bin/sh\n{text}\n")
    compiler.chmod(0o755)


@needs_compiler
@pytest.mark.usefixtures("small_source")
def test_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second process finds what the first one made, and compiles nothing."""
    assert COMPILER is not None
    calls = tmp_path / "calls"
    compiler = tmp_path / "c++"
    made_by(compiler, f'echo "$@" >> {calls}; exec {COMPILER} "$@"')
    monkeypatch.setenv("CXX", str(compiler))
    for _ in range(2):
        library = build_again().library
        assert isinstance(library, CDLL)
        assert library.answer() == 42
    compiled = [line for line in calls.read_text().splitlines() if "-shared" in line]
    assert len(compiled) == 1
    assert len(list(cache_folder("kernels").iterdir())) == 1


@needs_compiler
def test_another_source_makes_another_library(small_source: Path) -> None:
    build_again()
    small_source.write_text(SOURCE.replace("42", "43"))
    library = build_again().library
    assert library is not None
    assert library.answer() == 43


@needs_compiler
@pytest.mark.usefixtures("small_source")
def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    """The library is made for this process alone."""
    (tmp_path / "cache").write_text("not a folder")
    library = build_again().library
    assert library is not None
    assert library.answer() == 42


@needs_compiler
@pytest.mark.usefixtures("small_source")
def test_what_is_no_library_in_the_cache() -> None:
    """It is made anew."""
    assert COMPILER is not None
    path = cache_folder("kernels") / f"{build._identity(COMPILER)}.so"
    path.parent.mkdir(parents=True)
    path.write_text("no library")
    library = build_again().library
    assert library is not None
    assert library.answer() == 42
    assert path.stat().st_size > 100


@needs_compiler
def test_what_does_not_compile(small_source: Path) -> None:
    small_source.write_text("this is no C++\n")
    library, problem = build_again()
    assert library is None
    assert problem is not None
    assert "did not compile" in problem
    assert "\n" not in problem


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build_again() == (None, "there is no C++ compiler (no-such-compiler)")
    monkeypatch.setattr(build, "load_kernels", build_again)
    with pytest.warns(
        UserWarning, match=r"more than twice as long: there is no C\+\+ compiler \(no-such-compiler\)"
    ):
        warn_without_kernels("cpu", "float32")
    assert kernels_used("cpu", "float32") == "none (there is no C++ compiler (no-such-compiler))"
    assert kernels_used("cpu", "bfloat16") == "none (those for CPUs compute in float32, not in bfloat16)"


def test_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_spec", lambda _: None)
    with pytest.warns(
        UserWarning, match="copy the keys and values of all texts.*: triton is not installed; SURGEON_"
    ):
        warn_without_kernels("cuda", "bfloat16")
    assert kernels_used("cuda", "bfloat16") == "none (triton is not installed)"
    monkeypatch.setattr(build, "find_spec", lambda _: object())
    assert kernels_used("cuda", "bfloat16") == "Triton"


def test_a_compiler_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_by(tmp_path / "c++", 'echo "c++: error: cannot do that" >&2; exit 3')
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    problem = build_again().problem
    assert problem is not None
    assert problem.endswith("did not compile them: c++: error: cannot do that")


def test_switched_off(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    """Nothing is compiled, and nothing said."""
    monkeypatch.setenv(SWITCH, "off")
    assert build_again() == (None, None)
    monkeypatch.setattr(build, "load_kernels", build_again)
    for device in ("cpu", "cuda"):
        warn_without_kernels(device, "float32")
        assert kernels_used(device, "float32") == "none (SURGEON_KERNELS=off)"
    assert not recwarn.list


@needs_compiler
@pytest.mark.skipif(shutil.which("nm") is None, reason="nm lists what a library needs")
def test_it_brings_no_openmp() -> None:
    """The threads are its own: PyTorch's would wait for each other."""
    library = build.load_kernels().library
    assert library is not None
    listed = subprocess.run(
        ["nm", "-D", library._name], capture_output=True, text=True, check=True
    ).stdout
    assert "GOMP" not in listed
    assert " T product" in listed


def test_imports_no_torch() -> None:
    """Whoever starts ranks asks for the kernels before torch is there."""
    code = "import sys, surgeon.runtime.kernels.build; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
