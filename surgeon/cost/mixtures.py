"""How much of a mixture of experts a pass computes and reads, given how many tokens it has.

A token goes to k of E experts, each as likely as the others: routers are trained to that. Then all of T tokens leave
out an expert with the probability (1 - k/E)^T, and E (1 - (1 - k/E)^T) are read. Where ranks divide the experts, the
one with most of them is waited for. What a token goes to elsewhere lessens what it goes to here, which is counted
exactly for a single token; the experts of several tokens are taken to be hit each by itself.
"""

from __future__ import annotations

from functools import lru_cache
from math import comb
from typing import NamedTuple


class ExpertLoad(NamedTuple):
    """What a rank's experts have to do in a pass.

    Attributes:
        hit: how many of them some token goes to, the mean.
        pairs: how many tokens all of them get together, the mean.
    """

    hit: float
    pairs: float


def sliced_load(experts: int, chosen: int, tokens: int) -> ExpertLoad:
    """On a rank that has every expert, or some neurons of each."""
    missed = (1 - min(chosen, experts) / experts) ** tokens
    return ExpertLoad(experts * (1 - missed), float(tokens * min(chosen, experts)))


@lru_cache(maxsize=4096)
def divided_load(experts: int, chosen: int, tokens: int, ranks: int) -> ExpertLoad:
    """On the rank that most experts are hit on, where ranks have whole ones, about equally many."""
    whole = sliced_load(experts, chosen, tokens)
    own = -(-experts // ranks)
    chosen = min(chosen, experts)
    if tokens == 1:
        most = _most_of_one(experts, chosen, ranks)
    else:
        hit = whole.hit / experts
        below = 0.0
        most = 0.0
        chances = [comb(own, n) * hit**n * (1 - hit) ** (own - n) for n in range(own + 1)]
        for chance in chances[:-1]:  # the mean of the highest of some is the sum of the chances that it is above n
            below += chance
            most += 1 - below**ranks
    most = max(most, whole.hit / ranks)
    return ExpertLoad(most, whole.pairs * most / whole.hit)


def _most_of_one(experts: int, chosen: int, ranks: int) -> float:
    """The mean of the most experts that a rank has of one token's: counts how many ways keep all ranks below it."""
    sizes = [experts * (rank + 1) // ranks - experts * rank // ranks for rank in range(ranks)]
    total = comb(experts, chosen)
    mean = 0.0
    for limit in range(chosen):
        ways = [1] + [0] * chosen  # of choosing so many on the ranks so far, at most `limit` on each
        for size in sizes:
            ways = [
                sum(ways[count - here] * comb(size, here) for here in range(min(limit, size, count) + 1))
                for count in range(chosen + 1)
            ]
        mean += 1 - ways[chosen] / total
    return mean
