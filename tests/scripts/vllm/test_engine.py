"""scripts/vllm/engine.py: what vLLM's processes are started in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.vllm.engine import vllm_environment

REPOSITORY = Path(__file__).resolve().parents[3]
SET = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "THP_MEM_ALLOC_ENABLE")


def test_cores_are_bound_and_the_rest_is_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 5, 7})
    found = [vllm_environment(ranks, 3, {"A": "b", "OMP_NUM_THREADS": "1"}) for ranks in (1, 2)]
    bound = ["2,5,7", "2|5"]
    assert found == [
        {"A": "b", "VLLM_CPU_KVCACHE_SPACE": "3", "VLLM_CPU_OMP_THREADS_BIND": one} for one in bound
    ]


@pytest.mark.thorough  # importing a benchmark takes seconds
def test_what_a_benchmark_sets_for_itself_is_not_given() -> None:
    code = f"import os; from scripts.bench import engines; print(*[name in engines.AS_FOUND for name in {SET}])"
    code += f"; print(*[os.environ.get(name) for name in {SET}])"
    environment = {name: value for name, value in os.environ.items() if name not in SET}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False False False\n100000 None 1\n"
