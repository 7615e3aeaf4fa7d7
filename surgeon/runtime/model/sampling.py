"""From logits to the next token of a request.

Every request has a generator of its own, from which each of its tokens takes one number: so what it gets depends on
its seed and its logits, and not on what else is in the batch.
"""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor

from surgeon.runtime.batching.request import Request, Sampling, TokenLogprob

NUCLEUS = 512  # so many tokens are looked at first


class Sampler:
    """Chooses the tokens of one request, one after the other."""

    def __init__(self, request: Request, vocabulary: int, device: torch.device) -> None:
        self.sampling = request.sampling
        seed = request.sampling.seed
        self._random = Random(None if seed is None else seed % (1 << 65))  # it takes -1 for 1
        self._seen: Tensor | None = None
        if self.sampling.repetition_penalty != 1:
            self._seen = torch.zeros(vocabulary, dtype=torch.bool, device=device)
            self._seen[list(request.prompt)] = True

        def known(tokens: tuple[int, ...]) -> list[int]:
            return [token for token in tokens if 0 <= token < vocabulary]

        self._suppressed = known(self.sampling.suppress_tokens)
        self._suppressed_now = known(self.sampling.begin_suppress_tokens) + self._suppressed

    def choose(self, logits: Tensor) -> tuple[int, TokenLogprob | None]:
        """The next token, given the model's logits, (vocabulary,), and what is to be reported about it."""
        logits, sampling = logits.float(), self.sampling
        scores = logits
        if self._seen is not None:
            scores = penalise(logits, self._seen, sampling.repetition_penalty)
        if self._suppressed_now:
            scores = scores.clone()
            scores[self._suppressed_now] = -torch.inf
            self._suppressed_now = self._suppressed
        token = int(scores.argmax()) if sampling.temperature == 0 else draw(scores, sampling, self._random.random())
        if self._seen is not None:
            self._seen[token] = True
        return token, None if sampling.logprobs is None else logprob_of(token, logits, sampling.logprobs)


def penalise(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make tokens that have been seen, (vocabulary,) of booleans, less likely (more likely if the penalty is below 1).

    Keskar et al. 2019, section 4.1, divides their logits; negative ones are multiplied, as everybody does since, or
    they would become more likely.
    """
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def draw(scores: Tensor, sampling: Sampling, uniform: float) -> int:
    """A token with the probability that is left to it after temperature, top_k, top_p and min_p.

    Args:
        scores: (vocabulary,), float32.
        uniform: a random number in [0, 1).
    """
    tokens: Tensor | None = None  # which tokens the scores belong to; None for all in their order
    if sampling.top_k and sampling.top_k < len(scores):
        scores, tokens = scores.topk(sampling.top_k)
    # In float64 and with the highest subtracted first, because tiny temperatures would make scores infinite.
    probabilities = torch.softmax((scores.double() - scores.max()) / sampling.temperature, -1)
    if sampling.top_p < 1:
        probabilities, order = nucleus(probabilities, sampling.top_p)
        tokens = order if tokens is None else tokens[order]
    if sampling.min_p:
        probabilities = probabilities.where(probabilities >= sampling.min_p * probabilities.max(), 0)
    cumulative = probabilities.cumsum(-1)
    place = int(torch.searchsorted(cumulative, cumulative[-1:] * uniform, right=True))
    if place == len(cumulative):  # the product was rounded up to the sum
        place = int(probabilities.argmax())
    return place if tokens is None else int(tokens[place])


def nucleus(probabilities: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The fewest most likely tokens whose probabilities sum to at least top_p: these and the tokens, likeliest first.

    Holtzman et al. 2020, The Curious Case of Neural Text Degeneration, section 3.1. Sorting a vocabulary takes about
    30 times as long as finding its largest few hundred, which mostly suffice.
    """
    for number in (NUCLEUS, len(probabilities)):
        kept, tokens = probabilities.topk(min(number, len(probabilities)))
        cumulative = kept.cumsum(-1)
        if cumulative[-1] >= top_p:
            break
    # A token stays if those before it do not suffice; so the first always does.
    count = int(torch.searchsorted(cumulative, top_p)) + 1
    return kept[:count], tokens[:count]


def logprob_of(token: int, logits: Tensor, top: int) -> TokenLogprob:
    """The log-probability of a token under logits, (vocabulary,), and those of the `top` most likely ones."""
    logprobs = torch.log_softmax(logits, -1)
    values, tokens = logprobs.topk(min(top, len(logprobs)))
    return TokenLogprob(token, float(logprobs[token]), tuple(zip(tokens.tolist(), values.tolist(), strict=True)))
