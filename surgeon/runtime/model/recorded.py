"""Passes that add one token to each text, recorded once for each number of texts and then done again by one call.

Such a pass is a few hundred small calls of the kernels; on a CPU Python takes as long between them as some of them take
themselves. All that changes from one pass over as many texts to the next lies in few fixed tensors: the stream before
the program, the angles of positions, and where texts lie in the cache. The first pass of a size is recorded while it is
computed (kernels/recording.py); for the others those tensors are written anew. What comes out is the same to the bit.

Shapes: B texts, h the stream's width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from torch import Tensor

from surgeon.runtime.batching.sequence import Row
from surgeon.runtime.comm.collectives import Counts
from surgeon.runtime.kernels.functions import Kernels, Runs
from surgeon.runtime.kernels.recording import Arena, Recording, Replay, Span
from surgeon.runtime.model.layers import Angles, Attend, Pass, Weighting
from surgeon.runtime.model.paged_cache import PagedCache, PagedLayout
from surgeon.runtime.model.program import RankProgram
from surgeon.runtime.plan.kept import power_of_two

Reading = tuple[int, int | None]  # a group of the cache, and a window


class RecordedPass:
    """What a replay reads and writes, for so many texts.

    Attributes:
        stream: before the program, (B, h).
        angles: of the texts' positions, if there are rotary ones.
        places: of the new tokens in each group of the cache, (B,).
        reads: what attentions of a group with a window read.
        after: the stream after the program, (B, h).
        replay: computes it.
        layers: the collectives that a replay starts without counting them.
        spans: calls in it that somebody wants to know the time of.
    """

    after: Tensor

    def __init__(self, stream: Tensor, angles: Angles | None, layout: PagedLayout) -> None:
        self.stream = stream
        self.angles = None if angles is None else (angles[0].clone(), angles[1].clone())
        self.places = [numbers.clone() for numbers in layout.numbers]
        self.reads: dict[Reading, Runs] = {}
        self.replay: Replay | None = None
        self.layers = Counts()
        self.spans: list[Span] = []

    def load(self, stream: Tensor, angles: Angles | None, layout: PagedLayout) -> bool:
        """Write what the next pass is to read; False if there is no room for all of it."""
        reads = {key: layout.reads(*key) for key in self.reads}
        if any(len(found.runs) > len(self.reads[key].runs) for key, found in reads.items()):
            return False
        self.stream.copy_(stream)
        if self.angles is not None and angles is not None:
            for own, new in zip(self.angles, angles, strict=True):
                own.copy_(new)
        for place, numbers in zip(self.places, layout.numbers, strict=True):
            place.copy_(numbers)
        for key, found in reads.items():
            self.reads[key].runs[: len(found.runs)] = found.runs
            self.reads[key].ends.copy_(found.ends)
        return True

    def read(self, layout: PagedLayout, key: Reading) -> Runs:
        """What such attentions read, where a replay will find it; there is room for some more runs than now."""
        if key not in self.reads:
            found = layout.reads(*key)
            room = found.runs.new_zeros(2 * power_of_two(len(found.runs)), 2)
            room[: len(found.runs)] = found.runs
            self.reads[key] = Runs(room, found.ends.clone())
        return self.reads[key]


class RecordedDecode:
    """The recorded passes of one rank's program.

    Attributes:
        problem: why there are none, once one could not be recorded.
    """

    def __init__(self, rank_program: RankProgram, kernels: Kernels) -> None:
        self.problem: str | None = None
        self._program = rank_program
        self._kernels = kernels
        self._arena = Arena()
        # By cache, because recordings hold its address.
        self._passes: WeakKeyDictionary[PagedCache, dict[int, RecordedPass]] = WeakKeyDictionary()

    def fits(self, rows: Sequence[Row]) -> bool:
        """Whether a pass of these rows can be recorded: each adds one token to a text."""
        return self.problem is None and all(len(row.tokens) == 1 for row in rows)

    def stream_after(self, stream: Tensor, shared: Pass, layout: PagedLayout) -> Tensor:
        """The stream after the program, (B, h), which the next pass may overwrite.

        Raises:
            TimeoutError: if another rank does not come.
        """
        passes = self._passes.setdefault(layout.cache, {})
        known = passes.get(len(stream))
        if known is None or not known.load(stream, shared.rotation, layout):
            return self._recorded(stream, shared, layout, passes)
        assert known.replay is not None
        times = known.replay(bool(known.spans))
        for collectives in self._program.groups.values():
            if (failure := collectives.failure()) is not None:
                raise failure
        if times:
            self._program.replayed([(what, times[first], times[end]) for what, first, end in known.spans])
        phase = self._program.counts
        phase.layers = phase.layers + known.layers
        return known.after

    def _recorded(self, stream: Tensor, shared: Pass, layout: PagedLayout, passes: dict[int, RecordedPass]) -> Tensor:
        """The same, computed as any pass, and recorded if it can be."""
        held = self._arena.empty(stream.shape).copy_(stream)
        made = RecordedPass(self._arena.borrowed(held), shared.rotation, layout)
        recording = Recording(self._kernels, self._arena)
        phase = self._program.counts
        before, phase.layers = phase.layers, made.layers
        with self._sums_recorded(recording), recording.during():
            after = self._program.stream_after(held, Pass(self._attend(made, layout, recording), made.angles))
        phase.layers = before + made.layers
        made.after, made.replay, made.spans = self._arena.borrowed(after), recording.finished(), recording.spans
        if made.replay is not None:
            passes[len(stream)] = made
        self.problem = recording.problem
        return after

    def _attend(self, made: RecordedPass, layout: PagedLayout, recording: Recording) -> Attend:
        """Attention over the cache that finds everything where a replay will find it."""
        kernels, cache = self._kernels, layout.cache

        def attend(slot: int, queries: Tensor, kept: Tensor, weighting: Weighting) -> Tensor:
            group, pair = cache.group_of[slot], cache.pairs[slot]
            with recording.paused():
                read = made.read(layout, (group, weighting.window))
            kernels.keep(kept, made.places[group], pair)
            return kernels.attend(queries, pair, read, weighting.scale, weighting.softcap)

        return attend

    @contextmanager
    def _sums_recorded(self, recording: Recording) -> Iterator[None]:
        """Have the program's sums over ranks recorded."""
        groups = self._program.groups
        self._program.groups = {group: one.recorded(recording) for group, one in groups.items()}
        try:
            yield
        finally:
            self._program.groups = groups
