"""How near searches for LP pairs come to the true optimum, and how many programs they measure for that.

    python scripts/search/optimum.py demo
    python scripts/search/optimum.py MODEL --tokens 2048 --data demo
    python scripts/search/optimum.py random24          # made on the fly; too many choices to measure them all

For every depth: the divergence of the best unbroken window, of the choice with the least sum of single pairs' damage,
of the search after 30, 60 and 120 trials and, where all choices are measured (up to 16 layers), of the best there is.
Behind a search's number stands how much worse it is than that, in percent; "at" is the trial that found the optimum,
and what share of all choices had been measured by then.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.commands import make_parser
from scripts.search.run import try_programs
from surgeon.analysis.subject import Subject, open_subject
from surgeon.checkpoint.config import DEMO, locate
from surgeon.findings.edit import ADDITIVE, Choice
from surgeon.language.program import Program
from surgeon.searches.evaluate import Evaluator
from surgeon.searches.mixture import Mixture, Trial
from surgeon.searches.pricing import Pricing
from surgeon.searches.quantities import DEPTH
from surgeon.searches.question import PricedQuestion, Question
from surgeon.searches.search import Search
from surgeon.searches.spaces import parse_spaces
from surgeon.searches.terms import Terms, TermsPlan, measure_terms

TRIALS = (30, 60, 120)
ENUMERATED = 16  # layers, up to which all choices are measured
RANDOM = "random24"
TOGETHER = 256  # choices measured in one call


@dataclass(frozen=True)
class Measured:
    """Everything that is known of a model before any search."""

    mixture: Mixture
    evaluator: Evaluator
    terms: Terms
    every: dict[str, float]  # divergence by program, of all choices; empty where there are too many


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("--data", default="demo")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--depths", type=int, nargs="*", help="by default all that pairs reach")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = _random_model(Path(folder)) if given.model == RANDOM else given.model
        known = _measure(open_subject(model, given.data, given.tokens))
        layers = known.mixture.model.num_layers
        depths = given.depths or range(layers - 1, layers - layers // 2 - 1, -1)
        print(_head(), flush=True)
        for depth in depths:
            print(_row(known, depth), flush=True)


def _random_model(folder: Path) -> str:
    """24 layers, 128 wide, random weights; the demo's tokenizer."""
    torch.manual_seed(0)
    demo = locate(DEMO)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=128, intermediate_size=344, num_hidden_layers=24, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, initializer_range=0.08, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((demo / file).read_bytes())
    return str(folder)


def _measure(subject: Subject) -> Measured:
    mixture = Mixture(parse_spaces("pair"), subject.opened)
    layers = subject.opened.num_layers
    evaluator = Evaluator(subject.model, subject.windows)
    begun = time.monotonic()
    terms = measure_terms(evaluator, TermsPlan.whole(mixture))
    every: dict[str, float] = {}
    if layers <= ENUMERATED:
        programs = [mixture.program(choice) for choice in _every_choice(mixture)]
        for start in range(0, len(programs), TOGETHER):
            found = evaluator.measure(programs[start : start + TOGETHER])
            every |= {str(program): measured.divergence for program, measured in found.items()}
    seconds = time.monotonic() - begun
    print(f"{subject.opened.label}: {layers} layers, {subject.windows.predicted:,} tokens; {len(every):,} choices of "
          f"pairs measured ({seconds:.0f} s)")  # fmt: skip
    return Measured(mixture, evaluator, terms, every)


def _every_choice(mixture: Mixture) -> Iterator[Choice]:
    edits = mixture.edits
    for count in range(1, mixture.model.num_layers // 2 + 1):
        for chosen in combinations(edits, count):
            if all(other.first >= one.stop for one, other in pairwise(chosen)):
                yield chosen


def _head() -> str:
    searches = "".join(f"{f'search {trials}':>16}" for trials in TRIALS)
    return f"{'depth':>5} {'sets':>5}{'window':>9}{'sum':>9}{searches}{'best':>9}   at"


def _row(known: Measured, depth: int) -> str:
    trials = _search(known, depth)
    sets = {key: d for key, d in known.every.items() if Program.parse(key).effective_depth() == depth}
    best = min(sets.values(), default=math.nan)
    windows = _windows(known, depth)
    additive = next((t.measured.divergence for t in trials if t.source == ADDITIVE), math.nan)
    cells = "".join(f"{_cell(_best(trials[:count]), best):>16}" for count in TRIALS)
    place = next(
        (
            n
            for n, t in enumerate(trials, 1)
            if t.measured.whole and t.measured.divergence <= best * 1.000001
        ),
        0,
    )
    at = f"{place} ({place / len(sets):.1%})" if place else "-"
    count = str(len(sets)) if sets else "-"
    return f"{depth:>5} {count:>5}{windows:>9.4f}{additive:>9.4f}{cells}{best:>9.4f}   {at}"


def _search(known: Measured, depth: int) -> list[Trial]:
    """A search at one depth, as `surgeon search --budget depth=N` runs it."""
    pricing = Pricing(known.mixture.model, (DEPTH,))
    dense = known.mixture.model.program
    original = known.evaluator.measure([dense])[dense]
    settings = Question("pair", f"depth={depth}")
    question = PricedQuestion(settings, known.mixture, pricing, original)
    return try_programs(Search(question, known.evaluator, known.terms), max(TRIALS))


def _windows(known: Measured, depth: int) -> float:
    """The best unbroken window, all of them measured."""
    count = known.mixture.model.num_layers - depth
    edits = known.mixture.edits
    choices = [edits[start : start + 2 * count : 2] for start in range(len(edits) - 2 * count + 2)]
    programs = [known.mixture.program(choice) for choice in choices]
    return min(measured.divergence for measured in known.evaluator.measure(programs).values())


def _best(trials: Sequence[Trial]) -> float:
    return min(trial.measured.divergence for trial in trials if trial.measured.whole)


def _cell(value: float, best: float) -> str:
    return f"{value:.4f}" + ("" if math.isnan(best) else f" +{value / best - 1:.1%}")


if __name__ == "__main__":
    main()
