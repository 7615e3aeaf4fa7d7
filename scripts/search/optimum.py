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
from collections.abc import Iterator
from itertools import combinations, pairwise
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.bench.decoding import copy_tokenizer
from scripts.commands import add_defaults, make_parser
from scripts.search.run import Known
from surgeon.analysis.subject import open_subject
from surgeon.findings.trials import ADDITIVE
from surgeon.language.operations.applied import Choice
from surgeon.language.program import Program
from surgeon.searches.mixture import Mixture
from surgeon.searches.pricing import Pricing
from surgeon.searches.quantities import DEPTH

TRIALS = (30, 60, 120)
ENUMERATED = 16  # layers, up to which all choices are measured
RANDOM = "random24"
TOGETHER = 256  # choices measured in one call


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("model")
    add_defaults(parser, data="demo", tokens=2048)
    parser.add_argument("--depths", type=int, nargs="*", help="by default all that pairs reach")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = _random_model(Path(folder)) if given.model == RANDOM else given.model
        begun = time.monotonic()
        subject = open_subject(model, given.data, given.tokens)
        known = Known.of(subject, "pair")
        layers = known.mixture.model.num_layers
        every = measure_all(known) if layers <= ENUMERATED else {}
        tokens = subject.windows.predicted_tokens
        print(f"{subject.opened.label}: {layers} layers, {tokens:,} tokens; {len(every):,} choices "
              f"of pairs measured ({time.monotonic() - begun:.0f} s)")  # fmt: skip
        searches = "".join(f"{f'search {trials}':>16}" for trials in TRIALS)
        print(f"{'depth':>5} {'sets':>5}{'window':>9}{'sum':>9}{searches}{'best':>9}   at", flush=True)
        for depth in given.depths or range(layers - 1, layers - layers // 2 - 1, -1):
            print(_row(known, every, depth), flush=True)


def _random_model(folder: Path) -> str:
    """24 layers, 128 wide, random weights; the demo's tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=128, intermediate_size=344, num_hidden_layers=24, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, initializer_range=0.08, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    copy_tokenizer(folder)
    return str(folder)


def measure_all(known: Known) -> dict[str, float]:
    """The divergence of every choice, by program."""
    found = {}
    choices = list(_every_choice(known.mixture))
    for start in range(0, len(choices), TOGETHER):
        programs = map(known.mixture.program, choices[start : start + TOGETHER])
        measured = known.evaluator.measure([*programs])
        found |= {str(program): one.divergence for program, one in measured.items()}
    return found


def _every_choice(mixture: Mixture) -> Iterator[Choice]:
    edits = mixture.edits
    for count in range(1, mixture.model.num_layers // 2 + 1):
        for chosen in combinations(edits, count):
            if all(other.first >= one.stop for one, other in pairwise(chosen)):
                yield chosen


def _row(known: Known, every: dict[str, float], depth: int) -> str:
    pricing = Pricing(known.mixture.model, (DEPTH,))
    _, trials = known.search("pair", f"depth={depth}", pricing, max(TRIALS))
    sets = {key: d for key, d in every.items() if Program.parse(key).effective_depth() == depth}
    best = min(sets.values(), default=math.nan)
    windows = _windows(known, depth)
    additive = next((t.measured.divergence for t in trials if t.source == ADDITIVE), math.nan)
    cells = ""
    for count in TRIALS:
        value = min(trial.measured.divergence for trial in trials[:count] if trial.measured.whole)
        beside = "" if math.isnan(best) else f" +{value / best - 1:.1%}"
        cells += f"{f'{value:.4f}{beside}':>16}"
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


def _windows(known: Known, depth: int) -> float:
    """The best unbroken window, all of them measured."""
    count = known.mixture.model.num_layers - depth
    edits = known.mixture.edits
    choices = [edits[start : start + 2 * count : 2] for start in range(len(edits) - 2 * count + 2)]
    programs = [known.mixture.program(choice) for choice in choices]
    return min(measured.divergence for measured in known.evaluator.measure(programs).values())


if __name__ == "__main__":
    main()
