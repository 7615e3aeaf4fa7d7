"""What becomes of each argument of transformers' TrainingArguments: taken, decided by the run, or of no effect here.

An argument that stands in none of the tables, of a release of transformers that came later, is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surgeon.errors import did_you_mean

# Each with others, NAME or NAME=VALUE, one of which has to be given with it, or it would do nothing.
TAKEN: dict[str, tuple[str, ...]] = {
    "lr_scheduler_kwargs": (),
    "optim": (),
    "optim_args": ("optim",),
    "optim_target_modules": ("optim",),
    "weight_decay": (),
    "adam_beta1": (),
    "adam_beta2": (),
    "adam_epsilon": (),
    "max_grad_norm": (),
    "neftune_noise_alpha": (),
    "bf16": (),
    "fp16": (),
    "tf32": (),
    "full_determinism": (),
    "activation_checkpointing": (),
    "activation_checkpointing_kwargs": ("activation_checkpointing", "gradient_checkpointing"),
    "gradient_checkpointing": (),
    "gradient_checkpointing_kwargs": ("gradient_checkpointing", "activation_checkpointing"),
    "torch_compile": (),
    "torch_compile_backend": (),
    "torch_compile_mode": (),
    "torch_empty_cache_steps": (),
    "logging_strategy": (),
    "logging_steps": (),
    "logging_first_step": (),
    "include_num_input_tokens_seen": (),
    "skip_memory_metrics": (),
    "log_level": (),
    "log_level_replica": (),
    "log_on_each_node": (),
    "debug": (),
    "report_to": (),
    "run_name": ("report_to",),
    "project": ("report_to=trackio",),
    "trackio_space_id": ("report_to=trackio",),
    "trackio_bucket_id": ("report_to=trackio",),
    "trackio_static_space_id": ("report_to=trackio",),
    "eval_delay": (),
    "save_total_limit": (),
    "dataloader_num_workers": (),
    "dataloader_persistent_workers": ("dataloader_num_workers",),
    "dataloader_prefetch_factor": ("dataloader_num_workers",),
    "dataloader_multiprocessing_context": ("dataloader_num_workers",),
    "accelerator_config": (),
    "ddp_find_unused_parameters": (),
    "ddp_bucket_cap_mb": (),
    "ddp_broadcast_buffers": (),
    "ddp_static_graph": (),
    "fsdp": (),
    "fsdp_config": ("fsdp",),
    "deepspeed": (),
}

# Each with what a user gives in its place.
DECIDED = {
    "output_dir": "-o",
    "max_steps": "--steps",
    "num_train_epochs": "--epochs",
    "per_device_train_batch_size": "--batch and --micro-batch",
    "gradient_accumulation_steps": "--batch and --micro-batch",
    "auto_find_batch_size": "nothing: the micro-batch is halved where memory is short",
    "learning_rate": "--learning-rate",
    "lr_scheduler_type": "--schedule",
    "warmup_steps": "--warmup",
    "seed": "--seed",
    "data_seed": "--seed",
    "use_cpu": "--device",
    "dataloader_pin_memory": "--device: it is on for a GPU",
    "ddp_backend": "--device: nccl on GPUs, gloo on CPUs",
    "eval_strategy": "--evaluate-every",
    "eval_steps": "--evaluate-every",
    "eval_on_start": "nothing: held-out text is measured before the first step",
    "save_strategy": "--save-every",
    "save_steps": "--save-every",
    "save_only_model": "nothing: a run that goes on needs the whole checkpoint",
    "save_on_each_node": "nothing: the first process writes, and all have to see its folder",
    "enable_jit_checkpoint": "--save-every: a run that is ended goes on from its last checkpoint",
    "resume_from_checkpoint": "the same command again, which goes on where it was",
    "restore_callback_states_from_checkpoint": "the same command again, which goes on where it was",
    "ignore_data_skip": "nothing: a run goes on at its place in the text",
    "load_best_model_at_end": "--patience",
    "metric_for_best_model": "--patience",
    "greater_is_better": "--patience",
    "logging_nan_inf_filter": "nothing: a loss that is not finite ends the run",
    "disable_tqdm": "nothing: surgeon has a progress bar of its own",
    "push_to_hub": "nothing: the checkpoint is written to -o",
    "remove_unused_columns": "nothing: every column is needed",
    "label_names": "nothing: what is predicted is the next token",
    "dataloader_drop_last": "nothing: every batch is whole",
    "dataloader_in_order": "nothing: the order follows from --seed",
    "train_sampling_strategy": "nothing: the order follows from --seed",
    "local_rank": "torchrun or accelerate launch",
}

_OWN_LOSS = "losses are surgeon's own, of every token alike"
_OWN_MEASURE = "held-out text is measured by surgeon itself, a window at a time"
_NO_HUB = "nothing is sent to the hub"
# Each with the reason.
IDLE = {
    "label_smoothing_factor": _OWN_LOSS,
    "average_tokens_across_devices": f"{_OWN_LOSS}, and all windows are of one length",
    "use_liger_kernel": "its kernels replace layers and losses that a program does not call",
    "liger_kernel_config": "Liger's kernels replace layers and losses that a program does not call",
    "use_cache": "nothing is cached in training",
    "per_device_eval_batch_size": _OWN_MEASURE,
    "prediction_loss_only": _OWN_MEASURE,
    "bf16_full_eval": f"{_OWN_MEASURE}, in the dtype of the training",
    "fp16_full_eval": f"{_OWN_MEASURE}, in the dtype of the training",
    "eval_do_concat_batches": _OWN_MEASURE,
    "eval_use_gather_object": _OWN_MEASURE,
    "eval_accumulation_steps": _OWN_MEASURE,
    "include_for_metrics": _OWN_MEASURE,
    "batch_eval_metrics": _OWN_MEASURE,
    "length_column_name": "the order follows from --seed",
    "hub_token": _NO_HUB,
    "hub_private_repo": _NO_HUB,
    "hub_model_id": _NO_HUB,
    "hub_strategy": _NO_HUB,
    "hub_always_push": _NO_HUB,
    "hub_revision": _NO_HUB,
    "parallelism_config": "a model is trained whole, replicated, or shared out by fsdp or deepspeed",
    "ddp_timeout": "the processes have met before it is read",
    "do_train": "it is for scripts that do several things",
    "do_eval": "it is for scripts that do several things",
    "do_predict": "it is for scripts that do several things",
}


def check_taken(name: str) -> None:
    """Refuse an argument that would do nothing, or that the run decides itself.

    Raises:
        ValueError: with what to use in its place, or the reason.
    """
    if name in DECIDED:
        raise ValueError(f"{name} is decided by the run; use {DECIDED[name]}")
    if name in IDLE:
        raise ValueError(f"{name} has no effect here: {IDLE[name]}; leave it out")
    if name not in TAKEN:
        raise ValueError(f"{name} is not known here as one of TrainingArguments; {did_you_mean(name, TAKEN)}")


def check_trainer_arguments(given: Mapping[str, Any]) -> None:
    """Refuse arguments of which one is not taken, or does nothing without another.

    Raises:
        ValueError: naming the first one.
    """
    for name in given:
        check_taken(name)
        if TAKEN[name] and not any(_gives(given, other) for other in TAKEN[name]):
            raise ValueError(f"{name} does nothing without {' or '.join(TAKEN[name])}; give that, too, or leave it out")


def _gives(given: Mapping[str, Any], other: str) -> bool:
    name, equals, value = other.partition("=")
    found = given.get(name)
    if equals:
        return value in found if isinstance(found, list) else value == found
    return bool(found)
