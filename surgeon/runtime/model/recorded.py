"""Passes that add one token to each text, recorded once for each number of texts and then done again by one call.

Such a pass is a few hundred small calls of the kernels, and between them Python takes about as long as some of them.
Only the texts' newest tokens, positions and places in the cache change, and they lie in few fixed tensors. The first
pass of a size is recorded while it is computed (kernels/recording.py). Results are the same to the bit.

Shapes: B texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from surgeon.runtime.batching.blocks import power_of_two
from surgeon.runtime.batching.request import Row
from surgeon.runtime.kernels.functions import Kernels, Runs, Weighting, Window
from surgeon.runtime.kernels.recording import Arena, Recording, Replay, Span
from surgeon.runtime.model.attending import AllAngles
from surgeon.runtime.model.paged_cache import PagedCache, runs_of, stretches
from surgeon.runtime.model.peers import Sent
from surgeon.runtime.model.rank_model import RankModel, Results, Way

Reading = tuple[int, Window | None]  # a group of the cache, and a window
NOWHERE = -1  # a place of keys and values that are not kept
# Positions whose angles are computed at once: all passes are recorded anew when there are more.
FIRST_ANGLES = 4096
# Rows of the inputs; places in the cache's groups take as many as there are groups, and those in borrowed slots
# (`PagedCache.borrowed`) all further ones.
TOKEN = 0
POSITION = 1
PLACE = 2


class PassInputs:
    """The changing inputs of passes over as many texts, where recordings read them.

    Attributes:
        numbers: (2 + twice the groups of the cache, B).
        reads: of attentions of a group with a window.
    """

    def __init__(self, rows: Sequence[Row], angles: AllAngles) -> None:
        self.numbers = torch.tensor(_numbers(rows))
        self.angles = angles
        self.reads: dict[Reading, Runs] = {}

    def load(self, rows: Sequence[Row], angles: AllAngles) -> bool:
        """Write the inputs of the next pass; False if another recording is needed for it."""
        if angles is not self.angles:
            return False
        for key, read in self.reads.items():
            runs, ends = runs_of(rows, *key)
            if len(runs) > len(read.runs):
                return False
            read.runs.numpy()[: len(runs)] = runs
            read.ends.numpy()[:] = ends
        self.numbers.numpy()[:] = _numbers(rows)
        return True

    def read(self, rows: Sequence[Row], key: Reading) -> Runs:
        """Runs that such attentions read, with room for some more than now."""
        if key not in self.reads:
            runs, ends = runs_of(rows, *key)
            room = torch.zeros(2 * power_of_two(len(runs)), 2, dtype=torch.int64)
            room[: len(runs)] = torch.tensor(runs)
            self.reads[key] = Runs(room, torch.tensor(ends))
        return self.reads[key]


def _numbers(rows: Sequence[Row]) -> list[list[int]]:
    """Token, position, and place in each group of the cache; in slots of another that knows the token, none."""
    tokens = [row.tokens[0] for row in rows]
    positions = [row.start for row in rows]
    groups = range(len(rows[0].runs))
    places = [
        [stretches(row.runs[group], row.start, row.start + 1)[0].start for row in rows]
        for group in groups
    ]
    new = [row.known <= row.start for row in rows]
    newly = places
    if not all(new):
        newly = [
            [at if is_new else NOWHERE for at, is_new in zip(own, new, strict=True)] for own in places
        ]
    return [tokens, positions, *places, *newly]


class RecordedPass(NamedTuple):
    """A recorded pass over so many texts, with logits, (B, rows of the vocabulary), and what it sends."""

    inputs: PassInputs
    replay: Replay
    logits: Tensor
    sent: Sent
    spans: list[Span]


class RecordedDecode(Way):
    """Recorded passes, where kernels compute all that takes long.

    Attributes:
        problems: by number of texts, why such passes could not be recorded.
    """

    holds_caches = True

    def __init__(self, model: RankModel, kernels: Kernels) -> None:
        self.problems: dict[int, str] = {}
        self._model = model
        self._kernels = kernels
        self._arena = Arena()
        # By cache, because recordings hold its address.
        self._passes: WeakKeyDictionary[PagedCache, dict[int, RecordedPass]] = WeakKeyDictionary()
        model.angles_up_to(min(model.plan.max_tokens, FIRST_ANGLES))

    def fits(self, rows: Sequence[Row]) -> bool:
        """Tell whether a pass of these rows can be recorded: each adds one token to a text, and none is scored."""
        if len(rows) in self.problems or not all(map(self._model.turns_by_position, rows)):
            return False
        return all(len(row.tokens) == 1 and row.targets is None for row in rows)

    def step(self, rows: Sequence[Row], cache: PagedCache) -> Results:
        return Results(*self._model.chosen(self.logits(rows, cache), [row.wanted for row in rows]), [])

    def logits(self, rows: Sequence[Row], cache: PagedCache) -> Tensor:
        """Compute one pass; this rank's logits of each row, (B, rows of the vocabulary)."""
        model = self._model
        phase = model.peers.counts
        passes = self._passes.setdefault(cache, {})
        angles = model.angles_up_to(1 + max(row.start for row in rows))
        known = passes.get(len(rows))
        if known is None or not known.inputs.load(rows, angles):
            return self._record(rows, cache, PassInputs(rows, angles), passes)
        times = known.replay(bool(known.spans))
        for collectives in model.peers.groups.values():
            if (failure := collectives.failure()) is not None:
                raise failure
        if times and model.watcher is not None:
            model.watcher([(what, times[first], times[end]) for what, first, end in known.spans])
        phase.add(known.sent)
        return known.logits

    def _record(
        self, rows: Sequence[Row], cache: PagedCache, inputs: PassInputs, passes: dict[int, RecordedPass]
    ) -> Tensor:
        """Compute one as any pass, and record it if it can be."""
        model = self._model
        phase = model.peers.counts
        recording = Recording(self._kernels, self._arena)

        def attend(slot: int, queries: Tensor, kept: Tensor, weighting: Weighting) -> Tensor:
            """Attend over the cache through inputs that a replay finds again."""
            group = cache.group_of[slot]
            pair = cache.pairs[slot]
            with recording.paused():
                read = inputs.read(rows, (group, weighting.window))
            where = group + (len(rows[0].runs) if slot in cache.borrowed else 0)
            self._kernels.keep(kept, inputs.numbers[PLACE + where], pair)
            return self._kernels.attend(queries, pair, read, weighting)

        with phase.apart() as sent, model.peers.recorded(recording), recording.during():
            logits = model.next_logits(
                inputs.numbers[TOKEN], inputs.numbers[POSITION], inputs.angles, attend
            )
        phase.add(sent)
        replay = recording.finished()
        if replay is None:
            self.problems[len(rows)] = str(recording.problem)
        else:
            passes[len(rows)] = RecordedPass(
                inputs, replay, self._arena.borrowed(logits), sent, recording.spans
            )
        return logits
