"""What sharing wins: the heatmaps of a model by `surgeon scan`'s way against a plain loop over cells, in one run.

    python scripts/bench_scan.py [MODEL] [--tokens 4096] [--window 256] [--operation prune ...] [--threads N]

The loop does for each cell what anybody would do: `surgeon.edit(model, program)`, the model's own forward pass, and
the same quality numbers by the same fast head (so that the table shows what sharing wins, and nothing else). Each
heatmap is made both ways, one right after the other. Every number must agree to 1e-4; a sample of cells is checked
against full logits with `cross_entropy` and `kl_div` as well. A second table runs `surgeon scan --memory` in processes
of its own, and shows the most memory that each took.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer, PreTrainedModel

import surgeon
from surgeon.analysis.cells import SCANNED, Cell, scan_cells
from surgeon.analysis.journal import JOURNAL
from surgeon.analysis.measure import measure
from surgeon.analysis.sharing import plain_sublayers, share, simplify
from surgeon.checkpoint.read import locate
from surgeon.families import family_of
from surgeon.memory import parse_size
from surgeon.model import decoder_inputs
from surgeon.program import Program
from surgeon.quality.data import load_windows
from surgeon.quality.head import OutputHead, Quality, Reference

THE_THREE = ["prune", "parallel", "2-parallel"]
TOLERANCE = 1e-4  # relative, and in nats absolute where a divergence is next to nothing
CHECK_EVERY = 23  # cells

Numbers = dict[Program, tuple[float, float]]  # perplexity, divergence


@dataclass(frozen=True)
class Timed:
    """One heatmap, both ways.

    Attributes:
        shared, loop: wall-clock seconds.
        processor_ratio: loop / shared in processor seconds, which other programs on the machine disturb less.
    """

    name: str
    shared: float
    loop: float
    processor_ratio: float
    sublayers_shared: int
    sublayers_loop: int
    largest_difference: float


class Bench:
    """A model, its windows, and both ways of measuring programs on them."""

    def __init__(self, model: PreTrainedModel, ids: Tensor, at_once: int) -> None:
        self.model, self.ids, self.at_once = model, ids, at_once
        self.dense = Program.dense(model.config.num_hidden_layers, family_of(model.config).steps_per_layer)
        self.head = OutputHead(model)
        self.references: list[Reference] = []
        self.captured: list[Tensor] = []
        self.head.norm.register_forward_pre_hook(lambda _, inputs: self.captured.append(inputs[0]))

    def shared(self, programs: list[Program]) -> Numbers:
        wanted = {program: simplify(program) for program in programs}
        values: dict[Program, list[Quality]] = {}
        for measured in measure(self.model, self.ids, self.dense, wanted.values(), self.at_once):
            values.setdefault(measured.program, []).append(measured.quality)
            self.captured.clear()
        return {program: _numbers(values[simple]) for program, simple in wanted.items()}

    def loop(self, programs: list[Program]) -> list[tuple[float, float]]:
        self.references = []
        for chunk in self.ids.split(self.at_once):
            self.references.append(self.head.reference(self.stream(self.dense, chunk), chunk))
        numbers = []
        for program in programs:
            streams = (self.stream(program, reference.input_ids) for reference in self.references)
            qualities = [self.head.compare(s, r) for s, r in zip(streams, self.references, strict=True)]
            numbers.append(_numbers(qualities))
        surgeon.restore(self.model)
        return numbers

    @torch.inference_mode()
    def stream(self, program: Program, chunk: Tensor) -> Tensor:
        """The stream before the final norm, by the model's own forward pass."""
        self.captured.clear()
        if program.nodes:
            surgeon.edit(self.model, program)
            self.model.base_model(input_ids=chunk, use_cache=False)
        else:  # everything pruned: not even `edit` makes a model of that
            decoder_inputs(surgeon.restore(self.model), chunk)
        stream = self.captured.pop()
        self.captured.clear()
        return stream

    @torch.inference_mode()
    def explicit(self, program: Program) -> tuple[float, float]:
        """Perplexity and divergence from full logits."""
        nll, divergence = [], []
        for chunk in self.ids.split(1):
            surgeon.restore(self.model)
            original = self.model(input_ids=chunk, use_cache=False).logits[0, :-1].log_softmax(-1)
            surgeon.edit(self.model, program)
            changed = self.model(input_ids=chunk, use_cache=False).logits[0, :-1]
            nll.append(functional.cross_entropy(changed, chunk[0, 1:]).double())
            kl = functional.kl_div(changed.log_softmax(-1), original, reduction="batchmean", log_target=True)
            divergence.append(kl.double())
        surgeon.restore(self.model)
        return float(torch.stack(nll).mean().exp()), float(torch.stack(divergence).mean())

    def time(self, name: str, cells: list[Cell], rounds: int) -> Timed:
        """Make one heatmap both ways, and compare; of several rounds, the fastest of each way counts."""
        programs = [cell.program for cell in cells]
        times = []
        for _ in range(rounds):
            by_sharing, *shared_times = _timed(lambda: self.shared(programs))
            by_loop, *loop_times = _timed(lambda: self.loop(programs))
            times.append((*shared_times, *loop_times))
        shared, shared_processor, loop, loop_processor = map(min, zip(*times, strict=True))
        pairs = [(by_sharing[program], numbers) for program, numbers in zip(programs, by_loop, strict=True)]
        sample = [program for program in programs[::CHECK_EVERY] if program.nodes]
        pairs += [(by_sharing[program], self.explicit(program)) for program in sample]
        largest = max(_difference(a, b) for a, b in pairs)
        if largest > TOLERANCE:
            raise SystemExit(f"{name}: numbers differ by {largest:.2g}, more than {TOLERANCE:g}")
        plan = share([self.dense, *map(simplify, programs)])
        loop_sublayers = plain_sublayers([self.dense, *programs])
        ratio = loop_processor / shared_processor
        return Timed(name, shared, loop, ratio, plan.total_sublayers, loop_sublayers, largest)


def _timed(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """The result, and the wall-clock and processor seconds it took."""
    wall, processor = time.perf_counter(), time.process_time()
    result = work()
    return result, time.perf_counter() - wall, time.process_time() - processor


def _numbers(qualities: list[Quality]) -> tuple[float, float]:
    nll = torch.cat([quality.nll for quality in qualities]).mean()
    return float(nll.exp()), float(torch.cat([quality.divergence for quality in qualities]).mean())


def _difference(a: tuple[float, float], b: tuple[float, float]) -> float:
    """The larger relative difference of perplexity and divergence."""
    return max(abs(a[0] - b[0]) / b[0], abs(a[1] - b[1]) / max(abs(b[1]), 0.01))


def times_table(rows: list[Timed]) -> Table:
    table = Table(title="Heatmaps, shared against a plain loop over cells")
    for heading in (
        "heatmap",
        "shared s",
        "loop s",
        "times faster",
        "in processor time",
        "sublayers",
        "of a loop",
        "bound",
        "difference",
    ):
        table.add_column(heading, justify="left" if heading == "heatmap" else "right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.shared:.1f}",
            f"{row.loop:.1f}",
            f"{row.loop / row.shared:.2f}",
            f"{row.processor_ratio:.2f}",
            f"{row.sublayers_shared:,}",
            f"{row.sublayers_loop:,}",
            f"{row.sublayers_loop / row.sublayers_shared:.2f}",
            f"{row.largest_difference:.1e}",
        )
    return table


# Peak memory as the process itself sees it: what the system reports of a child includes its parent's at the fork.
MEASURED_COMMAND = """
from surgeon.cli.app import main
code = main()
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
raise SystemExit(code)
"""


def memory_table(arguments: argparse.Namespace, limits: list[str]) -> Table:
    """Peak memory of whole `surgeon scan` processes under several limits."""
    table = Table(title="surgeon scan --memory: peak resident memory of the process")
    for heading in ("--memory", "windows at once", "peak MB", "within"):
        table.add_column(heading, justify="right")
    for limit in limits:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-c", MEASURED_COMMAND, "scan", str(arguments.model), "--data", arguments.data]
            command += ["--tokens", str(arguments.tokens), "--window", str(arguments.window), "--memory", limit]
            command += ["--operation", "2-parallel", "--batch", "1000", "-o", folder]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            peak = int(done.stdout.split()[-1]) / 1024
            if done.returncode:
                table.add_row(limit, "-", f"{peak:.0f}", done.stderr.strip().splitlines()[-1])
                continue
            within = "yes" if peak <= parse_size(limit) / 2**20 else "NO"
            table.add_row(limit, str(windows_together(Path(folder))), f"{peak:.0f}", within)
    return table


def windows_together(folder: Path) -> int:
    """How many windows a scan ran together, from its journal."""
    lines = (folder / JOURNAL).read_text().splitlines()
    return int(next(line["at_once"] for line in map(json.loads, lines) if "at_once" in line))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", help="a model folder; default: the demo model")
    parser.add_argument("--data", default="demo")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8, help="windows at once, both ways")
    parser.add_argument("--operation", action="append", choices=list(SCANNED))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=1, help="repeat, alternating; the fastest of each way counts")
    parser.add_argument("--memory", action="append", help="limits to try; default: 512MB 576MB 640MB 1GB")
    parser.add_argument("--only-memory", action="store_true", help="make the second table only")
    arguments = parser.parse_args()
    arguments.model = arguments.model or surgeon.demo_model()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    model = surgeon.load(arguments.model)
    tokenizer = AutoTokenizer.from_pretrained(locate(arguments.model))
    windows = load_windows(tokenizer, arguments.data, arguments.window, arguments.tokens)
    bench = Bench(model, windows.ids, arguments.batch)
    names = arguments.operation or ([] if arguments.only_memory else list(SCANNED))
    cells = {name: scan_cells([name], model.config.num_hidden_layers, 0) for name in names}
    bench.shared([bench.dense])  # warm up
    rows = []
    for name in names:
        rows.append(bench.time(name, cells[name], arguments.rounds))
        print(f"{name}: {rows[-1].shared:.1f} s shared, {rows[-1].loop:.1f} s in a loop", file=sys.stderr)
    if set(THE_THREE) <= set(names):
        together = [cell for name in THE_THREE for cell in cells[name]]
        rows.append(bench.time("the three together", together, arguments.rounds))
    console = Console(width=120)
    console.print(
        f"{arguments.model}: {model.config.num_hidden_layers} layers, {windows.ids.numel():,} tokens in windows of "
        f"{arguments.window}, {torch.get_num_threads()} threads"
    )
    if rows:
        console.print(times_table(rows))
    console.print(memory_table(arguments, arguments.memory or ["512MB", "576MB", "640MB", "1GB"]))


if __name__ == "__main__":
    main()
