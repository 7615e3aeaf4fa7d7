"""Prompts for run.py, with the answers that transformers gives to them."""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from typing import Any

import torch

import surgeon
from surgeon.checkpoint.texts import open_tokenizer
from surgeon.demo import library_files
from surgeon.progress import progress


@dataclass(frozen=True)
class Case:
    """A prompt, and the greedy answer to it."""

    prompt: list[int]
    answer: str


def make_cases(options: argparse.Namespace) -> list[Case]:
    """Prompts of many lengths and what `transformers` makes of them, one at a time."""
    tokenizer = open_tokenizer(options.model)
    model = surgeon.load(options.model)
    if options.program:
        model = surgeon.edit(model, options.program)
    generator = random.Random(0)
    found = []
    files = library_files(held_out=True)
    with progress("offline answers", options.prompts, "prompts") as done:
        for number in range(options.prompts):
            text = files[number % len(files)].read_text(encoding="utf-8", errors="ignore")
            length = generator.randint(options.prompt_tokens // 8 + 1, options.prompt_tokens)
            tokens = tokenizer(text[: 20 * length]).input_ids[:length]
            sampled: Any = model.generate(
                torch.tensor([tokens]), do_sample=False, max_new_tokens=options.max_tokens
            )
            before = tokenizer.decode(tokens, skip_special_tokens=True)
            answer = tokenizer.decode(sampled[0].tolist(), skip_special_tokens=True)[len(before) :]
            found.append(Case(tokens, answer))
            done(1)
    return found
