"""What it takes to train on a text that is larger than memory should be: peak memory and time, of tokenizing and after.

    python scripts/bench/data_memory.py -o FOLDER [--gigabytes 2] [--documents joined|apart|whole] [--steps N]

It makes a text of that size from the demo's training text, whose names and numbers change from round to round; then a
process of its own tokenizes all of it and trains a small model for a few steps, and another one, which finds the tokens
there, trains again. Memory is the most that was resident, anonymous (allocated) and of files (mapped) apart, as the
kernel tells it every tenth of a second; the kernel takes back what is mapped whenever it needs room. The goal: less
than 1 GB in all. Killed, the same command goes on with the tokens.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import threading
import time
from pathlib import Path

from scripts.bench.goals import missed
from surgeon.demo import demo_training_data
from surgeon.processes.files import whole_file

GOAL = 1.0  # GB
CONFIG = {
    "surgeon": 1,
    "model": {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 172,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "tie_word_embeddings": True,
    },
    "tokenizer": "demo",
    "window": 512,
    "eval_tokens": 8192,
}


def make_text(path: Path, size: int) -> None:
    """Write rows of JSON, a file of source code each, of so many bytes together."""
    texts, written, number = demo_training_data(), 0, 0
    with whole_file(path) as beside, beside.open("w", encoding="utf-8") as file:
        while written < size:
            draw = random.Random(number)
            text = (
                texts[number % len(texts)]
                .replace("self", f"it{draw.randrange(10**6)}")
                .replace("1", f"{draw.random():.3}")
            )
            written += file.write(json.dumps({"text": text}) + "\n")
            number += 1


class Watch(threading.Thread):
    """The most memory that this process had, in bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = {"RssAnon": 0, "RssFile": 0, "VmRSS": 0}

    def run(self) -> None:
        while True:
            for line in Path("/proc/self/status").read_text().splitlines():
                name, _, value = line.partition(":")
                if name in self.most:
                    self.most[name] = max(self.most[name], 1024 * int(value.split()[0]))
            time.sleep(0.1)


def work(folder: Path, text: Path, documents: str, steps: int, which: str) -> None:
    """Train, in a process of its own, and say what it took."""
    watch = Watch()
    watch.start()
    import torch

    from surgeon.training.model import train_model
    from surgeon.training.scratch.build import blueprint
    from surgeon.training.scratch.config import parse_config
    from surgeon.training.texts import load_train_texts

    torch.set_num_threads(1)
    before, begun = dict(watch.most), time.monotonic()
    plan = blueprint(
        parse_config(
            json.dumps({**CONFIG, "data": str(text), "training": {"steps": steps, "batch": 8, "micro_batch": 1}})
        )
    )
    texts = load_train_texts(
        plan.tokenizer,
        str(text),
        512,
        1 << 50,
        None,
        8192,
        documents=documents,
        cache=folder / "tokens",  # type: ignore[arg-type]
    )
    tokenized, there = time.monotonic() - begun, dict(watch.most)
    begun = time.monotonic()
    identity = plan.identity()
    train_model(plan.build(), texts, plan.config.settings, folder / which, program=plan.program, identity=identity)
    time.sleep(0.2)
    said = {
        "which": which,
        "tokens": len(texts.training) * 512,
        "seconds to read": tokenized,
        "processor seconds": time.process_time(),
        "seconds to train": time.monotonic() - begun,
        **{
            f"{name} {when}": most[name] / 1e9
            for when, most in (("begun", before), ("read", there), ("end", watch.most))
            for name in most
        },
    }
    (folder / f"{which}.json").write_text(json.dumps(said, indent=2))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of text")
    parser.add_argument("--documents", choices=["joined", "apart", "whole"], default="apart")
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    folder, text = arguments.output, arguments.output / "text.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    if not text.is_file():
        make_text(text, int(arguments.gigabytes * 1e9))
    print(f"{text.stat().st_size / 1e9:.2f} GB of text, documents {arguments.documents}")
    most = 0.0
    for which in ("first", "again"):
        process = multiprocessing.get_context("spawn").Process(
            target=work, args=(folder, text, arguments.documents, arguments.steps, which)
        )
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(f"the process ended with {process.exitcode}")
        said = json.loads((folder / f"{which}.json").read_text())
        most = max(most, said["VmRSS end"])
        print(
            f"{which}: {said['tokens']:,} tokens there after {said['seconds to read']:.0f} s; "
            f"{said['processor seconds']:.0f} s of processors in all"
        )
        for what, when in (("begun", "begun"), ("tokens there", "read"), (f"after {arguments.steps} steps", "end")):
            resident, allocated, mapped = (said[f"{name} {when}"] for name in ("VmRSS", "RssAnon", "RssFile"))
            print(f"  {what}: at most {resident:.2f} GB, {allocated:.2f} allocated, {mapped:.2f} of files", flush=True)
    if most > GOAL:
        raise missed(f"at most {GOAL:g} GB, not {most:.2f}")


if __name__ == "__main__":
    main()
