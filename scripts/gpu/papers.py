"""A paper's tables, measured on this machine and printed row by row beside what the paper prints.

    scripts/gpu/papers lp|ladder|pt|deinfer|racks [-o FOLDER] [--small] [--exact] [--model SHAPE] [--only TEXT] [--list]

Models are configurations of docs/shapes with random weights, of which ranks have one copy for all programs that are
compared; nothing is fetched. Loads, ranks and programs are those of the paper's tables (docs/papers-tables.json).
Where there are fewer GPUs than a row is printed for, it runs on as many as there are (a power of two), and "ranks" says
so; with --exact it does not run. Prompts run in chunks of 8,192 tokens. A row that cannot run says why: memory,
GPUs, heads that do not divide. "No P2P" is NCCL with NCCL_P2P_DISABLE=1.

`racks` trains 1B to 13B as a 1F1B pipeline and as racks with codas of two layers, eight micro-batches of 2,048 tokens
an update, on four GPUs or as many as there are (at least two). It has no use for --model, --only, --rounds and
--decoding.

Over several machines torchrun runs papers.py, one process for each GPU of all of them. Then rows for as many ranks are
measured, those without peer to peer where the environment has NCCL_P2P_DISABLE=1.

FOLDER (by default runs/papers-PAPER) is what to send back: a file for each measured program and load in runs/, written
once it is measured, table.md, rows.csv, rows.json and machine.json, also where `timeout` or Ctrl-C ends it. The same
command goes on then.

--small takes tiny shapes of the same kind and small loads on two CPU ranks: it shows that the script works, and its
figures mean nothing. None of it has run on a GPU yet.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # surgeon need not be installed

import pandas as pd
import torch

from scripts.commands import Said, add_defaults, make_parser
from scripts.cost.cases import NOTES, TRAINING, read_cases
from scripts.gpu import paper_racks
from scripts.gpu.paper_bench import Settings, Shared, measure
from scripts.gpu.paper_specs import Measured, Place, Row, Spec
from scripts.markdown import format_row
from surgeon.checkpoint.tensor_file import read_json
from surgeon.machine import describe_gpu
from surgeon.opened import command_line, versions
from surgeon.processes.files import finite, make_folder, write_json, write_table, write_text
from surgeon.processes.rendezvous import rendezvous_at
from surgeon.processes.torchrun import TorchrunEnvironment, read_environment
from surgeon.runtime.worker.rank import be_rank
from surgeon.words import first_line

TABLES = Path(__file__).resolve().parents[2] / "docs" / "papers-tables.json"
RACKS = "racks"
PAPERS = {
    "lp": "layer-parallelism",
    "ladder": "ladder-residual",
    "pt": "parallel-track",
    "deinfer": "deinfer",
    RACKS: "block-wise-local-training",
}
SMALL_PASS = 32  # tokens of prompts: less than those of a load, so that there are chunks
NOTHING = float("nan")
HEAD = "| table | row | ranks | printed | here | unit | printed, x | here, x | |\n|:--|:--|--:|--:|--:|:--|--:|--:|:--|"


@dataclass(frozen=True)
class Line:
    """A row of the result.

    Attributes:
        ranks: that measured it; the paper's are in `printed_ranks`.
        printed, here: in the printed unit; NaN where it was not measured.
        printed_speedup, here_speedup: times the baseline of the table; NaN for a baseline.
        note: why there is nothing, or nothing to say.
    """

    table: str
    row: str
    ranks: int
    printed_ranks: int
    printed: float
    here: float
    unit: str
    printed_speedup: float
    here_speedup: float
    note: str

    def __str__(self) -> str:
        ranks = str(self.ranks)
        if self.ranks != self.printed_ranks:
            ranks = f"{self.ranks} of {self.printed_ranks}"
        numbers = (self.printed, self.here, self.printed_speedup, self.here_speedup)
        printed, here, *speedups = ("" if one != one else f"{one:.4g}" for one in numbers)
        return format_row([self.table, self.row, ranks, printed, here, self.unit, *speedups, self.note])


def write(folder: Path, lines: Sequence[Line], heading: str) -> None:
    """What is sent back, beside the runs."""
    read = [
        f"- {table}: {NOTES[table]}"
        for table in dict.fromkeys(line.table for line in lines)
        if table in NOTES
    ]
    notes = ["", "How rows are read, of which a paper does not say all:", "", *read] if read else []
    write_text(folder / "table.md", "\n".join([heading, "", HEAD, *map(str, lines), *notes]) + "\n")
    write_table(folder / "rows.csv", pd.DataFrame([asdict(line) for line in lines]))
    records = finite([asdict(line) for line in lines])
    write_text(folder / "rows.json", json.dumps(records, indent=1) + "\n")


@dataclass
class Results:
    """What has been measured, and what cannot be."""

    folder: Path
    found: dict[str, Measured]
    reasons: dict[str, str]

    @classmethod
    def read(cls, folder: Path) -> Results:
        """Those of an earlier start."""
        files = sorted((folder / "runs").glob("*.json"))
        return cls(folder, {file.stem: read_json(file) for file in files}, {})

    def add(self, key: str, measured: Measured | str) -> None:
        """Keep what a spec or a job came to, on disk if it is a measurement: what failed is tried again."""
        if isinstance(measured, str):
            self.reasons[key] = measured
        else:
            self.found[key] = finite(measured)
            write_json(self.folder / "runs" / f"{key}.json", dict(self.found[key]))

    def knows(self, one: Spec | paper_racks.RackJob) -> bool:
        """Whether there is nothing more to find out about it."""
        return one.key in self.found or one.key in self.reasons

    def line(self, row: Row) -> Line:
        """A row as far as it is known."""
        case = row.case
        missing = [spec for spec in row.specs if spec.key not in self.found]
        here = NOTHING if missing else row.value(self.found)
        speedup = None if missing else row.speedup(self.found)
        reasons = [self.reasons.get(spec.key, "not measured") for spec in missing]
        return Line(
            case.group,
            case.text,
            row.own[0].ranks,
            case.run.ranks,
            case.printed,
            here,
            case.unit,
            NOTHING if case.speedup is None else case.speedup,
            NOTHING if speedup is None else speedup,
            "; ".join(dict.fromkeys(reasons)),
        )


def run(settings: Settings, rows: Sequence[Row], results: Results, say: Callable[[str], None]) -> None:
    """Measure what is missing, and say every row once all of it is known."""
    open_rows = list(rows)

    def say_known() -> None:
        for row in [row for row in open_rows if all(map(results.knows, row.specs))]:
            open_rows.remove(row)
            say(str(results.line(row)))

    say_known()
    specs = dict.fromkeys(spec for row in rows for spec in row.specs if not results.knows(spec))
    for spec, measured in measure(
        settings, sorted(specs, key=lambda one: (one.load.length * one.batch, one.key))
    ):
        results.add(spec.key, measured)
        say_known()


def run_racks(settings: Settings, results: Results) -> Iterator[Line]:
    """Train every size in both ways, and yield the article's rows of each."""
    printed = [row for row in read_json(TABLES)["rows"] if row["use"] == TRAINING]
    for pipeline, local in _rack_jobs(settings):
        for job in (pipeline, local):
            if results.knows(job):
                continue
            why = paper_racks.why_not(job, settings.place.gpus, settings.free)
            try:
                results.add(job.key, why or paper_racks.measure(job, results.folder / "racks"))
            except RuntimeError as error:
                results.add(job.key, f"failed: {first_line(error)}")
        reasons = [results.reasons[job.key] for job in (pipeline, local) if job.key in results.reasons]
        for row, here in zip(
            printed, paper_racks.values(results.found, pipeline, local, printed), strict=True
        ):
            yield Line(
                "racks",
                f"{row['what']}, {pipeline.size}",
                pipeline.racks,
                paper_racks.PRINTED_RACKS,
                row["value"],
                here,
                row["unit"],
                NOTHING,
                NOTHING,
                "; ".join(dict.fromkeys(reasons)),
            )


def _rack_jobs(settings: Settings) -> list[tuple[paper_racks.RackJob, paper_racks.RackJob]]:
    racks = settings.place.ranks(paper_racks.PRINTED_RACKS)
    return paper_racks.jobs(racks, settings.device, settings.place.small)


def listed(settings: Settings, rows: Sequence[Row], results: Results) -> None:
    """Note of every spec why it cannot be measured, or that it can be."""
    for spec in dict.fromkeys(spec for row in rows for spec in row.specs if not results.knows(spec)):
        results.reasons[spec.key] = Shared(settings, [spec]).why_not(spec) or "can be measured"


def machine(settings: Settings) -> dict[str, Any]:
    """Facts of this machine and of how it was measured."""
    gpus = [describe_gpu(torch.device("cuda", number)) for number in range(torch.cuda.device_count())]
    how = {"rounds": settings.rounds, "pass_tokens": settings.pass_tokens, "decoding": settings.decoding}
    place = {"small": settings.place.small, "exact": settings.place.exact, "model": settings.place.model}
    return {"gpus": gpus, "versions": versions(), "cuda": torch.version.cuda, "settings": how | place}


def check_folder(folder: Path, settings: Settings) -> None:
    """Make the folder, or see that what is in it was measured in the same way.

    Raises:
        ValueError: if it was not.
    """
    make_folder(folder / "runs")
    facts = machine(settings)
    file = folder / "machine.json"
    if (
        file.exists()
        and (before := read_json(file))
        and any(before.get(key) != facts[key] for key in facts)
    ):
        changed = ", ".join(key for key in facts if before.get(key) != facts[key])
        raise ValueError(
            f"{folder} has runs of other {changed} (see its machine.json); give another folder with -o"
        )
    write_json(file, facts | {"command": command_line()})


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, prog="scripts/gpu/papers")
    parser.add_argument("paper", choices=list(PAPERS), help="which")
    parser.add_argument("-o", "--output", type=Path, metavar="FOLDER", help="to send back")
    parser.add_argument(
        "--model", metavar="SHAPE", help="a file of docs/shapes in place of the rows' own models"
    )
    parser.add_argument("--only", metavar="TEXT", help="rows in which this stands")
    add_defaults(
        parser,
        rounds=3,
        decoding=("auto", "auto (recorded passes), static, dynamic"),
        small=(False, "tiny shapes on two CPU ranks"),
        exact=(False, "on as many ranks as a row is printed for, or not at all"),
        list=(False, "say what can be measured here, and measure nothing"),
    )
    options = parser.parse_args(arguments)
    if not options.small and not torch.cuda.is_available():
        parser.error("there is no GPU that this PyTorch can use; --small tries the script on the CPU")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print one paper's rows; the exit status is 0 if a row was measured, or nothing was to be."""
    options = parse(arguments)
    folder = options.output or Path("runs") / f"papers-{options.paper}"
    torchrun = read_environment()
    started = None if torchrun is None else torchrun.ranks
    shapes = folder / "shapes"
    gpus = None if options.small else started or torch.cuda.device_count()
    place = Place(gpus, options.exact, options.small, options.model)
    settings = Settings(
        place, shapes, "cuda", options.rounds, decoding=options.decoding, started=started
    )
    if options.small:
        settings = replace(settings, device="cpu", rounds=1, pass_tokens=SMALL_PASS)
    try:
        rows = rows_of(options, place)
        if torchrun is not None:
            join(torchrun, settings, rows)
        check_folder(folder, settings)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    results = Results.read(folder)
    print(HEAD, flush=True)
    if options.list and options.paper == RACKS:
        for job in (job for pair in _rack_jobs(settings) for job in pair):
            print(
                f"| {job.key} | {paper_racks.why_not(job, place.gpus, settings.free) or 'can be measured'} |"
            )
        return 0
    if options.list:
        listed(settings, rows, results)
        print(*(results.line(row) for row in rows), sep="\n")
        return 0

    told = ", ".join(f"{package} {version}" for package, version in versions().items())
    heading = f"{PAPERS[options.paper]} on {place_of(settings)}; {told}; `{command_line()}`"
    say = Said()
    lines = list[Line]()
    try:
        for line in run_racks(settings, results) if options.paper == RACKS else ():
            say(str(line))
            lines.append(line)
        run(settings, rows, results, say)
    finally:
        lines = lines or [results.line(row) for row in rows]
        write(folder, lines, heading)
    measured = sum(line.here == line.here for line in lines)
    print(f"{measured} of {len(lines)} rows measured; {folder} is what to send back", file=sys.stderr)
    if measured:
        return 0
    return 1


def join(torchrun: TorchrunEnvironment, settings: Settings, rows: Sequence[Row]) -> None:
    """Meet the other processes of torchrun's; one whose rank is not 0 is that rank until rank 0 ends.

    Raises:
        ValueError: if there are no rows: racks start their own processes.
        OSError: if rank 0 is not found, or goes.
    """
    if not rows:
        raise ValueError("racks start processes of their own on one machine; run it without torchrun")
    if torchrun.rank == 0:
        rendezvous_at(torchrun)
        return
    if torchrun.local_rank == 0:  # of a machine that may have no disk in common with rank 0's
        for model in {spec.model for row in rows for spec in row.specs}:
            settings.place.write_config(settings.folder, model)
    be_rank(torchrun)


def rows_of(options: argparse.Namespace, place: Place) -> list[Row]:
    """The rows that are asked for.

    Raises:
        ValueError: if there is none.
    """
    tables: Mapping[str, Any] = read_json(TABLES)
    if options.paper == RACKS:
        return []
    cases = read_cases(tables["rows"])
    chosen = [
        case
        for case in cases
        if case.paper == PAPERS[options.paper] and (options.only or "") in case.text
    ]
    if not chosen:
        raise ValueError(
            f"no row of {PAPERS[options.paper]} has {options.only!r} in it; see docs/papers-tables.json"
        )
    return place.rows(chosen)


def place_of(settings: Settings) -> str:
    """Where, for people."""
    if settings.device == "cpu":
        return "two CPU ranks and tiny shapes (figures mean nothing)"
    return f"{settings.place.gpus} x {describe_gpu(torch.device('cuda', 0))}"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as `timeout` ends it
    sys.exit(main())
