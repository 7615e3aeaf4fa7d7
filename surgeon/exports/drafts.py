"""A healed draft as a folder of what it changes: written, read back, put into the model again, and proven."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from surgeon.checkpoint.drafts import ADAPTER_FILE, DRAFT_FILE, NORMS_FILE, WRAPPED, DraftChanges, HealedDraft
from surgeon.checkpoint.inherit import CARD_FILE
from surgeon.errors import NotProven
from surgeon.exports.adapters import on_modules
from surgeon.exports.in_memory import logits_of
from surgeon.exports.prove import EXACT_TOLERANCE, Reference, random_tokens
from surgeon.exports.staging import staged
from surgeon.language.program import Program
from surgeon.language.sublayer import Sublayer
from surgeon.models.edit import edit, edited_layers
from surgeon.models.edited_layers import EditedLayers
from surgeon.models.lora import LoraConfig, LoraLayer, PeftModel
from surgeon.models.weights import Factors, ModelWeights, Tensors, norm_paths
from surgeon.opened import EditedModel, Model
from surgeon.processes.files import write_json, write_text


def export_draft(
    model: PreTrainedModel | PeftModel,
    edited: EditedModel,
    folder: Path,
    card: str,
    record: dict[str, Any],
    overwrite: bool = False,
) -> float:
    """Write what training has changed of an edited model: norms, or LoRA adapters.

    Args:
        model: as it was trained, its adapter not merged.
        edited: what it was before.
        card: text of README.md.
        record: of the training, as JSON values.

    Returns:
        How far the logits of the model with what was written differ from the trained one's, relative to their scale.

    Raises:
        NotProven: if these are others than the trained model's.
        ValueError: if an adapter cannot be kept apart.
        FileExistsError: if the target is in the way.
        OSError: if the disk is full or cannot be written; whatever is raised, the target is as it was.
    """
    base: PreTrainedModel = model.get_base_model() if isinstance(model, PeftModel) else model  # type: ignore[assignment]
    weights = edited.model.weights
    with staged(folder, overwrite) as partial:
        if isinstance(model, PeftModel):
            _write_adapter(model, adapters_of(base, weights), edited.model.public_name, partial)
        elif norms := changed_norms(base, weights):
            save_file(norms, partial / NORMS_FILE, metadata={"format": "pt"})
        draft = HealedDraft(partial, edited.program, edited.model.public_name, edited.model.hash, record)
        write_json(partial / DRAFT_FILE, draft.to_json())
        write_text(partial / CARD_FILE, card)
        return _prove(model, edited.model, HealedDraft.read(partial))


def changed_norms(model: PreTrainedModel, weights: ModelWeights) -> Tensors:
    """The norms of an edited model that are others than stored, by their paths from the causal language model."""
    layers = edited_layers(model)
    family = weights.family
    modules = {family.final_norm: model.get_submodule(family.final_norm)}
    for sublayer in layers.program.sublayers():
        (layer,), owner = sublayer.layers, layers.owner(sublayer)
        for path in norm_paths(weights.spec(sublayer)).values():
            modules[f"{weights.prefix(layer)}{path}"] = owner.get_submodule(path)
    found = {}
    for path, module in modules.items():
        for name, parameter in module.named_parameters():
            own = parameter.detach().float().cpu()
            if not torch.equal(own, weights.tensor(f"{path}.{name}").float()):
                found[f"{path}.{name}"] = own.clone()
    return found


def check_adapters(model: PreTrainedModel, targets: list[str], weights: ModelWeights) -> None:
    """Refuse, before they are trained, adapters on modules that are no matrices of layers, or slices of one matrix.

    Raises:
        ValueError: naming the first one.
    """
    layers = edited_layers(model)
    for path in targets:
        _place(path, layers, weights)


def _place(path: str, layers: EditedLayers, weights: ModelWeights) -> tuple[str, Sublayer | None, str]:
    """The path of the model's own module that an edited model's is, or is a slice of; and the slice, with its role.

    Raises:
        ValueError: if it is neither.
    """
    inside = path.removeprefix(f"{layers.family.layers}.")
    owner, _, rest = inside.partition(".")
    if inside == path or owner.isdigit():
        return path, None, ""
    (sublayer,) = Program.parse(owner).sublayers()
    simple = replace(sublayer, piece=None) == Sublayer(sublayer.kind, sublayer.layers[:1])
    roles = [one.role for one in weights.spec(sublayer).projections if one.path == rest]
    if not simple or len(roles) != 1:
        raise ValueError(
            f"the adapter on {rest} of {sublayer} would be of no matrix that the model has by itself, so that it "
            "cannot lie beside the model's; train norms"
        )
    return f"{weights.prefix(sublayer.layers[0])}{rest}", sublayer, roles[0]


def adapters_of(model: PreTrainedModel, weights: ModelWeights) -> dict[str, Factors]:
    """An edited model's adapters by the paths of the model's own modules, scaled; those of slices one under another.

    Raises:
        ValueError: if there is one on something else.
    """
    layers = edited_layers(model)
    found = dict[str, list[Factors]]()
    for path, module in model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        (name,) = module.lora_A
        first, second = (getattr(module, side)[name].weight.detach().float().cpu() for side in ("lora_A", "lora_B"))
        second = second * module.scaling[name]
        own, sublayer, role = _place(path, layers, weights)
        if sublayer is not None:
            whole = weights.matrix(replace(sublayer, piece=None), role).shape
            at = weights.features(sublayer, role)
            if weights.spec(sublayer).projection(role).reads_stream:
                second = second.new_zeros(whole[0], len(first)).index_copy(0, at, second)
            else:
                first = first.new_zeros(len(first), whole[1]).index_copy(1, at, first)
        found.setdefault(own, []).append(Factors(first, second))
    return {
        path: Factors(torch.cat([one.first for one in each]), torch.cat([one.second for one in each], 1))
        for path, each in found.items()
    }


def _write_adapter(model: PeftModel, adapters: dict[str, Factors], name: str, folder: Path) -> None:
    """As peft reads it onto the unedited model: its scale is 1, since factors are scaled."""
    (config,) = model.peft_config.values()
    assert isinstance(config, LoraConfig)
    ranks = {path: len(one.first) for path, one in adapters.items()}
    most = max(ranks.values())
    on_modules(replace(config, r=most, lora_alpha=most), name, ranks, ranks).save_pretrained(str(folder))
    sides = (("lora_A", 0), ("lora_B", 1))
    tensors: dict[str, Tensor] = {
        f"{WRAPPED}{path}.{side}.weight": one[place].contiguous()
        for path, one in adapters.items()
        for side, place in sides
    }
    save_file(tensors, folder / ADAPTER_FILE, metadata={"format": "pt"})


@torch.no_grad()
def put_into(model: nn.Module, changes: DraftChanges) -> None:
    """Have an unedited model compute with a draft's norms, and with its adapters in its matrices."""
    for path, norm in changes.norms.items():
        model.get_parameter(path).copy_(norm)
    for path, factors in changes.adapters.items():
        module = model.get_submodule(path)
        added = factors.product()
        weight: Any = module.weight
        weight.add_(added.t() if isinstance(module, Conv1D) else added)


def _prove(model: Any, original: Model, draft: HealedDraft) -> float:
    """Put what was written into the model, edit it, and compare.

    Raises:
        NotProven: if its logits are others than the trained model's.
    """
    fresh = EditedModel(original.name, original).load("cpu").float()
    put_into(fresh, DraftChanges.read(draft.folder))
    tokens = random_tokens(original.config)
    differ = Reference(tokens, logits_of(model, tokens)).difference(logits_of(edit(fresh, draft.program), tokens))
    if not differ <= EXACT_TOLERANCE:
        raise NotProven(
            f"the model with what was written does not compute what was trained: logits differ by {differ:.2g} of "
            f"their scale (at most {EXACT_TOLERANCE:g} is allowed), so nothing was written"
        )
    return differ
