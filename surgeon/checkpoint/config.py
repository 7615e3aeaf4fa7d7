"""Finding a model, and its config.json as `transformers` reads it, checked against the tensors if there are any.

A model lies in a folder, in the hub's cache, or in ours, for GGUF files; without a network nothing is retried.
"""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_stack
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch

from surgeon.checkpoint.belongings import PATTERNS_FOR_THE_HUB
from surgeon.checkpoint.forms import FORMS, Form, form_of
from surgeon.checkpoint.forms.fused import GLOBAL_WIDTHS_KEY, WIDTHS_KEY
from surgeon.checkpoint.gguf import convert_gguf
from surgeon.checkpoint.imported import text_entries, translate_entries
from surgeon.checkpoint.stored import (
    PICKLE,
    PICKLES,
    QUANTIZATION,
    REPORT_FILE,
    UNPICKLE,
    Checkpoint,
    StoredModel,
)
from surgeon.checkpoint.tensor_file import read_json
from surgeon.language.program import Program
from surgeon.models.edit import PROGRAM_KEY, PROGRAM_PREFIX
from surgeon.models.families import Family, Unsupported, family_named, family_of
from surgeon.models.families.fused import FUSED
from surgeon.models.weights import Names
from surgeon.named import GGUF, HOW_TO_NAME, demo_model, hub_name, is_gguf, model_name, on_disk
from surgeon.words import show_value

DEMO = "demo"
CONFIG = "config.json"
# Of a model on the hub: what it consists of, what goes on with it, and code that a configuration may name.
WANTED = ("*.json", "*.safetensors", "README.md", "*.py", *PATTERNS_FOR_THE_HUB)
SECONDS = 5.0  # that a connection may take
MOST_LABELS = 1_000_000  # of a classifier, which a config.json may speak of
_OF_LAYERS_THAT_DIFFER = "transformers.integrations.heterogeneity.configuration_utils"  # a logger


# Of a size of a configuration whose layers differ in it others are told as they read it; surgeon reads all of them.
logging.getLogger(_OF_LAYERS_THAT_DIFFER).addFilter(
    lambda _: (
        not any(
            frame.f_globals.get("__name__", "").startswith("surgeon.") for frame, _ in walk_stack(None)
        )
    )
)


@contextmanager
def explain_fetch(name: str, what: str, advice: str) -> Iterator[None]:
    """Fetch something of a hub model in the block; whatever goes wrong is FileNotFoundError, ending in `advice`."""
    try:
        with without_retries():
            yield
    except Exception as error:
        raise FileNotFoundError(
            f"{name} is no folder here, and {what}could not be fetched from the hub ({type(error).__name__}); {advice}"
        ) from error


@contextmanager
def without_retries() -> Iterator[None]:
    """Work as under HF_HUB_OFFLINE=1 if the hub cannot be reached.

    Its libraries would try for half a minute, for every file, before they look into their cache.
    """
    import datasets
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or hub_answers(constants.ENDPOINT):
        yield
        return
    before = datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = False
        datasets.config.HF_HUB_OFFLINE = before


def hub_answers(address: str) -> bool:
    """Tell whether the address accepts connections; behind a proxy it may."""
    url = urlsplit(address)
    if url.scheme in getproxies() or url.hostname is None:
        return True
    try:
        socket.create_connection(
            (url.hostname, url.port or (80 if url.scheme == "http" else 443)), SECONDS
        ).close()
    except OSError:
        return False
    return True


def locate(path_or_name: str | Path) -> Path:
    """Return the folder of a model: itself, "demo" for the one that ships with surgeon, or a hub name's download.

    A GGUF file, here or on the hub, is converted into a folder (`convert_gguf`). Without a model it is
    FileNotFoundError.
    """
    if not isinstance(path_or_name, str | Path):
        raise ValueError(
            f"a model is given by its folder or its name on the hub, not by {type(path_or_name).__name__} "
            f"{show_value(path_or_name)}"
        )
    name = str(path_or_name)
    there = on_disk(path_or_name)
    if there is not None:
        if there.suffix.lower() == GGUF and not there.is_dir():
            return convert_gguf(there)
        if not there.is_dir():
            pickled = there.suffix.lower() in PICKLES
            raise FileNotFoundError(
                f"{there} is {PICKLE if pickled else 'a file'}; a model is a folder with config.json and *.safetensors"
                f"{f' ({UNPICKLE})' if pickled else ''}"
            )
        return there
    if name == DEMO:
        return demo_model()
    if (named := hub_name(name)) is None:
        raise FileNotFoundError(f"there is no model folder {name or repr(name)}; {HOW_TO_NAME}")
    with explain_fetch(
        str(named), "", "check the name and the connection, or give the path of a local folder"
    ):
        from huggingface_hub import snapshot_download

        wanted = [*WANTED]
        if named.file is not None:
            wanted = [re.sub(r"-\d{5}(-of-\d{5}\.)", r"-*\1", named.file)]  # all parts of a split one
        folder = Path(
            snapshot_download(named.repository, revision=named.revision, allow_patterns=wanted)
        )
    if named.file is None:
        return folder
    if not (folder / named.file).is_file():
        raise FileNotFoundError(
            f"{named.repository} has no file {named.file} on the hub; look up what its files are called"
        )
    return locate(folder / named.file)


def find_config(what: str | Path) -> Path:
    """Return the config.json of a model: its folder or itself, demo, or a hub name, of which only it is fetched."""
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
    with explain_fetch(str(named), "its configuration ", advice):
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(named.repository, CONFIG, revision=named.revision))


def open_stored(what: str | Path | Checkpoint | StoredModel) -> StoredModel:
    """Open a model without reading its weights, its configuration of the stock architecture whatever its form.

    `tie_word_embeddings` is False where a head of other numbers is stored, as in `transformers`. Zeros that are stored
    as biases of layers without any, as AutoGPTQ writes, are removed from the checkpoint's tensors.

    Args:
        what: a checkpoint's folder, a hub name, or either of what has been opened already.
    """
    if isinstance(what, StoredModel):
        return what
    checkpoint = what if isinstance(what, Checkpoint) else Checkpoint(locate(what))
    for matrix in checkpoint.quantised.values():
        _ = matrix.arrangement  # checks its tensors
    name = str(checkpoint.folder) if isinstance(what, Checkpoint) else model_name(what)
    path = checkpoint.folder / CONFIG
    config, program = _parse_config(checkpoint.config, path, form_of(checkpoint), checkpoint)
    family = family_of(config)
    _check_sizes(path, config, family)
    biases = [
        bias
        for matrix, one in checkpoint.quantised.items()
        if one.scheme.writes_biases
        and (bias := f"{matrix.removesuffix(one.scheme.stands_for)}.bias") in checkpoint
    ]
    if biases:
        from transformers import AutoModelForCausalLM  # takes its time, and others do without it

        with torch.device("meta"):
            own = {one for one, _ in AutoModelForCausalLM.from_config(config).named_parameters()}
        for bias in biases:
            if bias in own:
                continue
            if checkpoint.tensor(bias).any():
                raise ValueError(
                    f"{checkpoint.folder}: tensor {bias} is a bias of a layer that has none by config.json, and is not "
                    "zero; use the config.json that belongs to these weights"
                )
            del checkpoint.tensors[bias]
    config.tie_word_embeddings = bool(config.tie_word_embeddings)
    names = Names(checkpoint, family)
    embedding, head = (names.own(f"{one}.weight") for one in (family.embedding, family.head))
    if config.tie_word_embeddings and embedding in checkpoint and head in checkpoint:
        first = checkpoint[embedding]
        second = checkpoint[head]
        # Bit for bit; they are read as far as they are the same.
        config.tie_word_embeddings = (first.dtype, first.shape) == (second.dtype, second.shape) and all(
            a == b for a, b in zip(first.blocks(), second.blocks(), strict=True)
        )
    return StoredModel(name, checkpoint, config, program)


def read_config_only(what: str | Path) -> tuple[Any, Program | None]:
    """Read the configuration in a folder, its config.json, demo, or a hub name, of which nothing else is fetched.

    A checkpoint in the fused form is the model that it was made of, under the program that it runs.

    Returns:
        The configuration; and the program over its layers, None if it runs them as they are.
    """
    path = find_config(what)
    entries, _ = translate_entries(text_entries(read_json(path)))
    if entries.get("model_type") != FUSED.model_type:
        config, own = _parse_config(entries, path, FORMS["plain"])
        family_of(config)
        return config, own
    record = path.with_name(REPORT_FILE)
    said = f"{path} is of a checkpoint in the fused form"
    advice = "give the recipe that it was made by, or the model it was made of and the program"
    if not record.is_file():
        raise ValueError(f"{said}, and there is no {REPORT_FILE} beside it; {advice}")
    report = read_json(record)
    source = report.get("source")
    if isinstance(source, dict) and is_no_source(source):
        raise ValueError(
            f"{said}, which was trained from scratch, so that there is no model that it was made of; give the "
            "config.json of a model with its layers, and the program"
        )
    model = source.get("model") if isinstance(source, dict) else None
    program = report.get("program")
    if not isinstance(model, str) or not isinstance(program, str):
        raise ValueError(
            f"{record} is not what surgeon export writes: it lacks the program or its source; {advice}"
        )
    try:
        return read_config_only(model)[0], Program.parse(program)
    except OSError as error:
        raise ValueError(f"{said}, made of {model}: {error}; {advice}") from error


def _parse_config(
    entries: dict[str, Any], path: Path, form: Form, checkpoint: Checkpoint | None = None
) -> tuple[Any, Program | None]:
    """Parse the entries of a config.json as a form reads them, checked against tensors if there are any."""
    if not (named := entries.get("model_type")):
        raise Unsupported(f"{path} has no model_type, which says what architecture it is of")
    name = str(named)
    program = _program_in(entries, path)
    if name != FUSED.model_type and name.startswith(PROGRAM_PREFIX):
        name = name.removeprefix(PROGRAM_PREFIX)
        if program is None:
            raise ValueError(
                f"{path} has the model_type {PROGRAM_PREFIX}{name}, and so needs {PROGRAM_KEY}, the program"
            )
    family = family_named(name)
    if WIDTHS_KEY in entries and not form.widths_differ:  # where no class builds them
        able = " or ".join(one.name for one in FORMS.values() if one.widths_differ)
        raise ValueError(
            f"{path} has layers of different widths ({WIDTHS_KEY}), which only the {able} form has "
            f"(model_type {FUSED.model_type}), not {named}; export the model again"
        )
    if WIDTHS_KEY in entries and not entries.get(GLOBAL_WIDTHS_KEY):
        raise ValueError(f"{path} has {WIDTHS_KEY}, and so needs {GLOBAL_WIDTHS_KEY}: true")
    if checkpoint is not None:
        _check_counts(checkpoint, family)
    try:
        config = dense_config(form.stock_config(entries, family))
    except Exception as error:  # whatever it trips over is a fault of the file
        raise ValueError(f"{path} is not a valid configuration: {error}") from error
    return config, program or form.own_program(config)


def dense_config(config: Any) -> Any:
    """Remove the entry on quantised weights, which concerns the files alone."""
    vars(config).pop(QUANTIZATION, None)
    return config


def _program_in(entries: dict[str, Any], path: Path) -> Program | None:
    """Return the program in a config.json at a path; None if there is none."""
    if PROGRAM_KEY not in entries:
        return None
    text = entries[PROGRAM_KEY]
    if not isinstance(text, str) or not text.strip():
        raise ValueError(
            f"{path} has {PROGRAM_KEY}: {show_value(text)}, which is no program; write it as a text, as in "
            '"A0 F0 >A1 >F1", or export the model again'
        )
    try:
        return Program.parse(text)
    except ValueError as error:
        raise ValueError(f"{path} has a {PROGRAM_KEY} that is none: {error}") from error


def _check_counts(checkpoint: Checkpoint, family: Family) -> None:
    """Refuse counts of things that `transformers` would begin to make one by one."""
    tensors = len(checkpoint.names())
    left = [(name, checkpoint.config.get(name), tensors) for name in family.entries.counts]
    left.append(("num_labels", checkpoint.config.get("num_labels"), MOST_LABELS))
    for name, count, limit in left:
        if isinstance(count, list):
            left += [(name, each, limit) for each in count]  # which are looked at, too
        elif isinstance(count, int | float) and count > limit:
            if limit == tensors:
                reason = f"there are {tensors} tensors"
            else:
                reason = f"at most {limit} are supported"
            path = checkpoint.folder / "config.json"
            raise ValueError(
                f"{path} is not a valid configuration: {name} has {str(count)[:30]}, but {reason}"
            )


def _check_sizes(path: Path, config: Any, family: Family) -> None:
    """Refuse sizes that no model can have."""
    names = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    )
    try:
        sizes: dict[str, int] = {name: getattr(config, name) for name in names}
        shared = sizes["hidden_size"] // max(1, sizes["num_attention_heads"])
        # 0 and None both mean hidden size / heads.
        sizes["head_dim"] = getattr(config, "head_dim", None) or shared
        for layer in config.per_layer_config if config.is_heterogeneous else [config]:
            sizes.update(
                {
                    str(unit): min(count, sizes.get(unit, count))
                    for unit, count in family.units(layer).items()
                }
            )
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path} is not a valid configuration: {error}") from error
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(
                f"{path} is not a valid configuration: {name} must be at least 1, not {size}"
            )


def is_no_source(source: dict[str, Any]) -> bool:
    """Tell whether it says that the model was trained from scratch."""
    return source.get("model", "") is None
