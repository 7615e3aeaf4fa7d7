"""`surgeon.load`: a `transformers` model from a folder or a hub name, with its program if it has one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from surgeon.checkpoint.forms import FORMS, form_of
from surgeon.checkpoint.forms.fused import GLOBAL_WIDTHS_KEY, WIDTHS_KEY
from surgeon.checkpoint.read import Checkpoint, locate
from surgeon.checkpoint.stored import StoredModel
from surgeon.errors import shown
from surgeon.gpus import avoid_cudnn_attention
from surgeon.language.program import Program
from surgeon.models.edit import PROGRAM_KEY, PROGRAM_PREFIX, edit
from surgeon.models.families import Family, family_named, family_of
from surgeon.models.families.fused import FUSED
from surgeon.models.weights import Names

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOST_LABELS = 1_000_000  # of a classifier, which a config.json may speak of


def open_stored(what: str | Path | Checkpoint | StoredModel) -> StoredModel:
    """What is known of a model without reading its weights.

    Args:
        what: a checkpoint's folder, a hub name, or either of what has been opened already.

    Raises:
        FileNotFoundError: if there is no such model, or a file of it is missing.
        ValueError: if the architecture is not supported, or a file is damaged.
    """
    if isinstance(what, StoredModel):
        return what
    checkpoint = what if isinstance(what, Checkpoint) else Checkpoint(locate(what))
    name = str(checkpoint.folder if isinstance(what, Checkpoint) else what)
    return StoredModel(name, checkpoint, read_config(checkpoint), stored_program(checkpoint))


def load(model: str | Path | StoredModel, dtype: torch.dtype | None = None, device_map: Any = None) -> PreTrainedModel:
    """Load a model for surgery, in evaluation mode; no code that lies in the folder is run.

    Args:
        model: a checkpoint folder (edited by surgeon or not), a hub name, or a model that is open (`surgeon.open`).
        dtype: to compute in; by default that of the stored embedding, but float32 for 16-bit weights on a CPU.
        device_map: as in `transformers`: "auto", a device, or a mapping of modules to devices.

    Raises:
        FileNotFoundError: if there is no such model, or a file of it is missing.
        ValueError: if the architecture is not supported or a file is damaged.
    """
    avoid_cudnn_attention()
    stored = open_stored(model)
    if dtype is None:
        dtype = stored.compute_dtype("cuda" if _names_gpu(device_map) else "cpu")
    model_class = form_of(stored.checkpoint).model_class(stored)
    options = {"dtype": dtype, "device_map": device_map, "ignore_mismatched_sizes": True, "output_loading_info": True}
    options["config"] = copy.deepcopy(stored.config)  # which becomes the loaded model's own
    try:
        loaded, report = model_class.from_pretrained(stored.folder, **options)
    except (ArithmeticError, AssertionError, LookupError, TypeError) as error:
        raise ValueError(
            f"{stored.folder / 'config.json'} describes no model that can be built ({type(error).__name__}: {error})"
        ) from error
    check_complete(stored.folder, report)
    ready: PreTrainedModel = loaded.eval()
    if stored.own is not None:
        edit(ready, stored.own)
        vars(ready)["own_program"] = stored.own  # which recipes start from, whatever it is edited to
    return ready


def _names_gpu(device_map: Any) -> bool:
    """Whether some module goes to a GPU, by a device map as `transformers` takes it."""
    places = device_map.values() if isinstance(device_map, Mapping) else [device_map]
    return torch.cuda.is_available() and any(str(place) not in ("None", "cpu", "disk", "meta") for place in places)


def read_config(checkpoint: Checkpoint) -> Any:
    """The `transformers` configuration of a checkpoint: that of the stock architecture, whatever its form.

    Its `tie_word_embeddings` says what `transformers` makes of it: no, where a head of other numbers is stored, too.

    Raises:
        ValueError: if the architecture is not supported, or config.json is not what its architecture needs.
    """
    family = _family_in(checkpoint)
    stored_program(checkpoint)
    _check_widths(checkpoint)
    _check_counts(checkpoint, family)
    try:
        config = form_of(checkpoint).stock_config(checkpoint, family)
    except Exception as error:  # whatever it trips over is a fault of the file
        raise ValueError(f"{checkpoint.folder / 'config.json'} is not a valid configuration: {error}") from error
    family = family_of(config)
    _check_sizes(checkpoint.folder / "config.json", config, family)
    config.tie_word_embeddings = _are_tied(checkpoint, family, bool(config.tie_word_embeddings))
    return config


def stored_program(checkpoint: Checkpoint) -> Program | None:
    """The program over its stored layers that a checkpoint runs; None for one that runs them as they are.

    Raises:
        ValueError: if what config.json has in its place is no program.
    """
    return program_in(checkpoint.config, checkpoint.folder / "config.json")


def program_in(entries: dict[str, Any], path: Path) -> Program | None:
    """The program that the entries of a config.json have; None if they have none.

    Args:
        path: where they are from.

    Raises:
        ValueError: if what they have in its place is no program.
    """
    if PROGRAM_KEY not in entries:
        return None
    text = entries[PROGRAM_KEY]
    if not isinstance(text, str) or not text.strip():
        raise ValueError(
            f'{path} has {PROGRAM_KEY}: {shown(text)}, which is no program; write it as a text, as in "A0 F0 >A1 >F1", '
            "or export the model again"
        )
    try:
        return Program.parse(text)
    except ValueError as error:
        raise ValueError(f"{path} has a {PROGRAM_KEY} that is none: {error}") from error


def _family_in(checkpoint: Checkpoint) -> Family:
    """The family that config.json names, whatever the checkpoint's form."""
    stored = str(checkpoint.config.get("model_type"))
    name = stored if stored == FUSED.model_type else stored.removeprefix(PROGRAM_PREFIX)
    if name != stored and PROGRAM_KEY not in checkpoint.config:
        raise ValueError(
            f"{checkpoint.folder / 'config.json'} has the model_type {PROGRAM_PREFIX}{name}, and so needs "
            f"{PROGRAM_KEY}, the program"
        )
    return family_named(name)


def _check_counts(checkpoint: Checkpoint, family: Family) -> None:
    """Refuse numbers of things that `transformers` would begin to make one by one, whatever the number."""
    tensors = len(checkpoint.names())
    named = ((name, checkpoint.config.get(name)) for name in family.layer_counts)
    counts = [(name, count, tensors) for name, value in named for count in _numbers_in(value)]
    counts.append(("num_labels", checkpoint.config.get("num_labels"), MOST_LABELS))
    for name, count, limit in counts:
        if isinstance(count, int | float) and count > limit:
            reason = f"there are {tensors} tensors" if limit == tensors else f"at most {limit} are supported"
            path = checkpoint.folder / "config.json"
            raise ValueError(f"{path} is not a valid configuration: {name} has {str(count)[:30]}, but {reason}")


def _numbers_in(value: Any) -> list[Any]:
    """A value that is no list, or all that is in lists of lists."""
    found, left = [], [value]
    while left:
        item = left.pop()
        if isinstance(item, list):
            left += item
        else:
            found.append(item)
    return found


def _check_sizes(path: Path, config: Any, family: Family) -> None:
    """Refuse sizes that no model can have."""
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    try:
        sizes: dict[str, int] = {name: getattr(config, name) for name in names}
        shared = sizes["hidden_size"] // max(1, sizes["num_attention_heads"])
        sizes["head_dim"] = getattr(config, "head_dim", None) or shared  # 0 and None both mean hidden size / heads
        for layer in config.per_layer_config if config.is_heterogeneous else [config]:
            sizes.update({str(unit): min(count, sizes.get(unit, count)) for unit, count in family.units(layer).items()})
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path} is not a valid configuration: {error}") from error
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{path} is not a valid configuration: {name} must be at least 1, not {size}")


def check_complete(folder: Path, report: dict[str, Any]) -> None:
    """Refuse what `transformers` would go on with, with random numbers in place of weights that do not fit."""
    for name, stored, expected in sorted(report["mismatched_keys"]):
        raise ValueError(
            f"{folder}: tensor {name} has the shape {tuple(stored)}, but config.json asks for {tuple(expected)}"
        )
    missing = sorted(report["missing_keys"])
    if missing:
        more = "" if len(missing) == 1 else f" and {len(missing) - 1} more"
        raise ValueError(f"{folder} lacks a tensor of its model: {missing[0]}{more}")


def _check_widths(checkpoint: Checkpoint) -> None:
    """Refuse layers of different widths where no class builds them."""
    path = checkpoint.folder / "config.json"
    if WIDTHS_KEY not in checkpoint.config:
        return
    if not form_of(checkpoint).widths_differ:
        able = " or ".join(form.name for form in FORMS.values() if form.widths_differ)
        raise ValueError(
            f"{path} has layers of different widths ({WIDTHS_KEY}), which only the {able} form has "
            f"(model_type {FUSED.model_type}), not {checkpoint.config.get('model_type')}; export the model again"
        )
    if not checkpoint.config.get(GLOBAL_WIDTHS_KEY):
        raise ValueError(f"{path} has {WIDTHS_KEY}, and so needs {GLOBAL_WIDTHS_KEY}: true")


def _are_tied(checkpoint: Checkpoint, family: Family, wanted: bool) -> bool:
    """Whether embedding and head are the same matrix, as `transformers` finds it when it loads them.

    Args:
        wanted: whether the configuration says so. If it does and both are stored, they are what is stored.
    """
    names = Names(checkpoint, family)
    embedding, head = (names.own(f"{path}.weight") for path in (family.embedding, family.head))
    if not wanted or embedding not in checkpoint or head not in checkpoint:
        return wanted
    if (checkpoint.dtype(embedding), checkpoint.shape(embedding)) != (checkpoint.dtype(head), checkpoint.shape(head)):
        return False
    # Bit for bit; they are read as far as they are the same.
    return all(a == b for a, b in zip(checkpoint.blocks(embedding), checkpoint.blocks(head), strict=True))
