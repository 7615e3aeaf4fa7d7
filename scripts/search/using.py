"""What a search runs with what passes have found at hand, and without; and how good the program is that it finds.

    python scripts/search/using.py [MODEL] [--data demo] [--tokens 2048] [--window 128] [--trials 60] [-o FOLDER]

A scan of LP pairs and of ladders, and a spectrum, are made first, on the search's text. Then every question is searched
twice, with nothing and with the passes. Sublayers are those that single edits and trials of the search run, in passes
over all of the text; what the passes have run themselves is said above the table. Divergences are of the winner, on the
text of the search and on held-out text. Passes that are in FOLDER already are gone on with; searches are made anew.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

import surgeon

SLOW_LINK = {"link_delay": "1ms"}
ROWS: list[tuple[str, str, dict[str, Any]]] = [
    *(("pair", f"depth={depth}", {}) for depth in (14, 12, 10)),
    *(("ladder", f"speedup>={speedup}@cpu-2", SLOW_LINK) for speedup in (1.2, 1.4)),
    *(("rank", f"params={share}x", {}) for share in (0.9, 0.8)),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--data", default="demo")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--ranks", default="1/4,1/2", help="of the spectrum")
    parser.add_argument("--only", help="one space")
    parser.add_argument("-o", dest="output", type=Path)
    given = parser.parse_args()
    if given.output:
        given.output.mkdir(parents=True, exist_ok=True)
    with nullcontext(given.output) if given.output else tempfile.TemporaryDirectory() as folder:
        run(given, Path(folder))


def run(given: argparse.Namespace, folder: Path) -> None:
    text: dict[str, Any] = {"data": given.data, "tokens": given.tokens, "window": given.window}
    rows = [row for row in ROWS if given.only in (None, row[0])]
    passes: dict[str, Any] = {}
    searches = Path(tempfile.mkdtemp(prefix="searches-", dir=folder))
    if any(space != "rank" for space, *_ in rows):
        scan = surgeon.scan(given.model, output=folder / "scan", operations=["lp", "ladder"], **text)
        print(f"the scan ran {scan.record['sublayers_run']} sublayers")
        passes |= dict.fromkeys(("pair", "ladder"), scan)
    if any(space == "rank" for space, *_ in rows):
        calibrated = {"ranks": given.ranks, "calibration_tokens": 8192}
        passes["rank"] = surgeon.spectrum(given.model, output=folder / "spectrum", **calibrated, **text)
    print("| space | budget | without | with | share | divergence | with | held out | with | taken |")
    print("|:--|:--|--:|--:|--:|--:|--:|--:|--:|:--|")
    for space, budget, more in rows:
        name = f"{space} {budget}".replace(">", "").replace("=", "")
        asked = {"space": space, "budget": budget, "trials": given.trials, **more, **text}
        found = [
            surgeon.search(given.model, output=searches / f"{name} {way}", using=using, **asked)
            for way, using in (("without", ()), ("with", passes[space]))
        ]
        ran = [one.record["sublayers_run"] for one in found]
        seen = [f"{one.record['best']['divergence']:.4f}" for one in found]
        unseen = [f"{one.record['held_out']['searched']['unseen']['divergence']:.4f}" for one in found]
        (taken,) = found[1].record["using"]
        parts = ", ".join(f"{taken[what]} {what}" for what in ("edits", "choices", "trials") if taken[what])
        cells = [space, f"`{budget}`", f"{ran[0]:.0f}", f"{ran[1]:.0f}", f"{ran[1] / ran[0]:.2f}", *seen, *unseen]
        print(f"| {' | '.join(cells)} | {parts} |", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
