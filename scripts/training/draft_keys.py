"""What a draft wins where it is healed on the keys and values that it will read, beside healing on its own.

    python scripts/training/draft_keys.py -o FOLDER [--steps 100] [--tokens 4096]

Two drafts of the demo model, two tracks and pairs of layers 2:14, each with adapters of rank 8, are healed twice on the
same windows in the same order: on their own keys and values of all tokens, as an edited model that reads by itself,
and on the original's of all rounds of four tokens before (`surgeon heal --as-draft`). Both are judged as they draft, on
the original's keys, by the share of greedy and of drawn tokens that are accepted on held-out text, with the paired
difference of both and its 95% interval over windows. Killed, the same command goes on where it was.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

import surgeon
from surgeon.language.operations.variants import variant_of
from surgeon.quality.data import DEMO
from surgeon.quality.head import GREEDY, SAMPLED
from surgeon.quality.sources import DEMO_TRAINING
from surgeon.quality.summary import Values, interval
from surgeon.training.distill.distiller import Distillation
from surgeon.training.held_out import HeldOutQuality
from surgeon.training.run import train
from surgeon.training.settings import TrainSettings
from surgeon.training.texts import load_train_texts

WINDOW, RANK, BATCH = 128, 8, 4
DRAFTS = {"two tracks": "tracks:12", "six pairs": "lp"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=4096, help="held-out ones")
    asked = parser.parse_args()
    logging.disable_progress_bar()
    model = surgeon.open(DEMO)
    taken = asked.steps * BATCH * WINDOW
    texts = load_train_texts(model.tokenizer, DEMO_TRAINING, WINDOW, taken, DEMO, asked.tokens)
    judge = HeldOutQuality(texts.held_out, surgeon.load(model).float(), drafting=True)

    def judged(draft: nn.Module) -> dict[str, Values]:
        """The acceptance of each window."""
        values = judge.values(draft)
        return {GREEDY: np.asarray(values.greedy_acceptance), SAMPLED: np.asarray(values.sampled_acceptance)}

    def edited(name: str) -> PreTrainedModel:
        program = variant_of(DRAFTS[name], model.num_layers, model.family.steps_per_layer)(2)
        return surgeon.edit(surgeon.load(model).float(), program)

    def healed(name: str, on_original: bool) -> dict[str, Values]:
        learnt = Distillation(drafting=on_original)
        settings = TrainSettings(
            lora=RANK, distillation=learnt, steps=asked.steps, batch=BATCH, evaluate_every=asked.steps
        )
        folder = asked.output / f"{name.replace(' ', '-')}-{'original' if on_original else 'own'}"
        known = {"draft": name}
        found = train(edited(name), texts, settings, folder, lambda: surgeon.load(model).float(), identity=known)
        assert found is not None  # there is one process
        return judged(found.model)

    print("| draft, and its acceptance | unhealed | healed on its own keys | on the original's | difference |")
    print("|:--|--:|--:|--:|:--|")
    for name in DRAFTS:
        before, own, original = judged(edited(name)), healed(name, False), healed(name, True)
        for kind in (GREEDY, SAMPLED):
            more = original[kind] - own[kind]
            means = " | ".join(f"{one[kind].mean():.3f}" for one in (before, own, original))
            low, high = interval(more)
            print(
                f"| {name}, {kind.partition('_')[0]} | {means} | {more.mean():.4f} ({low:.4f} to {high:.4f}) |",
                flush=True,
            )


if __name__ == "__main__":
    main()
