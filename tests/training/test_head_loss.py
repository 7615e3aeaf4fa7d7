"""Losses computed at the head, without logits, against plain PyTorch with all of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import surgeon
from surgeon.models.families import FAMILIES
from surgeon.quality.head import OutputHead
from surgeon.training import head_loss
from surgeon.training.distiller import Distiller
from surgeon.training.head_loss import LogitsTask, TeacherStream, loss_of_stream, next_tokens, text_loss
from surgeon.training.settings import Distillation
from surgeon.training.token_store import IGNORED
from tests.tiny_models import HIDDEN, VOCABULARY, tiny_model

PAIRS = "A0 F0 [A1 A2] [F1 F2] A3 F3"
CHUNK, BLOCK = 7, 3
FEW = {"cohere", "gemma2", "granite", "llama", "opt"}
LARGE = 128_000  # a vocabulary


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that there are several, the last one shorter."""
    for module, name, rows in ((head_loss, "CHUNK_BYTES", CHUNK), (head_loss, "BLOCK_BYTES", BLOCK)):
        monkeypatch.setattr(module, name, {"cpu": 1})
        monkeypatch.setattr(module, "LEAST_ROWS", rows)


def batch(windows: int = 4, tokens: int = 9, vocabulary: int = VOCABULARY) -> dict[str, Tensor]:
    """Some windows, a third of whose tokens are not predicted."""
    drawn = torch.Generator().manual_seed(5)
    ids = torch.randint(2, vocabulary, (windows, tokens), generator=drawn)
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(torch.rand(ids.shape, generator=drawn) < 0.3, IGNORED),
    }


def plain_loss(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=inputs["input_ids"], use_cache=False).logits[:, :-1].flatten(0, 1)
    return functional.cross_entropy(logits, inputs["labels"][:, 1:].flatten())


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    "family",
    [
        name if name in FEW else pytest.param(name, marks=pytest.mark.thorough)
        for name in sorted(FAMILIES)
    ],
)
def test_every_family(family: str) -> None:
    """Whatever it does with its logits: scales, caps."""
    double = FAMILIES[family].mixture is None  # whose experts have no kernels for it
    model: Any = tiny_model(family).to(torch.float64 if double else torch.float32)
    for config in (model.config, model):
        if getattr(config, "final_logit_softcapping", None):
            config.final_logit_softcapping = 0.5  # it bends
    inputs = batch()
    wanted = plain_loss(model, inputs)
    slopes = gradients(model, wanted)
    found = text_loss(model, inputs)
    assert torch.allclose(found, wanted, rtol=1e-12 if double else 1e-5)
    ours = gradients(model, found)
    assert ours.keys() == slopes.keys()
    for name, slope in slopes.items():
        assert torch.allclose(
            ours[name], slope, rtol=1e-9 if double else 1e-4, atol=1e-14 if double else 1e-6
        ), name
    # When it is not asked for a loss, it gives logits.
    assert torch.equal(plain_loss(model, inputs), wanted)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_bias_scale_and_cap(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    stream, other, matrix, taught = (
        torch.randn(*shape, dtype=dtype) for shape in ((20, 6), (20, 5), (31, 6), (31, 5))
    )
    bias, labels = torch.randn(31, dtype=dtype), torch.randint(31, (20,))
    labels[::3] = IGNORED
    head, teacher = (OutputHead(tiny_model("llama", 1)) for _ in range(2))
    head.weight, head.bias, head.scale, head.softcap = (
        matrix.requires_grad_(),
        bias.requires_grad_(),
        0.7,
        1.3,
    )
    teacher.weight = taught
    inputs = [stream.requires_grad_(), matrix, bias]

    kept = labels != IGNORED
    logits = 1.3 * torch.tanh(0.7 * functional.linear(stream, matrix, bias) / 1.3)
    log_q, log_p = (
        logits[kept].div(2).log_softmax(-1),
        functional.linear(other, taught)[kept].div(2).log_softmax(-1),
    )
    divergence = 4 * functional.kl_div(log_q, log_p, reduction="sum", log_target=True)
    nll = functional.cross_entropy(logits[kept], labels[kept], reduction="sum")
    wanted = torch.autograd.grad(0.6 * divergence + 0.3 * nll, inputs)

    task = LogitsTask(TeacherStream(teacher, other, 2.0), labels, 2.0, 0.6, 0.3)
    found = loss_of_stream(stream, head, task)
    close = 1e-4 if dtype == torch.float32 else 1e-6  # the teacher's logits are single precision
    assert torch.allclose(found.divergence, divergence, rtol=close)
    assert torch.allclose(found.nll, nll, rtol=close)
    for ours, theirs in zip(torch.autograd.grad(3 * found.loss, inputs), wanted, strict=True):
        assert torch.allclose(ours, 3 * theirs, rtol=close, atol=close)


def test_nothing_to_predict() -> None:
    model = tiny_model("llama", 1)
    inputs = batch()
    inputs["labels"][:] = IGNORED
    loss = text_loss(model, inputs)
    assert float(loss.detach()) == 0
    assert all(not slope.any() for slope in gradients(model, loss).values())


@pytest.mark.thorough
def test_a_compiled_model() -> None:
    """Whose code is made at the first pass, for losses after it, too; and for logits in between."""
    model: Any = tiny_model("llama", 1)
    compiled: Any = torch.compile(model, backend="eager")
    for seed in range(2):
        inputs = batch()
        inputs["input_ids"] = inputs["input_ids"].roll(seed)
        wanted = plain_loss(model, inputs)
        assert torch.allclose(text_loss(compiled, inputs), wanted, rtol=1e-5)
        assert torch.allclose(plain_loss(compiled, inputs), wanted, rtol=1e-5)


def test_autocast() -> None:
    """Products are in half precision, as those of whole logits; gradients of weights are in single precision."""
    model = tiny_model("gemma2")
    inputs = batch()
    exact = gradients(model, plain_loss(model, inputs))
    with torch.autocast("cpu", torch.bfloat16):
        plain, ours = (gradients(model, loss(model, inputs)) for loss in (plain_loss, text_loss))
    for name, slope in exact.items():
        assert ours[name].dtype == torch.float32
        assert 0 < (ours[name] - slope).norm() < 2 * (plain[name] - slope).norm(), name


def test_a_copy_has_a_head_of_its_own() -> None:
    model = tiny_model("llama", 1)
    text_loss(model, batch())
    other: Any = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.zero_()
    assert not other(input_ids=batch()["input_ids"]).logits.any()
    assert model(input_ids=batch()["input_ids"]).logits.any()


class _Largest(TorchDispatchMode):
    """The numbers of the largest tensor that any operation gives, forward and backward, parameters' own apart."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.rows = vocabulary, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **kwargs or {})
        for one in torch.utils._pytree.tree_leaves(found):
            of_matrix = isinstance(one, Tensor) and tuple(one.shape) == (HIDDEN, self.vocabulary)
            if (
                isinstance(one, Tensor)
                and one.dim()
                and one.shape[-1] == self.vocabulary
                and not of_matrix
            ):
                self.rows = max(self.rows, one.numel() // self.vocabulary)
        return found


@contextmanager
def watched(vocabulary: int) -> Iterator[_Largest]:
    with _Largest(vocabulary) as largest:
        yield largest


def _text(student: Any, inputs: dict[str, Tensor]) -> Tensor:
    return text_loss(student, inputs)


def _distilled(student: Any, inputs: dict[str, Tensor]) -> Tensor:
    settings, teacher = Distillation(hidden=1, text=0.5), tiny_model("llama", vocab_size=LARGE)
    return Distiller(settings, surgeon.program_of(student), teacher).loss(student, inputs)["loss"]


@pytest.mark.parametrize("towards", [_text, pytest.param(_distilled, marks=pytest.mark.thorough)])
def test_logits_of_a_large_vocabulary_are_never_there(
    towards: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward, of no more tokens at a time than a chunk has."""
    monkeypatch.setattr(head_loss, "CHUNK_BYTES", {"cpu": 1})
    monkeypatch.setattr(head_loss, "LEAST_ROWS", CHUNK)
    student: Any = surgeon.edit(tiny_model("llama", vocab_size=LARGE), PAIRS)
    inputs = batch(2, 20, LARGE)
    with watched(LARGE) as largest:
        towards(student, inputs).backward()
    assert 0 < largest.rows <= CHUNK
    assert next_tokens(inputs["labels"]).ne(IGNORED).sum() > 3 * CHUNK
