"""An exploration under way: what its folder keeps of it, and the time that is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from surgeon.opened import Model
from surgeon.processes.files import make_folder
from surgeon.progress import clock
from surgeon.provenance import provenance
from surgeon.results.explore import ExploreRun

_BUSIEST = 4.0  # times as slow as an idle machine


@dataclass
class UnderWay:
    """An exploration under way: what its folder keeps of it, and the time that is left.

    Attributes:
        record: as in explore.json.
        steps: by name, what was done and the seconds that it took.
        begun: when this call began, by `time.monotonic`.
        before: seconds that earlier calls took.
        used: seconds of processors that this process had used when it began.
    """

    folder: Path
    record: dict[str, Any]
    begun: float
    say: Callable[[str], Any]
    steps: dict[str, tuple[str, float]] = field(default_factory=dict)
    before: float = 0.0
    used: float = field(default_factory=time.process_time)

    @classmethod
    def in_folder(
        cls,
        folder: Path,
        model: Model,
        data: str,
        separator: str | None,
        minutes: float,
        begun: float,
        say: Callable[[str], Any],
    ) -> UnderWay:
        """A new one, or what the folder has.

        Raises:
            ValueError: if that is of something else.
        """
        make_folder(folder)
        record = provenance(model.name, model.hash, data=data, separator=separator, minutes=minutes, left_out=[])
        file = folder / ExploreRun.RECORD
        if not file.is_file() or not ExploreRun.read(folder).record.get("plan"):  # or nothing was measured yet
            return cls(folder, record, begun, say)
        earlier = ExploreRun.read(folder, model.hash)
        for name in ("data", "separator"):
            if earlier.record.get(name) != record[name]:
                raise ValueError(
                    f"{folder} holds an exploration with another {name}: {earlier.record.get(name)!r}, not "
                    f"{record[name]!r}; give another output folder"
                )
        rows = earlier.steps.to_dict("records")
        steps = {str(row["step"]): (str(row["did"]), float(row["seconds"])) for row in rows}
        kept = {name: earlier.record[name] for name in ("plan",) if name in earlier.record}
        return cls(folder, record | kept, begun, say, steps, earlier.spent)

    @property
    def spent(self) -> float:
        """Seconds."""
        return self.before + time.monotonic() - self.begun

    @property
    def left(self) -> float:
        """Seconds; below 0 if it took longer than it should."""
        return 60 * float(self.record["minutes"]) - self.spent

    def drawing(self, seconds: float) -> float:
        """How long work of so many seconds takes on this machine, by how much of the time this process computed."""
        return seconds * min(_BUSIEST, max(1.0, (time.monotonic() - self.begun) / (time.process_time() - self.used)))

    def run(self) -> ExploreRun:
        """What there is, as of now."""
        rows = [(name, did, round(seconds, 1)) for name, (did, seconds) in self.steps.items()]
        record = self.record | {"spent": round(self.spent, 1)}
        return ExploreRun(pd.DataFrame(rows, columns=["step", "did", "seconds"]), record=record)

    def keep(self) -> None:
        """Write it to the folder."""
        self.run().write(self.folder)

    @contextmanager
    def step(self, name: str, what: str) -> Iterator[list[str]]:
        """Something that is done: says it, and notes its time, also of what is interrupted.

        Yields:
            a list, for what it has given.
        """
        self.say(f"[{clock(self.spent)} of {clock(60 * self.record['minutes'])}] {name}: {what}")
        start, (did, before) = time.monotonic(), self.steps.get(name, ("", 0.0))
        given: list[str] = []
        try:
            yield given
        finally:
            said = "; ".join(given) or did
            self.steps[name] = said, before + time.monotonic() - start
            self.keep()

    def leave_out(self, line: str) -> None:
        """Note what is not done, and why."""
        self.record["left_out"].append(line)
        self.say(line)
