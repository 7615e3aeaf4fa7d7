"""What was measured of each program, window by window, one line as soon as it is known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surgeon.analysis.engine.measure import MeasuredWindows
from surgeon.language.program import Program
from surgeon.processes.journal import Journal, read_journal
from surgeon.quality.summary import ACCEPTANCES

_DONE, _ACCEPTED = 2, slice(3, 3 + len(ACCEPTANCES))  # rows


class ProgramJournal(Journal):
    """Per-window numbers of programs.

    Args:
        folder: made if it is not there.
        name: of the file in it.
        work, identity: as in `Journal`.
        windows: how many windows are measured.
        sampled: whether a program without its sampled acceptance is measured again.
    """

    def __init__(
        self, folder: Path, name: str, work: str, identity: dict[str, Any], windows: int, sampled: bool = False
    ) -> None:
        self.folder = folder
        self.windows = windows
        self._wanted = [_DONE, -1] if sampled else [_DONE]
        self._values: dict[str, NDArray[np.float64]] = {}
        super().__init__(folder / name, work, identity)

    def add_new(self, measured: Iterable[MeasuredWindows], windows: Sequence[int]) -> None:
        """Keep what comes in, unless it is here already.

        Args:
            windows: the numbers of those that were measured, in their order.
        """
        for one in measured:
            part = windows[one.start : one.start + len(one.quality["nll"])]
            if not self.is_done(one.program, part):
                numbers = {name: tensor.tolist() for name, tensor in one.quality.items()}
                self.keep({"program": str(one.program), "windows": list(part)} | numbers)

    def is_done(self, program: Program, windows: Sequence[int]) -> bool:
        """Whether a program was measured on all of these windows."""
        values = self._values.get(str(program))
        return values is not None and not np.isnan(values[self._wanted][:, list(windows)]).any()

    def acceptances(self, program: Program, windows: Sequence[int]) -> NDArray[np.float64]:
        """A program's acceptances on windows, (kinds, windows); NaN where one was not measured."""
        return self._values[str(program)][_ACCEPTED, list(windows)]

    def values(self, program: Program, windows: Sequence[int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Negative log-likelihood and divergence of a program on windows it was measured on, each (windows,)."""
        nll, divergence, done, *_ = self._values[str(program)][:, list(windows)]
        assert not np.isnan(done).any(), "asked for a program on windows that it was not measured on"
        return nll, divergence

    def take(self, line: Any) -> None:
        take_program(line, self._values, self.windows)


def take_program(line: Any, values: dict[str, NDArray[np.float64]], windows: int) -> None:
    """Take in what a line says of a program.

    Rows of its nll, its divergence, 1 where it was measured, else NaN, and its acceptances, NaN where there are none.
    """
    # The third row, so that a NaN that was measured is not taken for a gap.
    found = values.setdefault(line["program"], np.full((_ACCEPTED.stop, windows), np.nan))
    here = line["windows"]
    found[0, here], found[1, here], found[_DONE, here] = line["nll"], line["divergence"], 1.0
    for row, name in enumerate(ACCEPTANCES, start=_ACCEPTED.start):
        found[row, here] = line.get(name, np.nan)


def read_programs(path: Path, work: str) -> tuple[dict[str, Any], dict[str, NDArray[np.float64]]]:
    """What a journal of programs depends on, and its numbers by the programs' texts, as `take_program` has them.

    Raises:
        FileNotFoundError, ValueError: as `read_journal`; and if it does not say how many windows it is of.
    """
    identity, lines = read_journal(path, work)
    try:
        windows = identity["tokens"] // identity["window"]
        values: dict[str, NDArray[np.float64]] = {}
        for line in lines:
            if "program" in line:
                take_program(line, values, windows)
    except (IndexError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{path} is damaged; run surgeon {work} again on its folder") from error
    return identity, values
