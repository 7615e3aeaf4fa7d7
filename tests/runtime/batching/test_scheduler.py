"""What passes are made of, and that whatever comes ends right; `Machine` checks every pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surgeon.runtime.batching.blocks import BlockPool, Windows, text_blocks
from surgeon.runtime.batching.request import (
    UNDEFINED,
    LongTexts,
    Request,
    Sampling,
    Wanted,
    check_length,
)
from surgeon.runtime.batching.scheduler import Limits, Scheduler
from tests.runtime.batching.machine import END, Machine, ask, continued, scores


def test_prompts_in_chunks_beside_continuations() -> None:
    machine = Machine(pass_tokens=8)
    machine.scheduler.submit(ask(0, [1, 2, 3], 6))
    machine.scheduler.submit(ask(1, list(range(20)), 2))
    machine.run()
    sizes = [
        [(chunk.sequence.request.id, chunk.tokens) for chunk in chunks] for chunks in machine.passes
    ]
    assert sizes[:4] == [[(0, 3), (1, 5)], [(0, 1), (1, 8)], [(0, 1), (1, 7)], [(0, 1), (1, 1)]]
    assert machine.tokens(0) == continued(ask(0, [1, 2, 3], 6))
    assert machine.tokens(1) == continued(ask(1, list(range(20)), 2))


def test_what_rows_are_to_give() -> None:
    scheduler = Machine(pass_tokens=8).scheduler
    scheduler.submit(Request(0, (1, 2, 3), Sampling(temperature=1.0, seed=0, max_new_tokens=9)))
    scheduler.submit(ask(1, list(range(9)), 1))
    assert [chunk.rows()[0].wanted for chunk in scheduler.plan()] == [Wanted.LOGITS, Wanted.NOTHING]
    with_logprobs = Machine().scheduler
    with_logprobs.submit(Request(0, (1,), Sampling(logprobs=0, max_new_tokens=9)))
    with_logprobs.submit(Request(1, (1,), Sampling(max_new_tokens=9)))
    assert [chunk.rows()[0].wanted for chunk in with_logprobs.plan()] == [Wanted.LOGITS, Wanted.BEST]


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


def test_passes_at_once() -> None:
    machine = Machine(at_once=8)
    requests = [ask(0, [1, 2], 20, ignore_end=False), ask(1, [4, 7, 2], 9)]
    for request in requests:
        machine.scheduler.submit(request)
    machine.run()
    for request in requests:
        assert machine.tokens(request.id) == continued(request)
    longest = max(len(continued(request)) for request in requests)
    assert len(machine.passes) <= 2 + longest // 4
    assert machine.scheduler.tally.new_tokens == sum(len(continued(request)) for request in requests)


def begun(sampling: Sampling, blocks: int = 16, waiting: int = 0, drafts: int = 0) -> Machine:
    """A text of which the prompt has been computed."""
    machine = Machine(blocks, max_batch=1, draft_tokens=drafts)
    for number in range(1 + waiting):
        machine.scheduler.submit(Request(number, (1, 2, 5), sampling))
    machine.step()
    return machine


def test_how_many_passes_need_nothing_of_the_scheduler() -> None:
    greedy = Sampling(max_new_tokens=6, ignore_end=True)
    drawn = Sampling(max_new_tokens=6, ignore_end=True, temperature=1.0, seed=0)
    for machine, count in (
        (begun(greedy), 5),  # it ends then
        (begun(greedy, blocks=1), 1),  # its blocks end now
        (begun(greedy, waiting=1), 1),
        (begun(greedy, drafts=2), 1),
        (begun(drawn), 1),
    ):
        assert machine.scheduler.passes_at_once(machine.scheduler.plan(), 8) == count


def test_a_token_that_is_undefined_ends_a_text_within_passes_at_once() -> None:
    scheduler = begun(Sampling(max_new_tokens=9, ignore_end=True)).scheduler
    chunks = scheduler.plan()
    assert scheduler.passes_at_once(chunks, 3) == 3
    choices = [(5, None), (UNDEFINED, None), (7, None)]
    found = scheduler.advance(chunks, [choices])
    assert [(each.token, each.finish_reason) for each in found] == [(5, None), (None, "undefined")]
    assert scheduler.idle
    assert scheduler.pool.free == scheduler.pool.blocks


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
    assert len({block for chunk in chunks for block in chunk.sequence.blocks.tables[0].blocks}) == 3 + 2
    machine.run()
    assert all(
        machine.tokens(number) == continued(ask(number, [*prompt, number], 3)) for number in (1, 2)
    )
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
    for request, message in [
        (ask(0, [], 1), "the prompt is empty"),
        (
            ask(0, [1] * 10, 7),
            "10 tokens of the prompt and 7 new ones are more than the 16 that fit; .* at most 6 new",
        ),
        (ask(0, [1] * 16, 1), "more than the 16 that fit; shorten the prompt"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_length(request, 16)
    check_length(ask(0, [1] * 10, 6), 16)


jobs = st.tuples(
    # Few different tokens, so that prefixes are often shared.
    st.lists(st.integers(0, 2), min_size=1, max_size=14),
    st.integers(0, 12),
    st.booleans(),  # whether it is to be scored
    st.integers(0, 6),  # passes until the next one comes
    st.none() | st.integers(0, 8),  # passes until it is cancelled, if it is
)


@settings(max_examples=100)
@given(
    st.lists(jobs, min_size=1, max_size=9),
    st.integers(7, 12),
    st.integers(1, 4),
    st.integers(4, 20),
    st.sampled_from([0, 0, 1, 3, 9]),
    st.sampled_from([(None,), (None,), (3,), (1, None), (None, 5, 9)]),
    st.sampled_from([0.0, 0.4, 1.0]),
    st.booleans(),
    st.sampled_from([1, 1, 3, 8]),
)
def test_whatever_comes_everything_ends_right(
    found: list[tuple[list[int], int, bool, int, int | None]],
    blocks: int,
    max_batch: int,
    pass_tokens: int,
    draft_tokens: int,
    windows: Windows,
    share: float,
    catches_up: bool,
    at_once: int,
) -> None:
    blocks = max(blocks, text_blocks(14 + 12, windows, 4))
    own = {"windows": windows, "share": share, "catches_up": catches_up and windows == (None,)}
    own["at_once"] = at_once
    machine = Machine(blocks, 4, max_batch, pass_tokens, draft_tokens=draft_tokens, **own)
    scheduler = machine.scheduler
    requests = [
        ask(number, prompt, new, scored=scored)
        for number, (prompt, new, scored, _, _) in enumerate(found)
    ]
    actions: list[tuple[int, Callable[[], object]]] = []
    now = 0
    for request, (*_, pause, patience) in zip(requests, found, strict=True):
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


def test_a_text_that_grows_beyond_a_length_is_computed_anew() -> None:
    """All its tokens as a prompt, once; what is drafted before stays within the length."""
    limits = Limits(
        1, 100, pass_tokens=16, draft_tokens=4, long_texts=LongTexts(10, by_length=False, anew=True)
    )
    scheduler, seen = Scheduler(BlockPool(16, 4), limits), []
    scheduler.submit(ask(0, [1] * 6, 12))
    while not scheduler.idle:
        (chunk,) = scheduler.plan()
        seen.append((chunk.sequence.computed, chunk.tokens + chunk.drafts, chunk.sequence.prompt))
        scheduler.advance([chunk], [[(5, None)] * (1 + chunk.drafts)])
    assert seen == [(0, 6, 6), (6, 4, 6), (0, 11, 11), (11, 5, 11), (16, 1, 11)]


def test_texts_share_what_keys_are_the_same_of() -> None:
    """With texts of their own kind, or of their own length."""
    for by_length, shared in ((False, 12), (True, 0)):
        limits = Limits(1, 100, long_texts=LongTexts(10, by_length, anew=False))
        scheduler, cached = Scheduler(BlockPool(64, 4), limits), []
        for number, length in enumerate((9, 12, 13, 12, 10)):
            scheduler.submit(ask(number, list(range(length)), 1))
            while not scheduler.idle:
                cached += [
                    output.cached for output in scheduler.advance(scheduler.plan(), [[(5, None)]])
                ]
        assert cached == [0, 0, shared, 8, 8]
