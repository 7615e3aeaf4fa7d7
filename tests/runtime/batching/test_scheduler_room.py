"""Who gets blocks where they are few: texts that run and that wait, drafts, groups with windows."""

from __future__ import annotations

from surgeon.runtime.batching.blocks import longest_text, text_blocks
from tests.runtime.batching.machine import Machine, ask, continued


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
    # 12 tokens in the cache, 3 blocks each.
    requests = [ask(number, [number + 1] * 5, 8) for number in range(4)]
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
    early = [
        number
        for number in range(400)
        if len(continued(ask(number, [number], 100, ignore_end=False))) < 9
    ][:40]
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
    assert longest_text(12, windows, 1000, 4) == 40
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
