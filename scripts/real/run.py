"""The whole way on a real model, SmolLM2-135M-Instruct, every step of it held against transformers alone.

    scripts/real/check [--model PATH] [--text FILE] [--only NAME ...] [-o TABLE.txt]

Commands run as a user types them, each in a process of its own; plain.py computes what they should give, in a process
that has torch and transformers and no surgeon. A row of the table is one comparison, "s" the seconds since the one
before. The exit status is 0 if none is WRONG; "open" is what surgeon refuses, in so many words, and is yet to do. What
is written goes to a temporary folder. Without --model the model is fetched into models/ (scripts/real/get).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # surgeon need not be installed

from scripts.commands import Said, make_parser
from scripts.gpu.run import table_line
from scripts.real.get import PROJECT, get_model
from surgeon.demo import demo_data
from surgeon.findings.explore import Exploration
from surgeon.findings.scan import Scan
from surgeon.findings.search import SearchResult
from surgeon.findings.training import HealRun
from surgeon.opened import versions
from surgeon.words import plural

LAYERS = 30
WINDOW = 256
MEMORY = 2_000_000_000  # bytes that opening and scanning have to stay under
CLOSE = 1e-3  # of a perplexity
CLOSE_LOGITS = 1e-4  # of the largest
CLOSE_NATS = 1e-3
TEXT_CHARACTERS = 400_000
PROMPTS = ("The capital of France is", "Water boils at a temperature of", "def read_lines(path):\n")
NEW_TOKENS = 24
PAIRS = "24:28"
LADDER = "20:28"
PRUNED = "26:28"
ROWS = (
    ("The capital of France is", "Paris", "Berlin", "Madrid"),
    ("Two plus two is", "four", "seven", "blue"),
    ("The opposite of hot is", "cold", "warm", "fast"),
    ("The sun rises in the", "east", "west", "evening"),
    ("A week has seven", "days", "months", "legs"),
    ("Ice is frozen", "water", "fire", "sand"),
    ("The largest planet of the solar system is", "Jupiter", "Mars", "Pluto"),
    ("Cows give", "milk", "bread", "stones"),
)  # a question, the right choice, and others


@dataclass(frozen=True)
class Row:
    """A comparison; `right` is None where surgeon refuses what is yet to do."""

    what: str
    expected: str
    found: str
    right: bool | None

    @property
    def verdict(self) -> str:
        return {True: "right", False: "WRONG", None: "open"}[self.right]


@dataclass(frozen=True)
class Ran:
    """A command that has ended, and the most memory that a process of it has taken, in bytes."""

    code: int
    said: str
    errors: str
    peak: int


class Plain:
    """The process of plain.py, which is asked by methods of that name there."""

    def __init__(self, model: Path, log: Path) -> None:
        command = [sys.executable, "-I", str(Path(__file__).with_name("plain.py")), str(model)]
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self._log = log

    def ask(self, question: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"ask": question, **arguments}), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"plain.py has ended: {last_line(self._log.read_text(errors='replace'))}")
        answer = json.loads(line)
        if "failed" in answer:
            raise RuntimeError(f"plain.py: {answer['failed']}")
        return answer["found"]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@dataclass(frozen=True)
class Way:
    """What the checks share: the model, a text file, a folder to write to, and transformers alone."""

    model: Path
    text: Path
    folder: Path
    plain: Plain

    def surgeon(self, *arguments: object, refused: bool = False, **environment: str) -> Ran:
        """Run a command as a user does.

        Raises:
            RuntimeError: if it fails; with `refused` it may end with 1.
        """
        with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "surgeon.commands", *map(str, arguments)],
                cwd=self.folder,
                env=os.environ | {"PYTHONPATH": str(PROJECT)} | environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=errors,
            )
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            unit = 1 if sys.platform == "darwin" else 1024
            said.seek(0)
            errors.seek(0)
            ran = Ran(process.returncode, said.read(), errors.read(), usage.ru_maxrss * unit)
        if ran.code and not (refused and ran.code == 1):
            raise RuntimeError(f"surgeon {arguments[0]} ended with {ran.code}: {last_line(ran.errors)}")
        return ran

    def recipe(self, operation: str, layers: str) -> Path:
        path = self.folder / f"{operation}.yaml"
        path.write_text(
            f'surgeon: 1\nmodel: {self.model}\noperations:\n  - {operation}: {{layers: "{layers}"}}\n'
        )
        return path

    def perplexity(self, tokens: int, after: int = 0, program: str | None = None) -> float:
        text = str(self.text)
        return float(
            self.plain.ask(
                "perplexity", text=text, tokens=tokens, window=WINDOW, after=after, program=program
            )
        )


def check_opening(way: Way) -> Iterator[Row]:
    # It has a cache of its own, so that a .gguf file is converted here, and not found converted.
    ran = way.surgeon("show", way.model, XDG_CACHE_HOME=str(way.folder / "cache"))
    yield memory_row("opening: most memory", ran)


def check_perplexity(way: Way) -> Iterator[Row]:
    output = way.folder / "eval"
    way.surgeon("eval", way.model, *on_text(way, 2048), "-o", output)
    found = json.loads((output / "text.json").read_text())["perplexity"]
    yield perplexity_row("perplexity", [way.perplexity(2048)], [found])


def check_scan(way: Way) -> Iterator[Row]:
    output = way.folder / "scan"
    ran = way.surgeon(
        "scan", way.model, *on_text(way, 512), "--operation", "prune,lp", "--every", 6, "-o", output
    )
    cells = Scan.read(output).cells.set_index(["operation", "first", "last"])["perplexity"]
    pruned = [(6, 11), (12, 17), (24, 29)]
    plain = [way.perplexity(512, program=without(first, last + 1)) for first, last in pruned]
    yield perplexity_row(
        f"scan: {len(plain)} pruned cells", plain, [cells["prune", *ends] for ends in pruned]
    )
    pairs = [(6, 17), (24, 29)]
    plain = [way.perplexity(512, program=paired(first, last + 1)) for first, last in pairs]
    yield perplexity_row(
        f"scan: {len(plain)} cells of LP", plain, [cells["lp", *ends] for ends in pairs]
    )
    yield memory_row("scan: most memory", ran)


def check_search(way: Way) -> Iterator[Row]:
    output = way.folder / "search"
    asked = ["--budget", "depth=27", "--trials", 6, "--holdout", 512, "-o", output]
    way.surgeon("search", way.model, *on_text(way, 512), *asked)
    winner = SearchResult.read(output).record["held_out"]["searched"]
    for where, after in (("seen", 0), ("unseen", 512)):
        plain = way.perplexity(512, after, winner["program"])
        yield perplexity_row(f"search: on {where} text", [plain], [winner[where]["perplexity"]])


def check_export(way: Way) -> Iterator[Row]:
    forms = {
        "plain": ("prune", PRUNED, without(26, 28)),
        "fused": ("pair", PAIRS, paired(24, 28)),
        "program": ("ladder", LADDER, " ".join(layer(k, k in range(20, 28)) for k in range(LAYERS))),
    }
    for form, (operation, layers, text) in forms.items():
        output = way.folder / form
        stored = ["--dtype", "float32"] if form == "fused" else []  # norms are folded into its matrices
        way.surgeon("export", way.recipe(operation, layers), "--form", form, *stored, "-o", output)
        found = way.plain.ask(
            "exported", folder=str(output), program=text, text=PROMPTS[0] + " " + PROMPTS[1]
        )
        stock = found["class"] == "LlamaForCausalLM"
        right = found["error"] < CLOSE_LOGITS and stock == (form == "plain")
        said = f"{found['error']:.1e} ({found['class'].removesuffix('ForCausalLM')})"
        yield Row(
            f"export: {form}, {operation} {layers}", f"logits within {CLOSE_LOGITS:g}", said, right
        )


def check_generate(way: Way) -> Iterator[Row]:
    plain = way.plain.ask("greedy", prompts=PROMPTS, new=NEW_TOKENS)
    for ranks in (1, 2, 3, 4):  # of which 2 and 4 have unequal numbers of its 9 heads
        ran = way.surgeon("generate", way.model, *writing(), "--tp", ranks)
        yield texts_row(f"generate: {plural(ranks, 'rank')}", plain, texts_of(ran))


def check_drafts(way: Way) -> Iterator[Row]:
    plain = way.plain.ask("greedy", prompts=PROMPTS, new=NEW_TOKENS)
    ran = way.surgeon("generate", way.model, *writing(), "--draft", paired(20, 28), "--draft-tokens", 3)
    lines = [json.loads(line) for line in ran.said.splitlines()]
    drafted, accepted = (sum(line[name] for line in lines) for name in ("drafted", "accepted"))
    row = texts_row("drafts", plain, texts_of(ran))
    yield Row(
        row.what,
        row.expected,
        f"{row.found}, {accepted} of {drafted} taken",
        bool(row.right and drafted),
    )


def check_heal(way: Way) -> Iterator[Row]:
    output = way.folder / "healed"
    asked = "--steps 8 --batch 2 --window 128 --eval-tokens 512 --distill logits"
    way.surgeon("heal", way.recipe("pair", LADDER), "--data", way.text, *asked.split(), "-o", output)
    healing = HealRun.read(output.with_name(output.name + ".run")).healing
    before, after = healing.edited.divergence, healing.healed.divergence
    yield Row("heal: divergence, 8 steps", f"under {before:.3f}", f"{after:.3f}", after < before)


def check_tasks(way: Way) -> Iterator[Row]:
    rows = []
    for number, (query, *choices) in enumerate(ROWS):
        turn = number % len(choices)  # the right one is not always the first
        turned = [*choices[len(choices) - turn :], *choices[: len(choices) - turn]]
        rows.append({"query": query, "choices": turned, "gold": turn})
    path = way.folder / "facts.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    output = way.folder / "tasks"
    way.surgeon("eval", way.model, "--tasks", path, "--log-samples", "-o", output)
    (samples,) = output.glob("samples_facts_*.jsonl")
    answers = sorted(
        map(json.loads, samples.read_text().splitlines()), key=lambda answer: int(answer["doc_id"])
    )
    plain = way.plain.ask("likelihoods", rows=rows)
    found = [[float(answer[0]) for answer in each["filtered_resps"]] for each in answers]
    pairs = [
        both for row, other in zip(plain, found, strict=True) for both in zip(row, other, strict=True)
    ]
    off = max(abs(one - other) for one, other in pairs)
    right = sum(row.index(max(row)) == asked["gold"] for row, asked in zip(found, rows, strict=True))
    said = f"{off:.0e} off, {right} of {len(rows)} known"
    yield Row(f"tasks: {len(pairs)} likelihoods", f"within {CLOSE_NATS:g} nats", said, off < CLOSE_NATS)


def check_explore(way: Way) -> Iterator[Row]:
    output = way.folder / "explore"
    way.surgeon("explore", way.model, "--data", way.text, "--minutes", 2, "-o", output)
    done = Exploration.read(output).record["done"]
    page = (output / "explore.html").is_file()
    yield Row(
        "explore: two minutes",
        "a page",
        f"{len(done)} pass{'es' * (len(done) != 1)}",
        bool(done) and page,
    )


CHECKS: dict[str, Callable[[Way], Iterator[Row]]] = {
    "opening": check_opening,
    "perplexity": check_perplexity,
    "scan": check_scan,
    "search": check_search,
    "export": check_export,
    "generate": check_generate,
    "drafts": check_drafts,
    "heal": check_heal,
    "tasks": check_tasks,
    "explore": check_explore,
}


def on_text(way: Way, tokens: int) -> list[object]:
    return ["--data", way.text, "--tokens", tokens, "--window", WINDOW]


def writing() -> list[object]:
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    return [*prompts, "--max-new-tokens", NEW_TOKENS, "--dtype", "float32", "--json"]


def texts_of(ran: Ran) -> list[str]:
    return [json.loads(line)["text"] for line in ran.said.splitlines()]


def layer(number: int, late: bool = False) -> str:
    mark = ">" if late else ""
    return f"{mark}A{number} {mark}F{number}"


def without(start: int, stop: int) -> str:
    """The model with its layers from `start` on, up to `stop`, left out."""
    return " ".join(map(layer, [*range(start), *range(stop, LAYERS)]))


def paired(start: int, stop: int) -> str:
    """The model with its layers from `start` on, up to `stop`, two by two side by side."""
    pairs = (f"[A{one} A{one + 1}] [F{one} F{one + 1}]" for one in range(start, stop, 2))
    return " ".join([*map(layer, range(start)), *pairs, *map(layer, range(stop, LAYERS))])


def perplexity_row(what: str, plain: Sequence[float], found: Sequence[float]) -> Row:
    """Of the perplexities, the one that is farthest off."""
    expected, most = max(zip(plain, found, strict=True), key=lambda both: abs(both[1] / both[0] - 1))
    off = abs(most / expected - 1)
    return Row(what, f"{expected:.6g}", f"{most:.6g} ({off:.0e} off)", off < CLOSE)


def memory_row(what: str, ran: Ran) -> Row:
    return Row(what, f"under {MEMORY / 1e9:g} GB", f"{ran.peak / 1e9:.2f} GB", ran.peak < MEMORY)


def texts_row(what: str, plain: Sequence[str], found: Sequence[str]) -> Row:
    equal = sum(one == other for one, other in zip(plain, found, strict=True))
    return Row(what, f"{len(plain)} texts as plain", f"{equal} equal", equal == len(plain))


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["nothing was said"])[-1]


def compare(way: Way, names: Sequence[str], say: Callable[[str], None]) -> list[Row]:
    """Say the table row by row, and return its rows; a check that fails is a row, and the others go on."""
    found = []
    say(table_line("what", "expected", "found", "s", "verdict"))
    for name in names:
        rows, began = CHECKS[name](way), time.monotonic()
        while True:
            try:
                row = next(rows, None)
            except Exception as error:  # noqa: BLE001 - whatever it is
                say(last_line(f"{name}: {type(error).__name__}: {error}"))
                row = Row(name, "", "failed", False)
            if row is None:
                break
            now = time.monotonic()
            say(table_line(row.what, row.expected, row.found, f"{now - began:.0f}", row.verdict))
            found.append(row)
            began = now
    return found


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, prog="scripts/real/check")
    parser.add_argument("--model", type=Path, help="the .gguf file, or a folder with the model")
    parser.add_argument(
        "--text", type=Path, help="a UTF-8 text file; default: files of Python's standard library"
    )
    parser.add_argument(
        "--only", nargs="+", choices=CHECKS, default=[*CHECKS], metavar="NAME", help=", ".join(CHECKS)
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the table here, too")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    began = time.monotonic()
    say = Said()
    model = (options.model or get_model()).resolve()
    with tempfile.TemporaryDirectory(prefix="surgeon-real-") as scratch:
        folder = Path(scratch)
        text = folder / "text.txt"
        if options.text is None:
            text.write_text("\n".join(demo_data())[:TEXT_CHARACTERS], encoding="utf-8")
        else:
            text = options.text.resolve()
        told = versions()
        say(
            f"{model.name}; surgeon {told['surgeon']}, torch {told['torch']}, transformers {told['transformers']}"
        )
        plain = Plain(model, folder / "plain.log")
        try:
            rows = compare(Way(model, text, folder, plain), options.only, say)
        finally:
            plain.close()
    wrong = [row.what for row in rows if row.verdict == "WRONG"]
    count = sum(row.verdict == "right" for row in rows)
    minutes = (time.monotonic() - began) / 60
    said = f"{count} of {len(rows)} comparisons are right, in {minutes:.0f} minutes"
    say(said + (f"; {len(wrong)} WRONG: {'; '.join(wrong)}" if wrong else ""))
    say.write(options.output)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
