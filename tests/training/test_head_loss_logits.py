"""Loss and gradient of logits against plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from surgeon.quality.head import OutputHead
from surgeon.training import head_loss
from surgeon.training.head_loss import FullLogits, HeadLoss, LogitsTask, TopLogits, loss_of_stream
from surgeon.training.token_store import IGNORED
from tests.tiny_models import tiny_model

TOKENS, VOCABULARY = 23, 31


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that there are several, the last one shorter."""
    monkeypatch.setattr(head_loss, "BLOCK_BYTES", {"cpu": 1})
    monkeypatch.setattr(head_loss, "LEAST_ROWS", 5)


@pytest.fixture
def student() -> Tensor:
    return (3 * torch.randn(TOKENS, VOCABULARY)).requires_grad_()


@pytest.fixture
def teacher() -> Tensor:
    return 3 * torch.randn(TOKENS, VOCABULARY)


@pytest.fixture
def labels() -> Tensor:
    return torch.where(torch.rand(TOKENS) < 0.3, IGNORED, torch.randint(VOCABULARY, (TOKENS,)))


def plainly(
    student: Tensor, teacher: Tensor, labels: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """PyTorch's own divergence and cross-entropy, summed over the tokens that are predicted."""
    kept = labels != IGNORED
    log_q = functional.log_softmax(student[kept] / temperature, -1)
    log_p = functional.log_softmax(teacher[kept] / temperature, -1)
    divergence = temperature**2 * functional.kl_div(log_q, log_p, reduction="sum", log_target=True)
    return divergence, functional.cross_entropy(student, labels, ignore_index=IGNORED, reduction="sum")


def in_buckets(
    student: Tensor, teacher: Tensor, labels: Tensor, temperature: float, kept: int
) -> Tensor:
    """The divergence over the teacher's likeliest tokens and all others as one, in probabilities."""
    p, q = (torch.softmax(each / temperature, -1)[labels != IGNORED] for each in (teacher, student))
    order = p.argsort(-1, descending=True)
    p, q = p.gather(-1, order), q.gather(-1, order)
    p, q = (torch.cat([each[:, :kept], each[:, kept:].sum(-1, keepdim=True)], -1) for each in (p, q))
    return temperature**2 * functional.kl_div(q.log(), p, reduction="sum")


def loss_of(task: LogitsTask, student: Tensor) -> HeadLoss:
    """Of these logits, of any dtype: the stream of a head that does nothing."""
    head = OutputHead(tiny_model("llama", 1))
    head.weight = torch.eye(student.shape[1], dtype=student.dtype)
    return loss_of_stream(student, head, task)


def gradient_of(loss: Tensor, student: Tensor) -> Tensor:
    return torch.autograd.grad(loss, student)[0]


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize(("weight", "text"), [(1.0, 0.0), (0.7, 0.4), (0.0, 2.0)])
def test_against_pytorch(
    student: Tensor, teacher: Tensor, labels: Tensor, temperature: float, weight: float, text: float
) -> None:
    divergence, nll = plainly(student.double(), teacher.double(), labels, temperature)
    wanted = gradient_of(weight * divergence + text * nll, student)
    target = FullLogits(teacher.clone(), temperature) if weight else None
    loss, *parts = loss_of(LogitsTask(target, labels, temperature, weight, text), student)
    assert torch.allclose(loss, (weight * divergence + text * nll).float(), rtol=1e-5)
    assert torch.allclose(gradient_of(2 * loss, student), 2 * wanted, rtol=1e-4, atol=1e-5)
    for part, found, factor in zip(parts, (divergence, nll), (weight, text), strict=True):
        assert not part.requires_grad
        assert torch.allclose(part, found.float() if factor else torch.tensor(0.0), rtol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("kept", [1, 6, VOCABULARY - 1])
def test_kept_logits_are_buckets(
    student: Tensor, teacher: Tensor, labels: Tensor, temperature: float, kept: int
) -> None:
    divergence = in_buckets(student.double(), teacher.double(), labels, temperature, kept)
    wanted = gradient_of(divergence, student)
    found, _, _ = loss_of(
        LogitsTask(TopLogits.of(teacher, kept, temperature), labels, temperature), student
    )
    assert torch.allclose(found, divergence.float(), rtol=1e-5)
    assert torch.allclose(gradient_of(found, student), wanted, rtol=1e-4, atol=1e-5)


def test_fewer_kept_logits_tell_of_less_divergence(
    student: Tensor, teacher: Tensor, labels: Tensor
) -> None:
    by_kept = [
        loss_of(LogitsTask(TopLogits.of(teacher, kept, 2.0), labels, 2.0), student)[0]
        for kept in (1, 5, 20, 31)
    ]
    full, _ = plainly(student, teacher, labels, 2.0)
    assert by_kept == sorted(by_kept)
    assert torch.allclose(by_kept[-1], full, rtol=1e-5)  # all of them
    assert by_kept[0] < 0.8 * full
    gradient = gradient_of(by_kept[-1], student)
    assert torch.allclose(gradient, gradient_of(full, student), rtol=1e-4, atol=1e-5)


def test_the_gradient_by_differences(student: Tensor, teacher: Tensor, labels: Tensor) -> None:
    targets: list[Callable[[], FullLogits | TopLogits]] = [
        lambda: FullLogits(teacher.clone(), 1.5),
        lambda: TopLogits.of(teacher, 4, 1.5),
    ]
    for target in targets:
        task = LogitsTask(target(), labels, 1.5, 1.0, 0.5)
        gradient = gradient_of(loss_of(task, student)[0], student)
        step = 0.05 * (gradient / gradient.norm() + torch.randn_like(student) / student.numel() ** 0.5)
        with torch.no_grad():
            low, high = (
                loss_of(LogitsTask(target(), labels, 1.5, 1.0, 0.5), student + s * step)[0]
                for s in (-1, 1)
            )
        assert torch.allclose(2 * (gradient * step).sum(), high - low, rtol=1e-3)


def test_far_certain_logits_stay_finite(labels: Tensor) -> None:
    """Where a softmax is 0 in single precision its logarithm is not."""
    teacher = torch.full((TOKENS, VOCABULARY), -300.0)
    teacher[:, 3] = 300
    student = (-teacher).requires_grad_()
    divergence, _ = plainly(student, teacher, labels, 1.0)
    for target in (
        FullLogits(teacher.clone(), 1.0),
        TopLogits.of(teacher, 2, 1.0),
        TopLogits.of(teacher, 31, 1.0),
    ):
        loss, _, _ = loss_of(LogitsTask(target, labels), student)
        assert torch.allclose(loss, divergence, rtol=1e-4)
        assert gradient_of(loss, student).isfinite().all()


def test_half_precision(student: Tensor, teacher: Tensor, labels: Tensor) -> None:
    """Computed in single precision from what is stored; the gradient has the logits' dtype."""
    small = student.detach().bfloat16().requires_grad_()
    wanted, _ = plainly(small.float(), teacher, labels, 1.0)
    loss, _, _ = loss_of(LogitsTask(FullLogits(teacher.clone(), 1.0), labels), small)
    assert loss.dtype == torch.float32
    assert torch.allclose(loss, wanted, rtol=1e-5)
    found = gradient_of(loss, small)
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.float(), gradient_of(wanted, small).float(), rtol=1e-2, atol=1e-3)


def test_what_does_not_fit(student: Tensor, labels: Tensor) -> None:
    target = FullLogits(torch.randn(TOKENS, VOCABULARY + 2), 1.0)
    with pytest.raises(
        ValueError, match="teacher has a vocabulary of 33 tokens and the student one of 31"
    ):
        loss_of(LogitsTask(target, labels), student)
    with pytest.raises(ValueError, match="vocabulary has 31 tokens; keep at most as many, not 32"):
        TopLogits.of(student, 32, 1.0)
