"""From settings to transformers' TrainingArguments, and arguments that a user adds."""

from __future__ import annotations

import copy
import json
from argparse import ArgumentError, Namespace
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import HfArgumentParser, Trainer, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.training_args import OptimizerNames

from surgeon.checkpoint.stored import read_json
from surgeon.errors import first_line
from surgeon.machine import avoid_cudnn_attention, describe_gpu
from surgeon.opened import choose_device
from surgeon.training.settings import TrainSettings, check_taken, check_trainer_arguments
from surgeon.training.sharding import check_sharding, read_all_weights

_OF_OPTIMISERS = ("optim_args", "optim_target_modules", "adam_beta1", "adam_beta2", "adam_epsilon")


class OneDevice(TrainingArguments):
    """Arguments of a process that computes on one device, however many there are.

    transformers' own replicate the model on all devices (nn.DataParallel), take the batch of each for the batch, and
    lose hooks on the model's streams. Several devices take a process each.
    """

    @property
    def n_gpu(self) -> int:
        return min(1, int(super().n_gpu))


def parse_trainer_arguments(texts: Iterable[str] | Mapping[str, Any] | None) -> dict[str, Any]:
    """Parse arguments of TrainingArguments from texts like "gradient_checkpointing=true"; a mapping is copied.

    Raises:
        ValueError: if one has no "=", is unknown, is not taken (`check_taken`), or its value cannot be read.
    """
    if isinstance(texts, Mapping):
        return dict(texts)
    found: dict[str, Any] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"the trainer argument {text!r} has no value; write it as NAME=VALUE")
        name = name.strip().lstrip("-").replace("-", "_")
        found[name] = read_trainer_argument(name, value.strip())
    check_trainer_arguments(found)
    return found


def read_trainer_argument(name: str, value: str) -> Any:
    """Read the value of one of TrainingArguments' arguments from its text, by the argument's type.

    Raises:
        ValueError: if there is no such argument, it is not taken, or the value cannot be read.
    """
    check_taken(name)
    kind: Any = TrainingArguments
    parser = HfArgumentParser(kind, allow_abbrev=False, exit_on_error=False)
    try:
        given: Namespace = parser.parse_args(["--output_dir", ".", f"--{name}", value])
    except (ArgumentError, ValueError) as error:
        raise ValueError(f"{name}={value} cannot be read ({first_line(error)})") from error
    return {"true": True, "false": False}.get(value.lower(), getattr(given, name))


def training_arguments(
    settings: TrainSettings,
    folder: Path,
    steps: int,
    micro_batch: int,
    device: str = "cpu",
) -> TrainingArguments:
    """Make the arguments of a run.

    Args:
        folder: of the run.
        steps: of the optimiser.
        micro_batch: windows per forward pass of one process.
        device: "cpu" or "cuda".

    Raises:
        ValueError: if an argument is not accepted.
    """
    given: dict[str, Any] = {
        "logging_steps": 10,
        "save_total_limit": 2,
        "max_grad_norm": 1.0,
        "report_to": [],
        "weight_decay": 0.0,
        **settings.arguments,
    }
    decided: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": steps,
        "per_device_train_batch_size": micro_batch,
        "learning_rate": settings.rate,
        "lr_scheduler_type": settings.schedule,
        "warmup_steps": settings.warmup,
        "seed": settings.seed,
        "eval_strategy": "steps",
        "eval_steps": settings.evaluate_every,
        "save_strategy": "steps",
        "save_steps": settings.save_every,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": False,
        "logging_nan_inf_filter": False,
        "disable_tqdm": True,
        "use_cpu": device == "cpu",
        "remove_unused_columns": False,
        "label_names": ["labels"],
        "dataloader_drop_last": True,
        "dataloader_pin_memory": device != "cpu",
        "train_sampling_strategy": "sequential",  # the windows come in the run's own order
    }
    if settings.patience is not None:
        decided |= {"load_best_model_at_end": True, "save_steps": settings.evaluate_every}
    try:
        if given.get("fsdp"):
            processes = PartialState(cpu=device == "cpu").num_processes
            given["fsdp_config"] = check_sharding(
                _read_configuration(given.get("fsdp_config")), processes
            )
        if "accelerator_config" in given:
            config = given["accelerator_config"] = _read_configuration(given["accelerator_config"])
            of_steps = config.get("gradient_accumulation_kwargs") or {}
            # What else it has would change which windows a step is made on.
            odd = {*config} - {"non_blocking", "gradient_accumulation_kwargs"} | {*of_steps} - {
                "sync_each_batch"
            }
            if odd:
                raise ValueError(
                    f"accelerator_config: {min(odd)} is decided by the run; what is taken is non_blocking, and "
                    "sync_each_batch of gradient_accumulation_kwargs"
                )
        arguments = OneDevice(**given | decided)
        # With this config ZeRO 3 would shard every model that is read, an original, too.
        unset_hf_deepspeed_config()
    except (ImportError, TypeError) as error:
        raise ValueError(f"transformers does not take these arguments ({first_line(error)})") from error
    if arguments.mixed_precision == "fp16" and device == "cpu":
        raise ValueError("fp16 does nothing on a CPU; use bf16, or leave it out")
    _require_effect(arguments, settings.arguments)
    arguments.gradient_accumulation_steps = settings.batch // (micro_batch * arguments.world_size)
    return arguments


def _require_effect(arguments: TrainingArguments, given: Mapping[str, Any]) -> None:
    """Refuse arguments that do nothing with the chosen optimiser."""
    defaults = {each.name: each.default for each in fields(TrainingArguments) if each.init}
    for name in [name for name in _OF_OPTIMISERS if name in given]:
        others = copy.copy(arguments)
        setattr(others, name, defaults[name])
        if getattr(arguments, name) == getattr(others, name):
            continue
        try:
            found, without = (Trainer.get_optimizer_cls_and_kwargs(each) for each in (arguments, others))
        except (ImportError, ValueError):
            continue  # one that asks for a model, or for a package, is heard or refused later
        if found == without:
            raise ValueError(
                f"{name} does nothing with the optimiser {OptimizerNames(arguments.optim).value}; leave it out"
            )


def _read_configuration(given: Any) -> dict[str, Any]:
    if isinstance(given, str):
        given = json.loads(given) if given.startswith("{") else read_json(Path(given))
    return dict(given or {})


def share_of_batch(settings: TrainSettings, processes: int) -> int:
    """Number of windows of a batch that one process has, or the micro-batch if that is given."""
    if settings.batch % processes:
        raise ValueError(
            f"{processes} processes cannot share a batch of {settings.batch} windows; change the batch"
        )
    share = min(settings.batch // processes, settings.micro_batch or settings.batch)
    if settings.batch % (share * processes):
        raise ValueError(
            f"{processes} processes of {share} windows each do not divide a batch of {settings.batch}; change the "
            "batch or the micro-batch"
        )
    return share


def join_processes(device: str) -> tuple[PartialState, str]:
    """Join the processes of a run, one or those of accelerate or torchrun, and choose their device.

    Args:
        device: "cpu", "cuda", or "auto" for the latter where there is one.
    """
    avoid_cudnn_attention()
    read_all_weights()
    where = choose_device(device)
    return PartialState(cpu=where == "cpu"), where


def describe_devices(processes: PartialState, where: str) -> str:
    """Describe the devices of a run for people; empty for a CPU."""
    if where == "cpu":
        return ""
    if processes.num_processes > 1:
        return f"on {processes.num_processes} GPUs, one for each process"
    on_gpu = f"on {describe_gpu(torch.device('cuda', 0))}"
    if torch.cuda.device_count() == 1:
        return on_gpu
    return f"{on_gpu}; accelerate launch or torchrun trains on several, CUDA_VISIBLE_DEVICES chooses another one"
