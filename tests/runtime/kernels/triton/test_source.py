"""That the kernels for GPUs compile to machine code, for which no GPU is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

# Bytes of shared memory that a program can have on the smallest of these GPUs (8.6, 8.9).
SHARED = 99 * 1024


@pytest.mark.thorough
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_kernels_compile(capability: int, dtype: str, tmp_path: Path) -> None:
    """In a process that interprets nothing; attention fetches keys while it computes with those before."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "compiled.py"), str(capability), dtype],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split() for line in done.stdout.splitlines()]
    others = "product_of_few", "highest_of_parts", "highest_part"
    assert [name for name, *_ in rows] == [
        "attend",
        "place",
        "place",
        "mean_squares",
        "norm",
        *["gate"] * 4,
        *others,
    ]
    assert all(int(shared) <= SHARED and made == "True" for _, shared, _, made in rows)
    assert rows[0][2] == "True"
