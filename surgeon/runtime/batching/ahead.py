"""The number of tokens to draft ahead of each text, by the worth of drafts so far.

A round is some passes of the draft, each of which drafts a token, and one pass of the model that verifies. If each of k
drafted tokens is right with the chance a, given that those before it are, a round adds

    1 + a + a^2 + ... + a^k

tokens to a text (Leviathan et al. 2023, Fast Inference from Transformers via Speculative Decoding, equation 1), and
takes k D + V(k + 1) seconds, where D is a pass of the draft and V(n) one of the model over n tokens. Drafts pay where

    (1 + a + ... + a^k) / (k D + V(k + 1)) > 1 / V(1)

and best with the k for which the left side is greatest. For several texts these are sums: a further token for a text
adds a^j to the round, one more text to the draft's pass j, and one more token to the model's. Tokens most likely to be
right are taken first, as long as tokens per second become more.

D, V and a are measured while texts are written: times by tokens in a pass, chances by text, where the mean of all texts
counts as a few tokens. Where nothing pays, a round is tried now and then; where drafts pay, a pass now and then has
none. To ask takes a tenth of a small model's pass for eight texts: after a no, it is asked again after 16 passes, or
for other texts.

Estimates may be wrong, so that an account in seconds bounds the loss. Each right draft earns V(n) / n with n texts;
passes of the draft cost their time, and one of the model its time beyond V(n), a mean of the latest five passes or more
without drafts; an interrupted pass counts as twice what is usual. A round is drafted only if its cost where no draft is
right is covered by the account, two passes, and 1.5% of the time of the latest thousand passes. Larger passes than any
before are taken to need time in proportion to tokens, a draft whose time is not known as long as the model, and the
first pass of a size, which may be recorded, as much longer than the next as others were.

A draft with keys of its own first computes the tokens it has missed of a text, which may take as long as twelve passes
of the latest thousand, or the account, and no longer than they are expected to save on the rest of the text; texts of
which least is missed come first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from math import inf
from statistics import median

MOST_AHEAD = 8
# Passes without drafts until they are tried again; twice as many each time
FIRST_WAIT = 16
LONGEST_WAIT = 256
ASK_AFTER = 16  # passes without drafts, whether they pay
LEAST_CHANCE = 0.02  # of a token that is drafted
# Rounds with drafts, one pass without comes, because how long that takes may change; earlier at first.
PLAIN_AFTER = 64
LEAST_GAIN = 1.05  # in tokens per second, that drafts are to promise
FIRST_CHANCE = 0.8  # what is taken for a before anything is known
OWN_WEIGHT = 4.0  # as how many tokens a mean counts
# Of what was seen, with each round
OWN_FADE = 0.9
ALL_FADE = 0.99
IDLE_FADE = 0.99  # with each pass in which nothing is drafted for a text
# The weight of the newest time: it is no accident if a pass was fast
NEWEST = 1 / 8
NEWEST_SHORTER = 1 / 2
# Passes without drafts that say what these take, at most and at least
LATEST = 64
FEWEST = 5
# Of the time of passes, and whole ones besides
MAY_LOSE = 0.015
MAY_LOSE_PASSES = 2
ENOUGH = (
    # Passes, to cover any trial: of the first ones of a size, which are recorded, one may take more than ever can.
    12
)
ACCOUNT_FADE = 0.999  # with each pass
# A first pass that takes longer than the next by so many of the smallest passes was recorded.
RECORDED = 4.0
USED_AGAIN = 8  # how often a size is, among many others
# Tokens, that come as rows of their own, and count as none: they show in the times of drafting passes.
FEW_MISSED = 8
LONGEST = 2.0  # a pass that takes longer than so many times what is usual was interrupted


def best_ahead(
    chances: Several[float],
    most: Several[int],
    drafting: Callable[[int], float],
    verifying: Callable[[int], float],
    covered: Callable[[float, int], bool] = lambda *_: True,
) -> tuple[list[int], float]:
    """Choose how many tokens to draft for each of some texts, and tell the tokens per second then.

    Args:
        chances: of each text's next drafted token to be right.
        most: that may be drafted for each.
        drafting: seconds of a pass of the draft, by its texts.
        verifying: seconds of a pass of the model, by its tokens.
        covered: whether the loss may be risked, by the seconds of the draft's passes and the tokens of the model's.
    """
    count = len(chances)
    further = [
        (-(chance**place), place, text)
        for text, chance in enumerate(chances)
        for place in range(1, most[text] + 1)
        if chance**place >= LEAST_CHANCE
    ]
    further.sort()
    tokens = float(count)
    drafted = 0.0
    taken = 0
    plain = count / verifying(count)
    fastest = LEAST_GAIN * plain
    texts = [0] * (1 + max(most))  # in each of the draft's passes
    seconds = [0.0, *map(drafting, range(1, count + 1))]
    for number, (less, place, _) in enumerate(further, start=1):
        drafted -= seconds[texts[place]]
        texts[place] += 1
        drafted += seconds[texts[place]]
        tokens -= less
        rate = tokens / (drafted + verifying(count + number))
        if rate > fastest and covered(drafted, count + number):
            fastest = rate
            taken = number
    best = Counter(text for _, _, text in further[:taken])
    return [best[text] for text in range(count)], fastest if taken else plain


@dataclass
class Hits:
    """Counts of drafted tokens and of right ones; older ones count less."""

    tried: float = 0.0
    right: float = 0.0

    def fade(self, by: float) -> None:
        """Have all that was seen count less."""
        self.tried = self.tried * by
        self.right = self.right * by

    def note(self, tried: int, right: int, fade: float) -> None:
        """Add a round."""
        self.fade(fade)
        self.tried = self.tried + tried
        self.right = self.right + right

    def chance(self, prior: float) -> float:
        """Estimate the chance of the next token to be right, from a prior."""
        return (self.right + OWN_WEIGHT * prior) / (self.tried + OWN_WEIGHT)


class PassTimes:
    """Seconds of a kind of passes, by their tokens.

    Attributes:
        longer_at_first: by how much the first pass of a size takes longer than others, where it is recorded.
    """

    def __init__(self) -> None:
        self._begun = dict[int, float]()  # the first of each size
        self._longer = list[float]()  # than the second that was, of the newest sizes
        self.longer_at_first = 0.0
        self._sizes = list[int]()
        self._seconds = dict[int, float]()
        self._first = defaultdict[int, list[float]](list)
        self._means = dict[int, float]()
        self._counts = Counter[int]()

    def note(self, tokens: int, seconds: float) -> None:
        """Add a pass; the first of a size may have been recorded, and does not count."""
        if tokens not in self._begun:
            self._begun[tokens] = seconds
            return
        self._counts[tokens] += 1
        if self._counts[tokens] <= FEWEST:
            self._first[tokens].append(seconds)
            self._means[tokens] = median(self._first[tokens])
        else:
            mean = self._means[tokens]
            self._means[tokens] += (min(seconds, LONGEST * mean) - mean) / min(
                self._counts[tokens], LATEST
            )
        if tokens not in self._seconds:
            insort(self._sizes, tokens)
            self._seconds[tokens] = seconds
            longer = self._begun[tokens] - seconds
            self._longer = [
                *self._longer[1 - FEWEST :],
                longer if longer > RECORDED * self._seconds[self._sizes[0]] else 0.0,
            ]
            self.longer_at_first = median(self._longer)
        else:
            before = self._seconds[tokens]
            weight = NEWEST_SHORTER
            if seconds > before:
                weight = NEWEST
            self._seconds[tokens] += (min(seconds, LONGEST * before) - before) * weight

    @property
    def is_known(self) -> bool:
        return bool(self._sizes)

    def count(self, tokens: int) -> int:
        """Count the measured passes of just this size."""
        return self._counts[tokens]

    def mean(self, tokens: int) -> float:
        """The mean of the latest passes of just this size, interrupted ones cut short; 0 for none."""
        return self._means.get(tokens, 0.0)

    def at_most(self, tokens: int) -> float:
        """Like `of`, but beyond what was measured in proportion to tokens, and with the surplus of a first pass."""
        longest = self.estimate(tokens) * max(1.0, tokens / self._sizes[-1])
        if tokens in self._seconds:
            return longest
        if tokens in self._begun:
            return min(self._begun[tokens], longest)
        return longest + self.longer_at_first

    @property
    def first(self) -> float | None:
        """The shortest of the first passes of their sizes; None if there was none."""
        return min(self._begun.values(), default=None)

    def estimate(self, tokens: int) -> float:
        """Estimate a pass: between measured sizes in proportion, beyond them as the nearest.

        Larger passes than any before are expected to take no longer, until they are tried; the surplus of a size's
        first pass counts as far as the size is to be used again.
        """
        if tokens in self._seconds:
            return self._seconds[tokens]
        first = 0.0 if tokens in self._begun else self.longer_at_first / USED_AGAIN
        at = bisect_left(self._sizes, tokens)
        low = self._sizes[max(0, at - 1)]
        high = self._sizes[min(at, len(self._sizes) - 1)]
        if low == high:
            return first + self._seconds[low]
        share = (tokens - low) / (high - low) if low < tokens else 0.0
        return first + self._seconds[low] + share * (self._seconds[high] - self._seconds[low])


@dataclass
class PerToken:
    """Seconds that a token takes in large passes; older ones count less."""

    tokens: float = 0.0
    seconds: float = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """Add a pass."""
        self.tokens = self.tokens * OWN_FADE + tokens
        self.seconds = self.seconds * OWN_FADE + seconds


class Ahead:
    """Chooses how many tokens to draft, by the times of passes."""

    def __init__(self) -> None:
        self.drafting = PassTimes()
        self.verifying = PassTimes()
        self.missed = PerToken()
        self.prompts = PerToken()
        self._all = Hits()
        self._wait = FIRST_WAIT
        # Whether the last pass had drafts, and how many before it were so, too
        self._drafted = False
        self._alike = 0
        # Of this round, and what a pass takes without drafts
        self._texts = 0
        self._plain = 0.0
        self._unasked = 0  # passes more without drafts, until it is asked whether they pay
        # The account, in seconds
        self._spent = 0.0
        self._won = 0.0
        self._made_up = 0.0  # of these, what the draft took for what it had missed

    def choose(
        self,
        texts: Several[Hits],
        most: Several[int],
        missed: Several[int] = (),
        further: Several[int] = (),
    ) -> list[int]:
        """Choose how many tokens to draft for each of some texts that are continued together.

        Args:
            most: that may be drafted for each.
            missed: tokens of each that the draft has to compute first.
            further: how many each is expected to get yet, where some are missed.
        """
        found = [0] * len(texts)
        if len(texts) != self._texts:
            self._texts = len(texts)
            self._unasked = 0
        if self._unasked:
            self._unasked -= 1
        elif self.verifying.count(len(texts)) >= FEWEST and any(most):
            self._plain = self.verifying.mean(len(texts))
            lacking = [number if number > FEW_MISSED else 0 for number in missed]
            found = self._worth(texts, most, lacking, further)
        self._alike = self._alike + 1 if any(found) == self._drafted else 1
        self._drafted = any(found)
        return found

    def _worth(
        self, texts: Several[Hits], most: Several[int], missed: Several[int], further: Several[int]
    ) -> list[int]:
        nothing = [0] * len(texts)
        free = ENOUGH * self._plain - self._made_up
        to_make_up = free + max(0.0, self._won)
        to_lose = self._won + min(0.0, free)
        to_lose += MAY_LOSE * self._spent + MAY_LOSE_PASSES * self._plain
        worth = [0.0] * len(texts)
        if any(missed) and self.drafting.is_known:
            _, rate = best_ahead(
                self._chances(texts), most, self.drafting.estimate, self.verifying.estimate
            )
            saved = self.verifying.estimate(len(texts)) / len(texts) - 1 / rate
            worth = [saved * tokens for tokens in further]
        best = self._best(texts, self._within(most, missed, worth, to_make_up), to_lose)
        if any(best):
            self._wait = FIRST_WAIT
            plain_after = min(PLAIN_AFTER, 2 * self.verifying.count(len(texts)))
            if self._drafted and self._alike >= plain_after:
                return nothing
            return best
        trial = [min(1, each) for each in self._within(most, missed, [inf] * len(texts), to_make_up)]
        together = self.verifying.at_most(len(texts) + sum(trial))
        due = not self.drafting.is_known or (self._alike >= self._wait and not self._drafted)
        cost = self._drafting_at_most(sum(trial)) + together - self._plain
        if not due or not any(trial) or to_lose < min(cost, ENOUGH * self._plain):
            self._unasked = ASK_AFTER - 1
            return nothing
        if self.drafting.is_known:
            self._wait = min(2 * self._wait, LONGEST_WAIT)
        else:
            self._wait = FIRST_WAIT
        return trial

    def _best(self, texts: Several[Hits], most: Several[int], to_lose: float) -> list[int]:
        """Maximise tokens per second among choices that lose no more seconds where no draft is right."""
        if not self.drafting.is_known:
            return [0] * len(texts)
        chances = self._chances(texts)
        most_seconds = self.verifying.estimate(len(texts)) + to_lose

        return best_ahead(
            chances,
            most,
            self.drafting.estimate,
            self.verifying.estimate,
            lambda drafted, tokens: drafted + self.verifying.at_most(tokens) <= most_seconds,
        )[0]

    def _chances(self, texts: Several[Hits]) -> list[float]:
        prior = self._all.chance(FIRST_CHANCE)
        return [text.chance(prior) for text in texts]

    def _within(
        self, most: Several[int], missed: Several[int], worth: Several[float], to_make_up: float
    ) -> list[int]:
        """Set numbers to 0 where missed tokens take longer than they are worth, or than all may take."""
        found = list(most)
        for text in sorted(range(len(missed)), key=missed.__getitem__):
            seconds = missed[text] * self._per_missed
            if seconds and most[text]:
                found[text] = most[text] if seconds <= min(worth[text], to_make_up) else 0
                to_make_up -= seconds if found[text] else 0.0
        return found

    @property
    def _per_missed(self) -> float:
        if self.missed.tokens:
            passes = self.missed
        else:
            passes = self.prompts
        if passes.tokens:
            return passes.seconds / passes.tokens
        return self._plain

    def _drafting_at_most(self, texts: int) -> float:
        if self.drafting.is_known:
            return self.drafting.at_most(texts)
        if self.drafting.first is not None:
            return min(self._plain, self.drafting.first)
        return self._plain + self.verifying.longer_at_first

    def note_draft(self, texts: int, seconds: float) -> None:
        """Add a pass of the draft."""
        longest = LONGEST * max(self._drafting_at_most(texts), self._plain)
        self.drafting.note(texts, seconds)
        self._spent = self._spent + seconds
        self._won = self._won - min(seconds, longest)

    def note_missed(self, tokens: int, seconds: float) -> None:
        """Add a pass of the draft that made up for many tokens."""
        self._spent += seconds
        self._made_up += min(seconds, LONGEST * max(tokens * self._per_missed, self._plain))
        self.missed.note(tokens, seconds)

    def note_pass(self, tokens: int, seconds: float) -> None:
        """Add a pass of the model."""
        self._spent = ACCOUNT_FADE * self._spent + seconds
        self._won = ACCOUNT_FADE * self._won
        self._made_up *= ACCOUNT_FADE
        if self._drafted and tokens > self._texts:
            usual = max(self.verifying.at_most(tokens), self.verifying.mean(tokens), self._plain)
            self._won += self._plain - min(seconds, LONGEST * usual)
        self.verifying.note(tokens, seconds)

    def note_verified(self, text: Hits, drafted: int, right: int) -> None:
        """Add how many drafted tokens of a text were right; of those behind a wrong one nothing is known."""
        if drafted:
            self._won += right * self._plain / self._texts
            tried = min(drafted, right + 1)
            text.note(tried, right, OWN_FADE)
            self._all.note(tried, right, ALL_FADE)
        else:
            text.fade(IDLE_FADE)
