"""How often tokens of drafts are accepted while they draft: greedy and drawn, one and four tokens ahead.

    python scripts/bench/acceptance.py --draft NAME=DRAFT ... [--model demo] [--ranks 1] [--texts 24] [--new 48]

Drafts are programs or recipes. Texts begin with words that the demo model has not seen. Nothing is timed, so that other
work on the machine changes nothing.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.bench.draft_runs import prompts_of
from transformers.utils import logging

import surgeon


def accepted(draft: str, prompts: list[str], ahead: int, temperature: float, asked: argparse.Namespace) -> str:
    """How many of the drafted tokens of all texts were accepted."""
    found = surgeon.generate(
        asked.model,
        prompts,
        max_new_tokens=asked.new,
        temperature=temperature,
        max_batch=len(prompts),
        ranks=asked.ranks,
        draft=draft,
        draft_tokens=ahead,
    )
    usages = [text.usage for text in found.texts]
    drafted, right = sum(one.drafted for one in usages), sum(one.accepted for one in usages)
    return f"{right / drafted:.3f} of {drafted}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--draft", nargs="+", required=True, metavar="NAME=DRAFT")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--prompt", type=int, default=48, help="tokens that each text begins with")
    asked = parser.parse_args()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")  # some texts may have to wait for others
    model = surgeon.open(asked.model)
    prompts = [model.tokenizer.decode(one) for one in prompts_of(model.folder, asked.texts, asked.prompt)]
    print("| draft | greedy, 1 ahead | 4 ahead | drawn at temperature 1, 1 ahead | 4 ahead |")
    print("|:--|--:|--:|--:|--:|")
    for name, _, draft in (each.partition("=") for each in asked.draft):
        cells = [accepted(draft, prompts, ahead, temperature, asked) for temperature in (0.0, 1.0) for ahead in (1, 4)]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
