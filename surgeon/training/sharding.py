"""Parameters sharded among processes (FSDP2), in the groups in which a program calls them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, str_to_bool
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from surgeon.language.program import Program
from surgeon.models.edited_layers import EditedLayers

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


def read_all_weights() -> None:
    """Have every process read all weights: each needs an original, and accelerate fills only the first's."""
    if is_launched_sharded():
        os.environ[ON_ONE] = "false"


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
