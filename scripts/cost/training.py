"""What a step of the papers' trainings costs on H100: a markdown table of recipes/train/papers/.

    python scripts/cost/training.py [--hardware h100-sxm] [--devices 8 64]

One of them: surgeon predict CONFIG.yaml --hardware h100-sxm --devices 8,64. Nothing is read but the configurations: the
demo's tokenizer stands in for each one's, and vocabularies are as they say.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from surgeon.library.predict_training import predict_training

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "train" / "papers"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", default="h100-sxm", help="a name or a file")
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 64], help="that share the batch")
    given = parser.parse_args()
    rows: dict[tuple[str, ...], list[str]] = {}
    for path in sorted(FOLDER.glob("*.yaml")):
        cells = list[str]()
        for step, steps in predict_training(path, given.hardware, given.devices, tokenizer="demo").values():
            fits = f"{step.memory / 1e9:.0f}" if step.fits else f"({step.memory / 1e9:.0f})"
            days = steps * step.seconds / 86400
            cells += [step.how, f"{step.seconds:.2f}", fits, f"{step.tokens_per_day / 1e9:.1f}", f"{days:.2f}"]
        rows.setdefault(tuple(cells), []).append(f"`{path.stem}`")
    print("| configuration |" + "".join(f" {number}: how | step s | GB | B a day | days |" for number in given.devices))
    print("|:--|" + ":--|--:|--:|--:|--:|" * len(given.devices))
    for cells, names in rows.items():
        print(f"| {', '.join(names)} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
