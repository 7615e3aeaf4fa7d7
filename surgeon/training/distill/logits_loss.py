"""A model's logits held against those of a teacher, and against the text, in little memory.

The gradient of both is known in closed form, so that it is computed with the loss, some tokens at a time, and put where
the teacher's logits were: no other tensor of the logits' size is made, where plain PyTorch makes five.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from surgeon.quality.head import BLOCK_BYTES
from surgeon.training.packing import IGNORED

LEAST_ROWS = 8  # of a block


class TeacherTarget(Protocol):
    """What a teacher predicts for some tokens."""

    def room(self, logits: Tensor) -> Tensor:
        """A tensor like these logits whose values are of no use any more, once their rows were compared."""

    def compare(self, rows: slice, log_q: Tensor) -> tuple[Tensor, Tensor]:
        """The divergence of a student from the teacher, token by token.

        Args:
            rows: which of the tokens.
            log_q: (rows, vocabulary), the log-softmax of the student's logits divided by the temperature, float32.

        Returns:
            The divergence in nats, (rows,), and its gradient for the divided logits, (rows, vocabulary).
        """


class FullLogits:
    """All logits of a teacher; the divergence is KL(softmax(t / T) || softmax(s / T)) over the vocabulary.

    Args:
        logits: (tokens, vocabulary). They are overwritten where they have the student's dtype and device.
        temperature: T.
    """

    def __init__(self, logits: Tensor, temperature: float) -> None:
        self.logits, self.temperature = logits, temperature

    def room(self, logits: Tensor) -> Tensor:
        alike = self.logits.dtype == logits.dtype and self.logits.device == logits.device
        return self.logits if alike and self.logits.is_contiguous() else torch.empty_like(logits)

    def compare(self, rows: slice, log_q: Tensor) -> tuple[Tensor, Tensor]:
        if self.logits.shape[1] != log_q.shape[1]:
            raise ValueError(
                f"the teacher has a vocabulary of {self.logits.shape[1]:,} tokens and the student one of "
                f"{log_q.shape[1]:,}; distil from a model with the same vocabulary"
            )
        log_p = functional.log_softmax(self.logits[rows].to(log_q.device).float() / self.temperature, dim=-1)
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

    def room(self, logits: Tensor) -> Tensor:
        return torch.empty_like(logits)

    def compare(self, rows: slice, log_q: Tensor) -> tuple[Tensor, Tensor]:
        ids, log_p, rest = (each[rows].to(log_q.device) for each in (self.ids.long(), self.log_p, self.rest))
        p, others = log_p.exp(), _without(log_q, ids)
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

    def loss(self, student: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sums over the predicted tokens, in float32: the weighted loss, and its parts, which have no gradient.

        Args:
            student: (tokens, vocabulary).

        Returns:
            The loss; the divergence times T^2; the negative log-likelihood.

        Raises:
            ValueError: if the teacher has another vocabulary.
        """
        loss, divergence, nll = _KnownGradient.apply(student, self)  # type: ignore[no-untyped-call]
        return loss, divergence, nll

    def room(self, student: Tensor) -> Tensor:
        """Where the gradient goes."""
        return torch.zeros_like(student) if self.target is None else self.target.room(student)

    def block(self, rows: slice, student: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Divergence (times T^2) and negative log-likelihood of some tokens, summed, and the gradient of the loss."""
        wanted = self.labels[rows] != IGNORED
        softened = functional.log_softmax(student if self.temperature == 1 else student / self.temperature, dim=-1)
        divergence = nll = student.new_zeros(())
        slopes = []
        if self.target is not None:
            by_token, slope = self.target.compare(rows, softened)
            divergence = torch.where(wanted, by_token, 0).sum() * self.temperature**2
            slopes.append(slope.mul_((wanted * (self.logits * self.temperature))[:, None]))
        if self.text:
            log_q = softened if self.temperature == 1 else functional.log_softmax(student, dim=-1)
            labels = torch.where(wanted, self.labels[rows], 0)[:, None]
            nll = -torch.where(wanted, log_q.gather(-1, labels)[:, 0], 0).sum()
            slope = log_q.exp_().scatter_add_(-1, labels, log_q.new_full(labels.shape, -1))
            slopes.append(slope.mul_((wanted * self.text)[:, None]))
        return divergence, nll, reduce(Tensor.add_, slopes)


class _KnownGradient(torch.autograd.Function):
    """A loss whose gradient is computed with it."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, task: LogitsTask) -> tuple[Tensor, Tensor, Tensor]:
        parts = [student.new_zeros(2, dtype=torch.float32)]
        room = task.room(student) if ctx.needs_input_grad[0] else None
        for rows in blocks(student) if task.target is not None or task.text else ():
            divergence, nll, gradient = task.block(rows, student[rows].float())
            parts.append(torch.stack([divergence, nll]))
            if room is not None:
                room[rows] = gradient
        if room is not None:
            ctx.save_for_backward(room)
        divergence, nll = torch.stack(parts).sum(0)
        ctx.mark_non_differentiable(divergence, nll)
        # A weight of 0 with a part that is not finite is none either: it was not computed.
        return task.logits * divergence + task.text * nll, divergence, nll

    @staticmethod
    def backward(ctx: Any, *wanted: Any) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(wanted[0]), None  # in place: going backward a second time is an error that PyTorch finds


def blocks(logits: Tensor) -> Iterator[slice]:
    """Rows of logits, (tokens, vocabulary), some at a time, so that what is made of them stays small."""
    limit = BLOCK_BYTES.get(logits.device.type, BLOCK_BYTES["cpu"])
    rows = max(LEAST_ROWS, limit // (4 * logits.shape[1]))
    return (slice(start, start + rows) for start in range(0, len(logits), rows))


def _without(log_p: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities, (tokens, vocabulary), with nothing left of some of them, (tokens, kept)."""
    return log_p.scatter(-1, ids, -torch.inf)
