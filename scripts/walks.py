"""Count the files of surgeon/ that run in five walks through it: whole commands on the demo model, all processes.

    python scripts/walks.py                  # five commands, with every call of Python traced: some minutes
    python scripts/walks.py --list step      # besides, the files of one of them

A file runs if a function of it is called; what importing it calls does not count.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "surgeon"
# The structure is to let each walk through at most so many files.
MOST = {"prompt": 70, "cell": 45, "trial": 60, "export": 50, "step": 70}
MOST_COMMON = 20
RECIPE = "surgeon: 1\nmodel: demo\noperations:\n  - pair: {layers: '4:8'}\n"
# Every process of a command runs this as it starts, its children too: Python imports a sitecustomize.
TRACER = """
import os, sys, threading

PACKAGE = os.environ["WALKS_PACKAGE"] + os.sep
FUNCTION = 0x1  # CO_OPTIMIZED, which bodies of modules and classes lack
ran = set()


def is_importing(frame):
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def watch(frame, event, argument):
    if event != "call":
        return
    code = frame.f_code
    file = code.co_filename
    if file in ran or not file.startswith(PACKAGE) or not code.co_flags & FUNCTION or is_importing(frame):
        return
    ran.add(file)
    # It is written at once, as ranks and workers may end without a last word.
    with open(os.path.join(os.environ["WALKS_OUTPUT"], str(os.getpid())), "a") as log:
        log.write(file.removeprefix(PACKAGE) + chr(10))


threading.setprofile(watch)
sys.setprofile(watch)
"""


def commands(folder: Path) -> dict[str, list[str]]:
    """The arguments of each walk's command, which runs in a folder."""
    recipe = folder / "pair.yaml"
    recipe.write_text(RECIPE)
    text = "--tokens 512 --window 128"
    asked = {
        "prompt": "generate demo --prompt Once --max-new-tokens 4 --device cpu",
        "cell": f"scan demo -o scan --operation lp --layers 4:7 {text}",
        "trial": f"search demo -o search --budget depth=12 --trials 3 {text}",
        "export": f"export {recipe.name} -o export",
        "step": f"heal {recipe.name} -o heal --data demo --steps 2 --batch 1 {text}",
    }
    return {name: command.split() for name, command in asked.items()}


def files_run(arguments: list[str], folder: Path) -> set[str]:
    """The files of surgeon/ that run in a command.

    Raises:
        RuntimeError: if it fails.
    """
    (folder / "sitecustomize.py").write_text(TRACER)
    output = folder / "files"
    output.mkdir()
    path = os.pathsep.join(
        filter(None, [str(folder), str(PACKAGE.parent), os.environ.get("PYTHONPATH")])
    )
    environment = os.environ | {
        "PYTHONPATH": path,
        "WALKS_PACKAGE": str(PACKAGE),
        "WALKS_OUTPUT": str(output),
    }
    command = [sys.executable, "-m", "surgeon.commands", *arguments]
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(
            f"surgeon {' '.join(arguments)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return {line for log in output.iterdir() for line in log.read_text().splitlines()}


def room(file: str) -> str:
    """The folder of surgeon/ that a file lies in."""
    return file.partition("/")[0] if "/" in file else "(top)"


def table(walks: dict[str, set[str]]) -> str:
    """Files by room and walk, the files of all walks and those common to them, and how many there should be at most."""
    common = set.intersection(*walks.values())
    columns = {**walks, "common": common}
    counts = {name: Counter(map(room, files)) for name, files in columns.items()}
    rooms = sorted(set(map(room, set.union(*walks.values()))))
    rows = [["room", *columns]]
    rows += [[one, *(str(counts[name][one] or "") for name in columns)] for one in rooms]
    rows.append(["all", *(str(len(files)) for files in columns.values())])
    rows.append(["at most", *(str((MOST | {"common": MOST_COMMON})[name]) for name in columns)])
    return "\n".join("".join([f"{row[0]:<12}", *(f"{cell:>8}" for cell in row[1:])]) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--walk", action="append", choices=MOST, help="only this one; may be repeated")
    parser.add_argument(
        "--list", action="append", default=[], metavar="WALK", help="list its files, or those common"
    )
    options = parser.parse_args()
    walks = {}
    for name in options.walk or MOST:
        with tempfile.TemporaryDirectory() as folder:
            walks[name] = files_run(commands(Path(folder))[name], Path(folder))
    print(table(walks), flush=True)
    for name in options.list:
        print(f"\n{name}:", *sorted(walks.get(name) or set.intersection(*walks.values())), sep="\n  ")


if __name__ == "__main__":
    main()
