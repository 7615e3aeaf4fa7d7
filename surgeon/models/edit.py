"""Programs on `transformers` models: load one, edit its program, put the original back.

Parameters keep their names, so that generation with caches, `peft`, `accelerate` (`device_map`, offloading) and
gradient checkpointing go on working.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from surgeon.language.operations.within import require_whole_layers
from surgeon.language.program import Program
from surgeon.language.recipe import Recipe
from surgeon.models.edited_layers import EditedLayers
from surgeon.models.families import family_of
from surgeon.models.weights import FactorSource, take_experts_apart

if TYPE_CHECKING:  # takes seconds, and who has no model yet does without
    from transformers import PreTrainedModel

PROGRAM_KEY = "surgeon_program"  # in config.json of a checkpoint that runs an edited program
# Before its model type, so that no stock class takes it and ignores the program.
PROGRAM_PREFIX = "surgeon_"


def edit(
    model: PreTrainedModel,
    program: Program | str,
    layers_class: type[EditedLayers] | None = None,
    factors: FactorSource | None = None,
) -> PreTrainedModel:
    """Make the model run this program, in place; editing an edited model starts from the original again.

    The configuration's `num_hidden_layers` and per-layer attention types then describe the program's attentions, so
    that caches and masks fit.

    Args:
        layers_class: of what stands in for the list of layers.
        factors: of matrices that the program has a rank for; by default truncated singular values.

    Returns:
        The same model.

    Raises:
        ValueError: if the architecture is not supported, or the program names a layer or a slice that it cannot have.
    """
    if isinstance(program, str):
        program = Program.parse(program)
    original = restore(model)
    family = family_of(original.config)
    parent, name = decoder_parent(original)
    layers = getattr(parent, name)
    check_layers(program, len(layers))
    take_experts_apart(layers)
    edited = (layers_class or EditedLayers)(layers, original.config, family, program, factors)
    setattr(parent, name, edited)
    edited.describe_in(original.config)
    vars(original)["save_pretrained"] = MethodType(_saver, original)
    return original


def restore(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `edit`, and return the model."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, EditedLayers):
                setattr(module, name, child.undo(model.config))
                del vars(model)["save_pretrained"]
                return model
    return model


def program_of(model: PreTrainedModel) -> Program:
    """Return the program of the model's last `edit`, or the dense one."""
    layers = decoder_layers(model)
    if isinstance(layers, EditedLayers):
        return layers.program
    return Program.dense(len(layers), family_of(model.config).steps_per_layer)


@contextmanager
def as_stored(model: PreTrainedModel) -> Iterator[Program]:
    """Restore the model inside, and give the program that it runs outside.

    Raises:
        ValueError: if the program has weights that no layer has, which only live while the model runs it.
    """
    layers = decoder_layers(model)
    program = program_of(model)
    if not isinstance(layers, EditedLayers):
        yield program
        return
    derived = next(filter(layers.is_derived, program.sublayers()), None)
    if derived is not None:
        raise ValueError(
            f"the model runs {derived}, whose weights are those of no layer; export the model, and use the checkpoint"
        )
    restore(model)
    try:
        yield program
    finally:
        edit(model, program)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList | EditedLayers:
    """Return the decoder's list of layers, or what stands in for it."""
    parent, name = decoder_parent(model)
    layers: nn.ModuleList | EditedLayers = getattr(parent, name)
    return layers


def edited_layers(model: PreTrainedModel) -> EditedLayers:
    """Return what stands in for the layers of an edited model."""
    layers = decoder_layers(model)
    assert isinstance(layers, EditedLayers), "the model runs no program"
    return layers


def input_device(model: PreTrainedModel) -> torch.device:
    """Return the device of token ids; `accelerate` brings them to an embedding that is somewhere else meanwhile."""
    if model.device.type == "meta":
        return torch.device("cpu")
    return model.device


def decoder_inputs(model: PreTrainedModel, input_ids: Tensor) -> tuple[Tensor, list[dict[str, Any]]]:
    """Return what an unedited model's decoder hands its layers, without padding and without a cache.

    Args:
        input_ids: (batch, tokens).

    Returns:
        The embedded stream, (batch, tokens, hidden), and each layer's keyword arguments (mask, positions).

    Raises:
        ValueError: if the model runs an edited program.
    """
    require_unedited(model)
    family = family_of(model.config)
    parent, name = decoder_parent(model)
    layers = getattr(parent, name)
    tap = _InputTap(layers, model.config, family, Program.dense(len(layers), family.steps_per_layer))
    setattr(parent, name, tap)
    try:
        parent(input_ids=input_ids, use_cache=False)
    finally:
        setattr(parent, name, layers)
    return tap.taken


def require_unedited(model: PreTrainedModel) -> None:
    """Refuse an edited model where the original is meant."""
    if isinstance(decoder_layers(model), EditedLayers):
        raise ValueError(
            "the model runs an edited program, or one of its own (native tracks), and this is of layers that run one "
            "after the other; use the original (surgeon.restore brings it back)"
        )


def require_pairs(model: PreTrainedModel) -> None:
    """Refuse an edited model, and one without two layers that run one after the other."""
    require_unedited(model)
    if (num_layers := model.config.num_hidden_layers) < 2:
        raise ValueError(f"the model has {num_layers} layer; a pair in parallel needs at least 2")


def check_layers(program: Program, num_layers: int) -> None:
    """Refuse a program that names a layer the model does not have, or as `Program.require_steps`."""
    program.require_steps()
    for sublayer in program.sublayers():
        if max(sublayer.layers) >= num_layers:
            raise ValueError(f"{sublayer} is out of range: the model's layers are 0 to {num_layers - 1}")


def save_edited_with(saver: Callable[..., None]) -> None:
    """Set the function that saves edited models, called as `save_pretrained` is, with the model first.

    A room above this one (surgeon.exports) has it, and sets it when it is imported.
    """
    global _saver  # noqa: PLW0603 - one for the process, as there is one format
    _saver = saver


def _no_saver(*_: Any, **__: Any) -> None:
    raise RuntimeError(
        "how edited models are saved is not known yet; import surgeon.exports.in_memory first"
    )


_saver: Callable[..., None] = _no_saver


def decoder_parent(model: PreTrainedModel) -> tuple[nn.Module, str]:
    """Return the module that has the decoder's list of layers, and its name there."""
    path, _, name = family_of(model.config).layers.rpartition(".")
    return model.get_submodule(path), name


class _InputTap(EditedLayers):
    taken: tuple[Tensor, list[dict[str, Any]]]

    def run(self, stream: Tensor, arguments: list[dict[str, Any]]) -> Tensor:
        self.taken = stream, arguments
        return stream


def recipe_program(recipe: Recipe, config: Any, own: Program | None = None) -> Program:
    """Return the program that a recipe's operations make of a model with this `transformers` configuration.

    Args:
        own: the program of the model, if it is another than its layers one after the other.

    Raises:
        ValueError: as `Recipe.program`; if the architecture is not supported, or `own` is not the model's layers, each
            whole and once.
    """
    family = family_of(config)
    layers = int(config.num_hidden_layers)
    if own is not None:
        try:
            require_whole_layers(own, layers)
        except ValueError as error:
            raise ValueError(
                f"{recipe.source}: {recipe.model or 'the model'} is an edited model, and operations change whole "
                f"layers; name the model it was made of, or give the whole program ({error})"
            ) from error
    return recipe.program(layers, family.steps_per_layer, family.layer_shapes(config), own)
