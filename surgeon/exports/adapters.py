"""An adapter beside the edited model that it was trained on, each in a folder of its own.

The adapter's names are those of the modules in the written model, whose layers may have other numbers than in memory,
so that peft puts it onto the model that `transformers` loads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from surgeon.checkpoint.config import open_stored
from surgeon.checkpoint.forms import Layout, form_of, lay_out
from surgeon.checkpoint.load import from_files
from surgeon.checkpoint.stored import Checkpoint
from surgeon.errors import NotProven
from surgeon.exports.export import plan_export, stage_folder, write_export
from surgeon.exports.in_memory import export, logits_of, stock_model
from surgeon.exports.prove import EXACT_TOLERANCE, WRITTEN_TOLERANCE, Proof, Reference, random_tokens
from surgeon.language.sublayer import KINDS
from surgeon.models.families import Family, family_of
from surgeon.models.lora import LoraConfig, LoraLayer, PeftModel, get_peft_model_state_dict
from surgeon.opened import EditedModel

BASE = "base"
ADAPTER = "adapter"
ADAPTER_FILE = "adapter_model.safetensors"
WRAPPED = "base_model.model."  # before the names of the model's own modules, as peft writes them
_MERGE = "leave keep_adapter out, so that the adapter is merged into the weights"
Names = dict[str, list[str]]  # of modules: as the written model calls those that one in memory becomes


def export_with_adapter(
    model: PeftModel, folder: str | Path, *, tokenizer: Any = None, base_of: EditedModel | None = None
) -> Proof:
    """Write an edited model without its adapter as `folder/base`, and the adapter as `folder/adapter`.

    The base is in the plain form or the program form, which keep modules as they are. `peft` puts the two together:
    `PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, trust_remote_code=True), adapter)`. That this
    computes what the model does is proven before the folder gets its name.

    Args:
        model: with one LoRA adapter, not merged; left as it is.
        folder: the target, which must not be there yet.
        tokenizer: as in `surgeon.export`.
        base_of: the model that it was loaded as without its adapter, and still is: the base is written of its files, so
            that quantised weights stay as they are stored (QLoRA, Dettmers et al. 2023, arXiv 2305.14314).

    Returns:
        The proof of the base.

    Raises:
        NotProven: if the files do not compute what the model does.
        ValueError: if the adapter is of another kind, or lies on averages, slices or factors, which are stored as
            something else.
        FileExistsError: if the target is in the way.
        OSError: if the disk is full or cannot be written; on any error, the target is as it was.
    """
    target = Path(folder)
    name, config = _only_adapter(model)
    base: Any = model.get_base_model()
    lora = {path: module for path, module in base.named_modules() if isinstance(module, LoraLayer)}
    with stage_folder(target) as partial:
        with _without_adapter(base, lora):
            with stock_model(base) as stock:  # in a form that keeps modules
                family = family_of(base.config)
                try:
                    layout = lay_out(stock.program, family, base.config, among=("plain", "program"))
                except ValueError as refusal:
                    raise ValueError(
                        f"the model cannot be written with its modules as they are: {refusal}; {_MERGE}"
                    ) from refusal
            if base_of is None:
                proof = export(base, partial / BASE, form=layout.form.name, tokenizer=tokenizer)
            else:
                plan = plan_export(
                    base_of.model, base_of.program, layout.form.name, factors=base_of.factors
                )
                proof = write_export(plan, partial / BASE)
        wrapped = Checkpoint(partial / BASE).wrapped
        place = str if wrapped is None else wrapped.wrapper.path_inside
        names = {
            path: [*map(place, _written_names(path, layout, family_of(base.config)))] for path in lora
        }
        (partial / ADAPTER).mkdir()
        state = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
        save_file(_rename(state, names), partial / ADAPTER / ADAPTER_FILE, metadata={"format": "pt"})
        own = {written: lora[path] for path, all_of_it in names.items() for written in all_of_it}
        # Modules by their whole names: patterns may fit others there.
        written = replace(
            config,
            base_model_name_or_path=BASE,
            inference_mode=True,
            target_modules=sorted(own),
            exclude_modules=None,
            layers_to_transform=None,
            layers_pattern=None,
            rank_pattern={
                f"^{re.escape(path)}": one.r[name]
                for path, one in own.items()
                if one.r[name] != config.r
            },
            alpha_pattern={
                f"^{re.escape(path)}": one.lora_alpha[name]
                for path, one in own.items()
                if one.lora_alpha[name] != config.lora_alpha
            },
        )
        written.save_pretrained(str(partial / ADAPTER))
        _prove(model, partial)
    return proof


def _only_adapter(model: PeftModel) -> tuple[str, LoraConfig]:
    """Return the adapter's name and configuration."""
    if not hasattr(model, "peft_config"):
        raise ValueError("the model has no adapter of peft; leave adapter out")
    if len(model.peft_config) != 1:
        raise ValueError(f"the model has {len(model.peft_config)} adapters; one can be kept beside it")
    ((name, config),) = model.peft_config.items()
    others = ("modules_to_save", "trainable_token_indices", "target_parameters")
    if not isinstance(config, LoraConfig) or any(getattr(config, other) for other in others):
        raise ValueError(f"only LoRA adapters without {', '.join(others)} can be kept apart; {_MERGE}")
    return name, config


@contextmanager
def _without_adapter(base: nn.Module, lora: dict[str, Any]) -> Iterator[None]:
    """Put the modules that carry the adapter back to those before it, while inside."""
    for path, module in lora.items():
        if module.merged:
            raise ValueError(
                f"the adapter is merged into {path} already; unmerge it, or export the model as it is"
            )
    for path, module in lora.items():
        base.set_submodule(path, module.base_layer)
    try:
        yield
    finally:
        for path, module in lora.items():
            base.set_submodule(path, module)


def _written_names(path: str, layout: Layout, family: Family) -> list[str]:
    """Return a module's names in the written model, one for each layer that has it."""
    inside = path.removeprefix(f"{family.layers}.")
    if inside == path:
        return [path]
    layer, _, rest = inside.partition(".")
    if not layer.isdigit():
        raise ValueError(f"the adapter lies on {layer}, which is stored as something else; {_MERGE}")
    kinds = [
        kind
        for kind in KINDS
        if any(f"{rest}.".startswith(f"{one}.") for one in family.spec(kind).modules)
    ]
    return [
        f"{family.layers}.{index}.{rest}"
        for index, stored in enumerate(layout.layers)
        if any(one.kind in kinds and one.layers == (int(layer),) for one in stored.sublayers)
    ]


def _rename(state: dict[str, Tensor], names: Names) -> dict[str, Tensor]:
    """Name the adapter's tensors by the written model's modules."""
    found = {}
    for name, tensor in state.items():
        own = name.removeprefix(WRAPPED)
        path = max((path for path in names if own.startswith(f"{path}.")), key=len, default=None)
        if path is None:
            raise ValueError(
                f"the adapter has a tensor {own}, which is of no module that carries it; {_MERGE}"
            )
        for written in names[path]:
            found[f"{WRAPPED}{written}{own.removeprefix(path)}"] = (
                tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            )
    if not found:
        raise ValueError(
            "the adapter lies on no module that the program runs, so there is nothing to keep"
        )
    return found


def _prove(model: PeftModel, folder: Path) -> None:
    """Load the written base and adapter, and compare logits."""
    written = open_stored(folder / BASE)
    model_class, config = form_of(written.checkpoint).written_class(written)
    kept = next(model.parameters()).dtype
    if written.checkpoint.quantised:
        base: Any = from_files(model_class, written, config=config, dtype=kept)
    else:
        base = model_class.from_pretrained(folder / BASE, config=config, dtype=kept)
    tokens = random_tokens(written.config)
    alive: Any = model  # which takes what its base model takes
    reference = Reference(tokens, logits_of(alive, tokens))
    adapted: Any = PeftModel.from_pretrained(base, str(folder / ADAPTER))
    found = reference.difference(logits_of(adapted, tokens))
    bound = WRITTEN_TOLERANCE.get(kept, EXACT_TOLERANCE)
    if not found <= bound:
        raise NotProven(
            f"base and adapter together do not compute what the model does: their logits differ by {found:.2g} of "
            f"their scale (at most {bound:g} is allowed), so nothing was written"
        )
