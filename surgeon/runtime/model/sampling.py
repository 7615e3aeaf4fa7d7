"""From logits to the next tokens of all texts of a pass, together.

A request with a seed has a random number for each place of its text, so that its tokens depend on its seed, its place
among the texts of that seed, and its logits alone. Texts that need the same operations are one batch.

Each drafted token is drawn from the draft's distribution q and accepted with the chance min(1, p / q) that it has by
the model's own distribution p; otherwise the token is drawn from what p has more than q (Leviathan et al. 2023, Fast
Inference from Transformers via Speculative Decoding, algorithm 1). Tokens have the distribution p.

With a seed the draft and the model both draw with the number of the place (`race`), and a draft is accepted if
the model has drawn it, too: a little less often, and the text is that without drafts.

The arithmetic on logits of many texts comes first: penalty, temperature, filters, draws, log-probabilities. It waits
for no device.

Shapes: R rows of logits, V tokens of the vocabulary, K of them that are looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import accumulate, islice
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from surgeon.runtime.batching.blocks import power_of_two
from surgeon.runtime.batching.request import (
    MOST_LOGPROBS,
    UNDEFINED,
    Choice,
    Request,
    Sampling,
    TokenLogprob,
)
from surgeon.runtime.kernels.functions import kernels_for, triton_kernels_for

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


def filter_probabilities(
    scores: Tensor, texts: Sequence[Sampling], look: Look
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Filter the probabilities of each row by temperature, top_k, top_p and min_p, where tokens are drawn.

    Args:
        scores: (R, V), float32.
        look: of all texts; at more tokens, if it has turned out not to be enough.

    Returns:
        The probabilities that are left, (R, K) of float64, 0 for what is left out, which may sum to less than 1; the
        tokens that these are of, (R, K), None for all in their order; and whether what was looked at is all that can be
        left, (R, 1), None where it always is.
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
    if look.ranked or look.tokens == scores.shape[-1]:
        enough = None
    return weights, tokens, enough


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
    weights, tokens, enough = filter_probabilities(scores, texts, look)
    if enough is not None and not enough.all():
        look = look._replace(tokens=scores.shape[-1])
        weights, tokens, _ = filter_probabilities(scores, texts, look)
    weights = weights / weights.sum(-1, keepdim=True)
    if tokens is None:
        return weights
    return chances.scatter_(-1, tokens, weights)


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


# Logits that a CPU takes at a time, because what is computed of them stays in its cache then.
CACHED_NUMBERS = 1 << 17


class SampledText:
    """The sampler's state of one request.

    Attributes:
        again: whether it is drawn with the numbers of its places.
        seen: the different tokens so far, if they are penalised.
        suppressed: tokens that must not come next.
        drafts: drafted tokens, and the distributions, (V,), that they were drawn from.
    """

    def __init__(self, request: Request, vocabulary: int) -> None:
        sampling = self.sampling = request.sampling
        self.again = sampling.draws and sampling.seed is not None
        self.position = 0
        self.look = Look.of(sampling, vocabulary)
        self.penalised = sampling.repetition_penalty != 1
        self.seen = dict.fromkeys(request.prompt) if self.penalised else {}
        self._later = [token for token in sampling.suppress_tokens if 0 <= token < vocabulary]
        self.suppressed = [
            token for token in sampling.begin_suppress_tokens if 0 <= token < vocabulary
        ] + self._later
        self.drafts: list[tuple[int, Tensor]] = []

    def key(self, ahead: int = 0) -> int:
        """63 random bits of the place so many tokens ahead; neighbours have nothing in common."""
        seed = self.sampling.seed
        (prompt, answer) = self.sampling.place
        hashed = blake2b(f"{seed} {prompt} {answer} {self.position + ahead}".encode(), digest_size=8)
        return int.from_bytes(hashed.digest()) >> 1

    def add(self, choice: Choice) -> Choice:
        """Note the next token."""
        self.position += 1
        self.suppressed = self._later
        token = choice[0]
        if self.penalised and token != UNDEFINED:
            self.seen[token] = None
        return choice


class Sampler:
    """Chooses the next tokens of requests.

    Args:
        random: of requests without a seed.
    """

    def __init__(self, vocabulary: int, device: torch.device, random: Random | None = None) -> None:
        self._random = random or Random()
        self._vocabulary = vocabulary
        self._texts: dict[int, SampledText] = {}
        self._device = device

    def add(self, request: Request) -> None:
        self._texts[request.id] = SampledText(request, self._vocabulary)

    def remove(self, request: int) -> None:
        self._texts.pop(request, None)

    def choose(self, requests: Sequence[int], logits: Tensor) -> list[Choice]:
        """Choose the next token of each request, by the model's logits, (R, V), with its report.

        UNDEFINED where the logits are not finite.
        """
        texts = [self._texts[request] for request in requests]
        chosen = self._choose(texts, logits)
        narrow = [row for row, (token, _) in enumerate(chosen) if token == WIDER]
        if narrow:
            again = self._choose([texts[row] for row in narrow], of_rows(logits, narrow), whole=True)
            for row, choice in zip(narrow, again, strict=True):
                chosen[row] = choice
        return [text.add(choice) for text, choice in zip(texts, chosen, strict=True)]

    def _choose(self, texts: Sequence[SampledText], logits: Tensor, whole: bool = False) -> list[Choice]:
        """Choose; WIDER where that takes a look at the `whole` vocabulary."""
        batches = list[tuple[list[int], Tensor]]()
        for rows in self._batches(texts, logits):
            some = [texts[row] for row in rows]
            own = of_rows(logits, rows).float()
            scores = self._scores(some, own)
            look = some[0].look
            if look.tokens == 1:
                tokens = likeliest(scores)
            else:
                if whole:
                    look = look._replace(tokens=self._vocabulary)
                options = [text.sampling for text in some]
                weights, among, enough = filter_probabilities(scores, options, look)
                if some[0].again:
                    tokens = race(weights, [text.key() for text in some], among)
                else:
                    tokens = self._pick(weights)
                if among is not None:
                    tokens = among.gather(-1, tokens)
                if enough is not None:  # another one may have been drawn
                    tokens = tokens.where(enough, WIDER)
            batches.append((rows, report(tokens, own, [text.sampling.logprobs for text in some])))
        flat = [table.flatten() for _, table in batches]
        found = iter((flat[0] if len(flat) == 1 else torch.cat(flat)).tolist())
        chosen: list[Choice] = [(UNDEFINED, None)] * len(texts)
        for rows, table in batches:
            for row in rows:
                chosen[row] = read_report([*islice(found, table.shape[1])], texts[row].sampling.logprobs)
        return chosen

    def _pick(self, weights: Tensor) -> Tensor:
        return pick(weights, column([self._random.random() for _ in weights], weights))

    def _scores(
        self, texts: Sequence[SampledText], logits: Tensor, before: Sequence[Sequence[int]] | None = None
    ) -> Tensor:
        """Logits, (R, V), with tokens seen and those drafted `before` penalised, and without those suppressed."""
        scores = logits
        if texts[0].penalised:
            tokens = [
                [*text.seen, *more]
                for text, more in zip(texts, before or [()] * len(texts), strict=True)
            ]
            most = max(map(len, tokens))
            seen = np.empty((len(tokens), most), np.int64)
            for line, own in zip(seen, tokens, strict=True):
                line[: len(own)] = own
                line[len(own) :] = own[0]  # which is seen in any case
            scores = penalise(
                scores,
                torch.from_numpy(seen).to(scores.device),
                column([text.sampling.repetition_penalty for text in texts], scores),
            )
        suppressed = [(row, token) for row, text in enumerate(texts) for token in text.suppressed]
        if suppressed:
            scores = scores.index_put(
                places(suppressed, scores).unbind(-1), scores.new_tensor(-torch.inf)
            )
        return scores

    def _batches(self, texts: Sequence[SampledText], logits: Tensor) -> Iterator[list[int]]:
        """Rows of texts that need the same operations; on CPUs not too many."""
        batches: dict[tuple[Look, bool, bool, bool], list[int]] = {}
        for row, text in enumerate(texts):
            kind = text.look, text.penalised, text.sampling.logprobs is not None, text.again
            batches.setdefault(kind, []).append(row)
        if logits.is_cuda:
            most = len(texts)
        else:
            most = max(1, CACHED_NUMBERS // self._vocabulary)
        for rows in batches.values():
            for first in range(0, len(rows), most):
                yield rows[first : first + most]

    def draft(self, requests: Sequence[int], logits: Tensor) -> list[int]:
        """Draft a token of each request behind those drafted so far, by a draft's logits, (R, V).

        Logits that are not finite draft token 0.
        """
        texts = [self._texts[request] for request in requests]
        chances = self._distributions(
            texts, logits, [[token for token, _ in text.drafts] for text in texts]
        )
        first = torch.zeros_like(chances)
        first[:, 0] = 1
        chances = chances.where(logits.amax(-1, keepdim=True).isfinite(), first)
        tokens = self._pick(chances)[:, 0].tolist()
        for text, token, own in zip(texts, tokens, chances, strict=True):
            text.drafts.append((token, own))
        return list(tokens)

    def offer(self, request: int, drafts: Sequence[int]) -> None:
        """Take tokens from elsewhere as drafts of a request."""
        text = self._texts[request]
        for token in drafts:
            certain = torch.zeros(self._vocabulary, dtype=torch.float64, device=self._device)
            certain[token] = 1
            text.drafts.append((token, certain))

    def _distributions(
        self, texts: Sequence[SampledText], logits: Tensor, before: Sequence[Sequence[int]]
    ) -> Tensor:
        """The probability of every token after all filters, (R, V); 1 for the one that a place's number draws."""
        chances = torch.empty(logits.shape, dtype=torch.float64, device=logits.device)
        for rows in self._batches(texts, logits):
            some = [texts[row] for row in rows]
            scores = self._scores(some, of_rows(logits, rows).float(), [before[row] for row in rows])
            own = distribution(scores, [text.sampling for text in some], some[0].look)
            if some[0].again:
                drawn = race(own, [texts[row].key(len(before[row])) for row in rows])
                own = torch.zeros_like(own).scatter_(-1, drawn, 1)
            chances[places(rows, logits)] = own
        return chances

    def judge(self, requests: Sequence[int], logits: Tensor) -> list[list[Choice]]:
        """The drafted tokens of each request up to the first that is rejected, and the one in its place or behind all.

        Args:
            logits: the model's where each drafted token stands, and behind the last one, of one request after the
                other, (R, V).

        Returns:
            The tokens of each; the last one is UNDEFINED if the logits at its place are not finite.
        """
        texts = [self._texts[request] for request in requests]
        drafts = [text.drafts for text in texts]
        if not any(drafts):
            return [[choice] for choice in self.choose(requests, logits)]
        for text in texts:
            text.drafts = []
        firsts = [0, *accumulate(len(each) + 1 for each in drafts)]
        judged = [(number, place) for number, each in enumerate(drafts) for place in range(len(each))]
        own = of_rows(logits, [firsts[number] + place for number, place in judged]).float()
        before = [[token for token, _ in drafts[number][:place]] for number, place in judged]
        wanted = self._distributions([texts[number] for number, _ in judged], own, before)
        offered = torch.stack([drafts[number][place][1] for number, place in judged])
        tokens = places([[drafts[number][place][0]] for number, place in judged], own)
        chances = [
            own.amax(-1, keepdim=True).double(),
            wanted.gather(-1, tokens),
            offered.gather(-1, tokens),
        ]

        numbers = [self._random.random() for _ in judged]
        ends, rejected = verdicts(
            numbers, judged, torch.cat(chances, -1).tolist(), [len(each) for each in drafts]
        )
        shown = [at for at, (number, place) in enumerate(judged) if place < ends[number]]
        candidates = tokens[places(shown, tokens)]
        if rejected:
            instead = places([*rejected.values()], own)
            more = (wanted[instead] - offered[instead]).clamp_(min=0)
            # Nothing is left where they differ by rounding only.
            rest = more.where(more.any(-1, keepdim=True), wanted[instead])
            shown += rejected.values()
            candidates = torch.cat([candidates, self._pick(rest)])
        choices: list[list[Choice]] = [[] for _ in texts]
        those = [texts[judged[at][0]] for at in shown]
        tops = [text.sampling.logprobs for text in those]
        table = report(candidates, own[places(shown, own)], tops).tolist()
        for at, text, top, told in zip(shown, those, tops, table, strict=True):
            choices[judged[at][0]].append(text.add(read_report(told, top)))

        left = [number for number in range(len(texts)) if number not in rejected]
        if not left:
            return choices
        last = logits[places([firsts[number] + ends[number] for number in left], logits)]
        for number, choice in zip(
            left, self.choose([requests[number] for number in left], last), strict=True
        ):
            choices[number].append(choice)
        return choices


def verdicts(
    numbers: Sequence[float],
    judged: Sequence[tuple[int, int]],
    chances: Sequence[Sequence[float]],
    ends: list[int],
) -> tuple[list[int], dict[int, int]]:
    """The place of each text at which the last token comes, and the row of each text that is rejected there.

    Args:
        numbers: of each row, random, in [0, 1).
        judged: the text and the place, after those before it, that each row is of.
        chances: the highest logit of each row, the chance of its token, and that with which it was drafted.
        ends: how many tokens were drafted for each text.
    """
    rejected: dict[int, int] = {}
    for row, ((number, place), (highest, chance, drafted)) in enumerate(
        zip(judged, chances, strict=True)
    ):
        if place > ends[number]:
            continue
        if not math.isfinite(highest):
            ends[number] = place
        elif numbers[row] * drafted >= chance:
            ends[number] = place
            rejected[number] = row
    return ends, rejected


def read_report(numbers: Sequence[float], top: int | None) -> Choice:
    """A token that comes next and its report, by a row of `report`."""
    token, highest, *more = numbers
    if not math.isfinite(highest):  # NaN is higher than any number
        return UNDEFINED, None
    if top is None:
        return int(token), None
    values = more[1 : 1 + len(more) // 2]
    best = more[1 + len(more) // 2 :]
    return int(token), TokenLogprob(
        int(token), more[0], tuple(zip(map(int, best[:top]), values, strict=False))
    )
