"""From settings to transformers' TrainingArguments, arguments that a user adds, and parameters that processes share.

Sharded parameters (FSDP2) are in the groups in which a program calls them.
"""

from __future__ import annotations

import copy
import json
import os
from argparse import ArgumentError, Namespace
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, str_to_bool
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import HfArgumentParser, Trainer, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.training_args import OptimizerNames

from surgeon.checkpoint.tensor_file import read_json
from surgeon.errors import first_line
from surgeon.language.program import Program
from surgeon.machine import avoid_cudnn_attention, describe_gpu
from surgeon.models.edited_layers import EditedLayers
from surgeon.opened import choose_device
from surgeon.training.settings import TrainSettings, check_taken, check_trainer_arguments

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
    if is_launched_sharded():
        # Every process reads all weights: each needs an original, and accelerate fills only the first's.
        os.environ[ON_ONE] = "false"
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


# Variables that accelerate launch sets for FSDP.
LAUNCHED, ON_ONE = "ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"
# Names of accelerate's sharded folder and whole file in a checkpoint.
_SHARES, _WHOLE_FILE = "pytorch_model_fsdp_0", "pytorch_model_fsdp.bin"
_TAKEN = {"version", "reshard_after_forward", "cpu_offload", "state_dict_type"}


class ProgramSharding(FullyShardedDataParallelPlugin):  # type: ignore[misc] # accelerate is untyped
    """accelerate's FSDP2, with groups of modules that follow from a program.

    accelerate groups by classes of modules, usually whole layers, which an edited model never calls. Nor can classes
    tell an MLP's linear modules from an output head, or say which slices have a norm between them.
    """

    _prepared = False

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Shard the sublayers' modules; embedding, head and the rest are left to accelerate.

        accelerate calls this twice: before it has noted which parameters the optimiser has, and after that.
        """
        self.auto_wrap_policy = None
        if self._prepared:
            for group in group_modules(model):
                fully_shard(
                    group,
                    reshard_after_forward=self.reshard_after_forward,
                    offload_policy=self.cpu_offload,
                    mp_policy=self.mixed_precision_policy or MixedPrecisionPolicy(),
                )
        self._prepared = not self._prepared


def group_modules(model: nn.Module) -> list[list[nn.Module]]:
    """Group modules by calls: those of a sublayer, and of all that share a parameter with it.

    Modules of layers that the program does not call are groups, too, which are never gathered.

    Args:
        model: runs a program, or wraps a model that does.
    """
    layers = next(module for module in model.modules() if isinstance(module, EditedLayers))
    dense = Program.dense(len(layers.original[0]), layers.family.steps_per_layer)
    placed = [(layers.owner(one), one) for one in dict.fromkeys(layers.program.sublayers())]
    placed += [(layers.layer(one.layers[0]), one) for one in dense.sublayers()]
    groups: list[list[nn.Module]] = []
    for owner, sublayer in placed:
        spec = layers.family.spec(sublayer.kind, sublayer.layers[0])
        called = [owner.get_submodule(path) for path in spec.modules]
        group = [module for module in called if any(True for _ in module.parameters())]
        parameters = _parameters(group)
        beside = [other for other in groups if parameters & _parameters(other)]
        groups = [other for other in groups if other not in beside]
        groups.append(list(dict.fromkeys([*(module for other in beside for module in other), *group])))
    return [group for group in groups if group]


def _parameters(modules: list[nn.Module]) -> set[int]:
    return {id(parameter) for module in modules for parameter in module.parameters()}


@torch.no_grad()
def gather_whole(parameter: Tensor) -> Tensor:
    """A parameter in one piece; where it is sharded, all processes ask at the same time."""
    if isinstance(parameter, DTensor):
        return parameter.full_tensor()
    return parameter.detach()


@torch.no_grad()
def set_whole(parameter: Tensor, numbers: Tensor) -> None:
    """Set a parameter to numbers that every process has; of a sharded one each takes its own."""
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        numbers = distribute_tensor(
            numbers.to(parameter.device), mesh, parameter.placements, src_data_rank=None
        )
    parameter.copy_(numbers)


def check_sharding(config: Mapping[str, Any], processes: int) -> dict[str, Any]:
    """Convert FSDP's configuration for TrainingArguments."""
    if processes == 1:
        raise ValueError(
            "fsdp shares parameters out among processes, and there is one; start several with torchrun or accelerate "
            "launch, or leave fsdp out"
        )
    found = {name.removeprefix("fsdp_"): value for name, value in config.items()}
    if odd := sorted(found.keys() - _TAKEN):
        raise ValueError(
            f"fsdp_config: {odd[0]} has no effect here; what is gathered together follows from the program, and what "
            f"is taken is {', '.join(sorted(_TAKEN))}"
        )
    _check_version(found.get("version", 2))
    return found


def is_launched_sharded() -> bool:
    """Tell whether accelerate launch asks for FSDP."""
    return bool(str_to_bool(os.environ.get(LAUNCHED, "false")))


def shard_parameters(accelerator: Accelerator, asked: Mapping[str, Any] | None) -> bool:
    """Have an accelerator shard parameters by the program; on CPUs, too, where it would replicate.

    Args:
        asked: arguments of accelerate's plugin; None for those of accelerate launch.

    Returns:
        Whether it shards.

    Raises:
        ValueError: if accelerate launch asks for another version than FSDP2, or to divide more than the batch.
    """
    state = accelerator.state
    if accelerator.parallelism_config is not None:
        raise ValueError(
            "a parallelism_config of accelerate divides what is trained in other ways than among all processes; leave "
            "it out, and share parameters out by FSDP2 alone"
        )
    if not (asked is not None or is_launched_sharded()) or state.distributed_type not in (
        DistributedType.MULTI_CPU,
        DistributedType.MULTI_GPU,
        DistributedType.FSDP,
    ):
        return False
    plugin = ProgramSharding(**(asked or {}))
    _check_version(plugin.fsdp_version)
    if plugin.activation_checkpointing:
        raise ValueError(
            "fsdp_activation_checkpointing does not know programs; use gradient_checkpointing"
        )
    if state.mixed_precision != "no":
        plugin.set_mixed_precision(state.mixed_precision)
    state.fsdp_plugin = plugin
    state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    return True


def follow_checkpoint(accelerator: Accelerator, checkpoint: Path) -> None:
    """Have a run write its checkpoints like the one it resumes from, whole or in shards."""
    kinds = {
        "SHARDED_STATE_DICT": (checkpoint / _SHARES).is_dir(),
        "FULL_STATE_DICT": (checkpoint / _WHOLE_FILE).is_file(),
    }
    there = [kind for kind, is_there in kinds.items() if is_there]
    sharded = accelerator.distributed_type == DistributedType.FSDP
    if sharded != bool(there):
        was, now = ("with", "without") if there else ("without", "with")
        raise ValueError(
            f"{checkpoint} is of a run {was} FSDP, and this one is {now}; go on {was} it, or choose another output"
        )
    if sharded:
        plugin = accelerator.state.fsdp_plugin
        # The configurations of the kind asked for before do not fit another kind.
        plugin.state_dict_config = plugin.optim_state_dict_config = None
        plugin.set_state_dict_type(there[0])


def _check_version(version: Any) -> None:
    if int(version) != 2:
        raise ValueError(f"fsdp_version {version} does not know programs; use 2")
