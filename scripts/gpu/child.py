"""One process of scripts/gpu/check: `python scripts/gpu/child.py SIDE SETUP.json LINES.jsonl NAME ...`.

It writes a line of JSON for every number or list of tokens as it comes, and ends at the first check or measurement that
fails: what a GPU was asked for may have left it unusable for this process.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # surgeon need not be installed

from scripts.gpu.checks import MODELS, checks, make_models
from scripts.gpu.sides import Setup, Side
from scripts.gpu.speeds import SPEEDS
from surgeon.words import first_line


def rows(setup: Setup, side: Side, name: str) -> Iterator[tuple[str, Any]]:
    """What one check or measurement finds."""
    if name == MODELS:
        make_models(setup)
        return iter(())
    if side == "speed":
        return SPEEDS[name][0](setup)
    return checks(setup)[name].compute(setup, side)


def main(arguments: Sequence[str]) -> int:
    """Compute one side of some checks, into a file of lines."""
    side: Any = arguments[0]
    setup = Setup(**json.loads(Path(arguments[1]).read_text()))
    with Path(arguments[2]).open("a", encoding="utf-8") as lines:

        def tell(**said: Any) -> None:
            lines.write(json.dumps(said) + "\n")
            lines.flush()

        for name in arguments[3:]:
            began = time.monotonic()
            try:
                for row, value in rows(setup, side, name):
                    tell(row=row, value=value, seconds=time.monotonic() - began)
                    began = time.monotonic()
            except Exception as error:  # noqa: BLE001 - the process that started this one has others for the rest
                traceback.print_exc()
                tell(failed=first_line(error))
                return 1
            tell(done=name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
