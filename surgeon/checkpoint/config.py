"""config.json as `transformers` reads it, checked so that it describes a model that there is, or could be.

Of a checkpoint it is compared with its tensors; of a configuration alone, whether there are weights or not, it is the
same without them.
"""

from __future__ import annotations

import logging
from pathlib import Path
from traceback import walk_stack
from typing import Any

import torch
from transformers import CONFIG_MAPPING

from surgeon.checkpoint.belongings import REPORT_FILE
from surgeon.checkpoint.forms import FORMS, form_of
from surgeon.checkpoint.forms.base import config_beside
from surgeon.checkpoint.forms.fused import GLOBAL_WIDTHS_KEY, WIDTHS_KEY
from surgeon.checkpoint.imported import uniform
from surgeon.checkpoint.locate import DEMO, locate
from surgeon.checkpoint.offline import fetching
from surgeon.checkpoint.read import QUANTIZATION, Checkpoint, read_json
from surgeon.checkpoint.training import is_no_source
from surgeon.errors import shown
from surgeon.language.program import Program
from surgeon.models.edit import PROGRAM_KEY, PROGRAM_PREFIX
from surgeon.models.families import Family, Unsupported, family_named, family_of
from surgeon.models.families.fused import FUSED
from surgeon.models.weights import Names
from surgeon.models.wrappers import text_entries
from surgeon.named import hub_name, is_gguf, on_disk

CONFIG = "config.json"
MOST_LABELS = 1_000_000  # of a classifier, which a config.json may speak of
_OF_LAYERS_THAT_DIFFER = "transformers.integrations.heterogeneity.configuration_utils"  # a logger


# Of a size of a configuration whose layers differ in it others are told as they read it; surgeon reads all of them.
logging.getLogger(_OF_LAYERS_THAT_DIFFER).addFilter(
    lambda _: not any(frame.f_globals.get("__name__", "").startswith("surgeon.") for frame, _ in walk_stack(None))
)


def read_config(checkpoint: Checkpoint) -> tuple[Any, Program | None]:
    """The `transformers` configuration of a checkpoint, that of the stock architecture whatever its form; its program.

    Its `tie_word_embeddings` says what `transformers` makes of it: no, where a head of other numbers is stored, too.
    Zeros that are stored as biases of layers without any are no tensors of the checkpoint any more.

    Returns:
        The configuration; and the program over its stored layers that it runs, None if it runs them as they are.

    Raises:
        ValueError: if the architecture is not supported, or config.json is not what its architecture needs.
    """
    path = checkpoint.folder / CONFIG
    entries = checkpoint.config
    stored = _model_type(entries, path)
    name = stored if stored == FUSED.model_type else stored.removeprefix(PROGRAM_PREFIX)
    if name != stored and PROGRAM_KEY not in entries:
        raise ValueError(f"{path} has the model_type {PROGRAM_PREFIX}{name}, and so needs {PROGRAM_KEY}, the program")
    family = family_named(name)
    program = _program_in(entries, path)
    _check_widths(checkpoint)
    _check_counts(checkpoint, family)
    try:
        config = dense_config(form_of(checkpoint).stock_config(checkpoint, family))
    except Exception as error:  # whatever it trips over is a fault of the file
        raise ValueError(f"{path} is not a valid configuration: {error}") from error
    family = family_of(config)
    _check_sizes(path, config, family)
    _leave_out_biases(checkpoint, config)
    config.tie_word_embeddings = _are_tied(checkpoint, family, bool(config.tie_word_embeddings))
    return config, program or form_of(checkpoint).own_program(config)


def read_config_only(what: str | Path) -> tuple[Any, Program | None]:
    """The same of a model's configuration alone: a folder or its config.json, demo, or a name on the hub.

    Of a name on the hub nothing else is fetched, or it is taken from the hub's cache. A checkpoint in the fused form is
    the model that it was made of, under the program that it runs.

    Raises:
        FileNotFoundError: if there is no such model.
        ValueError: if it is not what a supported architecture needs, or a checkpoint in the fused form whose model is
            not there.
    """
    path = find_config(what)
    entries = uniform(text_entries(read_json(path))).entries
    model_type = _model_type(entries, path)
    if model_type == FUSED.model_type:
        return _of_source(path)
    family = family_named(model_type.removeprefix(PROGRAM_PREFIX) if PROGRAM_KEY in entries else model_type)
    try:
        config = dense_config(config_beside(entries, CONFIG_MAPPING[family.model_type]))
        family_of(config)
    except Unsupported:
        raise
    except Exception as error:  # whatever it trips over is a fault of the file
        raise ValueError(f"{path} is not a valid configuration: {error}") from error
    return config, _program_in(entries, path)


def dense_config(config: Any) -> Any:
    """A configuration without what it says of quantised weights, which is a matter of the files alone."""
    vars(config).pop(QUANTIZATION, None)
    return config


def _model_type(entries: dict[str, Any], path: Path) -> str:
    """The architecture that a config.json names.

    Raises:
        Unsupported: if it names none.
    """
    if not (named := entries.get("model_type")):
        raise Unsupported(f"{path} has no model_type, which says what architecture it is of")
    return str(named)


def _of_source(path: Path) -> tuple[Any, Program]:
    """What a checkpoint in the fused form was made of, and the program that it runs: its layers are several in one."""
    record = path.with_name(REPORT_FILE)
    advice = "give the recipe that it was made by, or the model it was made of and the program"
    if not record.is_file():
        raise ValueError(
            f"{path} is of a checkpoint in the fused form, and there is no {REPORT_FILE} beside it; {advice}"
        )
    report = read_json(record)
    source = report.get("source")
    program = report.get("program")
    if isinstance(source, dict) and is_no_source(source):
        raise ValueError(
            f"{path} is of a checkpoint in the fused form that was trained from scratch, so that there is no model "
            "that it was made of; give the config.json of a model with its layers, and the program"
        )
    model = source.get("model") if isinstance(source, dict) else None
    if not isinstance(model, str) or not isinstance(program, str):
        raise ValueError(f"{record} is not what surgeon export writes: it lacks the program or its source; {advice}")
    try:
        config, _ = read_config_only(model)
    except OSError as error:
        raise ValueError(f"{path} is of a checkpoint in the fused form, made of {model}: {error}; {advice}") from error
    return config, Program.parse(program)


def find_config(what: str | Path) -> Path:
    """The config.json of a model; errors as `read_config_only`."""
    name = str(what)
    there = on_disk(what)
    if is_gguf(what):  # which is one file with all that there is
        return locate(what) / CONFIG
    if there is not None and not there.is_dir():
        if there.suffix.lower() != ".json":
            raise FileNotFoundError(
                f"{there} is no {CONFIG}; give one, a folder with one, a name on the hub, or a recipe"
            )
        return there
    if there is not None or name == DEMO or (named := hub_name(name)) is None:
        return locate(what) / CONFIG
    advice = "check the name and the connection, or give the path of a config.json"
    with fetching(str(named), "its configuration ", advice):
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(named.repository, CONFIG, revision=named.revision))


def _program_in(entries: dict[str, Any], path: Path) -> Program | None:
    """The program that the entries of a config.json have, which lies at a path; None if they have none."""
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


def _check_counts(checkpoint: Checkpoint, family: Family) -> None:
    """Refuse numbers of things that `transformers` would begin to make one by one, whatever the number."""
    tensors = len(checkpoint.names())
    named = ((name, checkpoint.config.get(name)) for name in family.entries.counts)
    counts = [(name, count, tensors) for name, value in named for count in _numbers_in(value)]
    counts.append(("num_labels", checkpoint.config.get("num_labels"), MOST_LABELS))
    for name, count, limit in counts:
        if isinstance(count, int | float) and count > limit:
            if limit == tensors:
                reason = f"there are {tensors} tensors"
            else:
                reason = f"at most {limit} are supported"
            path = checkpoint.folder / "config.json"
            raise ValueError(f"{path} is not a valid configuration: {name} has {str(count)[:30]}, but {reason}")


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


def _leave_out_biases(checkpoint: Checkpoint, config: Any) -> None:
    """Leave out zeros that are stored as biases of layers that have none, as AutoGPTQ did; refuse other numbers."""
    beside = [
        bias
        for name, one in checkpoint.quantised.items()
        if one.scheme.writes_biases and (bias := f"{name.removesuffix(one.scheme.stands_for)}.bias") in checkpoint
    ]
    if not beside:
        return
    from transformers import AutoModelForCausalLM  # takes its time, and others do without it

    with torch.device("meta"):
        own = {name for name, _ in AutoModelForCausalLM.from_config(config).named_parameters()}
    spare = [name for name in beside if name not in own]
    for name in spare:
        if checkpoint.tensor(name).any():
            raise ValueError(
                f"{checkpoint.folder}: tensor {name} is a bias of a layer that has none by config.json, and is not "
                "zero; use the config.json that belongs to these weights"
            )
    checkpoint.without(spare)


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


def _numbers_in(value: Any) -> list[Any]:
    """A value that is no list, or all that is in lists of lists."""
    found = []
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, list):
            left += item
        else:
            found.append(item)
    return found
