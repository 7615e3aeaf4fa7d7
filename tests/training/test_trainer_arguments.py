"""Every argument of TrainingArguments: taken, and then it changes something, or refused with the reason."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from transformers import TrainingArguments
from transformers.integrations.integration_utils import TensorBoardCallback

from surgeon.training.checkpoints import checkpoints_of
from surgeon.training.settings import (
    DECIDED,
    TAKEN,
    TrainSettings,
    check_sharding,
    parse_trainer_arguments,
    training_arguments,
)
from surgeon.training.trainer import ModelTrainer
from tests.training.runs import TEXTS, run, same, student, tables, weights

STEPS = 3


@pytest.mark.parametrize("name", [*DECIDED, "push_to_hub", "label_smoothing_factor", "debug"])
def test_what_would_do_nothing_is_refused(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"{name} (is decided by the run; use surgeon's own|is no argument .* here; )"
    ):
        TrainSettings(arguments={name: 1})
    with pytest.raises(ValueError, match=f"{name} "):
        parse_trainer_arguments([f"{name}=1"])


@pytest.mark.parametrize(
    ("name", "others"), [(name, others) for name, others in TAKEN.items() if others]
)
def test_what_does_nothing_alone_is_refused_alone(name: str, others: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=f"{name} does nothing without {others[0]}"):
        TrainSettings(arguments={name: 1})
    TrainSettings(arguments={name: 1, others[0]: 1})


def test_what_nobody_has_thought_of_is_refused() -> None:
    with pytest.raises(ValueError, match="weight_decays is no argument .*did you mean 'weight_decay'"):
        TrainSettings(arguments={"weight_decays": 0.1})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optim": "sgd", "adam_beta1": 0.5}, "adam_beta1 does nothing with the optimiser sgd"),
        (
            {"optim": "adafactor", "optim_args": "momentum=0.9"},
            "optim_args does nothing with the optimiser adafactor",
        ),
        ({"accelerator_config": '{"split_batches": true}'}, "split_batches is decided by the run"),
        (
            {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}},
            "num_steps is decided by the run",
        ),
    ],
)
def test_what_the_others_rule_out_is_refused(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        training_arguments(TrainSettings(arguments=arguments), tmp_path, 1, 8)


# What a run comes to changes: what is given, and what is given to the run that it is compared with.
WEIGHTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "optim": ({"optim": "sgd"}, {}),
    "optim_args": ({"optim": "sgd", "optim_args": "momentum=0.9"}, {"optim": "sgd"}),
    "weight_decay": ({"weight_decay": 0.5}, {}),
    "adam_beta1": ({"adam_beta1": 0.5}, {}),
    "adam_beta2": ({"adam_beta2": 0.5}, {}),
    "adam_epsilon": ({"adam_epsilon": 1e-2}, {}),
    "max_grad_norm": ({"max_grad_norm": 1e-3}, {}),
    "neftune_noise_alpha": ({"neftune_noise_alpha": 5.0}, {}),
    "bf16": ({"bf16": True}, {}),
    "lr_scheduler_kwargs": (
        {"lr_scheduler_kwargs": {"num_cycles": 3}},
        {"lr_scheduler_kwargs": {"num_cycles": 1}},
    ),
}


def weights_with(folder: Path, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    schedule = "cosine_with_restarts" if "lr_scheduler_kwargs" in arguments else "linear"
    return weights(run(folder, steps=STEPS, save_every=STEPS, schedule=schedule, arguments=arguments))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return weights_with(tmp_path_factory.mktemp("plain"), {})


@pytest.mark.parametrize("name", WEIGHTS)
def test_it_changes_the_weights(name: str, tmp_path: Path, plain: dict[str, torch.Tensor]) -> None:
    given, compared = WEIGHTS[name]
    other = weights_with(tmp_path / "other", compared) if compared else plain
    assert not same(weights_with(tmp_path / "given", given), other)


def steps_told(folder: Path, table: str) -> list[int]:
    found: list[int] = tables(folder)[table]["step"].tolist()
    return found


OFTEN = {"logging_steps": 1}
# What a run leaves changes: from what it is without the argument to what it is with it.
FILES: dict[str, tuple[dict[str, Any], Callable[[Path], Any], Any, Any]] = {
    "logging_steps": ({"logging_steps": 2}, lambda run: steps_told(run, "training"), [1, 2, 3], [2, 3]),
    "logging_strategy": ({"logging_strategy": "no"}, lambda run: steps_told(run, "training"), [1, 2, 3], [3]),
    "logging_first_step": (
        {"logging_steps": 3, "logging_first_step": True}, lambda run: steps_told(run, "training"), [1, 2, 3], [1, 3],
    ),
    "save_total_limit": ({"save_total_limit": 1}, lambda run: [*checkpoints_of(run)], [2, 3], [3]),
}  # fmt: skip


@pytest.fixture(scope="module")
def plain_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    run(folder, steps=STEPS, evaluate_every=1, arguments=OFTEN)
    return folder


@pytest.mark.parametrize("name", FILES)
def test_it_changes_the_files(name: str, tmp_path: Path, plain_files: Path) -> None:
    given, look, without, expected = FILES[name]
    run(
        tmp_path,
        steps=STEPS,
        evaluate_every=1,
        save_every=3 if "logging" in name else 1,
        arguments=OFTEN | given,
    )
    assert (look(plain_files), look(tmp_path)) == (without, expected)


def trainer_with(folder: Path, **arguments: Any) -> ModelTrainer:
    made = training_arguments(TrainSettings(batch=4, arguments=arguments), folder, 1, 4)
    measure: Any = None  # nothing is measured
    return ModelTrainer(student(), made, TEXTS.training, measure)


# What the Trainer is made of changes.
MADE: dict[str, tuple[dict[str, Any], Callable[[ModelTrainer], Any], Any]] = {
    "torch_compile": (
        {"torch_compile": True}, lambda trainer: trainer.accelerator.state.dynamo_plugin.backend.value, "INDUCTOR",
    ),
    "torch_compile_backend": (
        {"torch_compile_backend": "eager"},
        lambda trainer: trainer.accelerator.state.dynamo_plugin.backend.value, "EAGER",
    ),
    "torch_compile_mode": (
        {"torch_compile_mode": "max-autotune"},
        lambda trainer: trainer.accelerator.state.dynamo_plugin.mode, "max-autotune",
    ),
    "accelerator_config": (
        {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}},
        lambda trainer: trainer.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch"), True,
    ),
    "ddp_find_unused_parameters": (
        {"ddp_find_unused_parameters": False},
        lambda trainer: trainer.accelerator.ddp_handler.find_unused_parameters, False,
    ),
    "ddp_bucket_cap_mb": ({"ddp_bucket_cap_mb": 7}, lambda trainer: trainer.accelerator.ddp_handler.bucket_cap_mb, 7),
    "ddp_static_graph": (
        {"ddp_static_graph": True}, lambda trainer: trainer.accelerator.ddp_handler.static_graph, True,
    ),
    "dataloader_num_workers": (
        {"dataloader_num_workers": 1}, lambda trainer: trainer.get_train_dataloader().num_workers, 1,
    ),
    "report_to": (
        {"report_to": "tensorboard"},
        lambda trainer: any(isinstance(each, TensorBoardCallback) for each in trainer.callback_handler.callbacks), True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_it_changes_the_trainer(name: str, tmp_path: Path) -> None:
    given, look, expected = MADE[name]
    assert look(trainer_with(tmp_path)) != expected
    assert look(trainer_with(tmp_path, **given)) == expected


# What one process on a CPU cannot have is refused in the words of who would do it; several processes share out
# parameters in test_processes.py.
IMPOSSIBLE = {
    "fp16": ({"fp16": True}, "fp16 does nothing on a CPU; use bf16"),
    "tf32": ({"tf32": True}, "tf32"),
    "fsdp": ({"fsdp": True}, "there is one; start several with torchrun"),
    "deepspeed": ({"deepspeed": "missing.json"}, "deepspeed"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_it_is_refused_by_who_would_do_it(name: str, tmp_path: Path) -> None:
    given, message = IMPOSSIBLE[name]
    with pytest.raises((ValueError, TypeError), match=message):
        trainer_with(tmp_path, **given)


def test_activations_are_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    original = transformers.modeling_utils.checkpoint

    def checkpoint(*arguments: Any, **options: Any) -> Any:
        asked.append(options)
        return original(*arguments, **options)

    monkeypatch.setattr("transformers.modeling_utils.checkpoint", checkpoint)
    for name in CHECKPOINTING[::2]:
        if name not in {each.name for each in fields(TrainingArguments)}:
            continue  # of a later release than this one
        given = {name: True, f"{name}_kwargs": {"use_reentrant": False, "preserve_rng_state": False}}
        run(tmp_path / name, steps=1, arguments=given)
        assert asked
        assert all(each["preserve_rng_state"] is False for each in asked)
        asked.clear()
    run(tmp_path / "plain", steps=1)
    assert not asked


CHECKPOINTING = [
    *("gradient_checkpointing", "gradient_checkpointing_kwargs"),
    *("activation_checkpointing", "activation_checkpointing_kwargs"),
]


def test_memory_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emptied = list[int]()
    monkeypatch.setattr("transformers.trainer.clear_device_cache", lambda: emptied.append(1))
    run(tmp_path, steps=STEPS, arguments={"torch_empty_cache_steps": 2})
    assert len(emptied) == 2  # before steps 1 and 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"transformer_layer_cls_to_wrap": "LlamaDecoderLayer"},
            "follows from the program, and what is taken is cpu_",
        ),
        ({"fsdp_version": 1}, "fsdp_version 1 does not know programs; use 2"),
    ],
)
def test_how_parameters_are_shared_out(config: dict[str, Any], message: str) -> None:
    assert check_sharding({"fsdp_reshard_after_forward": False}, 2) == {"reshard_after_forward": False}
    with pytest.raises(ValueError, match=message):
        check_sharding(config, 2)


def test_modules_that_an_optimiser_is_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for GaLore's package, which is not installed here."""
    package: Any = ModuleType("galore_torch")
    package.GaLoreAdamW = package.GaLoreAdamW8bit = package.GaLoreAdafactor = torch.optim.AdamW
    monkeypatch.setitem(sys.modules, "galore_torch", package)
    monkeypatch.setattr("transformers.trainer_optimizer.is_galore_torch_available", lambda: True)
    trainer = trainer_with(tmp_path, optim="galore_adamw", optim_target_modules=["q_proj"])
    _, groups = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)[1]["params"]
    assert len(groups["params"]) == 2


def test_every_argument_that_is_taken_is_shown() -> None:
    others = [
        *CHECKPOINTING,
        "run_name",
        "torch_empty_cache_steps",
        "optim_target_modules",
        "fsdp_config",
    ]
    assert sorted([*WEIGHTS, *FILES, *MADE, *IMPOSSIBLE, *others]) == sorted(TAKEN)
