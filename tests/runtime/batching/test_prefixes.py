"""Known beginnings against a plain list of who holds which: known is what somebody holds, and all that is shorter."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from surgeon.runtime.batching.blocks import ROOT, KnownPrefixes

Path = tuple[int, ...]  # of blocks, each told apart by one token


class Twin:
    """The beginnings, and beside them who holds them."""

    def __init__(self) -> None:
        self.prefixes = KnownPrefixes()
        self.numbers: dict[Path, int] = {(): ROOT}
        self.holds: Counter[Path] = Counter()
        self.seen = {ROOT}

    def add(self, before: Path, block: int) -> None:
        path = (*before, block)
        number = self.prefixes.add(self.numbers[before], (block,))
        if path not in self.numbers:
            assert number not in self.seen, "a number that was another beginning's"
            self.seen.add(number)
        assert self.numbers.setdefault(path, number) == number
        self.hold(path)

    def hold(self, path: Path) -> None:
        self.prefixes.hold(self.numbers[path])
        self.holds[path] += 1

    def let_go(self, path: Path) -> None:
        self.prefixes.let_go(self.numbers[path])
        self.holds[path] -= 1
        held = [one for one, count in self.holds.items() if count]
        self.numbers = {
            one: n
            for one, n in self.numbers.items()
            if not one or any(h[: len(one)] == one for h in held)
        }

    def check(self) -> None:
        assert len(self.prefixes._keys) == len(self.numbers) - 1
        for path, number in self.numbers.items():
            for block in range(3):
                assert self.prefixes.find(number, (block,)) == self.numbers.get((*path, block))
            shorter = [self.numbers[path[:length]] for length in range(len(path), 0, -1)]
            assert list(self.prefixes.path(number)) == shorter


@given(
    st.lists(
        st.tuples(st.sampled_from(("add", "add", "hold", "let go")), st.integers(0), st.integers(0, 2))
    )
)
def test_what_is_held_is_known_and_nothing_else(steps: list[tuple[str, int, int]]) -> None:
    twin = Twin()
    for what, which, block in steps:
        if what == "let go":
            held = sorted(path for path, count in twin.holds.items() if count)
            if held:
                twin.let_go(held[which % len(held)])
        else:
            known = sorted(twin.numbers)
            path = known[which % len(known)]
            if what == "add":
                twin.add(path, block)
            elif path:
                twin.hold(path)
        twin.check()


def test_nobody_has_to_hold_what_has_no_tokens() -> None:
    prefixes = KnownPrefixes()
    prefixes.hold(ROOT)
    prefixes.let_go(ROOT)
    prefixes.let_go(ROOT)
    assert (len(prefixes._keys), list(prefixes.path(ROOT))) == (0, [])


def test_blocks_are_compared_token_by_token() -> None:
    prefixes = KnownPrefixes()
    prefixes.hold(first := prefixes.add(ROOT, (1, 2)))
    prefixes.hold(other := prefixes.add(ROOT, (2, 1)))
    assert first != other
    assert [prefixes.find(ROOT, block) for block in ((1, 2), (2, 1))] == [first, other]
    assert prefixes.find(first, (1, 2)) is None
    assert prefixes.find(ROOT, (1,)) is None
