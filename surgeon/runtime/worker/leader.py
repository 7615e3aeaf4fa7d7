"""Rank 0's side of the work on some requests: it plans each pass and chooses tokens; and the ranks' messages."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import islice, takewhile
from operator import eq
from typing import NamedTuple

from surgeon.runtime.batching.blocks import BlockPool
from surgeon.runtime.batching.request import Choice, Request, ScheduledChunk, Wanted
from surgeon.runtime.batching.scheduler import Limits, Output, Scheduler
from surgeon.runtime.comm.pipes import Ring, Sender
from surgeon.runtime.model.engine import Figures, RankEngine
from surgeon.runtime.model.paged_cache import PagedCache
from surgeon.runtime.model.rank_model import Results
from surgeon.runtime.model.sampling import Sampler


class Cancel(NamedTuple):
    """To rank 0: end a request."""

    request: int


class Report(NamedTuple):
    """To every rank: send an `Account`."""

    ticket: int


class Progress(NamedTuple):
    """From rank 0, at the start and after every pass and cancellation.

    Attributes:
        stats: the fields of `Stats`, in their order.
    """

    outputs: list[Output]
    stats: tuple[int, ...]


class Account(NamedTuple):
    """From a rank: what its passes have cost."""

    ticket: int
    rank: int
    figures: Figures


RECORDING_SECONDS = 60.0
# That passes at once may take: for so long neither new requests nor cancellations are heard of.
AT_ONCE_SECONDS = 0.01


class Leader:
    """Rank 0's side of the work on some requests."""

    def __init__(
        self, engine: RankEngine, cache: PagedCache, blocks: int, limits: Limits, sender: Sender | Ring
    ) -> None:
        self.engine = engine
        self.cache = cache
        draft = engine.plan.draft
        catches_up = draft is not None and draft.keeps_own
        self.scheduler = Scheduler(BlockPool(blocks, windows=cache.windows), limits, catches_up)
        self._sender = sender
        # Used where the likeliest token is not enough.
        self._sampler = Sampler(engine.plan.vocabulary, engine.device)
        self._pass_seconds = AT_ONCE_SECONDS  # of the newest pass

    def record_ahead(self, seconds: float = RECORDING_SECONDS) -> None:
        """Record passes that texts will come to, as many as the seconds suffice for; the rest when they come."""
        most = self.scheduler.limits.max_batch
        passes = [rows for way in self.engine.ways for rows in way.passes_to_record(self.cache, most)]
        end = time.monotonic() + seconds
        for rows in passes:
            if time.monotonic() > end:
                return
            self._sender.send(("record_ahead", rows))
            self.engine.record_ahead(rows, self.cache)

    def submit(self, request: Request) -> None:
        self.scheduler.submit(request)
        if not request.sampling.greedy:
            self._sampler.add(request)

    def cancel(self, request: int) -> Output | None:
        """End a request; None if it is not open."""
        self._sampler.remove(request)
        return self.scheduler.cancel(request)

    def step(self) -> list[Output]:
        """Compute one pass on all ranks, after the passes that draft tokens for it, or several passes at once."""
        began = time.perf_counter()
        chunks = self.scheduler.plan()
        most = min(self.scheduler.limits.at_once, int(AT_ONCE_SECONDS / self._pass_seconds))
        passes = self.scheduler.passes_at_once(chunks, most) if most > 1 else 1
        if passes > 1:
            rows = [row for chunk in chunks for row in chunk.rows()]
            self._sender.send(("several", rows, passes))
            by_pass = self.engine.several(rows, passes, self.cache)
            self._pass_seconds = (time.perf_counter() - began) / passes
            by_text = zip(*by_pass, strict=True)
            outputs = self.scheduler.advance(
                chunks, [[(token, None) for token in text] for text in by_text]
            )
            self._note(outputs)
            return outputs
        planned = time.perf_counter() - began  # with what is drafted, which may take long to choose
        if self.scheduler.limits.looked_up:
            chunks, drafts = self._look_up(chunks)
        else:
            drafts = self._draft(chunks)
        began = time.perf_counter() - planned
        rows = [
            row for chunk, drafted in zip(chunks, drafts, strict=True) for row in chunk.rows(drafted)
        ]
        self._sender.send(("step", rows))
        results = self.engine.step(rows, self.cache)
        self._pass_seconds = time.perf_counter() - began
        chosen = self._choose(chunks, drafts, results)
        if self.scheduler.ahead is not None:
            tokens = sum(len(row.tokens) for row in rows)
            seconds = time.perf_counter() - began
            if all(row.continues for row in rows):
                self.scheduler.ahead.note_pass(tokens, seconds)
            else:
                self.scheduler.ahead.prompts.note(tokens, seconds)
        outputs = self.scheduler.advance(chunks, chosen, results.scores)
        self._note(outputs)
        return outputs

    def _note(self, outputs: list[Output]) -> None:
        self.engine.model.peers.counts.new += sum(output.token is not None for output in outputs)
        for output in outputs:
            if output.finish_reason is not None:
                self._sampler.remove(output.request)

    def _draft(self, chunks: list[ScheduledChunk]) -> list[list[int]]:
        """Draft tokens for each chunk; none for most, or those with the most of them come first.

        A draft with keys of its own has a pass of chunks that only make up for what it has missed.
        """
        drafts: list[list[int]] = [[] for _ in chunks]
        passes = [chunk.drafts or int(chunk.missed > 0) for chunk in chunks]
        for number in range(max(passes, default=0)):
            going = [place for place, most in enumerate(passes) if most > number]
            began = time.perf_counter()
            rows = [row for place in going for row in chunks[place].drafting_rows(drafts[place])]
            self._sender.send(("draft", rows))
            results = self.engine.draft(rows, self.cache)
            asking = [place for place in going if chunks[place].drafts > number]
            drawn = [chunks[place] for place in asking if chunks[place].wanted == Wanted.LOGITS]
            tokens = {
                # Any token, if the logits are not finite.
                Wanted.BEST: iter(max(0, token) for token in results.best),
                Wanted.LOGITS: iter(
                    () if results.logits is None else self._sampler.draft(ids(drawn), results.logits)
                ),
            }
            for place in asking:
                drafts[place].append(next(tokens[chunks[place].wanted]))
            if (ahead := self.scheduler.ahead) is not None:
                count = sum(len(row.tokens) for row in rows)
                seconds = time.perf_counter() - began
                if count == len(rows):
                    ahead.note_draft(count, seconds)
                else:
                    ahead.note_missed(count, seconds)
        return drafts

    def _look_up(self, chunks: list[ScheduledChunk]) -> tuple[list[ScheduledChunk], list[list[int]]]:
        """Look up drafts in the chunks' own texts, and give the chunks with as many as were found."""
        began = time.perf_counter()
        drafts = [
            chunk.sequence.lookup.drafts(chunk.sequence.tokens, chunk.drafts) if chunk.drafts else []
            for chunk in chunks
        ]
        for chunk, found in zip(chunks, drafts, strict=True):
            if chunk.wanted == Wanted.LOGITS:
                self._sampler.offer(chunk.sequence.request.id, found)
        if self.scheduler.ahead is not None and any(drafts):
            self.scheduler.ahead.note_draft(len(chunks), time.perf_counter() - began)
        return [
            chunk._replace(drafts=len(found)) for chunk, found in zip(chunks, drafts, strict=True)
        ], drafts

    def _choose(
        self, chunks: list[ScheduledChunk], drafts: list[list[int]], results: Results
    ) -> list[list[Choice]]:
        """Choose the next tokens of every chunk that wants one: the right drafts, and one more.

        UNDEFINED where the logits are not finite.
        """
        likeliest = iter(results.best)
        judged = iter(list[list[Choice]]())
        if results.logits is not None:
            wanting = (chunk for chunk in chunks if chunk.wanted == Wanted.LOGITS)
            judged = iter(self._sampler.judge(ids(wanting), results.logits))
        chosen: list[list[Choice]] = []
        for chunk, drafted in zip(chunks, drafts, strict=True):
            if chunk.wanted == Wanted.BEST:
                best = list(islice(likeliest, len(drafted) + 1))
                right = takewhile(bool, map(eq, best, drafted))
                chosen.append([(token, None) for token in best[: sum(right) + 1]])
            elif chunk.wanted == Wanted.LOGITS:
                chosen.append(next(judged))
        return chosen

    def progress(self, outputs: list[Output]) -> Progress:
        """Report to the starting process."""
        figures = self.engine.figures
        scheduler = self.scheduler
        phases = figures.prefill, figures.decode, figures.drafting
        stats = (  # the fields of `Stats`, in their order; to make one would take as long as all of this
            *vars(scheduler.tally).values(),
            len(scheduler.running),
            len(scheduler.waiting),
            scheduler.pool.blocks,
            scheduler.pool.free,
            sum(phase.passes for phase in phases),
            figures.drafting.passes,
        )
        return Progress(outputs, stats)

    def report(self, message: Report) -> None:
        self._sender.send(message)

    def end(self) -> None:
        self._sender.send(None)


def ids(chunks: Iterable[ScheduledChunk]) -> list[int]:
    """The ids of their requests."""
    return [chunk.sequence.request.id for chunk in chunks]
