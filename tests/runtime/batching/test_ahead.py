"""How many tokens are drafted: by the equation where all is known, and in rounds whose times are made up."""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress
from random import Random
from statistics import fmean
from typing import Any

import pytest

from surgeon.runtime.batching.ahead import (
    ASK_AFTER,
    FEW_MISSED,
    FEWEST,
    LEAST_GAIN,
    USED_AGAIN,
    Ahead,
    Hits,
    PassTimes,
    best_ahead,
)

Seconds = Callable[[int], float]


def test_times_lie_between_those_that_were_measured() -> None:
    times = PassTimes()
    assert not times.is_known
    for tokens, seconds in ((4, 9.0), (4, 2.0), (8, 9.0), (8, 4.0), (2, 9.0)):
        times.note(tokens, seconds)
    assert [times.estimate(tokens) for tokens in (1, 4, 5, 6, 8, 100)] == [2.0, 2.0, 2.5, 3.0, 4.0, 4.0]
    times.note(4, 3.0)
    assert times.estimate(4) == pytest.approx(2.125)
    times.note(4, 100.0)  # something else came between
    assert times.estimate(4) == pytest.approx(2.125 * 1.125)
    times.note(4, 0.0)
    assert times.estimate(4) == pytest.approx(2.125 * 1.125 / 2)
    assert times.count(4) < FEWEST
    times.note(4, 4.0)
    assert times.count(4) >= FEWEST
    assert times.mean(4) == 3.0  # the median of the first
    times.note(4, 100.0)
    assert times.mean(4) == 3.5  # as if it had been 6
    assert [times.at_most(tokens) for tokens in (8, 24)] == [4.0, 12.0]


def test_the_first_pass_of_a_size_counts_apart() -> None:
    """By how much longer it took than the second, but for a few passes at most; it does not say how long others are."""
    times = PassTimes()
    for seconds in (12.0, 2.0):
        times.note(4, seconds)
    assert times.longer_at_first == 10.0
    assert [times.estimate(tokens) for tokens in (4, 8)] == [2.0, 2.0 + 10 / USED_AGAIN]
    assert [times.at_most(tokens) for tokens in (4, 8)] == [2.0, 2 * (2 + 10 / USED_AGAIN) + 10]
    times.note(8, 100.0)
    assert [times.estimate(8), times.at_most(8)] == [2.0, 4.0]
    times.note(8, 3.0)
    assert times.longer_at_first == (10 + 97) / 2
    chance = PassTimes()
    for seconds in (9.0, 2.0):  # not so much longer that it was recorded
        chance.note(4, seconds)
    assert chance.longer_at_first == 0.0


def measured(draft: Seconds, verify: Seconds) -> Ahead:
    """One that knows how long passes take, and has spent some time on them."""
    ahead = Ahead()
    for size in range(1, 40):
        ahead.drafting.note(size, draft(size))
        ahead.drafting.note(size, draft(size))
        for _ in range(FEWEST + 1):
            ahead.note_pass(size, verify(size))
    return ahead


@pytest.mark.parametrize("draft", [0.05, 0.2, 0.5, 0.8])
@pytest.mark.parametrize("chance", [0.28, 0.63, 0.9])
def test_one_text_is_drafted_for_as_the_equation_says(draft: float, chance: float) -> None:
    ahead = measured(lambda _: draft, lambda size: 1 + 0.05 * size)
    text = Hits(1e6, chance * 1e6)

    def rate(ahead: int) -> float:
        return sum(chance**place for place in range(ahead + 1)) / (
            ahead * draft + 1 + 0.05 * (ahead + 1)
        )

    best = max(range(9), key=rate)
    assert ahead.choose([text], [8]) == [best if rate(best) > LEAST_GAIN * rate(0) else 0]


def test_several_texts_are_drafted_for_nearly_as_is_best_of_all_numbers() -> None:
    """Against all of them tried; not for those that are seldom right, and no further than there is room."""
    ahead = measured(lambda size: 0.2 + 0.02 * size, lambda size: 1 + 0.1 * size)
    chances, most = [0.9, 0.2, 0.7], [3, 4, 2]
    texts = [Hits(1e6, chance * 1e6) for chance in chances]

    def rate(counts: tuple[int, ...]) -> float:
        tokens = sum(
            sum(a**place for place in range(k + 1)) for a, k in zip(chances, counts, strict=True)
        )
        passes = [sum(k > place for k in counts) for place in range(max(counts))]
        return tokens / (sum(0.2 + 0.02 * size for size in passes) + 1 + 0.1 * (3 + sum(counts)))

    every = [(x, y, z) for x in range(4) for y in range(5) for z in range(3)]
    found = ahead.choose(texts, most)
    assert found == [3, 0, 2]
    assert rate(tuple(found)) > 0.95 * max(map(rate, every)) > 1.1 * rate((0, 0, 0))


def speedup(
    draft: Seconds,
    verify: Seconds,
    chances: list[float],
    rounds: int = 600,
    noise: Callable[[Random], float] = lambda _: 1.0,
    wrong_until: int = 0,
    seed: int = 0,
    recording: float = 0.0,
    prompts: Seconds | None = None,
    length: int = 0,
) -> float:
    """Tokens per second of rounds with made-up times, beside those without drafts.

    Args:
        noise: how many times as long as usual a pass takes.
        wrong_until: the round before which no draft is right.
        recording: seconds that the first pass of a size takes besides, without drafts, too.
        prompts: of a draft with keys of its own, seconds of a pass over what it has missed; the model's take twice.
        length: how much it has missed of each text at first.
    """
    new = {(kind, size) for kind in (draft, verify) for size in range(100)}
    ahead, texts, random = Ahead(), [Hits() for _ in chances], Random(seed)
    count, tokens, seconds, extra, passes = len(texts), 0, 0.0, 0.0, 0
    missed = [length] * count
    if prompts is not None:
        ahead.prompts.note(length, 2 * prompts(length))
    for round_ in range(rounds):
        drafts = ahead.choose(
            texts, [8] * count, () if prompts is None else missed, [rounds - round_] * count
        )
        made_up = sum(compress(missed, drafts))
        if prompts is not None and made_up > FEW_MISSED:
            ahead.note_missed(made_up, prompts(made_up))
            seconds += prompts(made_up)
        sizes = [sum(number > place for number in drafts) for place in range(max(drafts))]
        for kind, note, size in (
            *((draft, ahead.note_draft, size) for size in sizes),
            (verify, ahead.note_pass, count + sum(drafts)),
        ):
            times = noise(random)
            own = times * kind(size) + recording * ((kind, size) in new)
            new.discard((kind, size))
            note(size, own)
            seconds, extra, passes = seconds + own, extra + times, passes + 1
        missed = [0 if number else one + 1 for one, number in zip(missed, drafts, strict=True)]
        for text, chance, number in zip(texts, chances, drafts, strict=True):
            wrong = round_ < wrong_until
            right = next(
                (place for place in range(number) if wrong or random.random() >= chance), number
            )
            ahead.note_verified(text, number, right)
            tokens += right + 1
    return (
        tokens
        / seconds
        / (count / verify(count))
        * (extra / passes + recording / verify(count) / tokens * count)
    )


def doubled(random: Random) -> float:
    """Every third pass takes twice as long."""
    return 1.0 + (random.random() < 1 / 3)


def interrupted(random: Random) -> float:
    """One pass of twenty takes ten times as long."""
    return 10.0 if random.random() < 0.05 else 1.0


def recorded(random: Random) -> float:
    """As passes on two ranks with two cores, beside ten other programs, were recorded: in units of their median."""
    return random.choice(
        (*(0.1,) * 8, 0.3, 0.3, 0.5, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.3, 1.5, 1.7, 1.8, 2.0, 2.7, 4.2)
    )


def steady(_: Random) -> float:
    """None does."""
    return 1.0


@pytest.mark.parametrize("chances", [[0.8], [0.9, 0.2, 0.7, 0.5]])
def test_it_switches_itself_off_where_drafts_do_not_pay(chances: list[float]) -> None:
    assert speedup(lambda _: 1.0, lambda _: 1.0, chances) > 0.98  # a draft that is as slow as the model
    assert speedup(lambda _: 0.5, float, chances) > 0.97  # a model that gains nothing by batches
    assert speedup(lambda _: 0.3, lambda _: 1.0, [0.05] * len(chances)) > 0.97  # drafts that are wrong


def test_it_comes_near_the_best_where_they_pay() -> None:
    best = max(sum(0.9**place for place in range(k + 1)) / (k * 0.2 + 1) for k in range(9))
    assert speedup(lambda _: 0.2, lambda _: 1.0, [0.9]) > 0.9 * best
    mixed = speedup(lambda _: 0.2, lambda size: 1 + 0.02 * size, [0.95, 0.95, 0.0, 0.0])
    assert mixed > 1.2


@pytest.mark.parametrize("noise", [steady, doubled, interrupted])
def test_what_it_loses_is_bounded_in_the_long_run(noise: Callable[[Random], float]) -> None:
    assert speedup(lambda _: 1.0, lambda _: 1.0, [0.8], 2000, noise) > 0.97
    assert speedup(lambda _: 0.5, float, [0.8], 2000, noise) > 0.97
    assert speedup(lambda _: 0.3, lambda _: 1.0, [0.0], 2000, noise) > 0.97
    # Where they come out even.
    assert speedup(lambda _: 0.5, lambda size: 1 + 0.1 * size, [0.6], 2000, noise) > 0.97


def test_what_it_loses_beside_many_programs_is_bounded_on_average() -> None:
    """Single runs differ by more, where a pass takes a tenth of the usual or four times as long."""
    for draft, verify, chance in (
        (1.0, lambda _: 1.0, 0.8),
        (0.5, float, 0.8),
        (0.3, lambda _: 1.0, 0.0),
    ):
        found = [
            speedup(lambda _, own=draft: own, verify, [chance], 1000, recorded, seed=seed)
            for seed in range(8)
        ]
        assert fmean(found) > 0.95
        assert min(found) > 0.8
    assert (
        fmean(
            speedup(lambda _: 0.35, lambda _: 1.0, [0.9], 1000, recorded, seed=seed) for seed in range(8)
        )
        > 1.3
    )


@pytest.mark.parametrize("recording", [5.0, 20.0])
def test_first_passes_that_take_long_are_risked_when_there_was_time_to_lose_them(
    recording: float,
) -> None:
    """And only few sizes of passes are tried, where many texts with many drafts could have any."""
    for draft, chance, texts in ((1.0, 0.8, 1), (0.3, 0.0, 1), (0.01, 0.9, 1), (0.01, 0.9, 8)):
        for rounds in (192, 1500):

            def verify(size: int) -> float:
                return 1 + 0.1 * size

            own = {"rounds": rounds, "recording": recording * verify(texts)}
            assert speedup(lambda _, draft=draft: draft, verify, [chance] * texts, **own) > 0.97
    assert speedup(lambda _: 0.01, verify, [0.9], 3000, recording=recording) > 1.5
    assert speedup(lambda _: 0.01, verify, [0.9] * 8, 3000, recording=recording * verify(8)) > (
        1.1 if recording < 20 else 0.97
    )


def test_whether_drafts_pay_is_not_asked_with_each_pass_where_they_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which takes as long as a tenth of a pass of a small model."""
    asked = []

    def counted(*arguments: Any) -> tuple[list[int], float]:
        asked.append(arguments)
        return best_ahead(*arguments)

    monkeypatch.setattr("surgeon.runtime.batching.ahead.best_ahead", counted)
    ahead = measured(lambda _: 1.0, lambda _: 1.0)
    found = [ahead.choose([Hits()] * 4, [8] * 4) for _ in range(600)]
    assert 5 <= sum(map(any, found)) < len(asked) <= 600 / ASK_AFTER + 6
    asked.clear()
    ahead.choose([Hits()] * 5, [8] * 5)  # other texts
    assert len(asked) == 1


@pytest.mark.parametrize("rounds", [24, 48, 192])
def test_a_short_text_loses_a_few_passes(rounds: int) -> None:
    """Two and 1.5%, and one more where the model gains nothing by computing tokens together."""
    for own, chance in ((1.0, 0.8), (0.5, 0.5), (0.3, 0.0)):
        draft = {1: own}.__getitem__
        for seed in range(5):
            assert speedup(draft, lambda _: 1.0, [chance], rounds, seed=seed) > rounds / (
                1.015 * rounds + 2
            )
            assert speedup(draft, float, [chance], rounds, seed=seed) > rounds / (1.015 * rounds + 3)


@pytest.mark.parametrize("noise", [steady, doubled, interrupted])
def test_drafts_over_a_link_pay_all_the_same(noise: Callable[[Random], float]) -> None:
    """As fast as if they were certain: those that are right from the beginning, and those that become so."""
    best = max(sum(0.9**place for place in range(k + 1)) / (k * 0.35 + 1) for k in range(9))
    assert speedup(lambda _: 0.35, lambda _: 1.0, [0.9], 2000, noise) > 0.93 * best
    late = speedup(lambda _: 0.35, lambda _: 1.0, [0.9], 2000, noise, wrong_until=500)
    assert late > 0.85 * 2000 / (500 + 1500 / best)


def test_nothing_is_drafted_that_the_account_does_not_cover() -> None:
    ahead = measured(lambda _: 0.2, lambda _: 1.0)
    assert ahead.choose([Hits(1e6, 0.95e6)], [8]) == [8]
    for _ in range(5):
        ahead.note_draft(1, 0.4)
    ahead.note_pass(9, 2.0)  # 3 lost
    allowed = ahead.choose([Hits(1e6, 0.95e6)], [8])[0]
    assert 0 < allowed < 8
    for _ in range(20):
        ahead.note_draft(1, 0.2)
    assert ahead.choose([Hits(1e6, 0.95e6)], [8]) == [0]


def test_it_tries_again_now_and_then() -> None:
    ahead = measured(lambda _: 1.0, lambda _: 1.0)
    text = Hits()
    drafted = [ahead.choose([text], [8]) for _ in range(600)]
    assert [number for number, each in enumerate(drafted) if any(each)] == [16, 49, 114, 243, 500]
    faster = measured(lambda _: 0.1, lambda _: 1.0)
    for number in range(1, 4):  # passes without are few at first, and measured sooner
        for _ in range(2 * (FEWEST - 1 + number)):
            assert any(faster.choose([text], [8]))
        assert not any(faster.choose([text], [8]))
        faster.note_pass(1, 1.0)
    for _ in range(64):
        faster.note_pass(1, 1.0)
    drafted = [faster.choose([text], [8]) for _ in range(200)]
    assert [number for number, each in enumerate(drafted) if not any(each)] == [64, 129, 194]


def test_a_text_is_drafted_for_if_what_was_missed_of_it_pays() -> None:
    """By the account, and by the tokens that it is to get: as many as save more than that takes."""

    def chosen(missed: list[int], further: list[int], won: int = 100, known: bool = False) -> list[bool]:
        ahead = measured(lambda _: 0.2, lambda _: 1.0)
        ahead.prompts.note(10, 1.0)
        ahead.choose([Hits()], [0])
        ahead._plain = 1.0
        for _ in range(won):
            ahead.note_verified(Hits(), 1, 1)  # a second each
        if known:
            ahead.note_missed(100, 0.1)
        count = len(missed)
        return [
            each > 0 for each in ahead.choose([Hits(1e6, 0.9e6)] * count, [8] * count, missed, further)
        ]

    assert chosen([FEW_MISSED], [1], won=0) == [True]
    saved = 1 - 1 / best_ahead([0.9], [8], lambda _: 0.2, lambda _: 1.0)[1]
    tokens = 60 / saved  # 600 tokens that were missed take 60 seconds
    assert [chosen([600], [further]) for further in (int(tokens), int(tokens) + 1)] == [[False], [True]]
    assert chosen([1200], [10**6]) == [False]  # more than was won, and twelve passes
    assert chosen([6000], [10**6], known=True) == [True]  # a tenth of a second for a hundred
    assert chosen([70_000, 0, 60_000], [10**6] * 3, known=True) == [False, True, True]
    assert chosen([6000], [10**6], won=0, known=True) == [True]


@pytest.mark.parametrize(
    "noise", [steady, *(pytest.param(one, marks=pytest.mark.thorough) for one in (doubled, interrupted))]
)
@pytest.mark.parametrize("length", [10, 150, 400])
def test_what_keys_of_its_own_lose_is_bounded_too(length: int, noise: Callable[[Random], float]) -> None:
    own = {"noise": noise, "length": length, "prompts": lambda tokens: 0.3 + 0.02 * tokens}
    assert speedup(lambda _: 0.3, lambda _: 1.0, [0.0], 2000, **own) > 0.97
    assert speedup(lambda _: 0.5, float, [0.8], 2000, **own) > 0.97
    assert speedup(lambda _: 0.3, lambda size: 1 + 0.05 * size, [0.1] * 4, 2000, **own) > 0.97
    best = max(sum(0.9**place for place in range(k + 1)) / (k * 0.35 + 1) for k in range(9))
    assert speedup(lambda _: 0.35, lambda _: 1.0, [0.9], 2000, **own) > (
        0.9 * best if length < 400 else 0.97
    )
