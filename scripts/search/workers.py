"""What a shared study costs beside rounds: the best divergence, and the time, of one worker and of several.

    python scripts/search/workers.py demo=demo MODEL=TEXT ... -o runs/samplers

Workers and time are simulated: a batch takes as long as the sublayers that it runs (what its programs begin with in
common runs once). In "rounds" all workers divide 8 proposals among them and wait for each other before the next 8, so
that any number of workers finds what one finds; "shared" is what `surgeon search` does: each worker asks for its share
of 8 whenever it has none, by what is finished then, with what is running taken as tried. The cells are those of
samplers.py, and so is the file of what programs come to.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.search.given import to_search_cells
from scripts.search.samplers import AFTER, CELLS, KnownPrograms, cells_of
from surgeon.analysis.engine.sharing import share
from surgeon.language.program import Program
from surgeon.searches.search import BATCH, Search
from surgeon.searches.terms import measure_terms
from surgeon.searches.trial import Proposal, Trial

WORKERS = 4


@dataclass
class Simulation:
    """A search by workers that take virtual time.

    Attributes:
        finished: trials with the time at which each was.
    """

    search: Search
    known: KnownPrograms
    asked: int = 0
    finished: list[tuple[float, Trial]] = field(default_factory=list)

    def ask(self, count: int, now: float, running: Sequence[Proposal]) -> list[Proposal]:
        """What `Search` proposes to whoever asks now."""
        trials = [trial for time, trial in self.finished if time <= now]
        trials.sort(key=lambda trial: trial.number)
        keys, found = [proposal.key for proposal in running], list[Proposal]()
        while len(found) < count and (one := self.search.next_proposal(trials, keys)) is not None:
            found.append(one)
            keys.append(one.key)
        return found

    def run(self, proposals: Sequence[Proposal], now: float) -> float:
        """Measure them from now on; returns when that is done."""
        programs = [Program.parse(proposal.key) for proposal in proposals]
        measured = self.known.measure(programs)
        done = now + share(programs).total_sublayers
        for proposal, program in zip(proposals, programs, strict=True):
            self.finished.append((done, Trial(self.asked, proposal, measured[program])))
            self.asked += 1
        return done


def rounds(simulation: Simulation, workers: int, trials: int) -> None:
    now = 0.0
    while simulation.asked < trials:
        waiting = simulation.ask(min(BATCH, trials - simulation.asked), now, ())
        if not waiting:
            return
        free = [now] * workers
        while waiting:
            size = math.ceil(len(waiting) / workers)
            heapq.heappush(free, simulation.run(waiting[:size], heapq.heappop(free)))
            waiting = waiting[size:]
        now = max(free)


def shared(simulation: Simulation, workers: int, trials: int) -> None:
    free, running = [(0.0, worker) for worker in range(workers)], dict[int, list[Proposal]]()
    while simulation.asked < trials and free:
        now, worker = heapq.heappop(free)
        running.pop(worker, None)
        others = [proposal for batch in running.values() for proposal in batch]
        batch = simulation.ask(min(math.ceil(BATCH / workers), trials - simulation.asked), now, others)
        if batch:
            running[worker] = batch
            heapq.heappush(free, (simulation.run(batch, now), worker))


WAYS: dict[str, tuple[Callable[[Simulation, int, int], None], int]] = {
    "one worker": (shared, 1),
    f"{WORKERS}, rounds": (rounds, WORKERS),
    f"{WORKERS}, shared": (shared, WORKERS),
}


def main() -> None:
    given = to_search_cells(__doc__, len(CELLS)).parse_args()
    rows = []
    for cell in cells_of(given):
        terms = measure_terms(cell.known.evaluator, cell.search().terms_plan)
        alone = 0.0
        for name, (way, workers) in WAYS.items():
            simulation = Simulation(cell.search(terms), cell.known)
            way(simulation, workers, AFTER[-1])
            ended = sorted(simulation.finished, key=lambda each: (each[0], each[1].number))
            alone = alone or ended[-1][0]
            row = {"model": cell.known.model.label, "space": cell.spaces, "way": name}
            for after in AFTER:
                row[f"best of {after}"] = min(trial.measured.divergence for _, trial in ended[:after])
            rows.append(row | {"times as fast": alone / ended[-1][0]})
            print(*rows[-1].values(), flush=True)
        pd.DataFrame(rows).to_csv(given.output / "workers.csv", index=False)
    print(pd.DataFrame(rows).to_string(index=False))


if __name__ == "__main__":
    main()
