"""Which rows of passes that follow one another count."""

from __future__ import annotations

from surgeon.runtime.batching.in_flight import ChosenToken, Flight, Verdicts, latest
from surgeon.runtime.batching.sequence import Row, Wanted


def row(start: int, *tokens: int) -> Row:
    return Row(start, [*tokens], ([(0, 1)],), Wanted.BEST)


def test_later_rows_of_a_text_make_earlier_ones_void() -> None:
    flights = [
        Flight([0, 1], [row(4, 7), row(9, 1)], follows=False),
        Flight([0], [row(5, 8)]),
        Flight([0], [row(4, 6)]),
    ]
    joined, kept = latest(flights)
    assert joined == Flight([1, 0], [row(9, 1), row(4, 6)], follows=False)
    assert kept == [1, 3]
    joined, kept = latest(flights[:2])
    assert [one.start for one in joined.rows] == [4, 9, 5]


def test_only_what_was_chosen_counts() -> None:
    verdicts = Verdicts()
    assert verdicts.counts(0, row(0, 5, 6))
    assert verdicts.asks(0, row(0, 5, 6))
    verdicts.choose(ChosenToken(0, 2, (9, None)))
    assert verdicts.counts(0, row(2, 9))
    assert not verdicts.counts(0, row(2, 8))
    assert not verdicts.counts(0, row(3, 9))
    assert verdicts.asks(0, row(2, 9))
    assert verdicts.counts(0, row(0, 5, 6))  # computed again
    assert not verdicts.asks(0, row(0, 5, 6))  # what comes behind is there
    verdicts.end(0)
    assert verdicts.counts(0, row(3, 1))
