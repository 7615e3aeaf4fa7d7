"""What `surgeon scan` wins over a plain loop over cells: sharing, and screening, on two models in one run.

    python scripts/bench/scan.py [--every N] [--threads N] [--only demo|random] [--neighbour]

The loop does for each cell what anybody would do: `surgeon.edit(model, program)`, the model's own forward pass, and
the same quality numbers by the same fast head (so that the table shows what sharing wins, and nothing else). Each map
is made both ways, one right after the other, then all five together, and all five with `--screen`. Every number of
the shared way must agree with the loop's to 1e-4; a sample of cells is checked against full logits with
`cross_entropy` and `kl_div` as well. Rank correlation (Spearman's) is between the perplexities of the full and of the
screened scan, over the cells that the full one has below ten times the base perplexity.

The models are the demo model on held-out text, and a random Llama of 24 layers, 512 wide, at 2,048 random tokens
(where screening says nothing: nothing that is done to a random model matters). `--neighbour` has a busy process run
beside both ways.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scipy import stats
from torch import Tensor
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

import surgeon
from scripts.bench.busy import neighbour
from scripts.bench.decoding import random_llama
from scripts.commands import add_defaults, make_parser
from scripts.markdown import print_table
from surgeon.analysis.engine.machine import TOKENS_AT_ONCE
from surgeon.analysis.engine.measure import MeasureOptions, measure
from surgeon.analysis.engine.sharing import plain_sublayers, share, simplify
from surgeon.analysis.scan import HOPELESS, SCANNED, Cell, scan, select, selected_cells
from surgeon.analysis.subject import Subject
from surgeon.checkpoint.texts import open_tokenizer
from surgeon.findings.scan import Scan
from surgeon.language.program import Program
from surgeon.models.edit import decoder_inputs
from surgeon.models.families import family_of
from surgeon.quality.data import Windows, load_windows
from surgeon.quality.head import (
    ByWindow,
    OutputHead,
    ReferencePredictions,
    join_measures,
    logits_of,
    text_quality,
)
from surgeon.quality.summary import perplexity

TOLERANCE = 1e-4  # relative, and in nats absolute where a divergence is next to nothing
CHECK_EVERY = 23  # cells
COLUMNS = [
    "maps",
    "cells",
    "loop s",
    "shared s",
    "times faster",
    "in processor time",
    "bound by sublayers",
]

Numbers = tuple[float, float]  # perplexity, divergence
# The wall clock comes first; other programs on the machine disturb processor time less.
Seconds = tuple[float, float]


@dataclass(frozen=True)
class Row:
    """One line of the table: a way to make some maps, against the loop over their cells."""

    name: str
    cells: int
    loop: Seconds
    ours: Seconds
    sublayers_loop: int
    sublayers_ours: int
    note: str = ""

    @property
    def times_faster(self) -> float:
        return self.loop[0] / self.ours[0]

    @property
    def bound(self) -> float:
        return self.sublayers_loop / self.sublayers_ours


class Bench:
    """A model, its windows, and both ways of measuring programs on them."""

    def __init__(self, model: PreTrainedModel, ids: Tensor) -> None:
        self.model = model
        self.ids = ids
        self.at_once = max(1, TOKENS_AT_ONCE["cpu"] // ids.shape[1])
        self.dense = Program.dense(
            model.config.num_hidden_layers, family_of(model.config).steps_per_layer
        )
        self.head = OutputHead(model)
        self.references: list[ReferencePredictions] = []
        self.captured: list[Tensor] = []
        self.head.norm.register_forward_pre_hook(lambda _, inputs: self.captured.append(inputs[0]))

    def shared(self, programs: list[Program]) -> dict[Program, Numbers]:
        wanted = {program: simplify(program) for program in programs}
        values: dict[Program, list[ByWindow]] = {}
        plan = share([self.dense, *wanted.values()])
        for measured in measure(self.model, self.ids, plan, MeasureOptions(self.at_once)):
            values.setdefault(measured.program, []).append(measured.quality)
            self.captured.clear()
        return {program: _numbers(values[simple]) for program, simple in wanted.items()}

    def loop(self, programs: list[Program]) -> list[Numbers]:
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

    def explicit(self, program: Program) -> Numbers:
        """Perplexity and divergence from full logits."""

        def changed(ids: Tensor) -> Tensor:
            return logits_of(surgeon.edit(self.model, program))(ids)

        def original(ids: Tensor) -> Tensor:
            return logits_of(surgeon.restore(self.model))(ids)

        found = text_quality(changed, self.ids, original, bar=False)
        surgeon.restore(self.model)
        self.captured.clear()
        return found.perplexity, found.divergence

    def row(self, name: str, cells: list[Cell]) -> Row:
        """Make one map both ways, and compare every number."""
        programs = [cell.program for cell in cells]
        by_sharing, ours = _timed(lambda: self.shared(programs))
        by_loop, loop = _timed(lambda: self.loop(programs))
        pairs = [
            (by_sharing[program], numbers) for program, numbers in zip(programs, by_loop, strict=True)
        ]
        pairs += [(by_sharing[p], self.explicit(p)) for p in programs[::CHECK_EVERY] if p.nodes]
        largest = max(_difference(a, b) for a, b in pairs)
        if largest > TOLERANCE:
            raise SystemExit(f"{name}: numbers differ by {largest:.2g}, more than {TOLERANCE:g}")
        return Row(
            name,
            len(cells),
            loop,
            ours,
            plain_sublayers([self.dense, *programs]),
            self.planned(programs),
        )

    def planned(self, programs: list[Program]) -> int:
        """How many sublayers the shared way runs for these programs."""
        return share([self.dense, *map(simplify, programs)]).total_sublayers

    def together(self, rows: list[Row], cells: list[Cell]) -> Row:
        """All maps at once, against the loops over each of them."""
        programs = [cell.program for cell in cells]
        _, ours = _timed(lambda: self.shared(programs))
        return Row(
            "five together",
            len(cells),
            _loops(rows),
            ours,
            plain_sublayers(programs),
            self.planned(programs),
        )


def screened(model: PreTrainedModel, windows: Windows, rows: list[Row], every: int) -> Row:
    """All maps of the demo model by `surgeon scan --screen`, against the loops; and how well it orders the cells."""
    selection = select(list(SCANNED), model.config.num_hidden_layers, every=every)
    subject = Subject(surgeon.open("demo"), model, windows)
    full = _scan(subject, selection, False)
    found, ours = _timed(lambda: _scan(subject, selection, True))
    good = full.cells["perplexity"] < HOPELESS * full.base_perplexity
    rank = stats.spearmanr(full.cells["perplexity"][good], found.cells["perplexity"][good]).statistic
    used = found.cells["tokens"].mean() / full.cells["tokens"].max()
    record = found.record
    loop_sublayers = record["sublayers_of_a_loop"]["total"]
    sublayers = record["sublayers_run"]["total"]
    note = f"rank correlation {rank:.4f} over {good.sum()} cells, {used:.0%} of the tokens"
    return Row("five, --screen", len(found.cells), _loops(rows), ours, loop_sublayers, sublayers, note)


def _scan(subject: Subject, selection: Any, screen: bool) -> Scan:
    with tempfile.TemporaryDirectory() as folder:
        return scan(subject, Path(folder), selection, screened=screen)


def _loops(rows: list[Row]) -> Seconds:
    return sum(row.loop[0] for row in rows), sum(row.loop[1] for row in rows)


def _timed(work: Callable[[], Any]) -> tuple[Any, Seconds]:
    wall = time.perf_counter()
    processor = time.process_time()
    result = work()
    return result, (time.perf_counter() - wall, time.process_time() - processor)


def _numbers(qualities: list[ByWindow]) -> Numbers:
    nll, divergence = join_measures(qualities)
    return perplexity(nll), float(divergence.mean())


def _difference(a: Numbers, b: Numbers) -> float:
    """The larger relative difference of perplexity and divergence."""
    return max(abs(a[0] - b[0]) / b[0], abs(a[1] - b[1]) / max(abs(b[1]), 0.01))


def cells_of(row: Row) -> list[str]:
    """Of the table."""
    numbers = [row.times_faster, row.loop[1] / row.ours[1], row.bound]
    seconds = [f"{row.loop[0]:.1f}", f"{row.ours[0]:.1f}"]
    return [row.name, f"{row.cells:,}", *seconds, *(f"{number:.2f}" for number in numbers)]


def demo_case(tokens: int) -> tuple[PreTrainedModel, Windows]:
    folder = surgeon.demo_model()
    return surgeon.load(folder), load_windows(open_tokenizer(folder), "demo", 128, tokens)


def random_case() -> tuple[PreTrainedModel, Windows]:
    model = random_llama()
    ids = torch.randint(model.config.vocab_size, (8, 256))
    return model, Windows(ids, "random", "")


def run(name: str, model: PreTrainedModel, windows: Windows, every: int) -> list[Row]:
    bench = Bench(model, windows.ids)
    bench.shared([bench.dense])  # so that no cell pays for what the first pass makes ready
    layers = model.config.num_hidden_layers
    cells: list[Cell] = []
    rows = []
    for operation in SCANNED:
        own = selected_cells([select([operation], layers, every=every)], layers, 0)
        rows.append(bench.row(operation, own))
        print(f"{name}, {operation}: {rows[-1].times_faster:.2f} times faster", file=sys.stderr)
        cells += own
    maps = list(rows)
    rows.append(bench.together(maps, cells))
    if name == "demo":
        rows.append(screened(model, windows, maps, every))
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    add_defaults(
        parser,
        tokens=(4096, "of the demo's text"),
        every=(1, "for the random model: a grid of stretches, as in scan"),
        neighbour=(False, "have a busy process beside both ways"),
    )
    parser.add_argument("--only", choices=("demo", "random"))
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    cases = {"demo": (lambda: demo_case(arguments.tokens), 1), "random": (random_case, arguments.every)}
    for name, (made, every) in cases.items():
        if arguments.only in (None, name):
            model, windows = made()
            with neighbour(arguments.neighbour):
                rows = run(name, model, windows, every)
            beside = ", beside a busy process" if arguments.neighbour else ""
            title = (
                f"{name}: {model.config.num_hidden_layers} layers, {windows.ids.numel():,} tokens in windows of "
                f"{windows.ids.shape[1]}, {torch.get_num_threads()} threads{beside}"
            )
            print_table(title, COLUMNS, map(cells_of, rows))
            for row in rows:
                if row.note:
                    print(f"{row.name}: {row.note}")


if __name__ == "__main__":
    main()
