"""What passes are made of: a cache of plain lists stands for the ranks and holds the scheduler to what it promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surgeon.runtime.batching.blocks import GONE, BlockPool
from surgeon.runtime.batching.request import QueueFull, Request, Sampling, TokenLogprob
from surgeon.runtime.batching.scheduler import Limits, Output, Scheduler
from surgeon.runtime.batching.sequence import Row, ScheduledChunk, Wanted
from surgeon.runtime.batching.windows import Windows, longest_text, text_blocks

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


def ask(number: int, prompt: list[int], new: int, ignore_end: bool = True, scored: bool = False) -> Request:
    sampling = Sampling(max_new_tokens=new, ignore_end=ignore_end, prompt_logprobs=0 if scored else None)
    return Request(number, tuple(prompt), sampling)


def drafted(chunk: ScheduledChunk) -> list[int]:
    """Guesses of what follows, some of them wrong, in the order in which passes would make them."""
    tokens, first = list(chunk.sequence.tokens), len(chunk.sequence.tokens)
    for number in range(chunk.drafts):
        row = chunk.drafting_row(tokens[first:])
        assert (row.start, row.tokens) == (first - 1 + number, [tokens[-1]])
        tokens.append(next_token(tokens) if len(tokens) % 5 else 1)
    return tokens[first:]


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
    max_waiting: int = 64
    draft_tokens: int = 0
    windows: Windows = (None,)
    share: float = 1.0  # of their limits, that texts are expected to come to at first
    outputs: dict[int, list[Output]] = field(default_factory=dict)
    passes: list[list[ScheduledChunk]] = field(default_factory=list)
    most_used: int = 0

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.blocks, self.block_tokens, self.windows)
        waiting, ends = self.max_waiting, (END,)
        limits = Limits(self.max_batch, 1000, waiting, self.pass_tokens, ends, self.draft_tokens, self.share)
        self.scheduler = Scheduler(self.pool, limits)
        self.cache: list[int | None] = [None] * (self.blocks * self.block_tokens)

    def places(self, runs: list[tuple[int, int]]) -> list[int | None]:
        """Of a sequence's tokens in the cache; None where they are gone."""
        size, found = self.block_tokens, list[int | None]()
        for first, length in runs:
            found += [None] * length * size if first == GONE else range(first * size, (first + length) * size)
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

    def step(self) -> list[ScheduledChunk]:
        """One pass: what is read from the cache must be the tokens before, whoever wrote them."""
        chunks = self.scheduler.plan()
        self.passes.append(chunks)
        written: set[int] = set()
        chosen, scores = [], []
        assert [chunk.drafts for chunk in chunks] == sorted((chunk.drafts for chunk in chunks), reverse=True)
        for chunk in chunks:
            drafts = drafted(chunk)
            row = chunk.row(drafts)
            before, end = chunk.sequence.tokens + drafts, row.start + len(row.tokens)
            self.write(row, before, written)
            if row.wanted != Wanted.NOTHING:
                assert end == len(chunk.sequence.tokens) + len(drafts)
                chosen.append([(token, None) for token in verified(chunk.sequence.tokens, drafts)])
            if row.targets is not None:
                predicted_by = [row.start + row.targets.first + number for number in range(len(row.targets.tokens))]
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

    def check(self, chunks: list[ScheduledChunk]) -> None:
        assert chunks
        assert sum(chunk.tokens for chunk in chunks if chunk.tokens > 1) <= self.pass_tokens  # of prompts
        assert sum(1 + chunk.drafts for chunk in chunks if chunk.tokens == 1) <= self.pass_tokens + self.max_batch
        held = [sequence.held for sequence in self.scheduler.running]
        for sequence in self.scheduler.running:  # what was for drafts only is given back, and what windows have left
            length, size, computed = len(sequence.tokens), self.block_tokens, sequence.computed
            for table, window in zip(sequence.held.tables, self.windows, strict=True):
                assert table.length <= self.pool.blocks_for(length)
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
        return [at for at, chunks in enumerate(self.passes) if any(s.sequence.request.id == number for s in chunks)]

    def tokens(self, number: int) -> list[int]:
        return [output.token for output in self.outputs[number] if output.token is not None]

    def prompt_logprobs(self, number: int) -> list[TokenLogprob]:
        return [logprob for output in self.outputs[number] for logprob in output.prompt_logprobs]


def scores(prompt: list[int]) -> list[TokenLogprob]:
    """What must come out for a prompt, computed alone."""
    return [TokenLogprob(token, pretended(list(prompt[:place]))) for place, token in enumerate(prompt) if place]


def test_prompts_in_chunks_beside_continuations() -> None:
    machine = Machine(pass_tokens=8)
    machine.scheduler.submit(ask(0, [1, 2, 3], 6))
    machine.scheduler.submit(ask(1, list(range(20)), 2))
    machine.run()
    sizes = [[(chunk.sequence.request.id, chunk.tokens) for chunk in chunks] for chunks in machine.passes]
    assert sizes[:4] == [[(0, 3), (1, 5)], [(0, 1), (1, 8)], [(0, 1), (1, 7)], [(0, 1), (1, 1)]]
    assert machine.tokens(0) == continued(ask(0, [1, 2, 3], 6))
    assert machine.tokens(1) == continued(ask(1, list(range(20)), 2))


def test_drafts_have_blocks_only_while_they_are_verified() -> None:
    machine = Machine(blocks=16, draft_tokens=6, pass_tokens=32)
    machine.scheduler.submit(ask(0, [1, 2, 3], 20))
    machine.scheduler.submit(ask(1, [4, 5], 4))
    machine.step()
    drafts = []
    while not machine.scheduler.idle:
        drafts.append([chunk.drafts for chunk in machine.step()])
    # As many as there are tokens to come, but one, which comes with them.
    assert drafts[0] == [6, 2]
    assert machine.tokens(0) == continued(ask(0, [1, 2, 3], 20))
    assert machine.tokens(1) == continued(ask(1, [4, 5], 4))
    tally = machine.scheduler.tally
    assert tally.drafted == sum(map(sum, drafts))
    assert 0 < tally.accepted < tally.drafted
    last = machine.outputs[0][-1]
    assert 0 < last.accepted < last.drafted < tally.drafted
    assert machine.pool.free == machine.blocks


def test_no_text_is_preempted_for_drafts() -> None:
    """Two texts that need all blocks for themselves: drafts get what is left."""
    machines = [Machine(blocks=8, max_batch=2, draft_tokens=number) for number in (0, 7)]
    for machine in machines:
        for number in range(2):
            machine.scheduler.submit(ask(number, [1, 2, 3 + number], 12))
        machine.run()
    assert [machine.scheduler.tally.preempted for machine in machines] == [0, 0]
    assert machines[0].outputs.keys() == machines[1].outputs.keys()
    assert machines[0].tokens(0) == machines[1].tokens(0)
    assert len(machines[1].passes) < len(machines[0].passes)


def test_what_rows_are_to_give() -> None:
    scheduler = Machine(pass_tokens=8).scheduler
    scheduler.submit(Request(0, (1, 2, 3), Sampling(temperature=1.0, seed=0, max_new_tokens=9)))
    scheduler.submit(ask(1, list(range(9)), 1))
    assert [chunk.row().wanted for chunk in scheduler.plan()] == [Wanted.LOGITS, Wanted.NOTHING]
    with_logprobs = Machine().scheduler
    with_logprobs.submit(Request(0, (1,), Sampling(logprobs=0, max_new_tokens=9)))
    with_logprobs.submit(Request(1, (1,), Sampling(max_new_tokens=9)))
    assert [chunk.row().wanted for chunk in with_logprobs.plan()] == [Wanted.LOGITS, Wanted.BEST]


def test_the_batch_is_refilled_as_soon_as_one_ends() -> None:
    machine = Machine(max_batch=2)
    for number, new in enumerate([2, 5, 3]):
        machine.scheduler.submit(ask(number, [number + 1], new))
    machine.run()
    present = [sorted(chunk.sequence.request.id for chunk in chunks) for chunks in machine.passes]
    assert present == [[0, 1], [0, 1], [1, 2], [1, 2], [1, 2]]


def test_nobody_is_let_past_the_first_in_the_queue() -> None:
    machine = Machine(blocks=4, max_batch=4)
    lengths = [9, 12, 1]
    for number, length in enumerate(lengths):
        machine.scheduler.submit(ask(number, [number] * length, 3))
    machine.step()
    assert [sequence.request.id for sequence in machine.scheduler.running] == [0]
    machine.run()
    starts = [machine.passes_of(number)[0] for number in range(3)]
    assert starts == sorted(starts)
    for number, length in enumerate(lengths):
        assert machine.tokens(number) == continued(ask(number, [number] * length, 3))


def test_the_youngest_is_preempted_and_the_oldest_never() -> None:
    machine = Machine(blocks=6, max_batch=3, share=0)
    requests = [ask(number, [number + 1] * 3, 14) for number in range(4)]
    for request in requests:
        machine.scheduler.submit(request)
    machine.run()
    assert machine.scheduler.tally.preempted > 0
    assert machine.passes_of(0) == list(range(14))
    ends = [machine.passes_of(request.id)[-1] for request in requests]
    assert ends == sorted(ends)
    assert all(machine.tokens(request.id) == continued(request) for request in requests)


def test_what_a_preempted_one_gave_back_it_shares_when_it_returns() -> None:
    machine = Machine(blocks=8, max_batch=2, pass_tokens=32, share=0)
    for number in range(2):
        machine.scheduler.submit(ask(number, [number] * 10, 12))
    machine.run()
    (returned,) = [
        chunks
        for chunks in machine.passes[1:]
        for chunk in chunks
        if chunk.sequence.request.id == 1 and chunk.tokens > 1
    ]
    assert machine.scheduler.tally.preempted == 1
    computed = sum(chunk.tokens for chunks in machine.passes for chunk in chunks)
    assert returned
    assert computed < 2 * 21 + 18  # all tokens once, and of those given back not all again


def test_texts_that_together_fit_exactly_run_together() -> None:
    """No block is held back for a text that has all it will ever need."""
    machine = Machine(blocks=12, max_batch=4, pass_tokens=64)
    requests = [ask(number, [number + 1] * 5, 8) for number in range(4)]  # 12 tokens in the cache, 3 blocks each
    for request in requests:
        machine.scheduler.submit(request)
    machine.step()
    assert len(machine.scheduler.running) == 4
    used = []
    while not machine.scheduler.idle:
        machine.step()
        used.append(12 - machine.pool.free)
    assert max(used) == 12
    assert machine.scheduler.tally.preempted == 0
    assert all(machine.tokens(request.id) == continued(request) for request in requests)


def test_a_block_is_held_back_for_texts_that_will_need_it() -> None:
    machine = Machine(blocks=4, max_batch=2)
    machine.scheduler.submit(ask(0, [1] * 7, 5))  # 2 blocks now, 3 in the end
    machine.scheduler.submit(ask(1, [2] * 7, 2))  # 2 blocks
    machine.step()
    assert [sequence.request.id for sequence in machine.scheduler.running] == [0]
    machine.run()
    assert machine.scheduler.tally.preempted == 0


def test_more_texts_than_blocks_all_end_right() -> None:
    """Twenty that together want several times the cache; at times they have all of it."""
    machine = Machine(blocks=12, max_batch=8, pass_tokens=24, share=0)
    requests = [ask(number, [number % 5 + 1] * (1 + number % 6), 8 + number % 9) for number in range(20)]
    for request in requests:
        machine.scheduler.submit(request)
    free, batches = [], []
    while not machine.scheduler.idle:
        batches.append(len(machine.step()))
        if machine.scheduler.waiting:
            free.append(machine.pool.free)
    assert max(batches) > 3
    assert min(free) == 0
    assert machine.pool.free == 12
    for request in requests:
        assert machine.tokens(request.id) == continued(request)


def test_prompts_are_scored_in_chunks_and_nothing_twice() -> None:
    machine = Machine(pass_tokens=8)
    prompts = [list(range(1, 21)), [7], [5, 6, 7, 8, 9]]
    for number, prompt in enumerate(prompts):
        machine.scheduler.submit(ask(number, prompt, number, scored=True))
    machine.run()
    for number, prompt in enumerate(prompts):
        assert machine.prompt_logprobs(number) == scores(prompt)
        assert machine.tokens(number) == continued(ask(number, prompt, number))
        assert machine.outputs[number][-1].finish_reason == "length"
    assert machine.pool.free == machine.blocks


def test_a_prompt_is_scored_anew_though_its_blocks_are_known() -> None:
    machine = Machine(blocks=32)
    prompt = list(range(1, 14))
    for number, scored in enumerate([False, True, False]):
        machine.scheduler.submit(ask(number, prompt, 1, scored=scored))
        machine.run()
    computed = [sum(chunk.tokens for chunks in machine.passes[at : at + 1] for chunk in chunks) for at in range(3)]
    assert computed == [13, 13, 1]
    assert machine.prompt_logprobs(1) == scores(prompt)
    assert machine.prompt_logprobs(2) == []


def test_a_prompt_whose_scoring_is_broken_off_goes_on_where_it_was() -> None:
    """The younger one is preempted amid its prompt, and what it has told is not told again."""
    machine = Machine(blocks=6, max_batch=2, pass_tokens=2, share=0)
    machine.scheduler.submit(ask(0, [1] * 3, 12))
    machine.scheduler.submit(ask(1, list(range(1, 16)), 1, scored=True))
    while not machine.scheduler.tally.preempted:
        machine.step()
    assert 0 < len(machine.prompt_logprobs(1)) < 14
    machine.run()
    assert machine.prompt_logprobs(1) == scores(list(range(1, 16)))
    assert machine.tokens(1) == continued(ask(1, list(range(1, 16)), 1))


def test_nothing_to_add() -> None:
    machine = Machine(pass_tokens=8)
    machine.scheduler.submit(ask(0, [1] * 12, 0))
    machine.run()
    assert [(output.token, output.finish_reason) for output in machine.outputs[0]] == [(None, "length")]
    assert machine.scheduler.tally.new_tokens == 0


def test_prefixes_are_shared_between_requests() -> None:
    machine = Machine(blocks=32)
    prompt = list(range(13))
    machine.scheduler.submit(ask(0, prompt, 3))
    machine.run()
    for number in (1, 2):
        machine.scheduler.submit(ask(number, [*prompt, number], 3))
    chunks = machine.step()
    assert [chunk.tokens for chunk in chunks] == [2, 2]
    assert machine.scheduler.tally.cached_tokens == 24
    assert len({block for chunk in chunks for block in chunk.sequence.held.tables[0].blocks}) == 3 + 2
    machine.run()
    assert all(machine.tokens(number) == continued(ask(number, [*prompt, number], 3)) for number in (1, 2))
    assert machine.outputs[1][-1].cached == 12
    assert machine.pool.free == 32


def test_cancelling_frees_blocks_at_once() -> None:
    machine = Machine(blocks=4, max_batch=4)
    for number in range(3):
        machine.scheduler.submit(ask(number, [number] * 11, 3))
    machine.step()
    assert machine.pool.free == 1
    cancelled = machine.scheduler.cancel(0)
    assert cancelled is not None
    assert (cancelled.request, cancelled.token, cancelled.finish_reason) == (0, None, "cancelled")
    assert machine.pool.free == 4
    assert machine.scheduler.cancel(0) is None
    waiting = machine.scheduler.cancel(2)
    assert waiting is not None
    machine.run()
    assert set(machine.outputs) == {0, 1}
    assert machine.tokens(1) == continued(ask(1, [1] * 11, 3))


def test_ends() -> None:
    stopping, going_on = ask(0, [2], 40, ignore_end=False), ask(1, [2], 40)
    assert len(continued(stopping)) < 40
    machine = Machine(blocks=32)
    machine.scheduler.submit(stopping)
    machine.scheduler.submit(going_on)
    machine.run()
    assert machine.tokens(0) == continued(stopping)
    assert machine.tokens(0)[-1] == END
    assert [output.finish_reason for output in machine.outputs[0]][-2:] == [None, "stop"]
    assert machine.tokens(1) == continued(going_on)
    assert machine.outputs[1][-1].finish_reason == "length"


def test_refusals() -> None:
    scheduler = Machine(blocks=4, max_batch=1, max_waiting=1).scheduler
    for request, message in [
        (ask(0, [], 1), "the prompt is empty"),
        (ask(0, [1] * 10, 7), "10 tokens of the prompt and 7 new ones are more than the 16 that fit; .* at most 6 new"),
        (ask(0, [1] * 16, 1), "more than the 16 that fit; shorten the prompt"),
    ]:
        with pytest.raises(ValueError, match=message):
            scheduler.submit(request)
    scheduler.submit(ask(0, [1] * 10, 6))
    scheduler.submit(ask(1, [1], 1))
    with pytest.raises(QueueFull, match="2 requests are open already"):
        scheduler.submit(ask(2, [1], 1))
    with pytest.raises(ValueError, match="pass_tokens must be at least 8, not 4"):
        Limits(8, 100, pass_tokens=4)


jobs = st.tuples(
    st.lists(st.integers(0, 2), min_size=1, max_size=14),  # few different tokens, so that prefixes are often shared
    st.integers(0, 12),
    st.booleans(),  # whether it is to be scored
    st.integers(0, 6),  # passes until the next one comes
    st.none() | st.integers(0, 8),  # passes until it is cancelled, if it is
)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(jobs, min_size=1, max_size=9),
    st.integers(7, 12),
    st.integers(1, 4),
    st.integers(4, 20),
    st.sampled_from([0, 0, 1, 3, 9]),
    st.sampled_from([(None,), (None,), (3,), (1, None), (None, 5, 9)]),
    st.sampled_from([0.0, 0.4, 1.0]),
)
def test_whatever_comes_everything_ends_right(
    found: list[tuple[list[int], int, bool, int, int | None]],
    blocks: int,
    max_batch: int,
    pass_tokens: int,
    draft_tokens: int,
    windows: Windows,
    share: float,
) -> None:
    blocks = max(blocks, text_blocks(14 + 12, windows, 4))
    machine = Machine(blocks, 4, max_batch, pass_tokens, draft_tokens=draft_tokens, windows=windows, share=share)
    scheduler = machine.scheduler
    requests = [ask(number, prompt, new, scored=scored) for number, (prompt, new, scored, _, _) in enumerate(found)]
    actions: list[tuple[int, Callable[[], object]]] = []
    now = 0
    for request, (_, _, _, pause, patience) in zip(requests, found, strict=True):
        actions.append((now, lambda request=request: scheduler.submit(request)))
        if patience is not None:
            actions.append((now + patience, lambda request=request: scheduler.cancel(request.id)))
        now += pause
    clock = 0
    while actions or not scheduler.idle:
        for action in [action for action in actions if action[0] <= clock]:
            action[1]()
            actions.remove(action)
        if not scheduler.idle:
            machine.step()
        clock += 1
        assert clock < 3000
    assert machine.pool.free == blocks
    for request, (prompt, _, scored, _, patience) in zip(requests, found, strict=True):
        if patience is None:
            assert machine.tokens(request.id) == continued(request)
            assert machine.prompt_logprobs(request.id) == (scores(prompt) if scored else [])
            assert machine.outputs[request.id][-1].finish_reason == "length"
        elif request.id in machine.outputs:
            tokens = machine.tokens(request.id)
            assert tokens == continued(request)[: len(tokens)]
    begun = [machine.passes_of(request.id)[0] for request in requests if machine.passes_of(request.id)]
    assert begun == sorted(begun)


def test_texts_that_would_not_fit_together_wait_and_none_gives_way() -> None:
    """Two of four texts fit; where none is expected to become long all are let in, and give way again and again."""
    machines = [Machine(blocks=10, max_batch=4, pass_tokens=64, share=share) for share in (1, 0)]
    for machine in machines:
        for number in range(8):
            machine.scheduler.submit(ask(number, [number + 1] * 4, 16))
        machine.run()
    careful, hopeful = machines
    assert (careful.scheduler.tally.preempted, max(map(len, careful.passes))) == (0, 2)
    assert hopeful.scheduler.tally.preempted > 0
    assert all(careful.tokens(number) == hopeful.tokens(number) for number in range(8))


def test_more_texts_run_where_they_end_early() -> None:
    machine = Machine(blocks=30, max_batch=8, pass_tokens=64)
    early = [number for number in range(400) if len(continued(ask(number, [number], 100, ignore_end=False))) < 9][:40]
    for number in early:
        machine.scheduler.submit(ask(number, [number], 100, ignore_end=False))
    machine.run()
    assert len(machine.passes[0]) == 1  # one of 101 tokens fits
    assert max(map(len, machine.passes)) > 4
    assert machine.scheduler.expected.share < 0.2


def test_a_long_text_holds_what_its_window_reaches() -> None:
    """With and without others beside it, in chunks of prompts and token by token."""
    machine = Machine(blocks=40, max_batch=2, pass_tokens=8, windows=(6,))
    machine.scheduler.submit(ask(0, list(range(100)), 60))
    machine.run()
    assert machine.most_used <= text_blocks(160, (6,), 4) + 2  # the blocks of one chunk of 8 tokens
    assert machine.tokens(0) == continued(ask(0, list(range(100)), 60))
    tight = Machine(blocks=4, max_batch=3, pass_tokens=8, windows=(6,))
    for number in range(3):
        tight.scheduler.submit(ask(number, list(range(number, 50 + number)), 20))
    tight.run()
    assert all(tight.tokens(at) == continued(ask(at, list(range(at, 50 + at)), 20)) for at in range(3))


def test_groups_with_and_without_windows_share_the_blocks() -> None:
    """Twelve blocks of one table each are nine of a long text's full table and three of its window's."""
    windows = (None, 5)
    machine = Machine(blocks=12, pass_tokens=4, windows=windows)
    assert machine.scheduler.longest == longest_text(12, windows, 1000, 4) == 40
    with pytest.raises(ValueError, match="more than the 40 that fit"):
        machine.scheduler.submit(ask(0, [1] * 31, 10))
    machine.scheduler.submit(ask(0, [1] * 31, 9))
    machine.run()
    assert machine.tokens(0) == continued(ask(0, [1] * 31, 9))
    assert machine.scheduler.tally.preempted == 0


def test_prefixes_are_shared_behind_a_window_too() -> None:
    """What the window of the first text has left is shared by later ones as long as the last of it is there."""
    for windows in ((5,), (None, 5)):
        machine = Machine(blocks=40, pass_tokens=64, windows=windows)
        prompt = list(range(24))
        for number, more in enumerate([[], [7, 8], [9] * 5]):
            machine.scheduler.submit(ask(number, prompt + more, 12))
            machine.run()
        assert [machine.outputs[number][0].cached for number in range(3)] == [0, 24, 24]
        for number, more in [(1, [7, 8]), (2, [9] * 5)]:
            assert machine.tokens(number) == continued(ask(number, prompt + more, 12))
