"""Sampling's arithmetic on logits of many texts: penalty, temperature, filters, draws, log-probabilities.

Nothing waits for a device. Shapes: R rows, V tokens of the vocabulary, K of them that are looked at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from surgeon.runtime.batching.request import MOST_LOGPROBS, Sampling
from surgeon.runtime.batching.windows import power_of_two
from surgeon.runtime.kernels.functions import kernels_for
from surgeon.runtime.kernels.triton.functions import triton_kernels_for

NUCLEUS = 512  # so many tokens are looked at first: to sort a vocabulary takes about 30 times as long
LEAST_RANKED = 64  # so many are looked at for any top_k up to that, so that these are one batch
WIDER = -2  # in place of a token: the nucleus is wider than what was looked at
# The constants of SplitMix64 (Steele, Lea and Flood 2014, Fast Splittable Pseudorandom Number Generators), as signed.
SPLIT_MIX = (
    0x9E3779B97F4A7C15 - (1 << 64),
    0xBF58476D1CE4E5B9 - (1 << 64),
    0x94D049BB133111EB - (1 << 64),
)
Column = float | Tensor  # a number that all rows have, or one of each, (R, 1)


def column(numbers: Sequence[float], like: Tensor) -> Column:
    """A number of each row, as precise and where a tensor is."""
    if all(number == numbers[0] for number in numbers):
        return numbers[0]
    return torch.tensor(numbers, dtype=like.dtype, device=like.device)[:, None]


def places(numbers: Sequence[int] | Sequence[Sequence[int]], like: Tensor) -> Tensor:
    """Indices, where a tensor is."""
    return torch.tensor(numbers, dtype=torch.long, device=like.device)


def of_rows(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Take rows of a tensor, as a view where they lie side by side."""
    first = rows[0]
    end = rows[-1] + 1
    consecutive = end - first == len(rows) and all(row == first + at for at, row in enumerate(rows))
    if consecutive:
        return tensor[first:end]
    return tensor.index_select(0, places(rows, tensor))


class Look(NamedTuple):
    """The tokens that a text's filters look at, whatever else is in the batch.

    Attributes:
        tokens: so many of the likeliest; 0 for all in their order.
        ranked: whether top_k limits them, so that probabilities are among these alone.
    """

    tokens: int
    ranked: bool

    @classmethod
    def of(cls, sampling: Sampling, vocabulary: int) -> Look:
        if not sampling.draws:
            return cls(1, ranked=True)
        if 0 < sampling.top_k < vocabulary:
            return cls(min(vocabulary, max(LEAST_RANKED, power_of_two(sampling.top_k))), ranked=True)
        return cls(min(vocabulary, NUCLEUS) if sampling.top_p < 1 else 0, ranked=False)


def penalise(logits: Tensor, seen: Tensor, penalty: Column) -> Tensor:
    """Make tokens that have been seen, (R, any), less likely in logits, (R, V), or more with a penalty below 1.

    Keskar et al. 2019, section 4.1, divides their logits; negative ones are multiplied, as everybody does since.
    """
    own = logits.gather(-1, seen)
    return logits.scatter(-1, seen, torch.where(own > 0, own / penalty, own * penalty))


def likeliest(scores: Tensor) -> Tensor:
    """The token with the highest score of each row of (R, V), the first of equal ones: (R, 1)."""
    kernels = kernels_for(scores) or triton_kernels_for(scores)
    return (scores.argmax(-1) if kernels is None else kernels.highest(scores.contiguous())[1])[:, None]


class Filtered(NamedTuple):
    """The probabilities that filters leave.

    Attributes:
        weights: (R, K) of float64, 0 for what is left out; they may sum to less than 1.
        tokens: that these are of, (R, K); None for all in their order.
        enough: whether what was looked at is all that can be left, (R, 1); None where it always is.
    """

    weights: Tensor
    tokens: Tensor | None
    enough: Tensor | None

    def at(self, place: Tensor) -> Tensor:
        """The token at a place of each row, both (R, 1); WIDER where another one may have been drawn."""
        token = place
        if self.tokens is not None:
            token = self.tokens.gather(-1, place)
        if self.enough is None:
            return token
        return token.where(self.enough, WIDER)


def filter_probabilities(scores: Tensor, texts: Sequence[Sampling], look: Look) -> Filtered:
    """Filter the probabilities of each row by temperature, top_k, top_p and min_p, where tokens are drawn.

    Args:
        scores: (R, V), float32.
        look: of all texts; at more tokens, if it has turned out not to be enough.
    """
    tokens: Tensor | None = None
    if look.ranked:
        scores, tokens = scores.topk(look.tokens)
        most = column([text.top_k for text in texts], scores)
        if isinstance(most, Tensor):
            scores = scores.masked_fill(
                torch.arange(look.tokens, device=scores.device) >= most, -torch.inf
            )
        else:
            scores = scores[:, : int(most)]
            tokens = tokens[:, : int(most)]
    # In float64 and with the highest subtracted first, because tiny temperatures would make scores infinite.
    exponents = scores.double().sub_(scores.amax(-1, keepdim=True))
    weights = torch.softmax(exponents.div_(column([text.temperature for text in texts], exponents)), -1)
    if look.tokens and not look.ranked:
        weights, tokens = weights.topk(look.tokens)
    enough: Tensor | None = None
    if any(text.top_p < 1 for text in texts):
        top_p = column([text.top_p if text.top_p < 1 else math.inf for text in texts], weights)
        cumulative = weights.cumsum(-1)
        enough = cumulative[:, -1:] >= top_p
        # Holtzman et al. 2020, The Curious Case of Neural Text Degeneration, section 3.1: a token stays if those before
        # it, the likeliest first, do not suffice; so the first always does.
        weights = weights.where(cumulative - weights < top_p, 0)
    if any(text.min_p for text in texts):
        least = weights.amax(-1, keepdim=True) * column([text.min_p for text in texts], weights)
        weights = weights.where(weights >= least, 0)
    return Filtered(weights, tokens, None if look.ranked or look.tokens == scores.shape[-1] else enough)


def pick(weights: Tensor, number: Column) -> Tensor:
    """A place of each row of (R, K), as likely as its share of the sum is: (R, 1).

    Args:
        number: in [0, 1), with 53 bits at most, so that its product with the sum is below the sum.
    """
    cumulative = weights.cumsum(-1)
    place = torch.searchsorted(cumulative, cumulative[:, -1:] * number, right=True)
    return place.clamp_(max=weights.shape[-1] - 1)  # of what is no number, too


def race(weights: Tensor, keys: Sequence[int], tokens: Tensor | None = None) -> Tensor:
    """Draw by a key of each row, 63 random bits, which decides of two distributions that are alike much the same.

    The greatest weight over a random number of its token, exponentially distributed, a function of key and token. The
    tokens of two distributions are the same with the chance (1 - d) / (1 + d) or more, if d is their distance in total
    variation (Daliri, Musco and Suresh 2024, Coupling without Communication and Drafter-Invariant Speculative
    Decoding).

    Args:
        tokens: that the weights are of, (R, K); all in their order if there are none.
    """
    if tokens is None:
        tokens = torch.arange(weights.shape[-1], device=weights.device)
    bits = places(keys, weights)[:, None] + tokens * SPLIT_MIX[0]
    for shift, factor in zip((30, 27, 31), (*SPLIT_MIX[1:], 1), strict=True):
        bits = (bits ^ (bits >> shift) & (1 << 64 - shift) - 1) * factor
    uniform = (bits >> 12 & (1 << 52) - 1).double().add_(0.5).mul_(2.0**-52)
    return (weights / uniform.log()).argmin(-1, keepdim=True)


def distribution(scores: Tensor, texts: Sequence[Sampling], look: Look) -> Tensor:
    """The probability of every token, (R, V) of float64: all for the highest score where nothing is drawn."""
    chances = torch.zeros(scores.shape, dtype=torch.float64, device=scores.device)
    if look.tokens == 1:
        return chances.scatter_(-1, likeliest(scores), 1)
    left = filter_probabilities(scores, texts, look)
    if left.enough is not None and not left.enough.all():
        left = filter_probabilities(scores, texts, look._replace(tokens=scores.shape[-1]))
    weights = left.weights / left.weights.sum(-1, keepdim=True)
    if left.tokens is None:
        return weights
    return chances.scatter_(-1, left.tokens, weights)


def report(tokens: Tensor, logits: Tensor, tops: Sequence[int | None]) -> Tensor:
    """Numbers about tokens, (R, 1), to be read at once: (R, numbers) of float64, in which a token id is exact.

    Each token, the highest of its logits and, if asked for, its log-probability, then those of the likeliest tokens,
    then these.
    """
    columns = [tokens, logits.amax(-1, keepdim=True).double()]
    if any(top is not None for top in tops):
        logprobs = logits.log_softmax(-1)
        most = max(top or 0 for top in tops)
        # As many are always looked at, so that the order of equal ones is the same whatever else is in the batch.
        values, best = logprobs.topk(min(MOST_LOGPROBS, logits.shape[-1]) if most else 0)
        columns += [logprobs.gather(-1, tokens.clamp(min=0)), values[:, :most], best[:, :most]]
    return torch.cat(columns, -1)
