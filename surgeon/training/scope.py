"""Trained parameters: of edited sublayers, all, norms or routers; adapters on matrices; and how processes share them.

Sharded parameters (FSDP2) are in the groups in which a program calls them.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from surgeon.checkpoint.random_weights import RandomFactors
from surgeon.exports.prove import original_model
from surgeon.language.program import Program, steps_of
from surgeon.language.sublayer import FEED_FORWARD, Sublayer
from surgeon.models.edit import EditedLayers, edit, edited_layers
from surgeon.models.families.specs import SublayerSpec
from surgeon.opened import Model
from surgeon.training.settings import (
    TrainSettings,
    check_fsdp_version,
    is_launched_sharded,
)

TRAINED = 4  # numbers for each parameter that is trained: itself, its gradient, and AdamW's two moments
BYTES = 4  # of each: weights are trained in 32 bits


def training_bytes(model: nn.Module) -> int:
    """Memory that a process takes for a model's weights, gradients and optimiser states, without activations.

    Args:
        model: with its trained parameters chosen; its weights need not be there.
    """
    return BYTES * sum(one.numel() * (TRAINED if one.requires_grad else 1) for one in model.parameters())


def edited_sublayers(program: Program, dense: Program) -> frozenset[Sublayer]:
    """The sublayers of a program that do not run where and as the unedited model runs them.

    Where layers were only taken out, those are the ones of the layers before and after the gap: their input has changed
    the most.
    """
    nodes = program.nodes
    found = set[Sublayer]()
    for tag, _, _, begin, end in SequenceMatcher(None, dense.nodes, nodes, autojunk=False).get_opcodes():
        if tag == "equal":
            continue
        if begin < end:
            found |= {one for step in steps_of(nodes[begin:end]) for one in step.sublayers}
        else:
            beside = {
                one.layers
                for step in steps_of(nodes[max(0, begin - 1) : begin + 1])
                for one in step.sublayers
            }
            found |= {one for one in program.sublayers() if one.layers in beside}
    return frozenset(found)


def find_edited(model: PreTrainedModel, program: Program) -> frozenset[Sublayer]:
    """The sublayers of an edited model that its edit has touched.

    Args:
        program: the model's, in the numbers of the original's layers.
    """
    layers = edited_layers(model)
    own = list(layers.program.sublayers())
    count = max(
        len(layers.original[0]), *(1 + layer for one in program.sublayers() for layer in one.layers)
    )
    touched = edited_sublayers(program, Program.dense(count, layers.family.steps_per_layer))
    if not touched:
        raise ValueError(
            "the scope edited: this model's program is the unedited one, so that no sublayer is edited; train all, or "
            "give the recipe of the edit"
        )
    return frozenset(
        mine for mine, place in zip(own, program.sublayers(), strict=True) if place in touched
    )


def choose_parameters(
    model: PreTrainedModel, scope: str, program: Program, router: str = "trained"
) -> None:
    """Choose the parameters that are trained.

    Args:
        model: edited.
        scope: "edited", "all", "norms", "edited-norms" or "routers".
        program: as `find_edited` takes it.
        router: of mixtures: "frozen", or "trained" where it is in scope.

    Raises:
        ValueError: if nothing is in scope.
    """
    chosen = {
        id(parameter) for module in _modules(model, scope, program) for parameter in module.parameters()
    }
    if not chosen:
        if scope == "routers":
            reason = "there are no routers to train: the program has no mixture of experts"
        else:
            reason = f"the scope {scope} has nothing to train: norms of this model have neither gains nor shifts"
        raise ValueError(f"{reason}; train another scope")
    chosen -= _freeze_router(model, router)
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in chosen)


def routers_of(layers: EditedLayers) -> list[nn.Module]:
    """The routers that a program runs, each once."""
    found = {}
    for sublayer in layers.program.sublayers():
        mixture = layers.family.spec(sublayer.kind, sublayer.layers[0]).mixture
        if mixture is not None:
            router = layers.owner(sublayer).get_submodule(mixture.router)
            found[id(router)] = router
    return list(found.values())


def shapes_to_train(model: Model, program: Program, settings: TrainSettings) -> PreTrainedModel:
    """Build a model under a program, without its numbers, with its trained parameters chosen."""
    student = edit(original_model(model, buffers=False)[0], program, factors=RandomFactors("meta"))
    return choose_or_adapt(student, program, settings)


def choose_or_adapt(
    student: PreTrainedModel, program: Program, settings: TrainSettings
) -> PreTrainedModel:
    """Choose trained parameters, or add adapters; ValueError if there is nothing."""
    if settings.lora is not None:
        adapted: PreTrainedModel = add_adapters(
            student, settings.scope, program, settings.lora, settings.router
        )
        return adapted
    choose_parameters(student, settings.scope, program, settings.router)
    return student


def _freeze_router(model: PreTrainedModel, router: str) -> set[int]:
    routers = routers_of(edited_layers(model)) if router == "frozen" else []
    return {id(parameter) for module in routers for parameter in module.parameters()}


def adapter_targets(
    model: PreTrainedModel, scope: str, program: Program, router: str
) -> tuple[list[str], list[str]]:
    """Name linear modules, and parameters, that are in scope for adapters; arguments as `choose_parameters`.

    The latter are the matrices of feed-forwards where some are mixtures: of experts, which are stacked in one parameter
    and of which each gets an adapter of its own, of routers, and of linear modules, too, since peft takes their names
    for those that experts had before they were stacked.
    """
    layers = edited_layers(model)
    inside = {id(inner) for module in _modules(model, scope, program) for inner in module.modules()}
    among = set[int]()
    if layers.family.mixture is not None:
        for sublayer in layers.program.sublayers():
            if sublayer.kind == FEED_FORWARD:
                for module in modules_of(layers, sublayer, lambda spec: spec.modules):
                    among |= inside & {id(inner) for inner in module.modules()}
    linears = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
    ]
    matrices = [(name, module.weight) for name, module in linears if id(module) in inside - among]
    parameters = [
        (f"{name}.{own}", parameter)
        for name, module in model.named_modules()
        if id(module) in among
        for own, parameter in module.named_parameters(recurse=False)
        if parameter.dim() > 1 and not own.endswith("bias")  # experts' biases are stacked, too
    ]
    # What slices share has one adapter at most, and none is simple: several would be merged into one matrix.
    elsewhere = [(name, module.weight) for name, module in linears if id(module) not in among]
    uses = Counter(id(weight) for _, weight in elsewhere + parameters)
    left = {id(model.get_output_embeddings().weight)} | {
        weight for weight, times in uses.items() if times > 1
    }
    left |= _freeze_router(model, router)
    modules, others = (
        [name for name, weight in each if id(weight) not in left] for each in (matrices, parameters)
    )
    return modules, others


def add_adapters(
    model: PreTrainedModel, scope: str, program: Program, rank: int, router: str = "trained"
) -> Any:
    """Add LoRA adapters (Hu et al. 2021, arXiv 2106.09685) to every matrix in scope; only they are trained.

    Args:
        rank: of the adapters; their output is scaled by 2, as is usual (alpha = 2 rank).
        router: as `choose_parameters` takes it.

    Returns:
        A `peft.PeftModel`.

    Raises:
        ValueError: if no matrix is in scope.
    """
    from surgeon.models.lora import LoraConfig, get_peft_model

    names, parameters = targets = adapter_targets(model, scope, program, router)
    if not any(targets):
        raise ValueError("there is no matrix for adapters; train all, or leave adapters (lora) out")
    transposed = any(isinstance(model.get_submodule(name), Conv1D) for name in names)
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=names,
        target_parameters=parameters or None,
        fan_in_fan_out=transposed,
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        # peft asks transformers in words that the latter is about to lose.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        # Of a model with both kinds of matrix, peft sees for itself which is which.
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to", UserWarning)
        return get_peft_model(model, config)


def _modules(model: PreTrainedModel, scope: str, program: Program) -> Iterator[nn.Module]:
    layers = edited_layers(model)
    if scope == "all":
        yield model
    elif scope == "edited":
        for sublayer in find_edited(model, program):
            yield from modules_of(layers, sublayer, lambda spec: spec.stages)
    elif scope == "routers":
        yield from routers_of(layers)
    else:
        if scope == "norms":
            yield model.get_submodule(layers.family.final_norm)
        for sublayer in (
            dict.fromkeys(layers.program.sublayers())
            if scope == "norms"
            else find_edited(model, program)
        ):
            yield from modules_of(layers, sublayer, lambda spec: spec.norms.values())


def modules_of(
    layers: EditedLayers, sublayer: Sublayer, paths: Callable[[SublayerSpec], Iterable[str]]
) -> list[nn.Module]:
    """List modules of a program's sublayer, by some of its paths."""
    spec = layers.family.spec(sublayer.kind, sublayer.layers[0])
    return [layers.owner(sublayer).get_submodule(path) for path in paths(spec)]


# Names of accelerate's sharded folder and whole file in a checkpoint.
_SHARES, _WHOLE_FILE = "pytorch_model_fsdp_0", "pytorch_model_fsdp.bin"


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
    check_fsdp_version(plugin.fsdp_version)
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
