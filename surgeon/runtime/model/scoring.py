"""How likely given tokens are, from logits that are spread over ranks: for the log-probabilities of a prompt.

A prompt has many tokens, and logits of a whole vocabulary for each of them would be most of what ranks send. Each rank
sends three kinds of numbers instead: the logarithm of its own share of the softmax's denominator, its own logit of the
token in question, and its own highest logits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from surgeon.runtime.batching.request import TokenLogprob


def score(
    own: Tensor, first: int, rows: int, targets: list[int], top: int, all_gather: Callable[[Tensor], Tensor]
) -> list[TokenLogprob]:
    """The log-probability of a target token under each row of logits, and those of the most likely tokens there.

    Args:
        own: this rank's logits, (tokens, its part of the vocabulary), the last part perhaps shorter or empty.
        first: the token id that the part begins with.
        rows: the length of every part but the last.
        targets: a token id for each row of `own`; the same on every rank, like all of what is returned.
        top: how many of the most likely tokens to report.
        all_gather: joins the ranks' tensors in a new first dimension.

    Returns:
        One for each row; its log-probability is NaN if the row's logits are not finite.
    """
    logits = F.pad(own.float(), (0, rows - own.shape[-1]), value=-torch.inf)
    at = torch.tensor(targets, device=own.device)[:, None] - first
    elsewhere = (at < 0) | (at >= own.shape[-1])
    target = logits.gather(-1, at.masked_fill(elsewhere, 0)).masked_fill(elsewhere, -torch.inf)
    values, places = logits.topk(min(top, rows))
    parts = logits.logsumexp(-1, keepdim=True), target, values, places + first
    sent = torch.cat([part.double() for part in parts], -1)  # a token id is exact in float64
    denominators, found, values, tokens = all_gather(sent).split([1, 1, values.shape[-1], values.shape[-1]], -1)
    total = denominators.logsumexp(0)
    undefined = ~total.isfinite()  # a logit is NaN or infinite, or there is none but -inf
    logprobs = (found.amax(0) - total).masked_fill(undefined, torch.nan)[:, 0].tolist()
    merged, order = _side_by_side(values - total).topk(min(top, values.shape[-1] * len(values)))
    likeliest = zip(_side_by_side(tokens).gather(-1, order).long().tolist(), merged.tolist(), strict=True)
    tops = [tuple(pair for pair in zip(*pairs, strict=True) if pair[1] > -torch.inf) for pairs in likeliest]
    return [TokenLogprob(*each) for each in zip(targets, logprobs, tops, strict=True)]


def _side_by_side(gathered: Tensor) -> Tensor:
    """(ranks, tokens, numbers) as (tokens, numbers of all ranks)."""
    return gathered.movedim(0, 1).flatten(1)
