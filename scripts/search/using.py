"""What a search runs with what passes have found at hand, and without; and how good the program is that it finds.

    python scripts/search/using.py [MODEL] [--data demo] [--tokens 8192] [--trials 60] [-o FOLDER]

A scan of LP pairs and of ladders and a spectrum are made first, on the search's text. Then every question is searched
twice, with nothing and with the passes. Sublayers are those that the search's single edits and trials run, in passes
over all of the text; what the passes themselves ran is said above the table. Divergences are of the winner on the text
of the search and on held-out text. In FOLDER what is there already is gone on with.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import surgeon

PAIRS = [("pair", f"depth={depth}", {}) for depth in (14, 12, 10)]
LADDERS = [("ladder", f"speedup>={speedup}@cpu-2", {"link_delay": "1ms"}) for speedup in (1.2, 1.4, 1.6)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--data", default="demo")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--only", help="one space")
    parser.add_argument("-o", dest="output", type=Path)
    given = parser.parse_args()
    with nullcontext(given.output) if given.output else tempfile.TemporaryDirectory() as folder:
        run(given, Path(folder))


def run(given: argparse.Namespace, folder: Path) -> None:
    text: dict[str, Any] = {"data": given.data, "tokens": given.tokens}
    rows = [row for row in PAIRS + LADDERS if given.only in (None, row[0])]
    scan = surgeon.scan(given.model, output=folder / "scan", operations=["lp", "ladder"], **text)
    print(f"the scan ran {scan.record['sublayers_run']} sublayers")
    print(f"{'space':8}{'budget':22}{'without':>9}{'with':>9}{'share':>7}{'divergence':>12}{'with':>9}"
          f"{'held out':>10}{'with':>9}  taken: edits, choices, trials")  # fmt: skip
    for space, budget, more in rows:
        name = f"{space} {budget}".replace(">", "").replace("=", "")
        asked = {"space": space, "budget": budget, "trials": given.trials, **more, **text}
        without = surgeon.search(given.model, output=folder / f"{name} without", **asked)
        fed = surgeon.search(given.model, output=folder / f"{name} with", using=[scan], **asked)
        ran = [one.record["sublayers_run"] for one in (without, fed)]
        found = [one.winner.trial.measured.divergence for one in (without, fed)]
        unseen = [one.record["held_out"]["searched"]["unseen"]["divergence"] for one in (without, fed)]
        taken = "; ".join(f"{one['edits']}, {one['choices']}, {one['trials']}" for one in fed.record["using"])
        print(f"{space:8}{budget:22}{ran[0]:9.1f}{ran[1]:9.1f}{ran[1] / ran[0]:7.2f}{found[0]:12.5f}{found[1]:9.5f}"
              f"{unseen[0]:10.5f}{unseen[1]:9.5f}  {taken}", flush=True)  # fmt: skip


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    warnings.simplefilter("ignore")
    main()
