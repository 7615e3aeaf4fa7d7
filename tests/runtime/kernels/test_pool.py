"""Threads that share work while something else wants a core of theirs, by a clock that the test moves."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from surgeon.runtime.kernels.build import FLAGS, SOURCES, find_compiler
from tests.waiting import PATIENCE

COMPILER = find_compiler()
# Two threads do a piece each in every round. Time passes in two places only: in a piece of the helper's, while the
# caller waits for it, as if the helper had lost its core for so long; and between rounds.
PROGRAM = """
#include <cstdio>
#include "pool.h"

using namespace std::chrono;

std::atomic<int64_t> passed{nanoseconds(hours(1)).count()};
std::atomic<int> looks{0};  // of the caller's, at the clock
const auto caller = std::this_thread::get_id();

struct HandClock {
    using duration = nanoseconds;
    using time_point = std::chrono::time_point<HandClock, duration>;
    static time_point now() {
        if (std::this_thread::get_id() == caller) ++looks;
        return time_point(duration(passed.load()));
    }
};

void pass(milliseconds time) { passed += nanoseconds(time).count(); }

PoolBy<HandClock> threads;

// How many of the pieces the helper has done, which loses its core for so long.
int round(milliseconds lost) {
    std::atomic<bool> mine{false}, theirs{false};
    std::atomic<int> looked{0}, helped{0};
    threads.share(2, [&](int64_t) {
        if (std::this_thread::get_id() == caller) {
            mine = true;
            while (threads.threads() > 1 && !theirs) std::this_thread::yield();
            looked = looks.load() + 1;  // the next look is that of one who waits
        } else {
            theirs = true;
            ++helped;
            while (!mine || !looked) std::this_thread::yield();
            while (lost.count() && looks < looked) std::this_thread::yield();
            pass(lost);
        }
    });
    return helped;
}

int rounds(int count, milliseconds lost, milliseconds between = milliseconds(0)) {
    int helped = 0;
    for (int done = 0; done < count; ++done, pass(between)) helped += round(lost);
    return helped;
}

int main() {
    const milliseconds none(0);
    threads.set_threads(2);
    std::printf("{\\"undisturbed\\": %d, ", rounds(30, none));
    std::printf("\\"now and then\\": %d, ", rounds(20, milliseconds(90), milliseconds(60)));
    std::printf("\\"hardly\\": %d, ", rounds(30, milliseconds(5), milliseconds(15)));
    pass(milliseconds(200));  // after which the time in which losses are counted begins anew
    std::printf("\\"twice\\": %d, ", rounds(2, milliseconds(30)) + rounds(1, none));
    pass(milliseconds(200));
    std::printf("\\"loses\\": %d, ", rounds(20, milliseconds(15)));
    std::printf("\\"rests\\": %d, ", rounds(99, none, milliseconds(10)));
    std::printf("\\"rested\\": %d, ", rounds(1, none, milliseconds(10)));
    std::printf("\\"again\\": %d}", rounds(30, none));
}
"""


@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler here")
def test_a_thread_that_loses_its_core_rests(tmp_path: Path) -> None:
    """It takes no piece for a second once it has held up the other one three times, and then takes part again.

    That is, three times within a tenth of a second, for two fifths of it.
    """
    assert COMPILER is not None
    source, program = tmp_path / "pool.cpp", tmp_path / "pool"
    source.write_text(PROGRAM)
    subprocess.run([COMPILER, *FLAGS, f"-I{SOURCES}", str(source), "-o", str(program)], check=True)
    printed = subprocess.run(
        [program], check=True, capture_output=True, text=True, timeout=PATIENCE
    ).stdout
    assert json.loads(printed) == {
        "undisturbed": 30,
        "now and then": 20,
        "hardly": 30,
        "twice": 3,
        "loses": 3,
        "rests": 0,
        "rested": 0,
        "again": 30,
    }
