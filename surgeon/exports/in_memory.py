"""Models in memory as checkpoints: whatever an edited model is now, merged, sliced or trained."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from surgeon.checkpoint.belongings import GENERATION, FileKind, kind_of
from surgeon.checkpoint.codas import Coda, read_codas, write_codas
from surgeon.checkpoint.companions import Companions, companions_at
from surgeon.checkpoint.config import CONFIG
from surgeon.checkpoint.forms import PROGRAM, Layout, lay_out
from surgeon.checkpoint.load import open_stored
from surgeon.checkpoint.read import Checkpoint, Wrapped, read_json
from surgeon.checkpoint.stored import StoredModel
from surgeon.checkpoint.training import Training
from surgeon.errors import NotProven
from surgeon.exports.export import DTYPES, keep_tokenizer_class, plan_export, write_export
from surgeon.exports.prove import Proof
from surgeon.exports.staging import check_target
from surgeon.exports.stock import stock_layers_of, stock_model, stock_state
from surgeon.models.edit import input_device
from surgeon.models.families import family_of
from surgeon.models.families.fused import FUSED
from surgeon.models.weights import Tensors, unstored
from surgeon.models.weights.quantised import PackedTensor
from surgeon.models.wrappers import wrapper_of
from surgeon.named import hub_name, on_disk
from surgeon.opened import Model
from surgeon.processes.files import write_json
from surgeon.processes.folders import scratch
from surgeon.quality.text import in_evaluation_mode


def export(
    model: PreTrainedModel,
    folder: str | Path,
    *,
    form: str = "auto",
    dtype: str | None = None,
    tokenizer: Any = None,
    overwrite: bool = False,
    training: Training | None = None,
    complete: Callable[[Path], None] = lambda _: None,
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
        complete: adds what belongs to the checkpoint to its folder, before that gets its name.

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
    if model.config.model_type == FUSED.model_type:
        raise ValueError(
            "the model is in the fused form, which is not edited again; model.save_pretrained(folder) writes it as it "
            "is, and another edit is one of the original model"
        )
    with scratch(target) as source:
        stock = stock_layers_of(model)
        with stock_model(model, stock):
            type(model).save_pretrained(model, source, state_dict=_numbers_of(model))
        if tokenizer is not None:
            tokenizer.save_pretrained(source)
        came_from = model.name_or_path or ""
        name = came_from if on_disk(came_from) is not None else "a model in memory"
        original = Model.of(Checkpoint(source), name)
        if unstored(original.weights, stock.program, original.num_layers):
            original = replace(original, own=stock.program)  # layers lack what it does not run
        companions = _with_home(companions_at(source), model, tokenizer is not None)
        around = original.wrapped or _around(model)
        plan = plan_export(original, stock.program, form, dtype, companions=companions, wrapped=around)
        alive = partial(logits_of, model)
        return write_export(plan, target, overwrite, alive=alive, training=training, complete=complete)


def check_form(model: PreTrainedModel, form: str) -> None:
    """Refuse a form that `export` could not write a model in, before it is trained.

    Raises:
        ValueError: with the reason.
    """
    stock = stock_layers_of(model)
    with stock_model(model, stock):
        lay_out(stock.program, family_of(model.config), model.config, form)


def export_with_codas(
    model: PreTrainedModel,
    folder: str | Path,
    racks: Sequence[str],
    nodes: Sequence[int],
    depth: int,
    codas: Sequence[Coda],
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    **options: Any,
) -> Proof:
    """Write a model as `surgeon.export` does, and the codas of its racks; both are proven before they get their name.

    Args:
        racks, nodes, depth, codas: as `write_codas` takes them.
        dtype, overwrite, options: as `surgeon.export` takes them; codas are written in the same dtype.

    Returns:
        The proof of the model.

    Raises:
        NotProven: if what was written is not the model, or not the codas.
        FileExistsError, OSError, ValueError: as `surgeon.export`.
    """

    def add_codas(written: Path) -> None:
        if codas:
            write_codas(written, racks, nodes, depth, codas, None if dtype is None else DTYPES[dtype])
            _prove_codas(written, nodes, codas)

    return export(model, folder, dtype=dtype, overwrite=overwrite, complete=add_codas, **options)


def _prove_codas(folder: Path, nodes: Sequence[int], codas: Sequence[Coda]) -> None:
    """Read what was written, and compare it with what it should be, bit for bit."""
    program = open_stored(folder).program
    found = read_codas(folder)
    assert found is not None
    if len(program) != nodes[-1]:
        raise NotProven(f"the checkpoint runs {len(program)} steps or forks, and the racks have {nodes[-1]}")
    for rack, coda in enumerate(codas):
        written = found.coda(rack)
        if written.tensors.keys() != coda.tensors.keys() or str(found.program) != str(coda.program):
            raise NotProven(f"the coda of rack {rack} is not what was written")
        for name, tensor in written.tensors.items():
            if not torch.equal(tensor, coda.tensors[name].detach().cpu().to(tensor.dtype)):
                raise NotProven(f"{name} of the coda of rack {rack} is not what was written")


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
    stock = stock_layers_of(model, options.get("state_dict"))
    family = family_of(model.config)
    if family.model_type == FUSED.model_type:
        raise ValueError("a fused model that was edited again cannot be saved; edit and export the original model")
    if options.get("state_dict") is not None:
        options["state_dict"] = stock_state(options["state_dict"], model, stock)
    with stock_model(model, stock):
        # Under their own names: those that stock checkpoints have are translated for stock classes only.
        options = {"state_dict": _numbers_of(model)} | options | {"save_original_format": False}
        type(model).save_pretrained(model, folder, **options)
    if not options.get("is_main_process", True):
        return
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    saved = StoredModel(str(folder), Checkpoint(folder), model.config)
    entries = PROGRAM.class_entries(saved, Layout(PROGRAM, "", (), stock.program))
    write_json(folder / "config.json", config | entries)
    shutil.copyfile(PROGRAM.shipped.file, folder / PROGRAM.shipped.file.name)
    keep_tokenizer_class(folder, model.config)


def _numbers_of(model: PreTrainedModel) -> Tensors:
    """The state dict of a model; what is packed is unpacked, for files hold no `PackedTensor`."""
    state = model.state_dict()
    packed = {name: one.numbers().cpu() for name, one in state.items() if isinstance(one, PackedTensor)}
    return state | packed


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
    try:
        is_unchanged = GENERATION in found.files and model.generation_config == GenerationConfig.from_pretrained(home)
    except (OSError, ValueError):  # the folder's cannot be read
        is_unchanged = False
    if is_unchanged:
        kept = {name: path for name, path in written.files.items() if name != GENERATION}  # the file says it all
        written = replace(written, files=kept)
    carried = found.files
    if has_tokenizer:
        carried = {name: path for name, path in carried.items() if kind_of(name) is not FileKind.TOKENIZER}
    return replace(found, files=carried | written.files)


def _around(model: PreTrainedModel) -> Wrapped | None:
    """What is around the text decoder that a model was loaded as; None if it is one by itself."""
    home = _home_of(model)
    if home is None or wrapper_of(read_json(home / CONFIG)) is None:
        return None
    return Checkpoint(home).wrapped


def _home_of(model: PreTrainedModel) -> Path | None:
    """The folder that a model was loaded from, which it names; of a name on the hub, the one in the hub's cache."""
    name = model.name_or_path or ""
    there = on_disk(name)
    if there is not None and there.is_dir():
        return there
    if (named := hub_name(name)) is None:
        return None
    commit = getattr(model.config, "_commit_hash", None) or named.revision
    found = try_to_load_from_cache(named.repository, CONFIG, revision=commit)
    if isinstance(found, str):
        return Path(found).parent
    return None


@torch.no_grad()
def logits_of(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Logits of the model as it is, without dropout, on the CPU in float32."""
    with in_evaluation_mode(model):
        logits: Tensor = model(input_ids=tokens.to(input_device(model)), use_cache=False).logits
    return logits.float().cpu()
