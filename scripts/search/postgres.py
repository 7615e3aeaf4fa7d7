"""Four workers on a real PostgreSQL: two are killed, and the database once; nothing is lost, nothing counts twice.

    python -m scripts.search.postgres --work FOLDER

`scripts/search/test_postgres` prepares what this needs and runs it. Four workers share a study; when some trials are
finished one of them is killed, later another, then the database, which ends all; when it is back four go on.
What programs cost is made up there; without --quick the same is done to `surgeon search demo --workers 4`, and the same
command joins from another folder.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import optuna
import pandas as pd
import psutil
from optuna.trial import TrialState

from scripts.commands import make_parser
from scripts.search.made_up import TRIALS, divergence, key, made_up_study
from scripts.search.server import PASSWORD, Server
from surgeon.searches.study import open_storage

SECONDS_A_TRIAL = 0.5
SECONDS_AWAY = 8.0
PATIENCE = 900.0
STARTED: list[subprocess.Popen[bytes]] = []


@dataclass
class Worker:
    """A process of the search, and the files in which it says what it does."""

    process: subprocess.Popen[bytes]
    log: Path
    messages: Path

    def ended(self) -> int:
        """Wait until it has ended; its exit status."""
        wait_until(lambda: self.process.poll() is not None)
        return self.process.returncode

    @property
    def measured(self) -> list[str]:
        """The programs that it began to measure."""
        if self.log.exists():
            return self.log.read_text().splitlines()
        return []


class Checks:
    """What holds and what does not, and what happens meanwhile, a line each."""

    def __init__(self) -> None:
        self.failed = 0
        self.begun = time.monotonic()

    def note(self, what: str) -> None:
        print(f"{time.monotonic() - self.begun:5.1f} s  {what}", flush=True)

    def __call__(self, holds: bool, what: str) -> None:
        self.failed += not holds
        print(f"{'ok  ' if holds else 'FAIL'}  {what}", flush=True)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--work", type=Path, required=True, help="folder for the database and what the workers say"
    )
    parser.add_argument("--quick", action="store_true", help="leave out the demo model")
    options = parser.parse_args()
    work = options.work.resolve()
    (work / "server").mkdir(parents=True)
    work.chmod(0o755)  # the server's user has to get into its folder
    os.environ["PGPASSWORD"] = PASSWORD
    server = Server(work / "server")
    check = Checks()
    try:
        server.make()
        refusals(server, work, check)
        killed(server, work, check)
        if not options.quick:
            demo(server, work, check)
    finally:
        for process in STARTED:
            process.kill()
        server.kill()
    print(f"{check.failed} failed" if check.failed else "all held")
    return min(check.failed, 1)


def killed(server: Server, work: Path, check: Checks) -> None:
    """Four workers, of which two are killed and come back, and a database that goes away and comes back."""
    workers = [start(server, work, f"worker {index}") for index in range(4)]
    study = made_up_study(server.address, "four")
    for index, finished in ((1, 6), (2, 14)):
        wait_until(lambda least=finished: finished_of(study) >= least)
        doomed = workers[index]
        wait_until(lambda worker=doomed: bool(worker.measured))
        held = len(study.get_trials(states=[TrialState.RUNNING]))
        doomed.process.send_signal(signal.SIGKILL)
        doomed.process.wait()
        check.note(f"worker {index} killed; {held} trials were running")
    wait_until(lambda: finished_of(study) >= 20)
    take_away(server, check)
    check.note(f"database back, with {finished_of(study)} trials")
    for worker in (workers[0], workers[3]):
        check(worker.ended() != 0, f"{worker.log.stem} ends when the database is away")
    back = [start(server, work, f"worker {index} again") for index in range(4)]
    for worker in back:
        code = worker.ended()
        said = worker.messages.read_text()
        check(code == 0, f"{worker.log.stem} ends well{said if code else ''}")
    check.note("all ended")
    judge(study, check)
    said = "".join(worker.messages.read_text() for worker in [*workers, *back])
    check("was lost with process" in said, "workers say whose trials were lost")
    check(all(worker.measured for worker in back), "workers that return take up trials")


def demo(server: Server, work: Path, check: Checks) -> None:
    """The same to the command that users give."""
    search(work, "demo-one").ended()
    joining = ("--storage", server.address, "--study", "demo")
    four = search(work, "demo-four", *joining, "--workers", "4")
    storage = open_storage(server.address, work).backend
    wait_until(lambda: "demo" in optuna.get_all_study_names(storage))
    study = optuna.load_study(study_name="demo", storage=storage)
    wait_until(lambda: finished_of(study) >= 3)
    for child in psutil.Process(four.process.pid).children()[:2]:
        child.kill()
        check.note(f"worker killed, with {finished_of(study)} trials")
    wait_until(lambda: finished_of(study) >= 8)
    take_away(server, check)
    four.ended()
    check.note("ended")
    said = four.messages.read_text()
    check(
        said.count("was ended by SIGKILL; the others go on") == 2, "it says that two workers were killed"
    )
    check("the same command goes on from there" in said, "it says that the database was away")
    four = search(work, "demo-four", *joining, "--workers", "4")
    check(four.ended() == 0, f"the same command goes on: {four.messages.read_text()}")
    search(work, "demo-joined", *joining).ended()
    tables = [
        pd.read_csv(work / name / "trials.csv") for name in ("demo-one", "demo-four", "demo-joined")
    ]
    merged = tables[0].merge(tables[1], on="program", suffixes=("", "_four"))
    apart = np.abs(merged["divergence"] / merged["divergence_four"] - 1)
    check(
        len(tables[1]) == len(tables[0]) == tables[1]["program"].nunique(),
        f"{len(tables[1])} programs, each once",
    )
    check(
        len(merged) > 0 and apart.max() < 1e-5,
        f"divergences of {len(merged)} are at most {apart.max():.1e} apart",
    )
    best = [table.loc[table["whole"], "divergence"].min() for table in tables[:2]]
    check(best[1] <= 1.05 * best[0], f"as good as one worker's: {best[1]:.5f} and {best[0]:.5f}")
    check(tables[1].equals(tables[2]), "the same command in another folder gives the same table")
    check(PASSWORD not in (work / "demo-four" / "search.json").read_text(), "the record has no password")


def take_away(server: Server, check: Checks) -> None:
    """Kill the database, and start it again later."""
    server.kill()
    check.note("database killed")
    time.sleep(SECONDS_AWAY)
    server.start()


def finished_of(study: optuna.Study) -> int:
    """How many trials are finished."""
    return len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)))


def search(work: Path, name: str, *arguments: str) -> Worker:
    """A `surgeon search` of the demo model, in a folder of its own."""
    question = "search demo --budget depth=12 --data demo --tokens 1024 --trials 16 -o"
    command = [sys.executable, "-m", "surgeon.commands", *question.split(), str(work / name), *arguments]
    messages = work / f"{name}.txt"
    with messages.open("wb") as file:
        return Worker(begin(command, file), work / name, messages)


def judge(study: optuna.Study, check: Checks) -> None:
    """Whether a study holds what it was to try, each once, and nothing else."""
    stored = study.get_trials()
    live = [trial for trial in stored if trial.state != TrialState.FAIL]
    check(len(live) == TRIALS, f"{TRIALS} trials")
    check(all(trial.state == TrialState.COMPLETE for trial in live), "none is left running or waiting")
    check(
        all(trial.value == divergence(key(trial.params)) for trial in live),
        "with the values that are right",
    )
    print(
        f"      {len(stored)} trials in the database: {len(live)} count, {len(stored) - len(live)} were given up"
    )


def refusals(server: Server, work: Path, check: Checks) -> None:
    """What is said of databases that cannot be used."""
    right = server.address
    cases = {
        right.replace("/searches", "/nowhere"): "there is no database 'nowhere'",
        # PostgreSQL does not tell that there is no such user.
        right.replace("surgeon@", "nobody@"): "does not take the password of 'nobody'",
        right.replace("surgeon@", "surgeon:wrong-word@"): "does not take the password of 'surgeon'",
        right.replace(f":{server.port}", ":9"): "Connection refused",
        right.replace("127.0.0.1", "no.such.host.invalid"): "cannot be reached",
    }
    for address, wanted in cases.items():
        said = refusal(address, work)
        check(wanted in said and "wrong-word" not in said and "\n" not in said, f"refused: {said}")
    del os.environ["PGPASSWORD"]
    said = refusal(right, work)
    os.environ["PGPASSWORD"] = PASSWORD
    check("asks for a password; put the right one into ~/.pgpass" in said, f"refused: {said}")


def refusal(address: str, work: Path) -> str:
    try:
        open_storage(address, work)
    except (OSError, ValueError) as error:
        return str(error)
    return "(nothing)"


def start(server: Server, work: Path, name: str) -> Worker:
    log = work / f"{name}.log"
    told = [server.address, "four", str(SECONDS_A_TRIAL), str(log)]
    command = [sys.executable, "-m", "scripts.search.made_up", *told]
    messages = work / f"{name}.txt"
    with messages.open("wb") as file:
        return Worker(begin(command, file), log, messages)


def begin(command: Sequence[str], messages: BinaryIO) -> subprocess.Popen[bytes]:
    STARTED.append(subprocess.Popen(command, stdout=messages, stderr=messages))
    return STARTED[-1]


def wait_until(holds: Callable[[], bool]) -> None:
    ending = time.monotonic() + PATIENCE
    while not holds():
        if time.monotonic() > ending:
            raise TimeoutError(
                f"nothing happened for {PATIENCE:.0f} s; the workers' files say what they do"
            )
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
