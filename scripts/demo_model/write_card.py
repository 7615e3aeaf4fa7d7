#!/usr/bin/env python3
"""Write the demo model's card, surgeon/demo/model/README.md: how it was trained, and what its layers tolerate.

    python scripts/demo_model/write_card.py              # about two minutes; run it after scripts/demo_model/train.py

The table is measured here, on held-out standard-library text.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from surgeon.analysis.subject import Subject, open_subject
from surgeon.language.operations import ladder, pair, parallel, prune
from surgeon.language.program import Program
from surgeon.named import demo_model
from surgeon.quality.summary import Quality
from surgeon.searches.evaluate import Evaluator

TOKENS = 32768

CARD = Path(__file__).with_suffix(".md")


def changes(layers: int) -> dict[str, Program]:
    """The edits of the table."""
    dense = Program.dense(layers)
    return {
        "none": dense,
        "LP pairs over `4:12`": pair(dense, range(4, 12)),
        "LP pairs over `2:14`": pair(dense, range(2, 14)),
        "LP pairs over all layers": pair(dense, range(layers)),
        "layers `4:8` in parallel": parallel(dense, range(4, 8)),
        "layers `2:14` in parallel": parallel(dense, range(2, 14)),
        "layers `8:10` left out": prune(dense, range(8, 10)),
        "ladder over `8:16`": ladder(dense, range(8, 16)),
        "ladder over all layers": ladder(dense, range(layers)),
    }


def card(subject: Subject) -> str:
    """The text of the card."""
    layers = subject.model.config.num_hidden_layers
    named = changes(layers)
    dropped = [prune(named["none"], range(k, k + 1)) for k in range(layers)]
    measured = Evaluator(subject.model, subject.windows).measure([*named.values(), *dropped])
    rows = [_row(name, program, measured[program]) for name, program in named.items()]
    facts = json.loads((demo_model() / "training.json").read_text(encoding="utf-8"))
    perplexities = ", ".join(f"{measured[program].perplexity:.4g}" for program in dropped)
    return CARD.read_text(encoding="utf-8").format(
        **facts, tokens=subject.windows.ids.numel(), rows="\n".join(rows), dropped=perplexities
    )


def _row(name: str, program: Program, measured: Quality) -> str:
    return f"| {name} | {program.effective_depth():g} | {measured.perplexity:.2f} | {measured.divergence:.3f} |"


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    text = card(open_subject("demo", "demo", tokens=TOKENS))
    (demo_model() / "README.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
