"""Choice of trained parameters: of edited sublayers, all, norms or routers; or adapters on matrices."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from surgeon.checkpoint.random_weights import RandomFactors
from surgeon.exports.prove import original_model
from surgeon.language.program import Program, steps_of
from surgeon.language.sublayer import FEED_FORWARD, Sublayer
from surgeon.models.edit import EditedLayers, edit, edited_layers
from surgeon.opened import Model
from surgeon.training.distiller import modules_of
from surgeon.training.settings import TrainSettings

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
    among = inside & {id(inner) for module in _beside_mixtures(layers) for inner in module.modules()}
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


def _beside_mixtures(layers: EditedLayers) -> Iterator[nn.Module]:
    """The feed-forwards of a program on an architecture of mixtures."""
    for sublayer in layers.program.sublayers() if layers.family.mixture is not None else ():
        if sublayer.kind == FEED_FORWARD:
            yield from modules_of(layers, sublayer, lambda spec: spec.modules)


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
