"""Whether healing the last candidates of a search changes which one is chosen.

    python scripts/search/heal.py demo --heal-data demo:train -o runs/heal-choice
    python scripts/search/heal.py demo --heal-data demo:train -o runs/heal-choice --heal 50 --heal-batch 2

For every question, a space and a budget, `surgeon search --heal` is run into a folder of its own; killed, it goes on.
A row of the table has the winner before healing with its divergence on held-out text, before and after; the candidate
that has the least after healing; the order of all candidates after healing, in the numbers of their places before (1
is the least divergence); and whether the choice changes, which takes a difference whose interval excludes 0.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.search.given import to_heal
from surgeon.cli.app import main as surgeon

QUESTIONS = (
    ("pair", "depth=12"),
    ("pair", "depth=10"),
    ("pair,drop:layers", "depth=11"),
    ("pair,ladder,fuse", "speedup>=1.4@cpu-2"),
)
LINK = ("--link-delay", "1ms")  # of predicted times


def main() -> None:
    parser = to_heal(__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--holdout", type=int, default=8192)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--heal", type=int, default=200, help="steps")
    parser.add_argument("--heal-batch", type=int, default=8, help="windows in a step")
    parser.add_argument("--ask", nargs=2, action="append", metavar=("SPACE", "BUDGET"), help="in place of those above")
    given = parser.parse_args()
    rows = [_row(given, space, budget) for space, budget in given.ask or QUESTIONS]
    print(f"\n{given.heal} steps of {given.heal_batch} windows each\n")
    print(
        "| space | budget | winner: before, healed | least after: trial, healed | order after | chosen another? | s |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def _row(given: argparse.Namespace, space: str, budget: str) -> list[str]:
    folder: Path = given.output / f"{space} {budget}".replace(",", "+").replace(" ", "-").replace(">", "")
    asked = ["search", given.model, "--data", given.data, "--space", space, "--budget", budget, "-o", str(folder)]
    sizes = {"tokens": given.tokens, "holdout": given.holdout, "trials": given.trials}
    healing = {"heal": given.heal, "heal-batch": given.heal_batch, "heal-data": given.heal_data}
    for name, value in (sizes | healing).items():
        asked += [f"--{name}", str(value)]
    if surgeon([*asked, *LINK]) != 0:
        raise SystemExit(f"surgeon {' '.join(asked)} failed")
    return [space, budget, *_cells(json.loads((folder / "search.json").read_text())["healing"])]


def _cells(healing: dict[str, Any]) -> list[str]:
    candidates = healing["candidates"]
    by_number = {one["trial"]: one for one in candidates}
    before, after = (_ordered(candidates, when) for when in ("before", "after"))
    winner, least = by_number[healing["winner_before"]], by_number[after[0]]
    order = " ".join(str(before.index(trial) + 1) for trial in after)
    return [
        f"{winner['trial']}: {winner['before']['divergence']:.4f}, {winner['after']['divergence']:.4f}",
        f"{least['trial']}: {least['after']['divergence']:.4f}",
        order,
        f"yes, trial {healing['winner']}" if healing["changed"] else "no",
        f"{sum(one['seconds'] for one in candidates):.0f}",
    ]


def _ordered(candidates: list[dict[str, Any]], when: str) -> list[int]:
    """The candidates' trials, those of least divergence first."""
    return [one["trial"] for one in sorted(candidates, key=lambda one: float(one[when]["divergence"]))]


if __name__ == "__main__":
    main()
