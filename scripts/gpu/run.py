"""Whether surgeon computes on GPUs what it computes on a CPU, and how fast it decodes there.

    scripts/gpu/check [--small] [--only NAME ...] [--seconds N] [-o TABLE.txt]

Edits, scans, continues texts, benches, evaluates and heals the demo model on the CPU and on the GPUs of this machine,
and compares: in float32 the same greedy tokens and the same numbers, of every form of program, in passes of any shape,
of fixed shapes, and recorded as CUDA graphs, with kernels of ours and without; layers on two devices; two ranks that
share a GPU over gloo and through its memory, and have one each over NCCL where there are two. A row of the table is one
such comparison, "s" the seconds that it took on the GPU. Then a random Llama of 3 billion parameters (of 1 billion
where less than 24 GB are free) is decoded on one GPU: the share of the memory's measured bandwidth, what was allocated
at the peak beside what the memory plan says, and the time beside that of passes of any shape, of the same layers in
pairs (fused, and side by side), of transformers (static cache), of the same compiled ("reduce-overhead"), and of vLLM
where this Python has it. It needs 7 GB of disk. What is computed runs in processes of their own: one that fails, is
killed or hangs costs its rows, and the rest goes on. A verdict in words is the end. The exit status is 0 if every
comparison is right, else 1; speed has no part in it.

--small takes the CPU for a GPU, and a tiny model, which shows that the script works and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # surgeon need not be installed

import torch

from scripts.commands import Said, add_defaults, make_parser
from scripts.gpu.checks import MODELS, checks
from scripts.gpu.sides import Check, Judgement, Setup, Side
from scripts.gpu.speeds import MEMORY, SPEEDS, speed_rows
from surgeon.machine import describe_gpu, show_size
from surgeon.opened import versions

CHECK_SECONDS = 180.0  # for one check on one side
POLL_SECONDS = 0.05
CHILD = Path(__file__).with_name("child.py")
Speeds = Mapping[str, Mapping[str, Any]]  # by row, as speeds.py yields them
SPEED_HEAD = (
    f"{'speed':<38}{'tokens/s':>9} {'ms each':>8} {'of bandwidth':>13}  most allocated (planned)"
)


@dataclass
class Results:
    """What processes of one side have said.

    Attributes:
        values: of rows, with the seconds that each took.
        failures: why a check has no more of them.
    """

    values: dict[str, tuple[Any, float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


class Processes:
    """Runs checks one after the other, in as few processes as there can be.

    Args:
        folder: for what they say.
        until: by which monotonic clock's time all of it has to end.
    """

    def __init__(self, setup: Setup, folder: Path, until: float) -> None:
        self.folder = folder
        self.until = until
        self.environment = os.environ | ({"TRITON_INTERPRET": "1"} if setup.device == "cpu" else {})
        (folder / "setup.json").write_text(json.dumps(asdict(setup)))

    def run(self, side: Side, names: Sequence[str], results: Results) -> Iterator[str]:
        """Compute one side of checks, and yield the name of each that is over.

        A process ends with the first check that fails in it; another one goes on with the rest.
        """
        left = list(names)
        while left:
            if time.monotonic() >= self.until:
                results.failures |= dict.fromkeys(left, "not run: the time was over")
                yield from left
                return
            for event in self._events(side, list(left)):
                if "row" in event:
                    results.values[event["row"]] = event["value"], event["seconds"]
                else:
                    name = left.pop(0)
                    if "failed" in event:
                        results.failures[name] = event["failed"]
                    yield name

    def _events(self, side: Side, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """What one process says, until it ends; the last thing is that a check is done, or has failed."""
        lines = self.folder / f"{side}.jsonl"
        log = self.folder / f"{side}.log"
        lines.write_text("")
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if side == "expected" else {}
        command = [sys.executable, str(CHILD), side, str(self.folder / "setup.json"), str(lines), *names]
        with log.open("ab") as output, lines.open(encoding="utf-8") as said:
            process = subprocess.Popen(
                command,
                env=self.environment | hidden,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
            try:
                began = time.monotonic()
                over = False
                open_line = ""
                while not over:
                    ended = process.poll() is not None  # before reading, so that nothing is missed
                    for line in said:
                        open_line += line
                        if open_line.endswith("\n"):
                            event = json.loads(open_line)
                            open_line = ""
                            began = time.monotonic()
                            yield event
                            over = "failed" in event or event.get("done") == names[-1]
                    if over:
                        break
                    if ended:
                        code = process.returncode
                        how = f"exit code {code}"
                        if code < 0:
                            how = f"the process was ended by {signal.Signals(-code).name}"
                        last = log.read_text(errors="replace").strip().splitlines()[-1:]
                        yield {"failed": ": ".join([how, *last])}
                        break
                    now = time.monotonic()
                    if now - began > CHECK_SECONDS or now > self.until:
                        yield {"failed": f"was ended after {now - began:.0f} s"}
                        break
                    time.sleep(POLL_SECONDS)
            finally:
                process.kill()
                process.wait()


def judged(
    check: Check, name: str, expected: Results, found: Results
) -> Iterator[tuple[str, Judgement, float]]:
    """The rows of a check, with the seconds that each took where it was to be found."""
    for row, judge in check.rows.items():
        wanted = expected.values.get(check.key(row))
        own = found.values.get(row)
        if own is None:
            yield row, Judgement("", found.failures.get(name, "nothing was found"), False), 0.0
        elif wanted is None:
            yield row, Judgement("not known", "the CPU's check failed", False), own[1]
        else:
            yield row, judge(wanted[0], own[0]), own[1]


def table_line(what: str, expected: str, found: str, seconds: str, right: str) -> str:
    return f"{what:<30}{expected:<21} {found:<24} {seconds:>5} {right}".rstrip()


def speed_line(row: str, speeds: Speeds) -> str:
    """A measured row of the table."""
    found = speeds[row]
    if row == MEMORY:
        return f"{row:<38}{found['rate'] / 1e9:>9.0f} GB/s"
    line = f"{row:<38}{found['batch'] / found['seconds']:>9.1f} {1e3 * found['seconds']:>8.2f}"
    share = bandwidth_share(row, speeds)
    shown = "" if share is None else f"{share:.0%}"
    return f"{line} {shown:>13}  {memory_words(found)}".rstrip()


def bandwidth_share(row: str, speeds: Speeds) -> float | None:
    """Of the measured bandwidth, what a pass reaches by what it has to read; None where that is not known."""
    found = speeds.get(row, {})
    if MEMORY not in speeds or "bytes" not in found:
        return None
    return float(found["bytes"] / found["seconds"] / speeds[MEMORY]["rate"])


def memory_words(found: Mapping[str, Any]) -> str:
    if "planned" not in found:
        return ""
    peak = show_size(found["peak"]) if "peak" in found else "not counted on a CPU"
    return f"{peak} ({show_size(found['planned'])})"


def verdict(rights: Mapping[str, bool], speeds: Speeds, failed: Sequence[str]) -> list[str]:
    """Sentences: what is right, how fast decoding is, how much memory it took, and what was not measured.

    Args:
        rights: by compared row, whether it is right.
        failed: rows of speeds that could not be measured.
    """
    wrong = [row for row, right in rights.items() if not right]
    said = f"{len(rights) - len(wrong)} of {len(rights)} comparisons are right"
    lines = [said + (f", {len(wrong)} WRONG: {'; '.join(wrong)}" if wrong else "")]
    lines += [_speed_words(row, speeds) for row in speeds if row.startswith("surgeon, ")]
    return lines + ([f"not measured: {'; '.join(failed)}"] if failed else [])


def _speed_words(row: str, speeds: Speeds) -> str:
    """A sentence about one load: the share of the bandwidth, and the time that others take beside surgeon's."""
    found = speeds[row]
    load = row.removeprefix("surgeon, ")
    share = bandwidth_share(row, speeds)
    texts, prompt = load.split(" x ")
    parts = [] if share is None else [f"reaches {share:.0%} of the measured bandwidth"]
    for other, measured in speeds.items():
        if other.endswith(f", {load}") and other != row:
            who = other.removesuffix(f", {load}")
            parts.append(f"is {measured['seconds'] / found['seconds']:.2f} times as fast as {who}")
    if "peak" in found:
        parts.append(f"allocates {found['peak'] / found['planned']:.2f} times what the memory plan says")
    what = f"decoding {texts} text{'s' if texts != '1' else ''} behind {prompt} tokens"
    return f"{what} {', '.join(parts) or 'was measured, and nothing to set it against'}"


def compare(
    setup: Setup, names: Sequence[str], processes: Processes, say: Callable[[str], None]
) -> dict[str, bool]:
    """Say the table of comparisons row by row; returns which of them are right."""
    every = checks(setup)
    expected = Results()
    found = Results()
    needed = {every[name].key(row) for name in names for row in every[name].rows}
    asked = [MODELS, *(name for name in every if needed & every[name].rows.keys())]
    for name in processes.run("expected", asked, expected):
        print(f"on the CPU: {name}", file=sys.stderr, flush=True)
    for name, why in expected.failures.items():
        say(f"on the CPU, {name} failed: {why}")
    say(table_line("what", "expected", "found", "s", "verdict"))
    rights = {}
    for name in processes.run("found", names, found):
        for row, judgement, seconds in judged(every[name], name, expected, found):
            rights[row] = judgement.right
            right = "right" if judgement.right else "WRONG"
            say(table_line(row, judgement.expected, judgement.found, f"{seconds:.1f}", right))
    return rights


def measure(
    setup: Setup, names: Sequence[str], processes: Processes, say: Callable[[str], None]
) -> tuple[dict[str, Any], list[str]]:
    """Say the table of speeds row by row; returns what was measured, and the rows that could not be."""
    results = Results()
    found: dict[str, Any] = {}
    failed = []
    say(SPEED_HEAD)
    for name in processes.run("speed", names, results):
        found = {row: value for row, (value, _) in results.values.items()}
        for row in speed_rows(name, setup.device):
            if row in found:
                say(speed_line(row, found))
            else:
                failed.append(row)
                say(f"{row:<38} not measured: {results.failures.get(name, 'nothing was found')}")
    return found, failed


def place_of(setup: Setup) -> str:
    """What is compared with the CPU, for people."""
    if setup.device == "cpu":
        return "the CPU itself, in place of a GPU"
    ranks = " and ".join(setup.collectives)
    return f"{describe_gpu(torch.device('cuda', 0))}, {setup.gpus} in all; two ranks over {ranks}"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, prog="scripts/gpu/check")
    known = [*checks(Setup("cpu", 0, "")), *SPEEDS]
    add_defaults(
        parser,
        small=(False, "on the CPU, in place of a GPU"),
        seconds=(570.0, "for everything"),
    )
    parser.add_argument(
        "--only", nargs="+", choices=known, default=known, metavar="NAME", help=", ".join(known)
    )
    parser.add_argument(
        "--folder", type=Path, help="where to keep models, results and logs; removed by default"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the table here, too")
    options = parser.parse_args(arguments)
    if not options.small and not torch.cuda.is_available():
        parser.error("there is no GPU that this PyTorch can use; --small tries the script on the CPU")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    say = Said()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if options.folder is None else options.folder
        folder.mkdir(parents=True, exist_ok=True)
        setup = Setup("cuda", torch.cuda.device_count(), str(folder.resolve()))
        if options.small:
            setup = replace(setup, device="cpu", gpus=0)
        told = ", ".join(f"{name} {version}" for name, version in versions().items())
        say(f"{place_of(setup)}; {told}")
        processes = Processes(setup, folder, time.monotonic() + options.seconds)
        compared = [name for name in options.only if name in checks(setup)]
        measured = [name for name in options.only if name in SPEEDS]
        rights = compare(setup, compared, processes, say) if compared else {}
        found, failed = measure(setup, measured, processes, say) if measured else ({}, [])
        for sentence in verdict(rights, found, failed):
            say(sentence)
    say.write(options.output)
    return int(not all(rights.values()))


if __name__ == "__main__":
    sys.exit(main())
