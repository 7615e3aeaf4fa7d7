"""Logits held against those of a teacher, and against the text, some tokens at a time.

The gradient of both is known in closed form, so that it is computed with the loss, and put where the logits were.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from surgeon.quality.head import BLOCK_BYTES, OutputHead
from surgeon.training.packing import IGNORED

LEAST_ROWS = 8  # of a block


class TeacherRows(Protocol):
    """What a teacher predicts for some tokens, at hand."""

    def compare(self, rows: slice, log_q: Tensor) -> tuple[Tensor, Tensor]:
        """The divergence of a student from the teacher, token by token.

        Args:
            rows: which of the tokens.
            log_q: (rows, vocabulary), the log-softmax of the student's logits divided by the temperature, of at least
                32 bits.

        Returns:
            The divergence in nats, (rows,), and its gradient for the divided logits, (rows, vocabulary).
        """


class TeacherTarget(Protocol):
    """What a teacher predicts for all tokens of a micro-batch."""

    def at(self, rows: Tensor) -> TeacherRows:
        """For some of them, by their numbers, (rows,)."""


@dataclass(frozen=True)
class TeacherStream:
    """A teacher's predictions as its stream before the head; logits of some tokens are made as they are asked for.

    Attributes:
        head: the teacher's.
        stream: (tokens, hidden), normed.
        temperature: T.
    """

    head: OutputHead
    stream: Tensor
    temperature: float

    def at(self, rows: Tensor) -> FullLogits:
        stream = self.stream[rows.to(self.stream.device)]
        return FullLogits(self.head.logits(stream.to(self.head.weight.device)), self.temperature)


@dataclass(frozen=True)
class FullLogits:
    """All logits of a teacher; the divergence is KL(softmax(t / T) || softmax(s / T)) over the vocabulary.

    Attributes:
        logits: (tokens, vocabulary).
        temperature: T.
    """

    logits: Tensor
    temperature: float

    def at(self, rows: Tensor) -> FullLogits:
        return replace(self, logits=self.logits[rows])

    def compare(self, rows: slice, log_q: Tensor) -> tuple[Tensor, Tensor]:
        if self.logits.shape[1] != log_q.shape[1]:
            raise ValueError(
                f"the teacher has a vocabulary of {self.logits.shape[1]:,} tokens and the student one of "
                f"{log_q.shape[1]:,}; distil from a model with the same vocabulary"
            )
        softened = self.logits[rows].to(log_q.device, log_q.dtype) / self.temperature
        log_p = functional.log_softmax(softened, dim=-1)
        p = log_p.exp()
        divergence = (p * log_p.sub_(log_q)).sum(-1)
        return divergence, log_q.exp().sub_(p)


@dataclass(frozen=True)
class TopLogits:
    """The largest log-probabilities of a teacher, and what the others have together.

    The divergence is that over the kept tokens and one more, which stands for all others: by the log-sum inequality it
    is never above the divergence over the full vocabulary, and with all tokens kept it is that.

    Attributes:
        ids: (tokens, kept), which of the vocabulary.
        log_p: (tokens, kept), of softmax(t / T).
        rest: (tokens,), the logarithm of what the others have together.
    """

    ids: Tensor
    log_p: Tensor
    rest: Tensor

    @classmethod
    def of(cls, logits: Tensor, kept: int, temperature: float) -> TopLogits:
        """The largest ones of logits, (tokens, vocabulary).

        Raises:
            ValueError: if the vocabulary has fewer.
        """
        vocabulary = logits.shape[-1]
        if kept > vocabulary:
            raise ValueError(f"the teacher's vocabulary has {vocabulary:,} tokens; keep at most as many, not {kept:,}")
        log_p = functional.log_softmax(logits.float() / temperature, dim=-1)
        top = log_p.topk(kept, dim=-1)
        return cls(top.indices, top.values, _without(log_p, top.indices).logsumexp(-1))

    def at(self, rows: Tensor) -> TopLogits:
        rows = rows.to(self.ids.device)
        return TopLogits(self.ids[rows], self.log_p[rows], self.rest[rows])

    def compare(self, rows: slice, log_q: Tensor) -> tuple[Tensor, Tensor]:
        ids, log_p, rest = (each[rows].to(log_q.device) for each in (self.ids.long(), self.log_p, self.rest))
        p = log_p.exp()
        others = _without(log_q, ids)
        # Where nothing is left for the others, their share is 0, and its logarithm no number to reckon with.
        log_q_rest = torch.where(rest.isneginf(), 0, others.logsumexp(-1))
        share = torch.where(rest.isneginf(), 0, rest.exp() * (rest - log_q_rest))
        divergence = (p * (log_p - log_q.gather(-1, ids))).sum(-1) + share
        # Of a kept token q - p; the others share what is left of p as they share what is left of q.
        gradient = log_q.exp() - (others + (rest - log_q_rest)[:, None]).exp()
        return divergence, gradient.scatter_add_(-1, ids, -p)


@dataclass(frozen=True)
class LogitsTask:
    """What some logits are held against.

    Attributes:
        target: the teacher's predictions; None where they are not asked for.
        labels: (tokens,), the token that each is to predict, or IGNORED.
        temperature: T.
        logits: the weight of the divergence from the teacher, which is multiplied by T^2 (Hinton et al. 2015,
            "Distilling the Knowledge in a Neural Network", arXiv 1503.02531, section 2.1), so that its gradient does
            not shrink as T grows.
        text: the weight of the negative log-likelihood of the labels.
    """

    target: TeacherTarget | None
    labels: Tensor
    temperature: float = 1.0
    logits: float = 1.0
    text: float = 0.0

    @property
    def rows(self) -> Tensor:
        """The numbers of the tokens whose logits are needed, (rows,)."""
        asks = self.target is not None or bool(self.text)
        return ((self.labels != IGNORED) & asks).nonzero()[:, 0]

    def become_gradient(self, rows: Tensor, logits: Tensor, head: OutputHead) -> Tensor:
        """Put the gradient of the loss of some tokens where their logits are.

        Args:
            rows: their numbers, (rows,), of such as are to predict something.
            logits: (rows, vocabulary), of the student's matrix product, which its head then scales and caps.

        Returns:
            (2,), at least float32: their divergence, times T^2, and their negative log-likelihood, summed.

        Raises:
            ValueError: if the teacher has another vocabulary.
        """
        target = None if self.target is None else self.target.at(rows)
        labels = self.labels[rows.to(self.labels.device)]
        labels = labels.to(logits.device)
        sums = []
        for block in blocks(logits):
            student = head.finished(logits[block].to(torch.promote_types(logits.dtype, torch.float32)))
            divergence, nll, gradient = self._block(target, block, labels[block], student)
            sums.append(torch.stack([divergence, nll]))
            logits[block] = head.unfinished(gradient, student)
        return torch.stack(sums).sum(0)

    def _block(
        self, target: TeacherRows | None, block: slice, labels: Tensor, student: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Divergence (times T^2) and negative log-likelihood, summed, and the gradient of the loss."""
        softened = functional.log_softmax(student if self.temperature == 1 else student / self.temperature, dim=-1)
        divergence = nll = student.new_zeros(())
        slopes = []
        if target is not None:
            by_token, slope = target.compare(block, softened)
            divergence = by_token.sum() * self.temperature**2
            slopes.append(_times(slope, self.logits * self.temperature))
        if self.text:
            if self.temperature == 1:
                log_q = softened
            else:
                log_q = functional.log_softmax(student, dim=-1)
            labels = labels[:, None]
            nll = -log_q.gather(-1, labels).sum()
            slope = log_q.exp_().scatter_add_(-1, labels, log_q.new_full(labels.shape, -1))
            slopes.append(_times(slope, self.text))
        return divergence, nll, reduce(Tensor.add_, slopes)


def _times(slope: Tensor, weight: float) -> Tensor:
    if weight == 1:
        return slope
    return slope.mul_(weight)


def blocks(logits: Tensor) -> Iterator[slice]:
    """Rows of logits, (tokens, vocabulary), some at a time, so that what is made of them stays small."""
    limit = BLOCK_BYTES.get(logits.device.type, BLOCK_BYTES["cpu"])
    rows = max(LEAST_ROWS, limit // (4 * logits.shape[1]))
    return (slice(start, start + rows) for start in range(0, len(logits), rows))


def _without(log_p: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities, (tokens, vocabulary), with nothing left of some of them, (tokens, kept)."""
    return log_p.scatter(-1, ids, -torch.inf)
