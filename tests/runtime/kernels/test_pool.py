"""Threads that share work while something else wants a core of theirs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from surgeon.runtime.kernels.build import FLAGS, SOURCES, find_compiler

COMPILER = find_compiler()
# The helper's pieces take 15 ms longer while it `loses`, as if it had no core for so long; the caller's wait for the
# helper to have begun one, so that it always takes part where it may.
PROGRAM = """
#include <cstdio>
#include "pool.h"

using namespace std::chrono;

int main() {
    pool().set_threads(2);
    const auto own = std::this_thread::get_id();
    bool loses = false;
    std::atomic<bool> begun;
    const auto round = [&] {  // how many pieces the helper has done
        begun = false;
        std::atomic<int> helped{0};
        pool().share(2, [&](int64_t) {
            if (std::this_thread::get_id() == own) {
                while (pool().threads() > 1 && !begun) std::this_thread::yield();
            } else {
                begun = true;
                ++helped;
                if (loses) std::this_thread::sleep_for(milliseconds(15));
            }
        });
        return helped.load();
    };
    int took = 0;  // rounds, the last time
    const auto rounds = [&](auto until) {
        int helped = 0;
        for (took = 0; until(took); ++took) helped += round();
        return helped;
    };
    // It may rest sooner than it is made to: whatever else the machine does may take its core.
    const auto together = [](int count) { return pool().threads() == 2 && count < 100; };
    const int before = rounds(together), rounds_before = took;
    loses = true;
    const int losing = rounds([](int count) { return pool().threads() == 2 && count < 20; });
    const int resting = rounds([](int count) { return count < 1000; });
    loses = false;
    const auto since = steady_clock::now();
    rounds([&](int) { return pool().threads() == 1 && steady_clock::now() - since < seconds(20); });
    const double rest = duration<double>(steady_clock::now() - since).count();
    const int after = rounds(together), rounds_after = took;
    std::printf("[%d, %d, %d, %d, %f, %d, %d]", before, rounds_before, losing, resting, rest, after, rounds_after);
}
"""


@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler here")
def test_a_thread_that_loses_its_core_rests(tmp_path: Path) -> None:
    """It takes no piece for a second once it has held up the other one three times, and then takes part again."""
    assert COMPILER is not None
    source, program = tmp_path / "pool.cpp", tmp_path / "pool"
    source.write_text(PROGRAM)
    subprocess.run([COMPILER, *FLAGS, f"-I{SOURCES}", str(source), "-o", str(program)], check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True, timeout=60).stdout
    before, rounds_before, losing, resting, rest, after, rounds_after = json.loads(printed)
    assert before >= rounds_before - 1 > 0  # in the last one it may have been sent to rest
    assert 3 <= losing < 20
    assert resting == 0
    assert 0.5 < rest < 10
    assert after >= rounds_after - 1 > 0
