"""Exports of a model larger than memory should be: speed against a plain copy, and peak memory.

    python scripts/bench/export.py [--size 8GB] [--folder DIR] [--only plain]

Makes a sharded random Llama in bfloat16 (in DIR, or in a temporary folder that is removed) and exports it in each
form, each in a process of its own. Before each, and at the end, its files are copied with `cp -r`, until they are on
the disk. Prints seconds, GB/s, the ratio to the mean speed of the two copies beside it (disks are not always equally
fast), and the most resident memory. An export should take at most twice as long as a copy, factors excepted, and
1500MiB of memory; at the end it is said which do not, and the exit status is 3 then.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from transformers import LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.bench.goals import MISSED, missed, run_surgeon
from scripts.bench.large_model import make_model
from scripts.commands import make_parser
from scripts.markdown import print_table, spread
from surgeon.machine import parse_size, show_size
from surgeon.processes.files import sync_tree

PEAK_LIMIT = parse_size("1500MiB")
SHARD_BYTES = parse_size("1GB")
SLOWEST = 2.0  # times a plain copy
LOW_RANK = "low-rank"
RECIPES = {
    "plain": "- prune: {{layers: '1:2'}}",
    "fused": "- pair: {{layers: '1:{even}'}}",
    "program": "- ladder: {{layers: '1:{layers}'}}",
    LOW_RANK: "- lowrank: {{layers: '1:2', keep: 0.6}}",
}


@dataclass(frozen=True)
class Run:
    """One way of writing the model: bytes written, seconds, and the process's peak resident bytes, if it matters."""

    size: int
    seconds: float
    peak: int | None = None

    @property
    def speed(self) -> float:
        """Bytes per second."""
        return self.size / self.seconds


def config_for(size: int) -> LlamaConfig:
    """A Llama of about this many bytes in bfloat16: 4096 wide, or 2048 below 4 GB."""
    width = 4096
    inner = 11008
    if size < 4e9:
        width = 2048
        inner = 5632
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_attention_heads=width // 128,
        num_key_value_heads=width // 128,
        vocab_size=32000,
    )
    layer = 2 * (4 * width**2 + 3 * width * inner)
    config.num_hidden_layers = max(3, round((size - 4 * width * config.vocab_size) / layer))
    return config


def copy_of(model: Path, target: Path) -> Run:
    """What a plain copy takes, until all of it is on the disk."""
    begun = time.perf_counter()
    subprocess.run(["cp", "-r", model, target], check=True)
    sync_tree(target)
    seconds = time.perf_counter() - begun
    size = size_of(target)
    shutil.rmtree(target)
    return Run(size, seconds)


def size_of(folder: Path) -> int:
    """The bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def recipe_for(model: Path, form: str, folder: Path) -> Path:
    """A recipe whose program has this form; factors of one layer, since theirs are a minute of work for each matrix."""
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    operation = RECIPES[form].format(layers=layers, even=1 + 2 * ((layers - 1) // 2))
    path = folder / f"{form}.yaml"
    path.write_text(f"surgeon: 1\nmodel: {model}\noperations:\n  {operation}\n")
    return path


def export(recipe: Path, target: Path) -> Run:
    """One export from its first line to its last."""
    seconds, peak = run_surgeon("export", recipe, "-o", target)
    return Run(size_of(target), seconds, peak)


def main() -> None:
    goal = f"an export was slower than {SLOWEST:g} copies, or took more than {show_size(PEAK_LIMIT)}"
    parser = make_parser(__doc__, epilog=f"Exit status {MISSED}: {goal}.")
    parser.add_argument("--size", default="8GB")
    parser.add_argument("--folder", type=Path, help="keep the model here, and use it again")
    parser.add_argument("--only", choices=RECIPES, action="append")
    arguments = parser.parse_args()
    if arguments.folder is not None:
        arguments.folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder and arguments.folder.parent) as temporary:
        place = Path(temporary)
        model = (arguments.folder or place / "model").resolve()
        if not model.exists():
            make_model(model, config_for(parse_size(arguments.size)), SHARD_BYTES)
            sync_tree(model)
        short = measure(model, place, arguments.only or list(RECIPES))
    if short:
        raise missed("; ".join(short))


def measure(model: Path, place: Path, forms: list[str]) -> list[str]:
    """Print the table; says which exports were too slow or too large."""
    copies = [copy_of(model, place / "copy")]
    runs = {}
    for form in forms:
        runs[form] = export(recipe_for(model, form, place), place / "target")
        shutil.rmtree(place / "target")
        copies.append(copy_of(model, place / "copy"))
    beside = {form: fmean(copy.speed for copy in copies[at : at + 2]) for at, form in enumerate(forms)}
    columns = ["", "written", "seconds", "GB/s", "of the copy's speed", "peak resident"]
    seconds = spread([copy.seconds for copy in copies], 1)
    speed = median(copy.speed for copy in copies)
    rows = [["cp -r and fsync", show_size(copies[0].size), seconds, f"{speed / 1e9:.2f}", "1.00", ""]]
    for form, run in runs.items():
        peak = "" if run.peak is None else show_size(run.peak)
        numbers = [f"{run.seconds:.1f}", f"{run.speed / 1e9:.2f}", f"{run.speed / beside[form]:.2f}"]
        rows.append([form, show_size(run.size), *numbers, peak])
    print_table(f"surgeon export of {show_size(size_of(model))} in bfloat16", columns, rows)
    return [line for form, run in runs.items() for line in short_of_goals(form, run, beside[form])]


def short_of_goals(name: str, run: Run, speed: float) -> Iterator[str]:
    """In what a way of writing misses the goals.

    Args:
        speed: of plain copies beside it, in bytes per second.
    """
    share = run.speed / speed
    if name != LOW_RANK and share * SLOWEST < 1:  # factors take as long as they take
        yield f"{name} has {share:.2f} of the copy's speed, not {1 / SLOWEST:g}"
    if run.peak is not None and run.peak > PEAK_LIMIT:
        yield f"{name} took {show_size(run.peak)}, not at most {show_size(PEAK_LIMIT)}"


if __name__ == "__main__":
    main()
