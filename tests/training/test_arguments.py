"""TrainingArguments from settings, and the user's own among them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import TrainingArguments
from transformers.training_args import ParallelMode

from surgeon.training.settings import (
    TrainSettings,
    describe_devices,
    join_processes,
    parse_trainer_arguments,
    share_of_batch,
    training_arguments,
)


def test_values_have_the_types_of_the_arguments() -> None:
    found = parse_trainer_arguments(
        [
            "gradient_checkpointing=true",
            "--adam-epsilon=1e-6",
            "save_total_limit=5",
            "optim=adafactor",
            "fsdp=true",
        ]
    )
    assert found["gradient_checkpointing"] is True
    assert (found["adam_epsilon"], found["save_total_limit"], found["optim"]) == (1e-6, 5, "adafactor")
    assert found["fsdp"] is True


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bf16", "has no value; write it as NAME=VALUE"),
        ("gradient_checkpoint=1", "did you mean 'gradient_checkpointing'"),
        ("learning_rate=1", "decided by the run; use surgeon's own learning_rate"),
        ("save_total_limit=many", "save_total_limit=many cannot be read"),
    ],
)
def test_what_is_no_argument_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_trainer_arguments([text])


def test_settings_become_arguments(tmp_path: Path) -> None:
    settings = TrainSettings(
        batch=12, micro_batch=4, learning_rate=3e-4, schedule="cosine", warmup=5, seed=7, patience=2, evaluate_every=20,
        arguments={"adam_beta2": 0.95, "weight_decay": 0.1},
    )  # fmt: skip
    made = training_arguments(settings, tmp_path, 40, 4)
    assert (made.per_device_train_batch_size, made.gradient_accumulation_steps, made.max_steps) == (
        4,
        3,
        40,
    )
    assert (made.learning_rate, str(made.lr_scheduler_type), made.warmup_steps, made.seed) == (
        3e-4,
        "SchedulerType.COSINE",
        5,
        7,
    )
    assert (made.adam_beta2, made.weight_decay, made.load_best_model_at_end, made.save_steps) == (
        0.95,
        0.1,
        True,
        20,
    )


def test_processes_share_a_batch(tmp_path: Path) -> None:
    assert share_of_batch(TrainSettings(batch=8), 2) == 4
    assert share_of_batch(TrainSettings(batch=8, micro_batch=2), 2) == 2
    with pytest.raises(ValueError, match="3 processes cannot share a batch of 8"):
        share_of_batch(TrainSettings(batch=8), 3)
    with pytest.raises(ValueError, match="do not divide a batch of 12"):
        share_of_batch(TrainSettings(batch=12, micro_batch=4), 2)
    with pytest.raises(ValueError, match="deepspeed"):
        training_arguments(TrainSettings(arguments={"deepspeed": "missing.json"}), tmp_path, 1, 8)


def test_one_process_trains_on_one_of_several_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of transformers would replicate the model on four, and make a batch of 8 one of 32."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100")
    settings = TrainSettings(batch=8, micro_batch=4)
    processes, where = join_processes("auto")
    made = training_arguments(
        settings, tmp_path, 1, share_of_batch(settings, processes.num_processes), where
    )
    assert TrainingArguments(str(tmp_path)).n_gpu == 4
    assert (str(made.device), made.n_gpu, made.parallel_mode) == ("cuda:0", 1, ParallelMode.NOT_PARALLEL)
    assert (made.train_batch_size, made.gradient_accumulation_steps) == (4, 2)
    assert describe_devices(processes, where) == (
        "on cuda:0 (NVIDIA H100), one of 4 GPUs; accelerate launch or torchrun trains on several, CUDA_VISIBLE_DEVICES "
        "chooses another one"
    )
    assert training_arguments(settings, tmp_path, 1, 4, "cpu").n_gpu == 0
    assert describe_devices(processes, "cpu") == ""
