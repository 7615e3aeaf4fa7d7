"""Model, programs, prompts, options and tables of scripts that compare programs by their speed of decoding."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.utils import logging

from scripts.commands import add_defaults
from surgeon.checkpoint.texts import open_tokenizer
from surgeon.language.operations import fuse_attention_mlp, ladder, pair, tracks
from surgeon.language.program import Program
from surgeon.machine import threads_per_rank
from surgeon.named import demo_model
from surgeon.opened import versions
from surgeon.processes.files import write_text
from surgeon.quality.data import load_windows
from surgeon.quality.sources import DEMO

RANKS = 2
LAYERS = 24  # of the random model
DENSE = "dense"


SIZES: dict[str, dict[str, int]] = {  # of random Llamas
    "75M": {
        "vocab_size": 4096,
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "1.1B": {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
}


def llama_config(size: str = "75M", **other: int) -> LlamaConfig:
    """The configuration of a random Llama, of other sizes where they are given."""
    return LlamaConfig(**{"max_position_embeddings": 4096} | SIZES[size] | other)


def random_llama(size: str = "75M") -> PreTrainedModel:
    """24 layers, 512 wide, 75M parameters, or another size; float32; speed does not depend on what the weights are."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(llama_config(size), dtype=torch.float32).eval()  # type: ignore[no-any-return]


def random_model(folder: Path, size: str = "75M") -> Path:
    """`random_llama` as a checkpoint."""
    random_llama(size).save_pretrained(folder)
    return folder


def copy_tokenizer(folder: Path) -> None:
    """Give a checkpoint the demo model's tokenizer."""
    for path in demo_model().glob("*token*.json"):
        shutil.copyfile(path, folder / path.name)


def lp_name(layers: int) -> str:
    """What tables call the program with pairs."""
    return f"LP to {_lp(layers).effective_depth():g} layers"


def compared(layers: int) -> dict[str, Program]:
    """The programs compared, by name: one of each kind, the dense one first."""
    dense = Program.dense(layers)
    lp = _lp(layers)
    every = range(layers)
    return {
        DENSE: dense,
        lp_name(layers): lp,
        "attention \\|\\| MLP": fuse_attention_mlp(dense, every),
        "ladder": ladder(dense, every),
        "ladder over LP": ladder(lp, every),
        "tracks, D = 4": tracks(dense, every, count=RANKS, depth=4),
    }


def _lp(layers: int) -> Program:
    return pair(Program.dense(layers), range(layers // 4, 3 * layers // 4))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Sizes of what is decoded, and where the tables go."""
    add_defaults(parser, batch=[1, 8], prompt=64, new=128, rounds=3)
    parser.add_argument(
        "-o", "--output", type=Path, help="write the tables here too, every round beside it as JSON"
    )


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    logging.disable_progress_bar()
    options = parser.parse_args()
    if options.new < 2:
        parser.error("--new must be at least 2: the first token comes out of the prompt's pass")
    return options


def prompts_of(folder: Path, count: int, length: int) -> list[list[int]]:
    """Beginnings of text that the demo model has not seen."""
    windows = load_windows(open_tokenizer(folder), DEMO, 2 * length, 2 * length * count).ids
    return [window[:length].tolist() for window in windows]


def format_section(title: str, options: argparse.Namespace, table: Sequence[str], ranks: int) -> str:
    """A table below its title and the sizes that were measured."""
    sizes = f"Prompt {options.prompt}, {options.new} new tokens, {options.rounds} rounds. Times are ms per pass."
    load = (
        f"{threads_per_rank(ranks)} thread per rank; load average {os.getloadavg()[0]:.1f} at the end."
    )
    return "\n".join([f"### {title}", "", sizes, "", *table, "", f"{load}\n"])


def write_tables(output: Path | None, texts: Sequence[str], rounds: Mapping[str, object]) -> None:
    """Write the tables, and beside them as JSON what they were made of."""
    if output is not None:
        record = {"command": sys.argv, "versions": versions(), **rounds}
        write_text(output, "\n".join(texts) + "\n")
        write_text(output.with_suffix(".json"), json.dumps(record, indent=1) + "\n")
