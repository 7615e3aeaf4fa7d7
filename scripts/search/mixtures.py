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

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.commands import make_parser
from scripts.search.run import try_programs
from surgeon.analysis.importance import most_important
from surgeon.analysis.subject import open_subject
from surgeon.cost.deployment import Deployment
from surgeon.cost.workload import Workload
from surgeon.quality.summary import Quality
from surgeon.runtime.comm.link import parse_link
from surgeon.searches.evaluate import Evaluator
from surgeon.searches.mixture import Mixture, Trial
from surgeon.searches.pricing import Pricing, open_pricing
from surgeon.searches.quantities import Aspect
from surgeon.searches.question import PricedQuestion, Question
from surgeon.searches.search import Search
from surgeon.searches.spaces import parse_spaces
from surgeon.searches.terms import Terms, TermsPlan, measure_terms


@dataclass(frozen=True)
class Known:
    """What all searches share."""

    mixture: Mixture
    terms: Terms
    evaluator: Evaluator
    original: Quality
    pricing: Pricing

    def search(self, spaces: str, budget: str, trials: int) -> Trial | None:
        """The best trial of a search of some of the spaces; None if they cannot keep the budget."""
        settings = Question(spaces, budget)
        mixture = Mixture(parse_spaces(spaces), self.mixture.model)
        numbers = {edit: number for number, edit in enumerate(self.mixture.edits)}
        terms = self.terms.of([numbers[edit] for edit in mixture.edits])
        question = PricedQuestion(settings, mixture, self.pricing, self.original)
        found = try_programs(Search(question, self.evaluator, terms), trials)
        return min(found, key=question.cost, default=None)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("--data", default="demo")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--space", default="pair,ladder,fuse")
    parser.add_argument(
        "--cost", default="speedup", help="speedup, or one that a budget limits: size, kv_bytes"
    )
    parser.add_argument(
        "--levels", type=float, nargs="+", help="of a speedup 1.1 to 1.7, of another cost 0.95 to 0.7"
    )
    parser.add_argument("--hardware", default="cpu-2")
    parser.add_argument("--link-delay", default="1ms")
    parser.add_argument("--batch", type=int, default=1, help="texts that are computed together")
    parser.add_argument("--without", help="one of the spaces: a column more, of all the others together")
    parser.add_argument("--trials", type=int, default=60)
    given = parser.parse_args()
    known = _known(given)
    spaces = given.space.split(",")
    timed = given.cost == "speedup"
    levels = given.levels or (
        [1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7] if timed else [0.95, 0.9, 0.85, 0.8, 0.75, 0.7]
    )
    named = [*(space[:9] for space in spaces), *([f"no {given.without}"[:9]] if given.without else [])]
    print(
        f"{given.cost:>7}"
        + "".join(f"{name:>10}" for name in named)
        + f"{'together':>10}{'lower by':>9}  edits"
    )
    won = []
    for level in levels:
        budget = f"speedup>={level}@{given.hardware}" if timed else f"{given.cost}={level}x"
        alone = [_divergence(known.search(space, budget, given.trials)) for space in spaces]
        together = known.search(given.space, budget, given.trials)
        won.append(1 - _divergence(together) / min(alone))
        if given.without:
            others = ",".join(space for space in spaces if space.split(":")[0] != given.without)
            alone.append(_divergence(known.search(others, budget, given.trials)))
        print(_row(level, alone, together, won[-1]), flush=True)
    print(f"at least 15% lower in {sum(gain >= 0.15 for gain in won)} of {len(won)}, never worse: "
          f"{all(gain >= -1e-6 for gain in won if not math.isnan(gain))}")  # fmt: skip


def _known(given: argparse.Namespace) -> Known:
    subject = open_subject(given.model, given.data, given.tokens)
    mixture = Mixture(parse_spaces(given.space), subject.opened)
    factors = most_important(subject.model, mixture.single_edits, subject.windows)
    evaluator = Evaluator(subject.model, subject.windows, factors=factors)
    terms = measure_terms(evaluator, TermsPlan.whole(mixture))
    dense = mixture.model.program
    deployment = Deployment(2, emulated=parse_link(given.link_delay or None, None))
    aspect = Aspect(given.cost, given.hardware if given.cost == "speedup" else None)
    pricing = open_pricing(subject.opened, [aspect], deployment, Workload(given.batch, 128, 128))
    return Known(mixture, terms, evaluator, evaluator.measure([dense])[dense], pricing)


def _divergence(trial: Trial | None) -> float:
    if trial is None:
        return math.inf
    return trial.measured.divergence


def _row(level: float, alone: Sequence[float], together: Trial | None, won: float) -> str:
    cells = "".join(
        f"{'-':>10}" if math.isinf(value) else f"{value:>10.4f}"
        for value in (*alone, _divergence(together))
    )
    edits = "" if together is None else ", ".join(map(str, together.choice))
    return f"{level:>7g}{cells}{won:>9.1%}  {edits}"


if __name__ == "__main__":
    main()
