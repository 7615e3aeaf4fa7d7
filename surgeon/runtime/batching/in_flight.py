"""Passes that follow one another through ranks with stretches of a model.

The scheduler of scheduler.py, but that results come some passes later. Passes go through all ranks in the order in
which they were sent, so what was sent counts as computed. A text whose newest token is on its way waits; meanwhile the
next pass takes others. So each has at most the share of one rank of the texts that run.

Where there are fewer texts than ranks and a coda drafts, a greedy text goes on with its drafts, one token in each pass.
Behind a wrong one the text goes on at its place, and later ones on their way do not count: tokens are those without
drafts.
"""

from __future__ import annotations

from collections.abc import Sequence as Several

from surgeon.runtime.batching.blocks import BlockPool
from surgeon.runtime.batching.request import UNDEFINED, Choice
from surgeon.runtime.batching.scheduler import Limits, Output, Scheduler
from surgeon.runtime.batching.sequence import Row, ScheduledChunk, Sequence, Wanted


class InFlight(Scheduler):
    """Open requests whose passes follow one another: `plan` and `sent` are called in turn, `arrived` at any time.

    Args:
        drafts: whether a coda drafts.
    """

    def __init__(self, pool: BlockPool, limits: Limits, drafts: bool) -> None:
        super().__init__(pool, limits)
        self._drafts = drafts

    @property
    def window(self) -> int:
        """The number of tokens of a text that may be on their way."""
        if self._drafts:
            return -(-self.limits.stretches // max(1, len(self.running)))
        return 1

    def _continue_sequences(self) -> list[ScheduledChunk]:
        """The next texts that lack one token, with blocks for it; those whose next token is known come first."""
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
        """Tell whether a draft is to follow a planned chunk's last token."""
        sequence = chunk.sequence
        longest = sequence.last - 1 if sequence.prompt > self._border else min(sequence.last - 1, self._border)
        return self.window > 1 and chunk.wanted == Wanted.BEST and len(sequence.tokens) < longest

    def sent(self, chunks: Several[ScheduledChunk]) -> list[Output]:
        """Note that a planned pass is on its way; texts to which nothing is added end with it."""
        outputs: list[Output] = []
        for chunk in chunks:
            sequence = chunk.sequence
            ends = chunk.completes and not sequence.wanted
            sequence.computed += chunk.tokens
            self._share(sequence)
            if ends:
                outputs.append(self._finish(sequence, "length"))
        return outputs

    def counts(self, sequence: Sequence, row: Row) -> bool:
        """Tell whether a row brings the next token of its text: it ends with the newest certain one.

        One of another draft's place ends elsewhere, or has another token there; passes arrive in their order.
        """
        end = row.end
        is_open = sequence in self.running or sequence in self.waiting
        return is_open and end == sequence.known and sequence.tokens[row.start : end] == row.tokens

    def arrived(self, sequence: Sequence, choice: Choice) -> Output:
        """Take the next token of a text."""
        computed = sequence.computed
        drafts = sequence.take_unverified()
        if choice[0] == UNDEFINED:
            self.pool.forget(sequence.blocks)  # nobody shares what predicts nothing
            return self._finish(sequence, "undefined")
        right = drafts[:1] == [choice[0]]
        for counted in (sequence, self.tally):
            counted.drafted += bool(drafts)
            counted.accepted += right
        output = self._append(sequence, choice, ())
        if output.finish_reason is not None:
            return output
        if right:
            sequence.tokens += drafts[1:]
            sequence.unverified = len(drafts) - 1
            sequence.computed = computed
        if sequence in self.running:
            self._share(sequence)
        return output

    def _share(self, sequence: Sequence) -> None:
        """Let others share what is certain of a sequence, and give back what no window of it reaches."""
        computed = min(sequence.computed, sequence.known)
        self.pool.learn(sequence.blocks, sequence.tokens, computed)
        self.pool.leave_behind(sequence.blocks, computed)
