"""A cache of plain lists stands for the ranks, and holds a scheduler to what it promises."""

from __future__ import annotations

from dataclasses import dataclass, field

from surgeon.runtime.batching.blocks import GONE, BlockPool, SequenceBlocks, Windows, blocks_for
from surgeon.runtime.batching.request import Request, Row, Sampling, ScheduledChunk, TokenLogprob, Wanted
from surgeon.runtime.batching.scheduler import Limits, Output, Scheduler

END = 3


def next_token(tokens: list[int]) -> int:
    """What the pretended model goes on with: a function of everything before, which is END now and then."""
    return sum((place + 3) * token for place, token in enumerate(tokens)) % 11


def pretended(before: list[int | None]) -> float:
    """The log-probability of whatever follows these tokens."""
    return -float(sum((place + 1) * (token or 0) for place, token in enumerate(before)))


def continued(request: Request) -> list[int]:
    """What must come out, computed alone."""
    tokens = list(request.prompt)
    for _ in range(request.sampling.max_new_tokens):
        tokens.append(next_token(tokens))
        if tokens[-1] == END and not request.sampling.ignore_end:
            break
    return tokens[len(request.prompt) :]


def ask(
    number: int, prompt: list[int], new: int, ignore_end: bool = True, scored: bool = False
) -> Request:
    sampling = Sampling(max_new_tokens=new, ignore_end=ignore_end, prompt_logprobs=0 if scored else None)
    return Request(number, tuple(prompt), sampling)


def verified(tokens: list[int], drafts: list[int]) -> list[int]:
    """The drafts that are right, and the token behind them."""
    right = list(tokens)
    while drafts and drafts[0] == next_token(right):
        right.append(drafts[0])
        drafts = drafts[1:]
    return [*right[len(tokens) :], next_token(right)]


@dataclass
class Machine:
    """Runs a scheduler's passes on a cache that holds tokens where the real one holds their keys and values."""

    blocks: int = 16
    block_tokens: int = 4
    max_batch: int = 4
    pass_tokens: int = 16
    draft_tokens: int = 0
    windows: Windows = (None,)
    share: float = 1.0  # of their limits, that texts are expected to come to at first
    catches_up: bool = False
    at_once: int = 1
    outputs: dict[int, list[Output]] = field(default_factory=dict)
    passes: list[list[ScheduledChunk]] = field(default_factory=list)
    most_used: int = 0

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.blocks, self.block_tokens, self.windows)
        limits = Limits(self.max_batch, 1000, self.pass_tokens, (END,), self.draft_tokens, self.share)
        self.scheduler = Scheduler(self.pool, limits, self.catches_up)
        self.cache: list[int | None] = [None] * (self.blocks * self.block_tokens)
        self.drafts_own = list(self.cache)

    def places(self, runs: list[tuple[int, int]]) -> list[int | None]:
        """Of a sequence's tokens in the cache; None where they are gone."""
        size, found = self.block_tokens, list[int | None]()
        for first, length in runs:
            found += (
                [None] * length * size if first == GONE else range(first * size, (first + length) * size)
            )
        return found

    def write(self, row: Row, tokens: list[int], written: set[int]) -> None:
        """Have the row's tokens in the cache; what each group looks at must be the tokens before, whoever wrote them.

        Args:
            tokens: of the sequence, the row's among them.
            written: where others have written in this pass.
        """
        end = row.start + len(row.tokens)
        for group, window in enumerate(self.windows):
            places = self.places(row.runs[group])
            assert len(places) >= end
            for place, token in zip(places[row.start : end], row.tokens, strict=True):
                assert place is not None
                assert place not in written, "two sequences write to the same place"
                written.add(place)
                self.cache[place] = token
            first = 0 if window is None else max(0, row.start - window + 1)
            before = [None if place is None else self.cache[place] for place in places[first:end]]
            assert before == tokens[first:end]

    def drafted(self, chunk: ScheduledChunk) -> list[int]:
        """Guesses of what follows, some of them wrong, in the order in which passes would make them."""
        tokens, first = list(chunk.sequence.tokens), len(chunk.sequence.tokens)
        for number in range(max(chunk.drafts, chunk.missed > 0)):
            rows = chunk.drafting_rows(tokens[first:])
            places = self.places(rows[0].runs[0])
            for row in rows:
                assert row.known == chunk.sequence.computed
                for place, token in enumerate(row.tokens, start=row.start):
                    at = places[place]
                    assert at is not None or not self.catches_up
                    self.drafts_own[at or 0] = token
            end = rows[-1].start + len(rows[-1].tokens)
            if self.catches_up:  # a draft reads what it has computed of all tokens before
                assert [self.drafts_own[at or 0] for at in places[:end]] == tokens[:end]
            if number < chunk.drafts:
                assert end == first + number
                assert [row.wanted for row in rows] == [
                    *[Wanted.NOTHING] * (len(rows) - 1),
                    chunk.wanted,
                ]
                tokens.append(next_token(tokens) if len(tokens) % 5 else 1)
        return tokens[first:]

    def step(self) -> list[ScheduledChunk]:
        """One pass: what is read from the cache must be the tokens before, whoever wrote them."""
        # A sequence that is preempted gets other blocks, and is one that begins, should it come back in the same pass.
        going_on = [one.blocks for one in self.scheduler.running if len(one.tokens) - one.computed == 1]
        chunks = self.scheduler.plan()
        self.check_sizes(chunks, going_on)
        self.passes.append(chunks)
        written: set[int] = set()
        chosen, scores = [], []
        further = self.scheduler.passes_at_once(chunks, self.at_once) - 1
        assert [chunk.drafts for chunk in chunks] == sorted(
            (chunk.drafts for chunk in chunks), reverse=True
        )
        for chunk in chunks:
            drafts = self.drafted(chunk)
            rows = chunk.rows(drafts)
            assert [len(one.tokens) for one in rows] == [1] * len(rows) or not drafts
            row = rows[0]._replace(tokens=[token for one in rows for token in one.tokens])
            before, end = chunk.sequence.tokens + drafts, row.start + len(row.tokens)
            self.write(row, before, written)
            if row.wanted != Wanted.NOTHING:
                assert end == len(chunk.sequence.tokens) + len(drafts)
                chosen.append([(token, None) for token in verified(chunk.sequence.tokens, drafts)])
            for _ in range(further):
                row = row._replace(start=row.start + 1, tokens=[next_token(before)])
                before = [*before, *row.tokens]
                self.write(row, before, written)
                chosen[-1].append((next_token(before), None))
            if row.targets is not None:
                predicted_by = [
                    row.start + row.targets.first + number for number in range(len(row.targets.tokens))
                ]
                assert row.start <= predicted_by[0] <= predicted_by[-1] < end
                assert row.targets.tokens == [chunk.sequence.tokens[place + 1] for place in predicted_by]
                scores.append(
                    [
                        TokenLogprob(token, pretended(before[: place + 1]))
                        for token, place in zip(row.targets.tokens, predicted_by, strict=True)
                    ]
                )
        for output in self.scheduler.advance(chunks, chosen, scores):
            self.outputs.setdefault(output.request, []).append(output)
        self.check(chunks)
        return chunks

    def check_sizes(self, chunks: list[ScheduledChunk], going_on: list[SequenceBlocks]) -> None:
        """Prompts have `pass_tokens` in a pass, and what goes on, with its drafts, as many more.

        Args:
            going_on: what is held by the sequences that lacked one token before the pass was planned.
        """
        goes_on = [any(chunk.sequence.blocks is held for held in going_on) for chunk in chunks]
        continuations = [chunk for chunk, goes in zip(chunks, goes_on, strict=True) if goes]
        prompts = [chunk for chunk, goes in zip(chunks, goes_on, strict=True) if not goes]
        assert all(chunk.tokens == 1 for chunk in continuations)
        assert sum(chunk.tokens + chunk.drafts for chunk in continuations) <= self.pass_tokens
        assert not any(chunk.drafts for chunk in prompts)
        assert sum(chunk.tokens for chunk in prompts) <= self.pass_tokens
        assert sum(chunk.missed for chunk in chunks) <= (self.pass_tokens if self.catches_up else 0)

    def check(self, chunks: list[ScheduledChunk]) -> None:
        assert chunks
        held = [sequence.blocks for sequence in self.scheduler.running]
        # What was for drafts only is given back, and what windows have left.
        for sequence in self.scheduler.running:
            length, size, computed = len(sequence.tokens), self.block_tokens, sequence.computed
            for table, window in zip(sequence.blocks.tables, self.windows, strict=True):
                assert table.length <= blocks_for(length, size)
                assert table.gone == (0 if window is None else max(0, computed - window + 1) // size)
                listed = [at for at, place in enumerate(self.places(table.runs)) if place is not None]
                assert listed == list(range(table.gone * size, table.length * size))
        assert len({id(chunk.sequence) for chunk in chunks}) == len(chunks) <= self.max_batch
        used = {block for one in held for table in one.tables for block in table.blocks}
        assert self.pool.free == self.blocks - len(used)
        self.most_used = max(self.most_used, len(used))

    def run(self, most: int = 1000) -> None:
        for _ in range(most):
            if self.scheduler.idle:
                return
            self.step()
        raise AssertionError(f"not done after {most} passes")

    def passes_of(self, number: int) -> list[int]:
        return [
            at
            for at, chunks in enumerate(self.passes)
            if any(s.sequence.request.id == number for s in chunks)
        ]

    def tokens(self, number: int) -> list[int]:
        return [output.token for output in self.outputs[number] if output.token is not None]

    def prompt_logprobs(self, number: int) -> list[TokenLogprob]:
        return [logprob for output in self.outputs[number] for logprob in output.prompt_logprobs]


def scores(prompt: list[int]) -> list[TokenLogprob]:
    """What must come out for a prompt, computed alone."""
    return [
        TokenLogprob(token, pretended(list(prompt[:place])))
        for place, token in enumerate(prompt)
        if place
    ]
