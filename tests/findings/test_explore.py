"""What an exploration says of itself."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from surgeon.findings.explore import Exploration, NextStep
from surgeon.version import FORMAT

LONG = "surgeon heal runs/explore/knee.yaml --data a.txt --distill logits --steps 100 --eval-tokens 1024 -o runs/healed"
STEPS = [
    NextStep(
        "Write it",
        "It " + "is written so that others load it, " * 4 + "too.",
        "surgeon export a.yaml -o b",
    ),
    NextStep("Train back what it costs", "More steps bring back more.", LONG),
]


def exploration(**more: object) -> Exploration:
    rows = [
        (
            "scan",
            "216 cells of shuffle, prune, merge, parallel, 2-parallel, lp, stretches of every 2 layers",
            61.2,
        ),
        ("on this-machine", "knee: 1.5 times the tokens/s", 2.0),
    ]
    record = {
        "format": FORMAT,
        "command": "surgeon explore",
        "model": "tiny",
        "model_hash": "a" * 64,
    } | more
    record |= {"minutes": 10.0, "spent": 245.0, "data": "a.txt", "plan": {"tokens": 4096}}
    record |= {"left_out": ["search: it has no layers"], "next": [vars(one) for one in STEPS]}
    return Exploration(pd.DataFrame(rows, columns=["step", "did", "seconds"]), record=record)


def test_on_a_terminal_only_commands_are_long() -> None:
    said = str(exploration())
    assert said.startswith("tiny, explored in 4:05 of 10 minutes\n")
    commands = [f"   {one.command}" for one in STEPS]
    assert max(len(line) for line in said.splitlines() if line not in commands) <= 80
    assert all(line in said.splitlines() for line in commands)
    assert (
        "on this-machine  knee: 1.5 times the tokens/s\nleft out         search: it has no layers"
        in said
    )


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = exploration()
    written.write(tmp_path)
    read = Exploration.read(tmp_path, "a" * 64)
    assert str(read) == str(written)
    assert read.next_steps == STEPS
    Exploration(record=written.record).write(tmp_path)  # before anything is done
    assert len(Exploration.read(tmp_path).steps) == 0
