"""The loss of a model, computed at its output head, so that logits are never in memory as a whole.

With a large vocabulary a batch's logits take more memory than all else in training. The head goes through the stream
some tokens at a time: from logits to their gradient, and at once to that of the stream and of the matrix, which are all
that is kept for the backward pass. That takes as many matrix products as with whole logits (as in Liger-Kernel: Hsu et
al. 2024, arXiv 2410.10989, section 3.2), and none for tokens at which nothing is predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from surgeon.models.weights.store import dense
from surgeon.quality.head import BLOCK_BYTES, OutputHead
from surgeon.training.texts import model_inputs
from surgeon.training.token_store import IGNORED

# From a model and a micro-batch to its mean loss under "loss", in nats per predicted token, with its gradient, and the
# loss's parts by their names. A micro-batch has `input_ids` and `labels`, (windows, tokens), and `position_ids` where
# documents are apart; and, (windows,), the `index` of each training window and its `place` in the run's order: step s
# has places from s * batch on.
LossParts = Callable[[nn.Module, Mapping[str, Any]], dict[str, Tensor]]


@dataclass(frozen=True)
class TeacherStream:
    """A teacher's predictions as its stream before the head; logits of some tokens are made on demand.

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
        """Compare a student with the teacher, token by token.

        Args:
            rows: of the tokens.
            log_q: (rows, vocabulary), the log-softmax of the student's logits divided by the temperature, in at least
                32 bits.

        Returns:
            The divergence in nats, (rows,), and its gradient for the divided logits, (rows, vocabulary).
        """
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


class TopLogits(NamedTuple):
    """The largest log-probabilities of a teacher, and the total of the others.

    The divergence is that over the kept tokens and one more, which stands for all others: by the log-sum inequality it
    is never above the divergence over the full vocabulary, and with all tokens kept it is that.

    Attributes:
        ids: (tokens, kept), of the vocabulary.
        log_p: (tokens, kept), of softmax(t / T).
        rest: (tokens,), the logarithm of the others' total.
    """

    ids: Tensor
    log_p: Tensor
    rest: Tensor

    @classmethod
    def of(cls, logits: Tensor, kept: int, temperature: float) -> TopLogits:
        """Take the largest of logits, (tokens, vocabulary)."""
        vocabulary = logits.shape[-1]
        if kept > vocabulary:
            raise ValueError(
                f"the teacher's vocabulary has {vocabulary:,} tokens; keep at most as many, not {kept:,}"
            )
        log_p = functional.log_softmax(logits.float() / temperature, dim=-1)
        top = log_p.topk(kept, dim=-1)
        others = log_p.scatter(-1, top.indices, -torch.inf)
        return cls(top.indices, top.values, others.logsumexp(-1))

    def at(self, rows: Tensor) -> TopLogits:
        rows = rows.to(self.ids.device)
        return TopLogits(*(each[rows] for each in self))

    @classmethod
    def join(cls, parts: Sequence[TopLogits]) -> TopLogits:
        """Join those of some tokens and of others behind them."""
        return cls(*(torch.cat(each) for each in zip(*parts, strict=True)))

    def compare(self, rows: slice, log_q: Tensor) -> tuple[Tensor, Tensor]:
        ids, log_p, rest = (
            each[rows].to(log_q.device) for each in (self.ids.long(), self.log_p, self.rest)
        )
        p = log_p.exp()
        others = log_q.scatter(-1, ids, -torch.inf)
        # Where nothing is left for the others, their share is 0, and its logarithm no number to reckon with.
        log_q_rest = torch.where(rest.isneginf(), 0, others.logsumexp(-1))
        share = torch.where(rest.isneginf(), 0, rest.exp() * (rest - log_q_rest))
        divergence = (p * (log_p - log_q.gather(-1, ids))).sum(-1) + share
        # Of a kept token q - p; the others share what is left of p as they share what is left of q.
        gradient = log_q.exp() - (others + (rest - log_q_rest)[:, None]).exp()
        return divergence, gradient.scatter_add_(-1, ids, -p)


TeacherRows = FullLogits | TopLogits  # what a teacher predicts for some tokens, at hand
TeacherTarget = TeacherStream | TeacherRows  # of all tokens of a micro-batch


@dataclass(frozen=True)
class LogitsTask:
    """Targets of some logits.

    Attributes:
        target: the teacher's predictions; None without a teacher.
        labels: (tokens,), the token that each is to predict, or IGNORED.
        temperature: T.
        logits: weight of the divergence from the teacher, which is multiplied by T^2 (Hinton et al. 2015, "Distilling
            the Knowledge in a Neural Network", arXiv 1503.02531, section 2.1), so that its gradient does not shrink as
            T grows.
        text: weight of the negative log-likelihood of the labels.
    """

    target: TeacherTarget | None
    labels: Tensor
    temperature: float = 1.0
    logits: float = 1.0
    text: float = 0.0

    @property
    def rows(self) -> Tensor:
        """Numbers of the tokens whose logits are needed, (rows,)."""
        asks = self.target is not None or bool(self.text)
        return ((self.labels != IGNORED) & asks).nonzero()[:, 0]

    def become_gradient(self, rows: Tensor, logits: Tensor, head: OutputHead) -> Tensor:
        """Replace logits by the gradient of their tokens' loss.

        Args:
            rows: numbers of the tokens, (rows,), of which each predicts something.
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
        limit = BLOCK_BYTES.get(logits.device.type, BLOCK_BYTES["cpu"])
        size = max(LEAST_ROWS, limit // (4 * logits.shape[1]))
        for start in range(0, len(logits), size):
            block = slice(start, start + size)
            student = head.finish(logits[block].to(torch.promote_types(logits.dtype, torch.float32)))
            divergence, nll, gradient = self._block(target, block, labels[block], student)
            sums.append(torch.stack([divergence, nll]))
            logits[block] = head.unfinish(gradient, student)
        return torch.stack(sums).sum(0)

    def _block(
        self, target: TeacherRows | None, block: slice, labels: Tensor, student: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Divergence (times T^2) and negative log-likelihood, summed, and the gradient of the loss."""
        softened = functional.log_softmax(
            student if self.temperature == 1 else student / self.temperature, dim=-1
        )
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


# Of logits at a time: so many that reading the matrix, and adding to its gradient, is little beside the products.
CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 512 << 20}
LEAST_ROWS = 256


class HeadLoss(NamedTuple):
    """Sums over the predicted tokens, numbers.

    Attributes:
        loss: weighted, with its gradient.
        divergence: times T^2; without a gradient.
        nll: negative log-likelihood, without a gradient.
    """

    loss: Tensor
    divergence: Tensor
    nll: Tensor


def loss_at_head(
    model: nn.Module, windows: Mapping[str, Tensor], ask: Callable[[], LogitsTask]
) -> HeadLoss:
    """Compute the loss of a forward pass, inside the pass, where sharded parameters are whole.

    Args:
        model: a causal language model or a wrapper of it (DDP, FSDP, peft); it is called once.
        windows: as the model takes them.
        ask: gives the targets; called when the stream has come to the head.

    Raises:
        ValueError: if the output projection is no plain linear map.
    """
    inner = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    head: Any = inner.get_output_embeddings()
    if not isinstance(vars(head).get("forward"), _LossInPlaceOfLogits):
        head.forward = _LossInPlaceOfLogits(inner)
    head.forward.ask = ask
    try:
        output = model(**windows, use_cache=False)
    finally:
        head.forward.ask = None
    found: HeadLoss = head.forward.found
    head.forward.found = None
    # Nothing is added; what wraps the model has its part in the backward pass only by what the model gave.
    return found._replace(loss=found.loss + output.logits.sum())


def loss_of_stream(stream: Tensor, head: OutputHead, task: LogitsTask) -> HeadLoss:
    """Compute the loss of a normed stream, (tokens, hidden)."""
    kind = stream.device.type
    half = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16
    if (
        kind == "cuda"
        and not half
        and task.target is None
        and len(task.rows)
        and find_spec("liger_kernel")
    ):
        return by_liger(stream, head, task)
    return HeadLoss(*_KnownGradient.apply(stream, head.weight, head.bias, head, task))  # type: ignore[no-untyped-call]


def by_liger(stream: Tensor, head: OutputHead, task: LogitsTask) -> HeadLoss:
    """Compute a text's loss by Liger-Kernel, whose kernels go over a chunk of logits once.

    It scales no logits, so that stream and bias are scaled; it caps them as a head does.
    """
    from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction

    rows = task.rows.to(stream.device)
    scale = 1.0 if head.scale is None else head.scale
    some = stream[rows] * scale
    bias = None if head.bias is None else head.bias * scale
    given = some, dense(head.weight), task.labels.to(stream.device)[rows], bias
    options = None, IGNORED, 0.0, 0.0, "sum", head.softcap, False, torch.float32
    nll, *_ = LigerFusedLinearCrossEntropyFunction.apply(*given, *options)
    return HeadLoss(task.text * nll, torch.zeros_like(nll), nll.detach())


def text_loss(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """The mean negative log-likelihood per predicted token of windows, 0 where nothing is predicted.

    Args:
        inputs: (windows, tokens) `input_ids` and `labels`, and `position_ids` of documents that are apart.
    """
    labels = next_tokens(inputs["labels"])
    task = LogitsTask(None, labels.flatten(), logits=0.0, text=1.0)
    summed = loss_at_head(model, model_inputs(inputs), lambda: task).loss
    return summed / (labels != IGNORED).sum().clamp_min(1).to(summed.device)


def next_tokens(labels: Tensor) -> Tensor:
    """Shift labels, (windows, tokens), to the tokens that predict them."""
    return nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


class _LossInPlaceOfLogits:
    """An output head's forward pass: logits, or the loss where one is asked for.

    It stays in place, since a compiled model would not see it come and go.
    """

    ask: Callable[[], LogitsTask] | None = None
    found: HeadLoss | None = None

    def __init__(self, model: PreTrainedModel) -> None:
        head: Any = model.get_output_embeddings()
        self.model = model
        self.plain = head.forward

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, stream: Tensor) -> Tensor:
        if self.ask is None:
            logits: Tensor = self.plain(stream)
            return logits
        head = OutputHead(self.model)
        task = self.ask()
        self.found = loss_of_stream(stream.flatten(0, -2).to(head.weight.device), head, task)
        # In the place of logits nothing, which yet comes from all that the loss comes from: DDP looks for that.
        return self.found.loss.reshape(1, 1, 1)[..., :0]


class _KnownGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, stream: Tensor, weight: Tensor, bias: Tensor | None, head: OutputHead, task: LogitsTask
    ) -> tuple[Tensor, Tensor, Tensor]:
        kind = stream.device.type
        dtype = weight.dtype
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16:
            # float16 is left out, as an unscaled gradient would underflow.
            dtype = torch.bfloat16
        with torch.autocast(kind, enabled=False):
            inputs = (stream, weight, bias)
            sum_dtype = torch.promote_types(dtype, torch.float32)
            of_stream, of_weight, of_bias = made = [
                torch.zeros_like(one, dtype=sum_dtype) if need and one is not None else None
                for one, need in zip(inputs, ctx.needs_input_grad, strict=False)
            ]
            matrix = dense(weight).to(dtype)
            shift = None if bias is None else bias.to(dtype)
            sums = stream.new_zeros(2, dtype=sum_dtype)
            limit = CHUNK_BYTES.get(stream.device.type, CHUNK_BYTES["cpu"])
            chunk = max(LEAST_ROWS, limit // (matrix.element_size() * len(matrix)))
            predicting = task.rows.to(stream.device)
            for start in range(0, len(predicting), chunk):
                rows = predicting[start : start + chunk]
                some = stream[rows].to(dtype)
                logits = nn.functional.linear(some, matrix, shift)
                sums += task.become_gradient(rows, logits, head)
                if of_stream is not None:
                    of_stream[rows] = (logits @ matrix).to(sum_dtype)
                if of_weight is not None and of_weight.dtype == dtype:
                    of_weight.addmm_(logits.T, some)
                elif of_weight is not None:
                    of_weight += logits.T @ some
                if of_bias is not None:
                    of_bias += logits.sum(0)
                del logits  # else there were two chunks, as the next one is made
        ctx.gradients = [
            None if own is None else own.to(one) for own, one in zip(made, inputs, strict=True)
        ]
        divergence, nll = sums.unbind()
        ctx.mark_non_differentiable(divergence, nll)
        # A weight of 0 with a part that is not finite is none either: it was not computed.
        return task.logits * divergence + task.text * nll, divergence, nll

    @staticmethod
    def backward(ctx: Any, wanted: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        assert ctx.gradients is not None, (
            "there is one way back: gradients are handed on in the memory they are in"
        )
        gradients = ctx.gradients
        ctx.gradients = None
        return *(None if one is None else one.mul_(wanted) for one in gradients), None, None
