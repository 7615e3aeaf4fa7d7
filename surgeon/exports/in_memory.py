"""Models in memory as checkpoints: whatever an edited model is now, merged, sliced or trained.

Sublayers that no layer has, averages and slices, have weights of their own while a model lives. To be stored they
become layers behind the original ones, and the program names these: of a model with three layers, `A0 F0 A1~A2 F1~F2`
is stored as four layers and `A0 F0 A3 F3`.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from surgeon.checkpoint.belongings import GENERATION
from surgeon.checkpoint.companions import Companions, companions_at
from surgeon.checkpoint.forms import PROGRAM, Layout, StoredModel
from surgeon.checkpoint.read import Checkpoint
from surgeon.checkpoint.tokenizer import keep_tokenizer_class
from surgeon.checkpoint.training import Training
from surgeon.exports.export import DTYPES, Original, plan_export, write_export
from surgeon.exports.prove import Proof
from surgeon.exports.staging import check_target, scratch
from surgeon.language.program import ATTENTION, FEED_FORWARD, KINDS, ROLES, WRITING, Program, Sublayer
from surgeon.models.edit import decoder_layers, decoder_parent, input_device, program_of
from surgeon.models.edited_layers import EditedLayers
from surgeon.models.families import family_of
from surgeon.models.families.fused import FUSED
from surgeon.models.weights import (
    Group,
    ModelWeights,
    ModuleStore,
    NamedTensors,
    Store,
    Tensors,
    module_with,
    packed,
)
from surgeon.named import is_hub_name, on_disk
from surgeon.provenance import write_json


@dataclass(frozen=True)
class LayersInMemory:
    """A model's layers as they are to be stored.

    Attributes:
        layers: the original ones, then those made of derived sublayers.
        sources: for each, the original layer that it has the configuration's entries of.
        program: over these layers.
    """

    layers: list[nn.Module]
    sources: list[int]
    program: Program


def export(
    model: PreTrainedModel,
    folder: str | Path,
    *,
    form: str = "auto",
    dtype: str | None = None,
    tokenizer: Any = None,
    overwrite: bool = False,
    training: Training | None = None,
) -> Proof:
    """Write what a model in memory is now as a checkpoint, in the most portable form that is exact, with its proof.

    The weights are written twice: as they are, into a folder beside the target that is removed at the end, then in the
    form. Besides the proof of every export, the model's own logits are compared with what is exported.

    Args:
        model: edited or not, trained or not; it is left as it is.
        folder: the target.
        form: "plain", "fused", "program", or "auto".
        dtype: of the written weights, "float32", "float16" or "bfloat16"; by default each tensor keeps its own.
        tokenizer: written in place of the tokenizer's files in the folder that the model was loaded from. What else
            belongs to the model there goes along: generation settings, processors, licence.
        overwrite: replace an existing checkpoint.
        training: what the model went through since its edit, where that is to be known of the checkpoint: its original
            is named as the source then, and its program is proven to be the recipe's.

    Raises:
        NotProven: if what was written does not compute what the model does, or its program is not the recipe's.
        ValueError: if the architecture is not supported, adapters are not merged, or the form cannot hold the program.
        FileExistsError: if the target is in the way.
        OSError: if the disk is full or cannot be written; whatever is raised, the target is as it was.
    """
    target = Path(folder)
    check_target(target, overwrite)
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; use {', '.join(DTYPES)}")
    with scratch(target) as source:
        stored = stored_layers_of(model)
        with as_stored(model, stored):
            type(model).save_pretrained(model, source)
        if tokenizer is not None:
            tokenizer.save_pretrained(source)
        came_from = model.name_or_path or ""
        name = came_from if on_disk(came_from) is not None else "a model in memory"
        original = Original.open(source)
        companions = _with_home(original.companions, model, tokenizer is not None)
        original = replace(original, name=name, companions=companions)
        plan = plan_export(original, stored.program, form, dtype)
        return write_export(plan, target, overwrite, alive=lambda tokens: logits_of(model, tokens), training=training)


def save_edited(model: PreTrainedModel, save_directory: str | Path, **options: Any) -> None:
    """`save_pretrained` of an edited model: its layers, its program, and the modeling file that runs it.

    The folder loads with `from_pretrained(folder, trust_remote_code=True)`, and with `surgeon.load`.

    Args:
        options: as `save_pretrained` takes them, but for `push_to_hub`.

    Raises:
        ValueError: if it is asked for what a folder with a modeling file cannot be.
    """
    if options.get("push_to_hub"):
        raise ValueError("an edited model is saved with a modeling file; save it into a folder, and upload that")
    folder = Path(save_directory)
    stored = stored_layers_of(model, options.get("state_dict"))
    family = family_of(model.config)
    if family.model_type == FUSED.model_type:
        raise ValueError("a fused model that was edited again cannot be saved; edit and export the original model")
    if options.get("state_dict") is not None:
        options["state_dict"] = _renamed(options["state_dict"], model, stored)
    with as_stored(model, stored):
        # Under their own names: those that stock checkpoints have are translated for stock classes only.
        type(model).save_pretrained(model, folder, **(options | {"save_original_format": False}))
    if not options.get("is_main_process", True):
        return
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    saved = StoredModel(Checkpoint(folder), model.config, family)
    entries = PROGRAM.class_entries(saved, Layout(PROGRAM, "", (), stored.program))
    write_json(folder / "config.json", config | entries)
    shutil.copyfile(PROGRAM.shipped.file, folder / PROGRAM.shipped.file.name)
    keep_tokenizer_class(folder, model.config)


def stored_layers_of(model: PreTrainedModel, state: dict[str, Tensor] | None = None) -> LayersInMemory:
    """The layers of a model as they are now.

    Args:
        state: of derived sublayers, to take their tensors from; by default their own.

    Raises:
        ValueError: if a layer holds what its architecture does not have.
    """
    layers = decoder_layers(model)
    if not isinstance(layers, EditedLayers):
        return LayersInMemory(list(layers), list(range(len(layers))), program_of(model))
    groups = layers.stored_groups
    made = [_layer_of(group, layers, state) for group in groups.groups]
    sources = [*range(len(layers.original[0])), *(group.layers[0] for group in groups.groups)]

    def stored(sublayer: Sublayer) -> Sublayer:
        return replace(sublayer, layers=(layers.stored_place(sublayer, groups),))

    return LayersInMemory([*layers.original[0], *made], sources, layers.program.renamed(stored))


def _layer_of(group: Group, edited: EditedLayers, state: dict[str, Tensor] | None) -> nn.Module:
    """A layer with the weights of a group's sublayers; those that the program does not have are as they were."""
    made, weights = nn.Module(), edited.weights()
    for kind in KINDS:
        spec, owner = edited.family.spec(kind), edited.layer(group.layers[0])
        count = group.count if kind in group.used else None
        pieces = [None] if count is None else [(index, count) for index in range(count)]
        sublayers = [group.sublayer(kind, piece) for piece in pieces]
        parts = [_values_of(sublayer, edited, state) for sublayer in sublayers]
        live = [part for part, sublayer in zip(parts, sublayers, strict=True) if _lives(sublayer, edited)]
        tensors = packed(_joined(parts, live, f"{kind}{group.layers[0]}"), spec, weights.width(kind))
        for name, module in module_with(tensors, owner, spec, weights.head_dim).named_children():
            made.add_module(name, module)
    return made


def _values_of(sublayer: Sublayer, edited: EditedLayers, state: dict[str, Tensor] | None) -> Tensors:
    """A sublayer's tensors by role, from the module that was derived for it, or as they would be derived."""
    if not _lives(sublayer, edited):
        return edited.weights().by_role(sublayer)
    inside, own = f"{edited.family.layers}.0.", f"{edited.family.layers}.{sublayer}."
    store: Store = ModuleStore(edited.get_submodule(str(sublayer)), inside)
    if state is not None:
        found = {name: tensor for name, tensor in state.items() if name.startswith(own)}
        store = NamedTensors({inside + name.removeprefix(own): tensor for name, tensor in found.items()})
    weights = ModelWeights(store, edited.family, edited.family.head_dim(edited.config))
    return weights.by_role(Sublayer(sublayer.kind, (0,), ranks=sublayer.ranks))


def _lives(sublayer: Sublayer, edited: EditedLayers) -> bool:
    """Whether there is a module of it, whose weights may be others than those it was derived from."""
    return str(sublayer) in edited._modules


def _joined(parts: list[Tensors], live: list[Tensors], name: str) -> Tensors:
    """The tensors of a whole sublayer, of those of its slices.

    Args:
        live: of the slices that the program has; where there are some, what is not divided is as they have it.
    """
    whole = dict(parts[0])
    for key in whole if len(parts) > 1 else ():
        dim = _divided_dim(key)
        if dim is not None:
            whole[key] = torch.cat([part[key] for part in parts], dim)
            continue
        first, *others = [part[key] for part in live if key in part] or [whole[key]]
        whole[key] = first
        if not all(torch.equal(first, other) for other in others):
            raise ValueError(
                f"the slices of {name} have {_shared(key)} of their own, and a checkpoint has one for all of them; "
                "replace no parameter of one slice alone"
            )
    return whole


def _divided_dim(key: str) -> int | None:
    """The dimension along which slices have parts of a tensor of a sublayer; None for what all of them have."""
    role, _, what = key.partition(".")
    if role not in ROLES[ATTENTION] + ROLES[FEED_FORWARD]:
        return None
    if role in WRITING:
        return 1 if what in ("weight", "first.weight") else None
    return None if what == "first.weight" else 0


def _shared(key: str) -> str:
    return "factors" if key.endswith(("first.weight", "second.weight")) else "norms"


@contextmanager
def as_stored(model: PreTrainedModel, stored: LayersInMemory) -> Iterator[None]:
    """While inside, the model is a stock one with the layers that are to be stored, in its configuration too."""
    family = family_of(model.config)
    edited = isinstance(decoder_layers(model), EditedLayers)
    parent, name = decoder_parent(model)
    before = getattr(parent, name)
    original = before.undo(model.config) if edited else before
    entries = family.per_layer_entries(model.config, stored.sources) | {"num_hidden_layers": len(stored.layers)}
    config_before = {key: getattr(model.config, key) for key in entries}
    for key, value in entries.items():
        setattr(model.config, key, value)
    setattr(parent, name, nn.ModuleList(stored.layers))
    try:
        yield
    finally:
        for key, value in config_before.items():
            setattr(model.config, key, value)
        setattr(parent, name, original)
        if edited:
            setattr(parent, name, before)
            before.describe_in(model.config)


def _renamed(state: dict[str, Tensor], model: PreTrainedModel, stored: LayersInMemory) -> dict[str, Tensor]:
    """A state dict of the edited model under the names of the stored layers."""
    edited = decoder_layers(model)
    assert isinstance(edited, EditedLayers)
    prefix = f"{edited.family.layers}."
    derived = {str(sublayer) for sublayer in edited.program.sublayers() if edited.is_derived(sublayer)}
    renamed = {}
    for name, tensor in state.items():
        inside = name.removeprefix(prefix).partition(".") if name.startswith(prefix) else ("", "", "")
        if inside[0] not in derived:
            renamed[name] = tensor
    for index in range(len(edited.original[0]), len(stored.layers)):
        for name, tensor in stored.layers[index].state_dict().items():
            renamed[f"{prefix}{index}.{name}"] = tensor
    return renamed


def _with_home(written: Companions, model: PreTrainedModel, has_tokenizer: bool) -> Companions:
    """What goes along with a model: what was written of it, and what lies where it was loaded from.

    Args:
        has_tokenizer: whether the tokenizer is among what was written.
    """
    home = _home_of(model)
    if home is None:
        if model.name_or_path and not has_tokenizer:
            warnings.warn(
                f"{model.name_or_path}, which the model was loaded from, is not found here, so neither a tokenizer nor "
                "a licence goes along; give tokenizer=",
                stacklevel=3,
            )
        return replace(written, left={})
    found = companions_at(home)
    if GENERATION in found.files and _is_of(model.generation_config, home):
        kept = {name: path for name, path in written.files.items() if name != GENERATION}  # the file says it all
        written = replace(written, files=kept)
    return written.over(found.without_tokenizer() if has_tokenizer else found)


def _is_of(settings: GenerationConfig | None, home: Path) -> bool:
    """Whether generation settings are those that a folder has."""
    try:
        return settings == GenerationConfig.from_pretrained(home)
    except (OSError, ValueError):  # it has none that can be read
        return False


def _home_of(model: PreTrainedModel) -> Path | None:
    """The folder that a model was loaded from, which it names; of a name on the hub, the one in the hub's cache."""
    name = model.name_or_path or ""
    there = on_disk(name)
    if there is not None and there.is_dir():
        return there
    if not is_hub_name(name):
        return None
    found = try_to_load_from_cache(name, "config.json", revision=getattr(model.config, "_commit_hash", None))
    return Path(found).parent if isinstance(found, str) else None


@torch.no_grad()
def logits_of(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Logits of the model as it is, without dropout, on the CPU in float32."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        logits: Tensor = model(input_ids=tokens.to(input_device(model)), use_cache=False).logits
    finally:
        for module, mode in modes.items():
            module.training = mode
    return logits.float().cpu()
