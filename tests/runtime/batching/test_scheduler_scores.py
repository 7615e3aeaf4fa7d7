"""Prompts whose likelihood is asked for."""

from __future__ import annotations

from tests.runtime.batching.machine import Machine, ask, continued, scores


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
    computed = [
        sum(chunk.tokens for chunks in machine.passes[at : at + 1] for chunk in chunks)
        for at in range(3)
    ]
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
