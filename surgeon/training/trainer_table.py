"""What becomes of each argument of transformers' TrainingArguments: taken, decided by the run, or of no effect here.

An argument that stands in none of the tables, of a release of transformers that came later, is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surgeon.errors import did_you_mean

_ALONE = """
    lr_scheduler_kwargs optim weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm neftune_noise_alpha
    bf16 fp16 tf32 full_determinism activation_checkpointing gradient_checkpointing
    torch_compile torch_compile_backend torch_compile_mode torch_empty_cache_steps
    logging_strategy logging_steps logging_first_step include_num_input_tokens_seen skip_memory_metrics
    log_level log_level_replica log_on_each_node debug report_to eval_delay save_total_limit
    dataloader_num_workers accelerator_config
    ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph fsdp deepspeed
"""
# Each with others, NAME or NAME=VALUE, one of which has to be given with it, or it would do nothing.
TAKEN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_ALONE.split(), ()),
    **dict.fromkeys(("optim_args", "optim_target_modules"), ("optim",)),
    "activation_checkpointing_kwargs": ("activation_checkpointing", "gradient_checkpointing"),
    "gradient_checkpointing_kwargs": ("gradient_checkpointing", "activation_checkpointing"),
    "run_name": ("report_to",),
    **dict.fromkeys(
        ("project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"), ("report_to=trackio",)
    ),
    **dict.fromkeys(
        ("dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_multiprocessing_context"),
        ("dataloader_num_workers",),
    ),
    "fsdp_config": ("fsdp",),
}


def _by_name(reasons: Mapping[str, str]) -> dict[str, str]:
    return {name: reason for reason, names in reasons.items() for name in names.split()}


# By name what a user gives in its place.
DECIDED = _by_name(
    {
        "output": "output_dir",
        "steps": "max_steps",
        "epochs": "num_train_epochs",
        "batch and micro_batch": "per_device_train_batch_size gradient_accumulation_steps",
        "learning_rate": "learning_rate",
        "schedule": "lr_scheduler_type",
        "warmup": "warmup_steps",
        "seed": "seed data_seed",
        "device": "use_cpu",
        "device: it is on for a GPU": "dataloader_pin_memory",
        "device: nccl on GPUs, gloo on CPUs": "ddp_backend",
        "evaluate_every": "eval_strategy eval_steps",
        "save_every": "save_strategy save_steps",
        "save_every: a run that is ended goes on from its last checkpoint": "enable_jit_checkpoint",
        "patience": "load_best_model_at_end metric_for_best_model greater_is_better",
        "torchrun or accelerate launch": "local_rank",
        "the same command again, which goes on where it was": (
            "resume_from_checkpoint restore_callback_states_from_checkpoint"
        ),
        "nothing: the micro-batch is halved where memory is short": "auto_find_batch_size",
        "nothing: held-out text is measured before the first step": "eval_on_start",
        "nothing: a run that goes on needs the whole checkpoint": "save_only_model",
        "nothing: the first process writes, and all have to see its folder": "save_on_each_node",
        "nothing: a run goes on at its place in the text": "ignore_data_skip",
        "nothing: a loss that is not finite ends the run": "logging_nan_inf_filter",
        "nothing: surgeon has a progress bar of its own": "disable_tqdm",
        "nothing: the checkpoint is written to the output": "push_to_hub",
        "nothing: every column is needed": "remove_unused_columns",
        "nothing: what is predicted is the next token": "label_names",
        "nothing: every batch is whole": "dataloader_drop_last",
        "nothing: the order follows from the seed": "dataloader_in_order train_sampling_strategy",
    }
)

# By name the reason.
IDLE = _by_name(
    {
        "losses are surgeon's own, of every token alike": "label_smoothing_factor",
        "losses are surgeon's own, of every token alike, and all windows are of one length": (
            "average_tokens_across_devices"
        ),
        "its kernels replace layers and losses that a program does not call": "use_liger_kernel liger_kernel_config",
        "nothing is cached in training": "use_cache",
        "held-out text is measured by surgeon itself, a window at a time": (
            "per_device_eval_batch_size prediction_loss_only eval_do_concat_batches eval_use_gather_object "
            "eval_accumulation_steps include_for_metrics batch_eval_metrics"
        ),
        "held-out text is measured by surgeon itself, a window at a time, in the dtype of the training": (
            "bf16_full_eval fp16_full_eval"
        ),
        "the order follows from the seed": "length_column_name",
        "nothing is sent to the hub": (
            "hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision"
        ),
        "a model is trained whole, replicated, or shared out by fsdp or deepspeed": "parallelism_config",
        "the processes have met before it is read": "ddp_timeout",
        "it is for scripts that do several things": "do_train do_eval do_predict",
    }
)


def check_taken(name: str) -> None:
    """Refuse an argument that would do nothing, or that the run decides itself.

    Raises:
        ValueError: with what to use in its place, or the reason.
    """
    if name in DECIDED:
        raise ValueError(f"{name} is decided by the run; use surgeon's own {DECIDED[name]}")
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
        if isinstance(found, list):
            return value in found
        return value == found
    return bool(found)
