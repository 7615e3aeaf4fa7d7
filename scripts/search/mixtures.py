"""What several spaces together win over the best of them alone, at the same predicted speed on a slow link, or cost.

    python scripts/search/mixtures.py demo
    python scripts/search/mixtures.py MODEL --space pair,ladder,drop,rank --hardware h100-sxm --link-delay ""
    python scripts/search/mixtures.py MODEL --space pair,fuse,width --link-delay "" --batch 16 --without width
    python scripts/search/mixtures.py MODEL --space drop,rank --cost size --levels 0.9 0.8 0.7

For every speedup over the unedited model (two ranks of the hardware, on a link where a collective takes 1 ms at least,
or on the hardware's own), or share of its size or of another cost: the least divergence that a search of each space
finds, and of all together, with as many trials; behind it how much lower that is than the best single one's, and the
edits that have it. All searches share what is known of single edits.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.commands import add_defaults, make_parser
from scripts.search.run import Known
from surgeon.analysis.subject import open_subject
from surgeon.cost.deployment import Deployment, Workload
from surgeon.cost.hardware import load_hardware
from surgeon.runtime.comm.collectives import parse_link
from surgeon.searches.mixture import Trial
from surgeon.searches.pricing import Pricing
from surgeon.searches.quantities import Aspect


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("model")
    add_defaults(
        parser,
        data="demo",
        tokens=2048,
        space="pair,ladder,fuse",
        cost=("speedup", "speedup, or one that a budget limits: size, kv_bytes"),
        hardware="cpu-2",
        link_delay="1ms",
        batch=(1, "texts that are computed together"),
        trials=60,
    )
    parser.add_argument(
        "--levels", type=float, nargs="+", help="of a speedup 1.1 to 1.7, of another cost 0.95 to 0.7"
    )
    parser.add_argument("--without", help="one of the spaces: a column more, of all the others together")
    given = parser.parse_args()
    subject = open_subject(given.model, given.data, given.tokens)
    known = Known.of(subject, given.space)
    timed = given.cost == "speedup"
    deployment = Deployment(2, emulated=parse_link(given.link_delay or None, None))
    aspect = Aspect(given.cost)
    levels = [0.95, 0.9, 0.85, 0.8, 0.75, 0.7]
    hardware = {}
    if timed:
        hardware[given.hardware] = load_hardware(given.hardware)
        aspect = Aspect(given.cost, given.hardware)
        levels = [1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7]
    load = Workload(given.batch, 128, 128)
    pricing = Pricing(subject.opened, (aspect,), deployment, load, hardware)
    spaces = given.space.split(",")
    columns = {space[:9]: space for space in spaces}
    if given.without:
        others = [space for space in spaces if space.split(":")[0] != given.without]
        columns[f"no {given.without}"[:9]] = ",".join(others)
    heads = "".join(f"{name:>10}" for name in (*columns, "together"))
    print(f"{given.cost:>7}{heads}{'lower by':>9}  edits")
    won = []
    for level in given.levels or levels:
        budget = f"{given.cost}={level}x"
        if timed:
            budget = f"speedup>={level}@{given.hardware}"
        best: list[Trial | None] = []
        for some in (*columns.values(), given.space):
            question, found = known.search(some, budget, pricing, given.trials)
            best.append(min(found, key=question.cost, default=None))
        # What cannot keep the budget is as bad as can be.
        divergences = [math.inf if one is None else one.measured.divergence for one in best]
        won.append(1 - divergences[-1] / min(divergences[: len(spaces)]))
        cells = "".join(f"{'-' if math.isinf(one) else f'{one:.4f}':>10}" for one in divergences)
        edits = "" if best[-1] is None else ", ".join(map(str, best[-1].choice))
        print(f"{level:>7g}{cells}{won[-1]:>9.1%}  {edits}", flush=True)
    print(f"at least 15% lower in {sum(gain >= 0.15 for gain in won)} of {len(won)}, never worse: "
          f"{all(gain >= -1e-6 for gain in won if not math.isnan(gain))}")  # fmt: skip


if __name__ == "__main__":
    main()
