"""From logits to the next token of a request.

Every request has a generator of its own, from which each of its tokens takes one number: so what it gets depends on
its seed, its place among the texts of that seed, and its logits, and not on what else is in the batch.

Where tokens are drafted, each is drawn from the draft's distribution q and accepted with the chance min(1, p / q) that
it has by the model's own distribution p; otherwise the token is drawn from what p has more than q (Leviathan et al.
2023, Fast Inference from Transformers via Speculative Decoding, algorithm 1). What comes out has the distribution p,
and takes more numbers from the generator, so that a seed gives other tokens than without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch
from torch import Tensor

from surgeon.runtime.batching.request import UNDEFINED, Choice, Request, Sampling, TokenLogprob

NUCLEUS = 512  # so many tokens are looked at first


class Sampler:
    """Chooses the tokens of one request, one after the other."""

    def __init__(self, request: Request, vocabulary: int, device: torch.device) -> None:
        self.sampling = request.sampling
        seed, (prompt, answer) = request.sampling.seed, request.sampling.place
        # `random` seeds itself with the SHA-512 of a text: neighbours of seed and place have nothing in common.
        self._random = Random(None if seed is None else f"{seed} {prompt} {answer}")
        self._seen: Tensor | None = None
        if self.sampling.repetition_penalty != 1:
            self._seen = torch.zeros(vocabulary, dtype=torch.bool, device=device)
            self._seen[list(request.prompt)] = True

        def known(tokens: tuple[int, ...]) -> list[int]:
            return [token for token in tokens if 0 <= token < vocabulary]

        self._suppressed = known(self.sampling.suppress_tokens)
        self._suppressed_now = known(self.sampling.begin_suppress_tokens) + self._suppressed
        self._proposed: list[tuple[int, Tensor]] = []  # tokens, and the distributions they were drawn from

    def choose(self, logits: Tensor) -> Choice:
        """The next token, given the model's logits, (vocabulary,), and what is to be reported about it."""
        sampling, scores = self.sampling, self._scores(logits.float(), self._seen)
        token = draw(scores, sampling, self._random.random()) if sampling.draws else int(scores.argmax())
        return self._chosen(token, logits.float())

    def _scores(self, logits: Tensor, seen: Tensor | None) -> Tensor:
        """Logits, (vocabulary,), after the penalty for tokens seen, and without those suppressed."""
        scores = logits if seen is None else penalise(logits, seen, self.sampling.repetition_penalty)
        if self._suppressed_now:
            scores = scores.clone()
            scores[self._suppressed_now] = -torch.inf
        return scores

    def _chosen(self, token: int, logits: Tensor) -> Choice:
        """A token that is added, and what is reported about it."""
        self._suppressed_now = self._suppressed
        if self._seen is not None:
            self._seen[token] = True
        logprobs = self.sampling.logprobs
        return token, None if logprobs is None else logprob_of(token, logits, logprobs)

    def propose(self, logits: Tensor) -> int:
        """A token behind those proposed so far, by a draft's logits, (vocabulary,); `judge` takes it over or not.

        Logits that are not finite propose token 0.
        """
        logits, seen = logits.float(), self._seen
        if seen is not None and self._proposed:
            seen = seen.clone()
            seen[[token for token, _ in self._proposed]] = True
        if logits.amax().isfinite():
            chances = distribution(self._scores(logits, seen), self.sampling)
        else:
            chances = only(0, logits)
        token = pick(chances, self._random.random())
        self._proposed.append((token, chances))
        return token

    def judge(self, logits: Sequence[Tensor]) -> list[Choice]:
        """The proposed tokens up to the first that is rejected, and the one in its place or behind all of them.

        Args:
            logits: the model's where each proposed token stands, and behind the last one, (vocabulary,) each.

        Returns:
            The tokens; the last one is UNDEFINED if the logits at its place are not finite.
        """
        proposed, self._proposed = self._proposed, []
        choices: list[Choice] = []
        for (token, drafted), row in zip(proposed, logits, strict=False):
            if not row.amax().isfinite():  # NaN is higher than any number
                return [*choices, (UNDEFINED, None)]
            wanted = distribution(self._scores(row.float(), self._seen), self.sampling)
            if self._random.random() * float(drafted[token]) >= float(wanted[token]):
                more = (wanted - drafted).clamp_(min=0)
                rest = more if more.any() else wanted  # nothing is left where they differ by rounding only
                return [*choices, self._chosen(pick(rest, self._random.random()), row.float())]
            choices.append(self._chosen(token, row.float()))
        last = logits[len(proposed)]
        return [*choices, self.choose(last) if last.amax().isfinite() else (UNDEFINED, None)]


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
    probabilities, tokens = filtered(scores, sampling)
    place = pick(probabilities, uniform)
    return place if tokens is None else int(tokens[place])


def distribution(scores: Tensor, sampling: Sampling) -> Tensor:
    """The probability of every token, (vocabulary,): all for the highest score where nothing is drawn."""
    if not sampling.draws:
        return only(int(scores.argmax()), scores)
    probabilities, tokens = filtered(scores, sampling)
    probabilities = probabilities / probabilities.sum()
    return probabilities if tokens is None else probabilities.new_zeros(len(scores)).scatter_(0, tokens, probabilities)


def only(token: int, like: Tensor) -> Tensor:
    """The distribution, as long as a tensor, that has one token only."""
    chances = torch.zeros(len(like), dtype=torch.float64, device=like.device)
    chances[token] = 1
    return chances


def pick(probabilities: Tensor, uniform: float) -> int:
    """A place of (places,), as likely as its share of the sum is.

    Args:
        uniform: a random number in [0, 1).
    """
    cumulative = probabilities.cumsum(-1)
    place = int(torch.searchsorted(cumulative, cumulative[-1:] * uniform, right=True))
    # The product may be rounded up to the sum.
    return place if place < len(cumulative) else int(probabilities.argmax())


def filtered(scores: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """What temperature, top_k, top_p and min_p leave of the probabilities, and the tokens these are of; None for all.

    The temperature is above 0. The probabilities are float64 and may sum to less than 1.
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
    return probabilities, tokens


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
