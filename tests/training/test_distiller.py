"""Distillation against a plain computation, and with what training does to a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import surgeon
from surgeon.language.program import Program
from surgeon.models.families import family_of
from surgeon.quality.data import Windows
from surgeon.training.distiller import Distiller, TeacherLogits, counterparts, watched_streams
from surgeon.training.settings import Distillation
from surgeon.training.texts import TrainingText
from tests.tiny_models import VOCABULARY, tiny_model

PAIRS = "A0 F0 [A1 A2] [F1 F2] A3 F3"
LATE = "A0 F0 >A1 >F1 A2 F2 {A3/2:0 F3/2:0 | A3/2:1 F3/2:1}"
PRUNED = "A0 F0 A2~A1 F2 A3"
BOTH = Distillation(logits=0.7, hidden=0.3, text=0.2, temperature=2.0)


def pair_of(family: str = "llama", program: str = PAIRS, **config: Any) -> tuple[Any, Any]:
    """A student with noise on its weights, and its original."""
    teacher, student = tiny_model(family, **config), tiny_model(family, **config)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(0.1 * parameter.std() * torch.randn_like(parameter))
    return surgeon.edit(student, program), teacher


def batch_of(windows: int = 4, tokens: int = 9) -> dict[str, Tensor]:
    ids = torch.randint(2, VOCABULARY, (windows, tokens), generator=torch.Generator().manual_seed(5))
    return {"input_ids": ids, "labels": ids.clone(), "index": torch.arange(windows)}


def rows(batch: dict[str, Tensor], some: slice) -> dict[str, Tensor]:
    return {name: tensor[some] for name, tensor in batch.items()}


def plainly(
    student: Any, teacher: Any, batch: dict[str, Tensor], settings: Distillation
) -> dict[str, Tensor]:
    """By transformers' own collection of streams, and PyTorch's own losses, with full gradients."""
    program, temperature = surgeon.program_of(student), settings.temperature
    ids = batch["input_ids"]
    ends: dict[Any, Tensor] = {}
    hooks = []
    for model in (student, teacher):
        norm = model.get_submodule(family_of(model.config).final_norm)
        hooks.append(
            norm.register_forward_pre_hook(lambda _, given, key=model: ends.update({key: given[0]}))
        )
    found = student(input_ids=ids, use_cache=False, output_hidden_states=True)
    with torch.no_grad():
        wanted = teacher(input_ids=ids, use_cache=False, output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    steps = family_of(teacher.config).steps_per_layer
    layers = 4
    teacher_edited = len(wanted.hidden_states) > layers + 1  # then they come by node
    every = steps if teacher_edited else 1
    assert len(wanted.hidden_states) == every * layers + 1
    errors = []
    for node, layer in counterparts(program, layers).items():
        s = ends[student] if node == len(program) else found.hidden_states[node]
        t = ends[teacher] if layer == layers else wanted.hidden_states[layer * every]
        errors.append(((s - t).norm(dim=-1) ** 2 / t.norm(dim=-1) ** 2)[:, :-1].mean())
    log_q, log_p = (
        functional.log_softmax(each.logits[:, :-1] / temperature, -1).flatten(0, 1)
        for each in (found, wanted)
    )
    parts = {
        "logits": temperature**2
        * functional.kl_div(log_q, log_p, log_target=True, reduction="batchmean"),
        "hidden": torch.stack(errors).mean(),
        "text": functional.cross_entropy(found.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()),
    }
    loss = sum((getattr(settings, name) * part for name, part in parts.items()), torch.zeros(()))
    return {"loss": loss, **{name: parts[name].detach() for name in settings.parts}}


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Of all parameters; those that take no part have one of zeros."""
    model.zero_grad()
    loss.backward()
    return {
        name.removeprefix("module."): torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], rtol: float = 1e-4) -> None:
    assert found.keys() == wanted.keys()
    largest = max(float(value.detach().abs().max()) for value in wanted.values())
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, rtol=rtol, atol=1e-5 * largest), name


@pytest.mark.parametrize(
    ("family", "program"),
    [
        ("llama", PAIRS),
        ("llama", LATE),
        ("llama", PRUNED),
        ("qwen3", "A0 F0 A2@q3 F2 A1 F1 A3 F3"),
        ("gemma2", PAIRS),
        ("granite", LATE),
        ("gpt2", PRUNED),
        ("gpt_neox", "[A0 F0] [A1 F1 A2 F2] [A3 F3]"),
    ],
)
def test_against_a_plain_computation(family: str, program: str) -> None:
    student, teacher = pair_of(family, program)
    batch = batch_of()
    wanted = plainly(student, teacher, batch, BOTH)
    slopes = gradients(student, wanted["loss"])
    found = Distiller(BOTH, surgeon.program_of(student), teacher).loss(student, batch)
    assert_close(found, wanted)
    assert_close(gradients(student, found["loss"]), slopes)


@pytest.mark.parametrize(
    "settings",
    [Distillation(), Distillation(logits=0, hidden=2), Distillation(text=1, temperature=3), BOTH],
    ids=["logits", "hidden", "logits and text", "all"],
)
def test_parts(settings: Distillation) -> None:
    student, teacher = pair_of()
    batch = batch_of()
    wanted = plainly(student, teacher, batch, settings)
    found = Distiller(settings, surgeon.program_of(student), teacher).loss(student, batch)
    assert_close(found, wanted)
    assert [name for name, part in found.items() if part.requires_grad] == ["loss"]
    slopes = gradients(student, wanted["loss"])
    assert_close(gradients(student, found["loss"]), slopes)


def test_the_original_has_nothing_to_learn() -> None:
    teacher = tiny_model("llama")
    student = surgeon.edit(tiny_model("llama"), Program.dense(4))
    settings = Distillation(hidden=1)
    found = Distiller(settings, surgeon.program_of(student), teacher).loss(student, batch_of())
    assert float(found["hidden"]) == 0
    assert abs(float(found["logits"])) < 1e-6
    assert all(value.abs().max() < 1e-5 for value in gradients(student, found["loss"]).values())


def test_micro_batches_add_up() -> None:
    student, teacher = pair_of()
    distiller = Distiller(BOTH, surgeon.program_of(student), teacher)
    batch = batch_of(5)
    whole = distiller.loss(student, batch)
    wanted = gradients(student, whole["loss"])
    student.zero_grad()
    parts = [rows(batch, some) for some in (slice(0, 3), slice(3, 4), slice(4, 5))]
    predicted = [int((part["labels"][:, 1:] != -100).sum()) for part in parts]
    losses = [distiller.loss(student, part) for part in parts]
    shares = [count / sum(predicted) for count in predicted]
    for loss, share in zip(losses, shares, strict=True):
        (loss["loss"] * share).backward()
    assert_close({name: p.grad for name, p in student.named_parameters()}, wanted)
    total = {
        name: sum(loss[name] * share for loss, share in zip(losses, shares, strict=True))
        for name in whole
    }
    assert_close(total, whole)


def test_tokens_that_are_not_predicted_do_not_count() -> None:
    """Labels of -100 as everywhere, and what follows is no input of what comes before."""
    student, teacher = pair_of()
    distiller = Distiller(BOTH, surgeon.program_of(student), teacher)
    batch = batch_of()
    batch["labels"][:, 6:] = -100
    batch["labels"][:, 0] = -100  # a window's first token is never predicted
    short = {name: tensor[:, :6] if tensor.dim() > 1 else tensor for name, tensor in batch_of().items()}
    found, wanted = distiller.loss(student, batch), distiller.loss(student, short)
    assert_close(found, wanted)
    assert_close(gradients(student, found["loss"]), gradients(student, wanted["loss"]))


def test_gradient_checkpointing_changes_nothing() -> None:
    student, teacher = pair_of(program=LATE, attention_dropout=0.0)
    distiller = Distiller(BOTH, surgeon.program_of(student), teacher)
    student.train()
    wanted = distiller.loss(student, batch_of())
    slopes = gradients(student, wanted["loss"])
    for reentrant in (False, True):
        student.gradient_checkpointing_enable({"use_reentrant": reentrant})
        student.enable_input_require_grads()
        assert student.model.layers.gradient_checkpointing
        found = distiller.loss(student, batch_of())
        assert_close(found, wanted)
        assert_close(gradients(student, found["loss"]), slopes)


def test_dropout_is_the_students_only() -> None:
    student, teacher = pair_of("opt")  # which has some of every kind
    distiller = Distiller(BOTH, surgeon.program_of(student), teacher.train())
    evaluated = plainly(student, teacher, batch_of(), BOTH)
    student.train()
    torch.manual_seed(11)
    wanted = plainly(student, teacher, batch_of(), BOTH)
    torch.manual_seed(11)
    found = distiller.loss(student, batch_of())
    assert_close(found, wanted)
    assert float(found["loss"].detach()) != pytest.approx(float(evaluated["loss"]), rel=1e-3)
    assert not any(module.training for module in teacher.modules())


def test_the_teacher_is_no_part_of_the_student() -> None:
    student, teacher = pair_of()
    names = set(student.state_dict())
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    distiller = Distiller(BOTH, surgeon.program_of(student), teacher)
    distiller.loss(student, batch_of())["loss"].backward()
    assert set(student.state_dict()) == names
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert all(parameter.grad is None for parameter in teacher.parameters())
    after = surgeon.restore(teacher).state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """A group of processes that is this one alone."""
    torch.distributed.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("settings", [BOTH, Distillation(logits=0, hidden=1)], ids=["all", "hidden"])
def test_through_ddp(settings: Distillation) -> None:
    """Which is called in the model's place, and waits for the gradient of every parameter."""
    student, teacher = pair_of()
    distiller = Distiller(settings, surgeon.program_of(student), teacher)
    wanted = distiller.loss(student, batch_of())
    slopes = gradients(student, wanted["loss"])
    wrapped = DistributedDataParallel(student)
    for _ in range(2):  # a gradient that was not waited for is an error at the next forward pass
        found = distiller.loss(wrapped, batch_of())
        assert_close(found, wanted)
        assert_close(gradients(wrapped, found["loss"]), slopes)


def test_through_adapters() -> None:
    student, teacher = pair_of()
    distiller = Distiller(BOTH, surgeon.program_of(student), teacher)
    wanted = distiller.loss(student, batch_of())
    adapted = get_peft_model(
        student, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=True)
    )
    found = distiller.loss(adapted, batch_of())
    assert_close(found, wanted)  # adapters begin with zeros
    slopes = gradients(adapted, found["loss"])
    assert slopes
    assert all("lora" in name for name in slopes)
    assert sum(float(slope.abs().sum()) for slope in slopes.values()) > 0


def test_logits_from_disk(tmp_path: Path) -> None:
    """With the whole vocabulary kept it is the same as with a live teacher."""
    student, teacher = pair_of()
    batch = batch_of()
    settings = Distillation(temperature=2, text=0.5, kept=VOCABULARY)
    live = Distiller(Distillation(temperature=2, text=0.5), surgeon.program_of(student), teacher)
    text = TrainingText.of(Windows(batch["input_ids"], "", ""))
    kept = TeacherLogits(tmp_path, text, VOCABULARY, 2.0)
    kept.make(teacher)
    for some in (slice(0, 4), slice(2, 3)):
        wanted = live.loss(student, rows(batch, some))
        slopes = gradients(student, wanted["loss"])
        found = kept.loss(settings, student, rows(batch, some))
        assert_close(found, wanted)
        assert_close(gradients(student, found["loss"]), slopes)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"logits": 0}, "a weight above 0 for logits or hidden"),
        ({"text": -1}, "the weight of text must be a number from 0 on, not -1"),
        ({"hidden": float("nan")}, "the weight of hidden must be a number"),
        ({"temperature": 0}, "temperature must be a number above 0, not 0"),
        ({"kept": 0}, "at least 1 of the original's logits"),
        ({"kept": 5, "hidden": 1}, "hidden streams need the original in memory"),
    ],
)
def test_settings_that_make_no_sense(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Distillation(**given)


def test_models_that_do_not_fit() -> None:
    student, teacher = pair_of()
    with pytest.raises(ValueError, match="teacher runs an edited program; use the original"):
        Distiller(BOTH, Program.dense(4), student)
    distiller = Distiller(BOTH, Program.parse(LATE), teacher)
    with pytest.raises(
        ValueError, match="runs a program of 6 nodes, not the one its streams are compared by"
    ):
        distiller.loss(student, batch_of())
    with pytest.raises(ValueError, match="runs no program"):
        distiller.loss(tiny_model("llama"), batch_of())
    distiller = Distiller(
        Distillation(), surgeon.program_of(student), tiny_model("llama", vocab_size=99)
    )
    with pytest.raises(ValueError, match="vocabulary of 99 tokens and the student one of 97"):
        distiller.loss(student, batch_of())


def test_a_larger_teacher_has_logits_only() -> None:
    student, _ = pair_of()
    larger = tiny_model("llama", 5, hidden_size=64)
    found = Distiller(Distillation(), surgeon.program_of(student), larger).loss(student, batch_of())
    assert_close(found, plainly_logits(student, larger))
    with pytest.raises(
        ValueError, match="stream has 64 numbers for a token and the student's 32; distil the logits"
    ):
        Distiller(BOTH, surgeon.program_of(student), larger).loss(student, batch_of())


def plainly_logits(student: Any, teacher: Any) -> dict[str, Tensor]:
    ids = batch_of()["input_ids"]
    both = (
        functional.log_softmax(model(input_ids=ids).logits[:, :-1], -1).flatten(0, 1)
        for model in (student, teacher)
    )
    found = functional.kl_div(*both, log_target=True, reduction="batchmean")
    return {"loss": found, "logits": found.detach()}


def test_streams_that_do_not_come_are_noticed() -> None:
    student, _ = pair_of()
    hooks = student.model.layers.stream_tap._forward_hooks
    before = len(hooks)
    unseen = pytest.raises(ValueError, match="streams were not seen .* train without torch_compile")
    with unseen, watched_streams(student, [2], 6):
        assert len(hooks) == before + 1
    assert len(hooks) == before
