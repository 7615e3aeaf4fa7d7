"""Models in memory as checkpoints: an edited model as it is, merged, sliced or trained; or beside its adapter.

Whatever its program, it is stored as a stock model, whose weights are those of whole layers. Averages and slices have
weights of their own while a model lives. They become layers behind the original ones, and the program names these: of a
model with three layers, `A0 F0 A1~A2 F1~F2` is stored as four layers and `A0 F0 A3 F3`.

An adapter's names are those of the modules in the written model, whose layers may have other numbers than in memory, so
that peft puts it onto the model that `transformers` loads.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from surgeon.checkpoint.belongings import GENERATION, Companions, FileKind, companions_of, kind_of
from surgeon.checkpoint.codas import Coda, read_codas, write_codas
from surgeon.checkpoint.config import CONFIG, open_stored
from surgeon.checkpoint.describe import Training
from surgeon.checkpoint.forms import PROGRAM, Layout, form_of, lay_out
from surgeon.checkpoint.imported import wrapper_of
from surgeon.checkpoint.stored import Checkpoint, StoredModel
from surgeon.checkpoint.tensor_file import read_json
from surgeon.errors import NotProven
from surgeon.exports.export import (
    DTYPES,
    check_storage,
    check_target,
    keep_tokenizer_class,
    plan_export,
    stage_folder,
    write_export,
)
from surgeon.exports.prove import (
    EXACT_TOLERANCE,
    WRITTEN_TOLERANCE,
    Proof,
    Reference,
    random_tokens,
    require_close,
)
from surgeon.language.program import Program
from surgeon.language.sublayer import ATTENTION, FEED_FORWARD, KINDS, ROLES, SHARED, WRITING, Sublayer
from surgeon.models.edit import (
    EditedLayers,
    decoder_layers,
    edit,
    input_device,
    program_of,
    save_edited_with,
)
from surgeon.models.families import Family, family_of
from surgeon.models.families.fused import FUSED
from surgeon.models.lora import LoraConfig, LoraLayer, PeftModel, get_peft_model_state_dict
from surgeon.models.weights import (
    Group,
    ModelWeights,
    ModuleStore,
    NamedTensors,
    Store,
    Tensors,
    absent_sublayers,
    pack_tensors,
)
from surgeon.models.weights.quantised import PackedTensor
from surgeon.named import hub_name, on_disk
from surgeon.opened import EditedModel, Model, from_files, load
from surgeon.processes.files import scratch, write_json
from surgeon.quality.head import in_evaluation_mode

# `edit` and `load` are those of models whose `save_pretrained` writes their program, too.
__all__ = ["edit", "load"]


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
        stock = stock_model(model)
        _save(model, stock, source)
        if tokenizer is not None:
            tokenizer.save_pretrained(source)
        came_from = model.name_or_path or ""
        name = came_from if on_disk(came_from) is not None else "a model in memory"
        saved = open_stored(Checkpoint(source))
        original = Model(name, saved.files, saved.config, saved.own)
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
    stock = stock_model(model)
    lay_out(stock.program, family_of(model.config), stock.config, form)


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
    stock = stock_model(model, options.pop("state_dict", None))
    # Under their own names: those that stock checkpoints have are translated for stock classes only.
    _save(model, stock, folder, **options | {"save_original_format": False})
    if not options.get("is_main_process", True):
        return
    saved = StoredModel(str(folder), Checkpoint(folder), model.config)
    entries = PROGRAM.class_entries(saved, Layout(PROGRAM, "", (), stock.program))
    write_json(folder / CONFIG, saved.checkpoint.entries | entries)
    (folder / PROGRAM.shipped.file_name).write_text(PROGRAM.shipped.text())
    keep_tokenizer_class(folder, model.config)


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
class StockModel:
    """A model in memory as a stock one, whose layers are the original ones, then those made of derived sublayers.

    Attributes:
        config: with entries for as many layers.
        program: over these layers.
        tensors: by name, shared with the model but for those of made layers.
    """

    config: Any
    program: Program
    tensors: Tensors


def stock_model(model: PreTrainedModel, state: Tensors | None = None) -> StockModel:
    """Return a model as it is now as a stock one; `state` stands in for its state dict."""
    family = family_of(model.config)
    config = copy.deepcopy(model.config)
    tensors: Tensors = model.state_dict() if state is None else state
    program = program_of(model)
    edited = decoder_layers(model)
    sources = list(range(len(edited)))
    if isinstance(edited, EditedLayers):
        for key, value in edited.config_before.items():
            setattr(config, key, value)
        groups = edited.stored_groups
        sources = list(range(len(edited.original[0])))
        derived = {one for one in program.sublayers() if edited.is_derived(one)}
        left = tuple(f"{family.layers}.{one}." for one in derived)
        found = {name: tensor for name, tensor in tensors.items() if not name.startswith(left)}
        for group in groups.groups:
            for path, tensor in _layer_of(group, edited, state).items():
                found[f"{family.layers}.{len(sources)}.{path}"] = tensor
            sources.append(group.layers[0])
        tensors = found
        places = {one: edited.stored_place(one, groups) for one in program.sublayers()}

        def rename(sublayer: Sublayer) -> Sublayer:
            if sublayer in derived:
                return sublayer.stored_in(places[sublayer])
            return replace(sublayer, layers=(places[sublayer],))

        program = program.map_sublayers(rename)
    entries = family.per_layer_entries(config, sources) | {"num_hidden_layers": len(sources)}
    for key, value in entries.items():
        setattr(config, key, value)
    return StockModel(config, program, tensors)


def _save(model: PreTrainedModel, stock: StockModel, folder: Path, **options: Any) -> None:
    """Save a stock model by the class of the one in memory; files hold no `PackedTensor`."""
    before = model.config
    packed = {
        name: one.numbers().cpu() for name, one in stock.tensors.items() if isinstance(one, PackedTensor)
    }
    model.config = stock.config
    try:
        type(model).save_pretrained(model, folder, state_dict=stock.tensors | packed, **options)
    finally:
        model.config = before


def _layer_of(group: Group, edited: EditedLayers, state: Tensors | None) -> Tensors:
    """Make a layer of a group's sublayers; those that the program does not have are as they were."""
    made: Tensors = {}
    modules = dict(edited.named_children())
    weights = edited.weights()
    for kind in KINDS:
        spec = edited.family.spec(kind, group.layers[0])
        pieces: list[tuple[int, int] | None] = [None]
        if group.count is not None and kind in group.used:
            pieces = [(index, group.count) for index in range(group.count)]
        parts: list[Tensors] = []
        live: list[Tensors] = []
        for sublayer in (group.sublayer(kind, piece) for piece in pieces):
            if str(sublayer) not in modules:
                parts.append(weights.by_role(sublayer))
                continue
            # Of its derived module, whose weights may have changed.
            layer = sublayer.layers[0]
            inside = f"{edited.family.layers}.{layer}."
            if state is None:  # offloaded weights are read
                store: Store = ModuleStore(modules[str(sublayer)], inside)
            else:
                own = f"{edited.family.layers}.{sublayer}."
                held = {name: state[name] for name in state if name.startswith(own)}
                store = NamedTensors({inside + name.removeprefix(own): held[name] for name in held})
            stored = ModelWeights(store, edited.family, weights.head_dim)
            live.append(stored.by_role(Sublayer(kind, (layer,), ranks=sublayer.ranks)))
            parts.append(live[-1])
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
                    f"the slices of {kind}{group.layers[0]} have {what} of their own, and a checkpoint has one for all "
                    "of them; replace no parameter of one slice alone"
                )
        made |= pack_tensors(whole, spec, weights.unit_width(kind))
    return made


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
    if what == "first.weight":
        return None
    if what == "bias":
        return -1
    return -2  # matrices of experts are stacked


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
    if not hasattr(model, "peft_config"):
        raise ValueError("the model has no adapter of peft; leave adapter out")
    if len(model.peft_config) != 1:
        raise ValueError(f"the model has {len(model.peft_config)} adapters; one can be kept beside it")
    ((name, config),) = model.peft_config.items()
    others = ("modules_to_save", "trainable_token_indices", "target_parameters")
    if not isinstance(config, LoraConfig) or any(getattr(config, other) for other in others):
        raise ValueError(f"only LoRA adapters without {', '.join(others)} can be kept apart; {_MERGE}")
    base: Any = model.get_base_model()
    lora = {path: module for path, module in base.named_modules() if isinstance(module, LoraLayer)}
    with stage_folder(target) as partial:
        with _without_adapter(base, lora):
            stock = stock_model(base)
            family = family_of(base.config)
            try:  # in a form that keeps modules
                layout = lay_out(stock.program, family, stock.config, among=("plain", "program"))
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
        names = {path: [*map(place, _written_names(path, layout, family))] for path in lora}
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
            rank_pattern=_patterns({path: one.r[name] for path, one in own.items()}, config.r),
            alpha_pattern=_patterns(
                {path: one.lora_alpha[name] for path, one in own.items()}, config.lora_alpha
            ),
        )
        written.save_pretrained(str(partial / ADAPTER))
        # Load the written base and adapter, and compare logits.
        read = open_stored(partial / BASE)
        model_class, base_config = form_of(read.checkpoint).written_class(read)
        kept = next(model.parameters()).dtype
        if read.checkpoint.quantised:
            again: Any = from_files(model_class, read, config=base_config, dtype=kept)
        else:
            again = model_class.from_pretrained(partial / BASE, config=base_config, dtype=kept)
        tokens = random_tokens(read.config)
        alive: Any = model  # which takes what its base model takes
        reference = Reference(tokens, logits_of(alive, tokens))
        adapted: Any = PeftModel.from_pretrained(again, str(partial / ADAPTER))
        require_close(
            reference.difference(logits_of(adapted, tokens)),
            WRITTEN_TOLERANCE.get(kept, EXACT_TOLERANCE),
            "base and adapter together do not compute what the model does: their logits",
            ", so nothing was written",
        )
    return proof


def _patterns(values: dict[str, int], usual: int) -> dict[str, int]:
    """Return the values of modules that differ from the usual one, by a pattern of their paths."""
    return {f"^{re.escape(path)}": value for path, value in values.items() if value != usual}


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


save_edited_with(save_edited)
