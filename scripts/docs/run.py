"""Run what the pages show, on the demo model, in a folder for each page.

    scripts/docs/run                                   # all pages: 45 minutes beside much other work
    scripts/docs/run --only docs/quick-start.md        # may be repeated; --list says what would run

Blocks marked `bash` or `python` run in their order, unless the page says why not (`<!-- not run: ... -->`). Their
folder has what they name: MODEL (the demo model), text.txt (a part of its text), recipe.yaml (pairs), and docs,
recipes and scripts of the project. A block marked `text` behind one is what it prints. Numbers may be others (they
depend on the Python whose library the demo's text is, say): those that are more than 5% apart are named. Ends with 1
if a block failed or printed something else.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

import surgeon
from scripts.commands import make_parser
from scripts.docs.blocks import PROJECT, Block, blocks, pages

RUN = ("bash", "python")
TESTED = ("docs/extending.md",)  # whose code the tests run
TEXT = 400_000  # characters of text.txt
RECIPE = (
    'surgeon: 1\nmodel: demo\noperations:\n  - pair: {layers: "2:8"}\nexpect: {effective_depth: 13}\n'
)
APART = 0.05
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")


def to_run(page: str) -> list[Block]:
    """The blocks of a page that are run."""
    found = [] if page in TESTED else blocks(page)
    return [block for block in found if block.language in RUN and block.not_run is None]


def furnish(folder: Path) -> None:
    """Put what the pages name into a folder."""
    for name in ("docs", "recipes", "scripts"):
        (folder / name).symlink_to(PROJECT / name)
    (folder / "MODEL").symlink_to(surgeon.demo_model())
    (folder / "text.txt").write_text("\n".join(surgeon.demo_data())[:TEXT], encoding="utf-8")
    (folder / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    (folder / "runs").mkdir()


def run(block: Block, folder: Path, seconds: float) -> str:
    """What a block prints.

    Raises:
        ValueError: if it fails, or takes longer than that.
    """
    python = shlex.quote(sys.executable)
    ours = f'surgeon() {{ {python} -m surgeon.commands "$@"; }}\npython() {{ {python} "$@"; }}\nset -e\n'
    command = (
        ["bash", "-c", ours + block.code]
        if block.language == "bash"
        else [sys.executable, "-c", block.code]
    )
    paths = os.pathsep.join(filter(None, (str(PROJECT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            timeout=seconds,
            capture_output=True,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"took longer than {seconds:g} s") from error
    if done.returncode:
        raise ValueError(f"ended with {done.returncode}\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
    return done.stdout


def compare(printed: str, shown: str) -> list[str]:
    """The numbers in which what a block printed is apart from what the page shows.

    Raises:
        ValueError: if they differ in more than numbers.
    """
    if _NUMBER.sub("#", printed).split() != _NUMBER.sub("#", shown).split():
        raise ValueError(f"prints something else than the page shows:\n{printed}")
    apart = []
    for old, new in zip(_NUMBER.findall(shown), _NUMBER.findall(printed), strict=True):
        before, now = (float(one.replace(",", "")) for one in (old, new))
        if abs(before - now) > APART * max(abs(before), abs(now)):
            apart.append(f"{old} is {new} now")
    return apart


def run_page(page: str, folder: Path, seconds: float) -> bool:
    """Run the blocks of a page in a folder, up to the first that fails; whether all of them were right."""
    furnish(folder)
    for block in to_run(page):
        began = time.monotonic()
        first = block.code.strip().partition("\n")[0]
        print(f"{page}:{block.line}: {first}", flush=True)
        try:
            printed = run(block, folder, seconds)
            notes = [] if block.output is None else compare(printed, block.output)
        except ValueError as error:
            print(f"  FAILED: {error}", flush=True)
            return False
        print(f"  ok, {time.monotonic() - began:.0f} s", *notes, sep="\n  ", flush=True)
    return True


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--only", action="append", metavar="PAGE", help="a page, such as docs/quick-start.md"
    )
    parser.add_argument("--list", action="store_true", help="say what would run, and what not, and why")
    parser.add_argument("--seconds", type=float, default=900, help="for a block (default: %(default)s)")
    parser.add_argument("-o", "--output", type=Path, help="keep the pages' folders here")
    options = parser.parse_args(arguments)
    if unknown := set(options.only or ()) - set(pages()):
        parser.error(f"there is no page {min(unknown)}; there are {', '.join(pages())}")
    chosen = options.only or pages()
    if options.list:
        for block in (block for page in chosen if page not in TESTED for block in blocks(page)):
            if block.language in RUN:
                why = "" if block.not_run is None else f" (not run: {block.not_run})"
                print(f"{block.page}:{block.line}: {block.language}{why}")
        return 0
    failed = []
    with tempfile.TemporaryDirectory() as temporary:
        for page in filter(to_run, chosen):
            folder = (options.output or Path(temporary)) / page.replace("/", "-").removesuffix(".md")
            folder.mkdir(parents=True)
            if not run_page(page, folder, options.seconds):
                failed.append(page)
    print(f"failed: {', '.join(failed)}" if failed else "all blocks ran")
    if failed:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
