"""What it takes to train on a text that is larger than memory should be: peak memory and time, of tokenizing and after.

    python scripts/bench/data_memory.py -o FOLDER [--gigabytes 2] [--documents joined|apart|whole] [--steps N]

It makes a text of that size from the demo's training text, whose names and numbers change from round to round; then a
process of its own tokenizes all of it and trains a small model for a few steps, and another one, which finds the tokens
there, trains again. Memory is the most that was resident, allocated (anonymous) and of files (mapped) apart, as the
kernel tells it every tenth of a second. What is mapped grows with the rows that were read, and the kernel takes it back
whenever it needs room; the goal is for what is allocated: less than 1 GB. Killed, the same command goes on.

With --drawn as many tokens as such a text has are drawn, not tokenized: what packing, the store and training take.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scripts.bench.goals import missed
from surgeon.demo import demo_training_data
from surgeon.processes.children import when_parent_ends
from surgeon.processes.files import whole_file
from surgeon.quality.data import Windows, digest_of
from surgeon.quality.tokens import Tokens
from surgeon.training.model import train_model
from surgeon.training.packing import Documents
from surgeon.training.scratch.build import blueprint
from surgeon.training.scratch.config import parse_config
from surgeon.training.texts import TrainingText, TrainTexts, load_train_texts
from surgeon.training.token_store import ALL_TOKENS, TokenStore

GOAL, WINDOW = 1.0, 512  # GB allocated; tokens
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
    "window": WINDOW,
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


class Drawn:
    """As many random documents as make so many bytes of text, as a source of tokens."""

    source = "drawn"

    def __init__(self, gigabytes: float) -> None:
        self.end, self.at = int(2800 * gigabytes), 0  # of 100,000 tokens each: 3.6 bytes a token

    def identity(self) -> dict[str, Any]:
        """As `TokenSource` has it, and so on."""
        return {"drawn": self.end}

    def read(self) -> Iterator[list[Tokens]]:
        for number in range(self.at, self.end):
            self.at = number + 1
            ids = np.random.default_rng(number).integers(2, 2000, (100, 1000)).astype(np.int32)
            yield [Tokens(each) for each in ids]

    def state(self) -> dict[str, Any]:
        return {"at": self.at}

    def resume(self, state: dict[str, Any]) -> None:
        self.at = state["at"]

    def known(self) -> dict[str, Any]:
        return {"column": None, "left_out": {}, "notes": []}


def drawn_texts(gigabytes: float, documents: Documents, cache: Path) -> TrainTexts:
    """Random documents to train on, and the last 16 windows of them to measure on."""
    store = TokenStore(Drawn(gigabytes), WINDOW, documents, cache=cache)
    count = store.fill(ALL_TOKENS) - 16
    ids = store.rows(range(count, count + 16)).with_format("torch")[:]["input_ids"]
    training = TrainingText(store.rows(range(count)), "drawn", store.digest(count))
    return TrainTexts(training, Windows(ids, "drawn", digest_of(ids)))


class Watch(threading.Thread):
    """The most memory that this process had, in bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = {"RssAnon": 0, "RssFile": 0, "VmRSS": 0}

    def look(self) -> None:
        """Once."""
        for line in Path("/proc/self/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in self.most:
                self.most[name] = max(self.most[name], 1024 * int(value.split()[0]))

    def run(self) -> None:
        while True:
            self.look()
            time.sleep(0.1)


def work(folder: Path, text: Path, documents: Documents, steps: int, drawn: float, which: str) -> None:
    """Train, in a process of its own, and say what it took."""
    when_parent_ends(lambda: os._exit(1))
    watch = Watch()
    watch.look()
    watch.start()
    torch.set_num_threads(1)
    before, begun = dict(watch.most), time.monotonic()
    plan = blueprint(
        parse_config(
            json.dumps({**CONFIG, "data": str(text), "training": {"steps": steps, "batch": 8, "micro_batch": 1}})
        )
    )
    cache = folder / "tokens"
    if drawn:
        texts = drawn_texts(drawn, documents, cache)
    else:
        texts = load_train_texts(
            plan.tokenizer, str(text), WINDOW, ALL_TOKENS, None, 8192, documents=documents, cache=cache
        )
    tokenized, there = time.monotonic() - begun, dict(watch.most)
    begun = time.monotonic()
    identity = plan.identity()
    train_model(plan.build(), texts, plan.config.settings, folder / which, program=plan.program, identity=identity)
    time.sleep(0.2)
    said = {
        "which": which,
        "tokens": len(texts.training) * WINDOW,
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
    parser.add_argument("--drawn", action="store_true", help="draw tokens in place of tokenizing a text")
    arguments = parser.parse_args()
    folder, text = arguments.output, arguments.output / "text.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    if not arguments.drawn and not text.is_file():
        make_text(text, int(arguments.gigabytes * 1e9))
    what = "as many tokens, drawn" if arguments.drawn else "tokenized"
    print(f"{arguments.gigabytes:g} GB of text, {what}, documents {arguments.documents}")
    most = 0.0
    for which in ("first", "again"):
        process = multiprocessing.get_context("spawn").Process(
            target=work,
            args=(
                folder,
                text,
                arguments.documents,
                arguments.steps,
                arguments.gigabytes * arguments.drawn,
                which,
            ),
        )
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(f"the process ended with {process.exitcode}")
        said = json.loads((folder / f"{which}.json").read_text())
        most = max(most, said["RssAnon end"])
        print(
            f"{which}: {said['tokens']:,} tokens there after {said['seconds to read']:.0f} s; "
            f"{said['processor seconds']:.0f} s of processors in all"
        )
        for what, when in (("begun", "begun"), ("tokens there", "read"), (f"after {arguments.steps} steps", "end")):
            resident, allocated, mapped = (said[f"{name} {when}"] for name in ("VmRSS", "RssAnon", "RssFile"))
            print(f"  {what}: at most {resident:.2f} GB, {allocated:.2f} allocated, {mapped:.2f} of files", flush=True)
    if most > GOAL:
        raise missed(f"at most {GOAL:g} GB allocated, not {most:.2f}")


if __name__ == "__main__":
    main()
