"""Models in memory as checkpoints: an edited model as it is, merged, sliced or trained.

Whatever its program, it is stored as a stock model, whose weights are those of whole layers. Averages and slices have
weights of their own while a model lives. They become layers behind the original ones, and the program names these: of a
model with three layers, `A0 F0 A1~A2 F1~F2` is stored as four layers and `A0 F0 A3 F3`.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from surgeon.checkpoint.belongings import GENERATION, Companions, FileKind, companions_of, kind_of
from surgeon.checkpoint.codas import Coda, read_codas, write_codas
from surgeon.checkpoint.config import CONFIG, open_stored
from surgeon.checkpoint.forms import PROGRAM, Layout, lay_out
from surgeon.checkpoint.imported import wrapper_of
from surgeon.checkpoint.load import load
from surgeon.checkpoint.stored import Checkpoint, StoredModel, read_json
from surgeon.checkpoint.training import Training
from surgeon.errors import NotProven
from surgeon.exports.export import DTYPES, check_target, keep_tokenizer_class, plan_export, write_export
from surgeon.exports.plan import check_storage
from surgeon.exports.prove import Proof
from surgeon.language.program import Program
from surgeon.language.sublayer import ATTENTION, FEED_FORWARD, KINDS, ROLES, SHARED, WRITING, Sublayer
from surgeon.models.edit import (
    decoder_layers,
    decoder_parent,
    edit,
    input_device,
    program_of,
    save_edited_with,
)
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
    absent_sublayers,
    module_with,
    pack_tensors,
)
from surgeon.models.weights.quantised import PackedTensor
from surgeon.named import hub_name, on_disk
from surgeon.opened import Model
from surgeon.processes.files import scratch, write_json
from surgeon.quality.head import in_evaluation_mode

# `edit` and `load` are those of models whose `save_pretrained` writes their program, too.
__all__ = [
    "check_form",
    "edit",
    "export",
    "export_with_codas",
    "load",
    "logits_of",
    "save_edited",
    "stock_layers_of",
    "stock_model",
]


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
    """Write a model in memory as a checkpoint, in the most portable form that is exact, with its proof.

    The weights are written twice: as they are, into a folder beside the target that is removed at the end, then in the
    form. The proof includes the model's own logits.

    Args:
        model: edited or not, trained or not; it is left as it is.
        folder: the target.
        form: "plain", "fused", "program", or "auto".
        dtype: of the written weights, "float32", "float16" or "bfloat16"; by default each tensor keeps its own.
        tokenizer: in place of that in the folder that the model was loaded from. Generation settings, processors and
            licence from there go along.
        overwrite: replace an existing checkpoint.
        training: since its edit, to be recorded: its original is the source then, and the program is proven to be the
            recipe's.
        complete: adds files to the checkpoint's folder before that gets its name.

    Raises:
        NotProven: if the written checkpoint computes something else than the model, or not the recipe's program.
        ValueError: if the architecture is not supported, adapters are not merged, or the form cannot hold the program.
        FileExistsError: if the target is in the way.
        OSError: if the disk is full or cannot be written; on any error, the target is as it was.
    """
    target = Path(folder)
    check_target(target, overwrite)
    check_storage(form, dtype)
    if model.config.model_type == FUSED.model_type:
        raise ValueError(
            "the model is in the fused form, which is not edited again; model.save_pretrained(folder) writes it as it "
            "is, and another edit is one of the original model"
        )
    with scratch(target) as source:
        with stock_model(model) as stock:
            type(model).save_pretrained(model, source, state_dict=_numbers_of(model))
        if tokenizer is not None:
            tokenizer.save_pretrained(source)
        came_from = model.name_or_path or ""
        name = came_from if on_disk(came_from) is not None else "a model in memory"
        original = Model.of(Checkpoint(source), name)
        if absent_sublayers(original.weights, stock.program, original.num_layers):
            original = replace(original, own=stock.program)  # layers lack what it does not run
        home = _home_of(model)
        companions = _with_home(companions_of(source), home, model, tokenizer is not None)
        around = original.wrapped
        if around is None and home is not None and wrapper_of(read_json(home / CONFIG)) is not None:
            around = Checkpoint(home).wrapped  # of which the model was loaded as the text decoder
        plan = plan_export(original, stock.program, form, dtype, companions=companions, wrapped=around)
        alive = partial(logits_of, model)
        return write_export(plan, target, overwrite, alive=alive, training=training, complete=complete)


def check_form(model: PreTrainedModel, form: str) -> None:
    """Refuse a form that `export` could not write a model in, before it is trained."""
    with stock_model(model) as stock:
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
    """Write a model as `surgeon.export` does, and the codas of its racks, both proven.

    Args:
        racks, nodes, depth, codas: as `write_codas` takes them.
        dtype, overwrite, options: as `surgeon.export` takes them; codas are written in the same dtype.

    Returns:
        The proof of the model.
    """

    def add_codas(written: Path) -> None:
        if not codas:
            return
        write_codas(written, racks, nodes, depth, codas, DTYPES.get(dtype or ""))
        # They are read back, and compared with what they should be, bit for bit.
        program = open_stored(written).program
        found = read_codas(written)
        assert found is not None
        if len(program) != nodes[-1]:
            raise NotProven(
                f"the checkpoint runs {len(program)} steps or forks, and the racks have {nodes[-1]}"
            )
        for rack, coda in enumerate(codas):
            back = found.coda(rack)
            if back.tensors.keys() != coda.tensors.keys() or str(found.program) != str(coda.program):
                raise NotProven(f"the coda of rack {rack} is not what was written")
            for name, tensor in back.tensors.items():
                if not torch.equal(tensor, coda.tensors[name].detach().cpu().to(tensor.dtype)):
                    raise NotProven(f"{name} of the coda of rack {rack} is not what was written")

    return export(model, folder, dtype=dtype, overwrite=overwrite, complete=add_codas, **options)


def save_edited(model: PreTrainedModel, save_directory: str | Path, **options: Any) -> None:
    """`save_pretrained` of an edited model: its layers, its program, and the modeling file that runs it.

    The folder loads with `from_pretrained(folder, trust_remote_code=True)`, and with `surgeon.load`.

    Args:
        options: as `save_pretrained` takes them, but for `push_to_hub`.
    """
    if options.get("push_to_hub"):
        raise ValueError(
            "an edited model is saved with a modeling file; save it into a folder, and upload that"
        )
    folder = Path(save_directory)
    if model.config.model_type == FUSED.model_type:
        raise ValueError(
            "a fused model that was edited again cannot be saved; edit and export the original model"
        )
    state = options.pop("state_dict", None)
    with stock_model(model, state) as stock:
        # Under their own names: those that stock checkpoints have are translated for stock classes only.
        numbers = _numbers_of(model) if state is None else stock.state(state)
        type(model).save_pretrained(
            model, folder, state_dict=numbers, **options | {"save_original_format": False}
        )
    if not options.get("is_main_process", True):
        return
    saved = StoredModel(str(folder), Checkpoint(folder), model.config)
    entries = PROGRAM.class_entries(saved, Layout(PROGRAM, "", (), stock.program))
    write_json(folder / CONFIG, saved.checkpoint.entries | entries)
    shutil.copyfile(PROGRAM.shipped.file, folder / PROGRAM.shipped.file.name)
    keep_tokenizer_class(folder, model.config)


def _numbers_of(model: PreTrainedModel) -> Tensors:
    """Return a model's state dict, unpacked, for files hold no `PackedTensor`."""
    state = model.state_dict()
    packed = {name: one.numbers().cpu() for name, one in state.items() if isinstance(one, PackedTensor)}
    return state | packed


def _with_home(
    written: Companions, home: Path | None, model: PreTrainedModel, has_tokenizer: bool
) -> Companions:
    """Join the files written of a model and those of the folder that it was loaded from."""
    if home is None:
        if model.name_or_path and not has_tokenizer:
            warnings.warn(
                f"{model.name_or_path}, which the model was loaded from, is not found here, so neither a tokenizer nor "
                "a licence goes along; give tokenizer=",
                stacklevel=3,
            )
        return replace(written, left={})
    found = companions_of(home)
    try:
        is_unchanged = (
            GENERATION in found.files
            and model.generation_config == GenerationConfig.from_pretrained(home)
        )
    except (OSError, ValueError):  # the folder's cannot be read
        is_unchanged = False
    if is_unchanged:
        # The file says it all.
        kept = {name: path for name, path in written.files.items() if name != GENERATION}
        written = replace(written, files=kept)
    carried = found.files
    if has_tokenizer:
        carried = {
            name: path for name, path in carried.items() if kind_of(name) is not FileKind.TOKENIZER
        }
    return replace(found, files=carried | written.files)


def _home_of(model: PreTrainedModel) -> Path | None:
    """Find the folder that a model was loaded from, by its name; for a hub name, in the hub's cache."""
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
    """Return logits of the model as it is, without dropout, on the CPU in float32."""
    with in_evaluation_mode(model):
        logits: Tensor = model(input_ids=tokens.to(input_device(model)), use_cache=False).logits
    return logits.float().cpu()


@dataclass(frozen=True)
class StockLayers:
    """The layers of the stock model.

    Attributes:
        layers: the original ones, then those made of derived sublayers.
        sources: for each, the original layer whose entries in the configuration it has.
        program: over these layers.
        prefix: of the names of layers.
        derived: the names of derived sublayers in the edited model.
    """

    layers: list[nn.Module]
    sources: list[int]
    program: Program
    prefix: str = ""
    derived: Collection[str] = ()

    def state(self, state: Tensors) -> Tensors:
        """Rename a state dict of the edited model to these layers."""
        renamed = {
            name: tensor
            for name, tensor in state.items()
            if name.removeprefix(self.prefix).partition(".")[0] not in self.derived
        }
        for index, layer in enumerate(self.layers):
            if type(layer) is nn.Module:  # made of derived sublayers
                renamed |= {
                    f"{self.prefix}{index}.{name}": one for name, one in layer.state_dict().items()
                }
        return renamed


def stock_layers_of(model: PreTrainedModel, state: Tensors | None = None) -> StockLayers:
    """Return the layers of a model as they are now."""
    layers = decoder_layers(model)
    if not isinstance(layers, EditedLayers):
        return StockLayers(list(layers), list(range(len(layers))), program_of(model))
    groups = layers.stored_groups
    made = [_layer_of(group, layers, state) for group in groups.groups]
    sources = [*range(len(layers.original[0])), *(group.layers[0] for group in groups.groups)]

    def stored(sublayer: Sublayer) -> Sublayer:
        place = layers.stored_place(sublayer, groups)
        if layers.is_derived(sublayer):
            return sublayer.stored_in(place)
        return replace(sublayer, layers=(place,))

    derived = {str(sublayer) for sublayer in layers.program.sublayers() if layers.is_derived(sublayer)}
    program = layers.program.renamed(stored)
    return StockLayers(
        [*layers.original[0], *made], sources, program, f"{layers.family.layers}.", derived
    )


def _layer_of(group: Group, edited: EditedLayers, state: Tensors | None) -> nn.Module:
    """Make a layer of a group's sublayers; those that the program does not have are as they were."""
    made = nn.Module()
    weights = edited.weights()
    for kind in KINDS:
        spec = edited.family.spec(kind, group.layers[0])
        owner = edited.layer(group.layers[0])
        count = group.count if kind in group.used else None
        pieces = [None] if count is None else [(index, count) for index in range(count)]
        parts: list[Tensors] = []
        live: list[Tensors] = []
        for sublayer in (group.sublayer(kind, piece) for piece in pieces):
            if str(sublayer) not in edited._modules:
                parts.append(weights.by_role(sublayer))
                continue
            # Of its derived module, whose weights may have changed, or derived anew.
            layer = sublayer.layers[0]
            inside = f"{edited.family.layers}.{layer}."
            store: Store = ModuleStore(edited.get_submodule(str(sublayer)), inside)
            if state is not None:
                own = f"{edited.family.layers}.{sublayer}."
                found = {name: tensor for name, tensor in state.items() if name.startswith(own)}
                store = NamedTensors(
                    {inside + name.removeprefix(own): tensor for name, tensor in found.items()}
                )
            stored = ModelWeights(store, edited.family, edited.family.head_dim(edited.config))
            live.append(stored.by_role(Sublayer(kind, (layer,), ranks=sublayer.ranks)))
            parts.append(live[-1])
        tensors = pack_tensors(
            _join(parts, live, f"{kind}{group.layers[0]}"), spec, weights.unit_width(kind)
        )
        for name, module in module_with(tensors, owner, spec, weights.head_dim).named_children():
            made.add_module(name, module)
    return made


def _join(parts: list[Tensors], live: list[Tensors], name: str) -> Tensors:
    """Join the tensors of slices to those of a whole sublayer."""
    whole = dict(parts[0])
    for key in whole if len(parts) > 1 else ():
        dim = _divided_dim(key)
        if dim is not None:
            whole[key] = torch.cat([part[key] for part in parts], dim)
            continue
        first, *others = [part[key] for part in live if key in part] or [whole[key]]
        whole[key] = first
        if not all(torch.equal(first, other) for other in others):
            if key.endswith(("first.weight", "second.weight")):
                what = "factors"
            else:
                what = "norms"
            raise ValueError(
                f"the slices of {name} have {what} of their own, and a checkpoint has one for all of them; "
                "replace no parameter of one slice alone"
            )
    return whole


def _divided_dim(key: str) -> int | None:
    """Return the dimension along which slices have parts of a tensor; None for undivided ones."""
    if key == "sinks":  # a number for each head
        return 0
    role, _, what = key.partition(".")
    if role not in ROLES[ATTENTION] + ROLES[FEED_FORWARD] + SHARED:
        return None
    if role in WRITING:
        if what in ("weight", "first.weight"):
            return -1
        return None
    # Matrices of experts are stacked.
    return None if what == "first.weight" else -1 if what == "bias" else -2


@contextmanager
def stock_model(model: PreTrainedModel, state: Tensors | None = None) -> Iterator[StockLayers]:
    """While inside, the model is a stock one with the layers to be stored, in its configuration too."""
    stock = stock_layers_of(model, state)
    family = family_of(model.config)
    edited = isinstance(decoder_layers(model), EditedLayers)
    parent, name = decoder_parent(model)
    before = getattr(parent, name)
    original = before.undo(model.config) if edited else before
    entries = family.per_layer_entries(model.config, stock.sources) | {
        "num_hidden_layers": len(stock.layers)
    }
    config_before = {key: getattr(model.config, key) for key in entries}
    for key, value in entries.items():
        setattr(model.config, key, value)
    setattr(parent, name, nn.ModuleList(stock.layers))
    try:
        yield stock
    finally:
        for key, value in config_before.items():
            setattr(model.config, key, value)
        setattr(parent, name, original)
        if edited:
            setattr(parent, name, before)
            before.describe_in(model.config)


save_edited_with(save_edited)
