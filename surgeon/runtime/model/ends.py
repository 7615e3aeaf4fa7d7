"""The ends of a program: embedded tokens and their positions before it, the final norm and the output head behind it.

`Ends` serves vLLM, too, which has the vocabulary's rows in layers of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from surgeon.models.weights import ModelWeights
from surgeon.runtime.batching.request import UNDEFINED, TokenLogprob
from surgeon.runtime.comm.collectives import Peers
from surgeon.runtime.kernels.functions import kernels_for, triton_kernels_for
from surgeon.runtime.model.attending import softcap
from surgeon.runtime.model.layers import Norm, plain_norm, torch_dtype
from surgeon.runtime.model.linear import Panels, Product, Transposed, laid_out
from surgeon.runtime.plan.specification import Plan

Index = slice | Tensor  # which of some places, in order


def read(
    source: ModelWeights,
    plan: Plan,
    device: torch.device,
    path: str,
    rows: tuple[int, int] | None = None,
) -> Tensor:
    """Read a tensor, or some of its rows, to the device in the plan's dtype."""
    return source.tensor(path, rows).to(torch_dtype(plan)).to(device)


def final_norm(source: ModelWeights, plan: Plan, device: torch.device) -> Norm:
    """Load the norm before the head."""
    if plan.family.norms.kind == "plain":
        return plain_norm(plan, device)
    path = plan.family.final_norm
    paths = [one for part in ("weight", "bias") if (one := f"{path}.{part}") in source]
    return Norm({one: read(source, plan, device, one) for one in paths}, path, plan)


class Ends:
    """Scales and positions of embedded tokens, and the final norm.

    Attributes:
        positions: learned ones, (positions, hidden), from that of a text's first token on; None without.
        final_norm: before the head.
    """

    def __init__(self, source: ModelWeights, plan: Plan, device: torch.device) -> None:
        family = plan.family
        self._scale: float | None = None
        if plan.arithmetic.embedding_scale is not None:  # rounded to the dtype first
            self._scale = float(torch.tensor(plan.arithmetic.embedding_scale, dtype=torch_dtype(plan)))
        self.positions: Tensor | None = None
        if family.positions.embedding is not None:
            path = f"{family.positions.embedding}.weight"
            self.positions = read(source, plan, device, path)[family.positions.offset :]
        self.final_norm = final_norm(source, plan, device)

    def scale(self, embedded: Tensor) -> Tensor:
        """Scale rows of the embedding, (tokens, hidden)."""
        if self._scale is None:
            return embedded
        return embedded * self._scale

    def add_positions(self, embedded: Tensor, positions: Index) -> Tensor:
        """Add learned positions to scaled embeddings, (tokens, hidden)."""
        if self.positions is None:
            return embedded
        return embedded + self.positions[positions]


def embedded_among(tokens: Tensor, rows: Tensor, first: int) -> Tensor:
    """Look up tokens, (tokens,), among a rank's rows of the embedding, (rows, hidden); 0 for tokens of others.

    Args:
        first: the token id of the first row.
    """
    if not len(rows):
        return rows.new_zeros(*tokens.shape, rows.shape[-1])
    own = tokens - first
    outside = (own < 0) | (own >= len(rows))
    return F.embedding(own.masked_fill(outside, 0), rows).masked_fill(outside[..., None], 0)


class Vocabulary:
    """A rank's rows of the embedding and of the output head; every rank calls the same methods in the same order.

    Attributes:
        rows: of each rank; the last ranks may have fewer, or none.
        first: the token id of this rank's first row.
        like: a tensor of the embedding's dtype, on its device.
        embedding: its rows, (rows, hidden).
        head: the product with the head: (tokens, hidden) to (tokens, rows). Tied, it shares the embedding's rows where
            kernels can read them packed.
    """

    def __init__(self, source: ModelWeights, plan: Plan, device: torch.device, peers: Peers) -> None:
        family = plan.family
        self.plan = plan
        self.peers = peers
        self.rows = -(-plan.vocabulary // plan.ranks)
        self.first = min(peers.rank * self.rows, plan.vocabulary)
        bounds = self.first, min(self.first + self.rows, plan.vocabulary)
        if plan.stretch:
            bounds = self.first, self.first
        embedding = read(source, plan, device, f"{family.embedding}.weight", bounds)
        self.like = embedding.new_empty(0)  # no view, which would keep an embedding that has been packed
        self.embedding: Tensor | Panels = embedding
        self.head: Product = Transposed(embedding.t())
        if not plan.tied:
            self.head = laid_out(read(source, plan, device, f"{family.head}.weight", bounds))
        elif kernels_for(embedding) is not None:
            head = laid_out(embedding)
            if isinstance(head, Panels):
                self.embedding = self.head = head
        bias = f"{family.head}.bias"
        self._bias = read(source, plan, device, bias, bounds) if bias in source else None

    def with_head(self, source: ModelWeights, plan: Plan, device: torch.device) -> Vocabulary:
        """Share the rows, with the head of other weights, or the embedding for one where they have none."""
        other = copy(self)
        head = f"{plan.family.head}.weight"
        bias = f"{plan.family.head}.bias"
        bounds = self.first, min(self.first + self.rows, self.plan.vocabulary)
        own = source.names.own(head) in source.store
        if own:
            other.head = laid_out(read(source, plan, device, head, bounds))
        elif isinstance(self.embedding, Panels):
            other.head = self.embedding
        else:
            other.head = Transposed(self.embedding.t())
        other._bias = read(source, plan, device, bias, bounds) if bias in source else None
        return other

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens, (tokens,), whole on every rank: (tokens, hidden)."""
        kernels = kernels_for(self.like)
        if isinstance(self.embedding, Panels):
            own = self.embedding.rows(tokens, self.first)
        elif kernels is not None:
            own = kernels.rows(self.embedding, tokens, self.first)
        else:
            own = embedded_among(tokens, self.embedding, self.first)
        if self.plan.ranks == 1:
            return own
        return self.peers.collectives.exact.all_reduce(own, self.peers.counts.vocabulary, at_once=True)()

    def logits(self, normed: Tensor) -> Tensor:
        """This rank's logits, (tokens, its rows), of a normed stream, (tokens, hidden)."""
        logits = self.head(normed, self._bias)
        if self.plan.arithmetic.logit_scale is not None:
            logits = logits * self.plan.arithmetic.logit_scale
        if self.plan.arithmetic.logit_softcap is None:
            return logits
        return softcap(logits, self.plan.arithmetic.logit_softcap)

    def gather(self, own: Tensor) -> Tensor:
        """Gather each rank's logits to (tokens, vocabulary)."""
        missing = self.rows - own.shape[-1]
        padded = own
        if missing:
            padded = F.pad(own, (0, missing))
        return torch.cat(list(self._gather(padded)), -1)[..., : self.plan.vocabulary]

    def score(self, own: Tensor, targets: list[int], top: int) -> list[TokenLogprob]:
        """Score targets, one of each row of this rank's logits."""
        return score(own, self.first, self.rows, targets, top, self._gather)

    def _gather(self, part: Tensor) -> Tensor:
        return self.peers.collectives.all_gather(part, self.peers.counts.vocabulary)

    def best(self, own: Tensor) -> Tensor:
        """The most likely token of each text, (texts,), from each rank's own logits, (texts, rows).

        UNDEFINED where the highest logit is not finite: NaN counts as higher than any number. Nothing waits for a GPU.
        """
        kernels = kernels_for(own) or triton_kernels_for(own)
        if own.shape[-1]:
            if kernels is None:
                best, at = own.max(-1)
            else:
                best, at = kernels.highest(own.contiguous())
        else:  # the vocabulary has fewer rows than there are ranks
            best = own.new_full(own.shape[:1], -torch.inf)
            at = own.new_zeros(own.shape[:1], dtype=torch.long)
        if self.plan.ranks == 1:
            return at.where(best - best == 0, UNDEFINED)  # `isfinite` is five launches
        # Two float64 numbers per text instead of a vocabulary; a token id is exact in them.
        candidates = self._gather(torch.stack([best.double(), (at + self.first).double()], -1))
        highest, winner = candidates[..., 0].max(0)
        return (
            candidates[..., 1]
            .gather(0, winner[None])[0]
            .long()
            .masked_fill(~highest.isfinite(), UNDEFINED)
        )


def score(
    own: Tensor,
    first: int,
    rows: int,
    targets: list[int],
    top: int,
    all_gather: Callable[[Tensor], Tensor],
) -> list[TokenLogprob]:
    """The log-probability of a target token under each row of logits, and those of the most likely tokens there.

    To spare logits of a whole vocabulary for each token of a prompt, each rank sends three kinds of numbers: the
    logarithm of its share of the softmax's denominator, its logit of the target, and its highest logits.

    Args:
        own: this rank's logits, (tokens, its part of the vocabulary), the last part perhaps shorter or empty.
        first: the token id that the part begins with.
        rows: the length of every part but the last.
        targets: a token id for each row of `own`.
        top: how many of the most likely tokens to report.
        all_gather: joins the ranks' tensors in a new first dimension.

    Returns:
        One for each row, the same on every rank; its log-probability is NaN if the row's logits are not finite.
    """
    logits = F.pad(own.float(), (0, rows - own.shape[-1]), value=-torch.inf)
    at = torch.tensor(targets, device=own.device)[:, None] - first
    elsewhere = (at < 0) | (at >= own.shape[-1])
    target = logits.gather(-1, at.masked_fill(elsewhere, 0)).masked_fill(elsewhere, -torch.inf)
    values, places = logits.topk(min(top, rows))
    parts = logits.logsumexp(-1, keepdim=True), target, values, places + first
    sent = torch.cat([part.double() for part in parts], -1)  # a token id is exact in float64
    denominators, found, values, tokens = all_gather(sent).split(
        [1, 1, values.shape[-1], values.shape[-1]], -1
    )
    total = denominators.logsumexp(0)
    undefined = ~total.isfinite()  # a logit is NaN or infinite, or there is none but -inf
    logprobs = (found.amax(0) - total).masked_fill(undefined, torch.nan)[:, 0].tolist()
    side_by_side = (values - total).movedim(0, 1).flatten(1)
    merged, order = side_by_side.topk(min(top, side_by_side.shape[1]))
    best = tokens.movedim(0, 1).flatten(1).gather(-1, order).long()
    likeliest = zip(best.tolist(), merged.tolist(), strict=True)
    tops = [
        tuple(pair for pair in zip(*pairs, strict=True) if pair[1] > -torch.inf) for pairs in likeliest
    ]
    return [TokenLogprob(*each) for each in zip(targets, logprobs, tops, strict=True)]
