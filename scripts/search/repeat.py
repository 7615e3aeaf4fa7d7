"""Whether layers that run again help a model that others were taken from, once both are healed.

    python scripts/search/repeat.py demo --heal-data demo:train -o runs/repeat
    python scripts/search/repeat.py demo --heal-data demo:train -o runs/repeat --drop 4 --steps 200

A search leaves so many layers out; another one, under the same parameters, also lets layers run twice, until the model
is as deep as it was. What the two find is healed alike, all weights towards the original's predictions, on the same
windows; and the shallower one again for as many more steps as the deeper one's take longer. A row of the table has what
was done, the parameters of the layers, the depth, and divergence from the original and perplexity on held-out text
before and after. Killed, the same command goes on.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

import surgeon
from scripts.search.given import to_heal
from surgeon.results.training import HealRun
from surgeon.training.distill.distiller import Distillation
from surgeon.training.settings import TrainSettings


def main() -> None:
    parser = to_heal(__doc__)
    parser.add_argument("--drop", type=int, default=2, help="layers")
    parser.add_argument("--tokens", type=int, default=4096, help="of a search")
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=8, help="windows in a step")
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--seeds", type=int, default=1)
    given = parser.parse_args()
    model = surgeon.open(given.model)
    share = 1 - given.drop / model.num_layers
    budgets = {"drop:layers": f"params<={share}x", "drop:layers,repeat": f"params<={share}x,depth>=1x"}
    recipes = {
        space: surgeon.search(
            model,
            given.data,
            given.output / space.replace(",", "+").replace(":", "-"),
            space=space,
            budget=budget,
            tokens=given.tokens,
            trials=given.trials,
        ).recipe
        for space, budget in budgets.items()
    }
    shallow, deep = recipes.values()
    longer = round(given.steps / share)
    rows = [
        _row(given, recipe, steps, seed)
        for seed in range(given.seeds)
        for recipe, steps in ((shallow, given.steps), (deep, given.steps), (shallow, longer))
    ]
    print("| what | parameters | depth | steps, seed | divergence: before, healed | perplexity: before, healed |")
    print("|---|---|---|---|---|---|")
    print("\n".join(rows))


def _row(given: argparse.Namespace, recipe: surgeon.Recipe, steps: int, seed: int) -> str:
    """A recipe, healed."""
    edited = surgeon.edit(surgeon.open(given.model), recipe)
    done = "; ".join(f"{one.name} {one.layers_text}" for one in recipe.operations)
    folder = given.output / f"{done.replace('; ', '+').replace(', ', ',').replace(' ', '-')}-{steps}-{seed}"
    if (folder / "surgeon.json").exists():
        found = HealRun.read(folder.with_name(f"{folder.name}.run"))
    else:
        settings = TrainSettings(
            scope="all",
            distillation=Distillation(),
            steps=steps,
            batch=given.batch,
            learning_rate=given.rate,
            seed=seed,
        )
        healed = surgeon.heal(
            edited, given.heal_data, folder, eval_data=given.data, window=given.window, settings=settings
        )
        assert healed is not None
        found = healed
    before, after = found.healing.edited, found.healing.healed
    depth = edited.program.effective_depth(edited.model.family.steps_per_layer)
    cells = [
        done,
        f"{edited.program.parameters(edited.model.shapes.layer_shapes):,}",
        f"{depth:g}",
        f"{steps}, {seed}",
        f"{before.divergence.value:.4f}, {after.divergence.value:.4f}",
        f"{before.perplexity.value:.3f}, {after.perplexity.value:.3f}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
