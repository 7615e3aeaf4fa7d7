"""What passes compute that follow one another through ranks with stretches of a model.

The scheduler of batching/scheduler.py, but that what a pass brings comes some passes later. A pass goes through all
ranks in the order in which it was sent, so what was sent counts as computed: whoever reads a key later finds it. A text
whose newest token is on its way waits for what comes next; meanwhile the next pass takes others. So each has at most
the share of one rank of the texts that run, and as many passes are on their way as there are ranks.

Where there are fewer texts than passes that are to be on their way (`Limits.in_flight`), and a coda drafts, a text goes
on with what is drafted, up to so many tokens that nobody has verified yet. What comes back is what the last rank has
chosen, in order; a draft that is something else is wrong, and with it all behind it: the text goes on at its place, and
what is on its way behind the wrong one is void (`Verdicts`). So the tokens are those without drafts.

No tensors here.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import NamedTuple

from surgeon.runtime.batching.request import UNDEFINED, Choice
from surgeon.runtime.batching.scheduler import Output, Scheduler
from surgeon.runtime.batching.sequence import Row, ScheduledChunk, Sequence


class ChosenToken(NamedTuple):
    """What the last rank has chosen.

    Attributes:
        place: of the token in its text.
        choice: the token, or UNDEFINED, and what is to be reported about it.
    """

    request: int
    place: int
    choice: Choice


class InFlight(Scheduler):
    """Open requests whose passes follow one another: `plan` and `sent` are called in turn, `arrived` at any time."""

    @property
    def window(self) -> int:
        """How many tokens of a text may be on their way; with one of them nothing is drafted."""
        return -(-self.limits.in_flight // max(1, len(self.running)))

    def _continued(self) -> list[ScheduledChunk]:
        """The next texts that lack one token, each with blocks for it: those whose next token is known come first."""
        ready = [one for one in self.running if len(one.tokens) - one.computed == 1 and one.unverified < self.window]
        ready.sort(key=lambda sequence: sequence.unverified)
        chunks: list[ScheduledChunk] = []
        for sequence in ready[: -(-len(self.running) // self.limits.stretches)]:
            length = len(sequence.tokens)
            if sequence.unverified and self.pool.lacking(sequence.blocks, length) > self.pool.free:
                continue  # nobody is preempted for a draft
            if sequence not in self.running or not self._make_room(sequence, length):
                break
            chunks.append(ScheduledChunk(sequence, 1))
        return [chunk for chunk in chunks if chunk.sequence in self.running]

    def _put_back(self, sequence: Sequence) -> None:
        sequence.take_unverified()
        super()._put_back(sequence)

    def drafts_behind(self, chunk: ScheduledChunk) -> bool:
        """Whether a planned chunk's last token is one that a draft is to follow."""
        sequence = chunk.sequence
        longest = sequence.last - 1 if sequence.prompt > self._border else min(sequence.last - 1, self._border)
        return self.window > 1 and chunk.completes and len(sequence.tokens) < longest and bool(sequence.wanted)

    def sent(self, chunks: Several[ScheduledChunk]) -> list[Output]:
        """Note that a planned pass is on its way; texts to which nothing is added end with it."""
        outputs: list[Output] = []
        for chunk in chunks:
            sequence, completes = chunk.sequence, chunk.completes
            sequence.computed += chunk.tokens
            self._share(sequence)
            if completes and not sequence.wanted:
                outputs.append(self._finish(sequence, "length"))
        return outputs

    def add_draft(self, sequence: Sequence, token: int) -> None:
        """Have a drafted token behind all others, which have been sent."""
        sequence.tokens.append(token)
        sequence.unverified += 1

    def arrived(self, answer: ChosenToken) -> list[Output]:
        """Take what the last rank has chosen; nothing of a text that has ended, or is there already."""
        open_ = (one for one in (*self.running, *self.waiting) if one.request.id == answer.request)
        sequence = next(open_, None)
        if sequence is None or answer.place != sequence.known:
            return []
        token, computed = answer.choice[0], sequence.computed
        drafts = sequence.take_unverified()
        if token == UNDEFINED:
            self.pool.forget(sequence.blocks)  # nobody shares what predicts nothing
            return [self._finish(sequence, "undefined")]
        right = drafts[:1] == [token]
        for counted in (sequence, self.tally):
            counted.drafted += bool(drafts)
            counted.accepted += right
        output = self._append(sequence, answer.choice, ())
        if right and output.finish_reason is None:
            sequence.tokens += drafts[1:]
            sequence.unverified, sequence.computed = len(drafts) - 1, computed
        if output.finish_reason is None and sequence in self.running:
            self._share(sequence)
        return [output]

    def _share(self, sequence: Sequence) -> None:
        """Let others share what is certain of a sequence, and give back what no window of it reaches."""
        computed = min(sequence.computed, sequence.known)
        self.pool.learn(sequence.blocks, sequence.tokens, computed)
        self.pool.leave_behind(sequence.blocks, computed)


class Flight(NamedTuple):
    """A pass on its way: rows, and whose they are.

    Attributes:
        follows: whether no block was given back since the pass before, which may be somebody else's in this one: only
            then the two can be computed as one.
    """

    requests: list[int]
    rows: list[Row]
    follows: bool = True

    @property
    def joinable(self) -> bool:
        """Whether it can be computed together with others: it has single tokens only."""
        return all(len(row.tokens) == 1 for row in self.rows)


def latest(flights: Several[Flight]) -> tuple[Flight, list[int]]:
    """Several passes as one, without rows that later ones of their text have made void; and the places of its rows."""
    requests = [request for flight in flights for request in flight.requests]
    rows = [row for flight in flights for row in flight.rows]
    first, kept = dict[int, int](), list[int]()
    for place in reversed(range(len(rows))):
        if rows[place].start < first.get(requests[place], rows[place].start + 1):
            first[requests[place]] = rows[place].start
            kept.insert(0, place)
    return Flight([requests[place] for place in kept], [rows[place] for place in kept], flights[0].follows), kept


class Verdicts:
    """Which rows count, by what has been chosen: those that have the token chosen for their place; on the last rank."""

    def __init__(self) -> None:
        self._newest = dict[int, tuple[int, int]]()  # place and token

    def counts(self, request: int, row: Row) -> bool:
        """Whether a row's tokens are those of its text."""
        place, token = self._newest.get(request, (row.start, row.tokens[0]))
        return row.start < place or (row.start == place and row.tokens[0] == token)

    def asks(self, request: int, row: Row) -> bool:
        """Whether what comes behind such a row is wanted, and has not been chosen yet."""
        place, _ = self._newest.get(request, (-1, 0))
        return bool(row.wanted) and row.start + len(row.tokens) > place

    def choose(self, answer: ChosenToken) -> None:
        self._newest[answer.request] = answer.place, answer.choice[0]

    def end(self, request: int) -> None:
        self._newest.pop(request, None)
