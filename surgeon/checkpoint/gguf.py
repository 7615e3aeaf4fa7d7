"""GGUF files of llama.cpp as sources: each is converted once into an ordinary folder, which everything else sees.

The package `gguf` reads the file and dequantises its tensors; `transformers` says which configuration, tokenizer and
parameters they are. Entries that it leaves out of a configuration are read here, refused, or warned of.
"""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from surgeon.checkpoint.belongings import CARD_FILE, GGUF_RECORD
from surgeon.checkpoint.tensor_file import PlannedTensor, Writing, read_json, split_into_shards
from surgeon.errors import needs_extra
from surgeon.machine import cache_folder
from surgeon.models.families import family_named
from surgeon.processes.files import (
    check_space,
    make_folder,
    name_file,
    publish,
    scratch,
    sync_tree,
    write_json,
)
from surgeon.progress import progress
from surgeon.words import did_you_mean, first_few

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

SWITCH = "SURGEON_GGUF_DTYPE"  # in the environment: what converted weights are stored in
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SHARD = 4 << 30  # bytes of a converted folder's files, at most
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)
_FREQUENCIES = "rope_freqs.weight"  # what llama.cpp divides each of RoPE's frequencies by
# Keys of an architecture that a configuration has, too, and transformers does not read from all architectures' files.
_ENTRIES = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "context_length": "n_positions",
    "feed_forward_length": "n_inner",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "rope.freq_base": "rope_theta",
}
# Of Gemma's largest models, by their number of layers, queries are scaled by the width of a head as the stream has it.
_LARGEST = {"gemma2": 46, "gemma3": 62}
# Keys that follow from others, or are of no account for what is computed.
_SPARE = ("attention.value_length", "attention.causal", "rope.dimension_count", "rope.scaling.")


def parts_of(path: Path) -> list[Path]:
    """List the files of a model that may be split (`-00001-of-00003`), in order."""
    found = _PART.fullmatch(path.name)
    if found is None:
        return [path]
    stem, _, count, ending = found.groups()
    parts = [
        path.with_name(f"{stem}-{number:05d}-of-{count}{ending}") for number in range(1, int(count) + 1)
    ]
    for part in parts:
        if not part.is_file():
            raise FileNotFoundError(
                f"{part} is missing: {path.name} is one of {int(count)} parts, and needs all of them"
            )
    return parts


def convert_gguf(path: Path) -> Path:
    """Convert a GGUF file, or find its conversion, in surgeon's cache; the folder is named by the file's hash.

    Weights are dequantised tensor by tensor, and stored in bfloat16, or as `SURGEON_GGUF_DTYPE` says (float32).
    """
    parts = parts_of(path)
    name = os.environ.get(SWITCH, "bfloat16")
    if name not in DTYPES:
        raise ValueError(f"{SWITCH}={name} in the environment: {did_you_mean(name, DTYPES)}")
    kept = cache_folder("gguf")
    try:
        make_folder(kept)
    except OSError as error:
        raise OSError(
            f"{kept}, for what {path.name} is converted into, cannot be made ({error.strerror or error}); name another "
            "place in XDG_CACHE_HOME"
        ) from error
    hashes = [_hash_of(part, kept) for part in parts]
    folder = kept / f"{hashlib.sha256(''.join(hashes).encode()).hexdigest()[:32]}-{name}"
    if folder.is_dir():  # of which no file may be gone, or of another size, since it was written
        sizes = {one.name: one.stat().st_size for one in folder.iterdir()}
        changed = [GGUF_RECORD]
        with suppress(FileNotFoundError, ValueError):
            written = read_json(folder / GGUF_RECORD).get("written", {})
            changed = [one for one, size in written.items() if sizes.get(one) != size]
        if changed:
            raise ValueError(
                f"{folder}, which {path.name} was converted into, is not as it was written ({first_few(changed, 3)}); "
                "remove it, and the file is converted again"
            )
        return folder
    with needs_extra("gguf", path.name):
        import gguf  # noqa: F401 - the reading below says nothing of extras
    from huggingface_hub import metadata_save

    readers = [_open_part(part) for part in parts]
    with name_file(kept), scratch(folder) as made:
        _write_folder(made, parts[0], readers, DTYPES[name])
        record = {
            "file": path.name,
            "sha256": dict(zip([part.name for part in parts], hashes, strict=True)),
        }
        types = [one.tensor_type.name for reader in readers for one in reader.tensors]
        record |= {"types": {one: types.count(one) for one in sorted(set(types))}, "dtype": name}
        if licence := _value(readers[0], "general.license"):
            metadata_save(made / CARD_FILE, {"license": licence})
        written = {one.name: one.stat().st_size for one in sorted(made.iterdir())}
        write_json(made / GGUF_RECORD, record | {"written": written})
        sync_tree(made)
        publish(made, folder)
    return folder


def _hash_of(part: Path, kept: Path) -> str:
    """Return SHA-256 of a file, which is read again only when it has changed."""
    facts = part.stat()
    file_identity = f"{part.resolve()} {facts.st_size} {facts.st_ctime_ns} {facts.st_ino}"
    note = kept / f"{hashlib.sha256(file_identity.encode()).hexdigest()[:32]}.json"
    with suppress(FileNotFoundError, KeyError, ValueError):  # as a machine that lost its power leaves it
        return str(read_json(note)["sha256"])
    with part.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    write_json(note, {"sha256": found})
    return found


@contextmanager
def _faults(said: str) -> Iterator[None]:
    """Turn whatever a reader trips over into an error that says what is wrong with the file."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise ValueError(f"{said}: {' '.join(str(error).split()) or type(error).__name__}") from error


def _open_part(part: Path) -> GGUFReader:
    from gguf import GGUFReader

    with part.open("rb") as file:
        magic, version = file.read(4), file.read(4)
    if magic != b"GGUF":
        raise ValueError(f"{part} is no GGUF file: it begins with {magic!r}, not with b'GGUF'")
    if (number := int.from_bytes(version, "little")) > 3 or version == b"\1\0\0\0":
        kind = "big-endian" if number >= 1 << 16 else f"of version {number}"
        raise ValueError(
            f"{part} is {kind}, and of GGUF files little-endian ones of versions 2 and 3 are read; convert the model "
            "that it was made of again (llama.cpp's convert_hf_to_gguf.py)"
        )
    with _faults(f"{part} is no GGUF file that can be read, or was cut short"):
        return GGUFReader(part)


def _write_folder(made: Path, first: Path, readers: Sequence[GGUFReader], dtype: torch.dtype) -> None:
    """Write configuration, tokenizer and weights of the file whose first part is given."""
    from transformers import GenerationConfig, PreTrainedTokenizerFast
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    tensors = [one for reader in readers for one in reader.tensors]
    architecture = _value(readers[0], "general.architecture")
    if not isinstance(architecture, str):
        raise ValueError(f"{first} has no general.architecture, and so does not say what it is")
    words = _value(readers[0], "tokenizer.ggml.tokens") or []
    for name in ("bos", "eos"):
        token = _value(readers[0], f"tokenizer.ggml.{name}_token_id")
        if words and token is not None and token >= len(words):
            raise ValueError(
                f"{first} has {len(words):,} tokens, and names number {token} as {name.upper()}; set its "
                f"tokenizer.ggml.{name}_token_id (gguf-set-metadata of the package gguf)"
            )
    config = _config_of(first, readers[0], architecture, {one.name: one for one in tensors})
    plan = _plan_tensors(first, architecture, config, tensors, dtype)
    config.dtype = dtype
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(made)
    GenerationConfig.from_model_config(config).save_pretrained(made)
    if words:
        with _faults(f"{first} has a tokenizer that cannot be made out"):
            tokenizer = PreTrainedTokenizerFast.from_pretrained(first.parent, gguf_file=first.name)
        tokenizer.save_pretrained(made)
        # The classes that build it may add special tokens of their own, of which the embedding has no rows.
        written = read_json(made / "tokenizer.json")
        added = [one for one in written["added_tokens"] if one["id"] < len(words)]
        write_json(made / "tokenizer.json", written | {"added_tokens": added})
    total = sum(one.num_bytes for one in plan)
    check_space(made.parent, total)
    with (
        progress(f"converting {first.name}", total, "bytes") as advance,
        Writing(made, split_into_shards(plan, SHARD), advance) as writing,
    ):
        writing.finish()


def _config_of(
    first: Path, reader: GGUFReader, architecture: str, tensors: Mapping[str, ReaderTensor]
) -> Any:
    """Return its configuration as `transformers` reads it, with the entries that that leaves out."""
    from transformers import CONFIG_MAPPING
    from transformers.modeling_gguf_pytorch_utils import (
        GGUF_TO_TRANSFORMERS_MAPPING,
        load_gguf_checkpoint,
    )

    try:
        entries = dict(load_gguf_checkpoint(str(first))["config"])
        config_class = CONFIG_MAPPING[entries["model_type"]]
    except (LookupError, NotImplementedError, ValueError) as error:
        raise ValueError(
            f"{first} is of the architecture {architecture}, whose GGUF files transformers does not map ({error}); "
            "give the folder that it was made of"
        ) from error
    family_named(entries["model_type"])
    entries.pop("_model_name_or_path", None)
    entries = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")) | entries
    # The output head may lie in another part than the first.
    entries["tie_word_embeddings"] = "output.weight" not in tensors
    mapping: Any = GGUF_TO_TRANSFORMERS_MAPPING["config"]
    read = {key for group in mapping.values() for key in group}
    defaults = config_class()
    unknown = []
    for key in (
        name.removeprefix(f"{architecture}.")
        for name in reader.fields
        if name.startswith(f"{architecture}.")
    ):
        entry = _ENTRIES.get(key)
        if (
            entry is not None
            and entry not in entries
            and (hasattr(defaults, entry) or entry == "rope_theta")
        ):
            entries[entry] = _value(reader, f"{architecture}.{key}")
        elif entry is None and key not in read and not key.startswith(_SPARE):
            unknown.append(key)
    if unknown:
        warnings.warn(
            f"{first.name} has {first_few(unknown, 3)} in its metadata, which nothing here reads; compare what it "
            "writes with llama.cpp",
            stacklevel=2,
        )
    if scaling := _rope_scaling(first, reader, architecture, tensors):
        entries["rope_scaling"] = scaling
    entries = {
        key: float(str(np.float32(one))) if isinstance(one, float) else one
        for key, one in entries.items()
    }
    if architecture in _LARGEST and entries["num_hidden_layers"] == _LARGEST[architecture]:
        entries["query_pre_attn_scalar"] = entries["hidden_size"] // entries["num_attention_heads"]
    with _faults(f"{first} has metadata that describe no model"):
        return config_class(**entries)


def _rope_scaling(
    first: Path, reader: GGUFReader, architecture: str, tensors: Mapping[str, ReaderTensor]
) -> dict[str, Any] | None:
    """Return the configuration's entry for RoPE scaling; None where there is none."""
    kind = _value(reader, f"{architecture}.rope.scaling.type") or "none"
    factor = _value(reader, f"{architecture}.rope.scaling.factor")
    before = _value(reader, f"{architecture}.rope.scaling.original_context_length")
    if _FREQUENCIES in tensors and kind == "none":
        # Llama 3 has its frequencies divided by these, which its configuration says in four numbers.
        stored = torch.from_numpy(tensors[_FREQUENCIES].data.copy()).float().flatten()
        base = float(_value(reader, f"{architecture}.rope.freq_base") or 10000.0)
        entry: dict[str, Any] = {"rope_type": "llama3", "factor": float(stored.max())}
        entry |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        entry |= {"original_max_position_embeddings": before or 8192}
        wave = 2 * torch.pi * base ** (torch.arange(len(stored)) / len(stored))
        smooth = (entry["original_max_position_embeddings"] / wave - 1.0) / 3.0
        expected = 1 / torch.lerp(
            torch.tensor(1 / entry["factor"]), torch.tensor(1.0), smooth.clamp(0, 1)
        )
        if torch.allclose(stored, expected, rtol=1e-4):
            return entry
        kind = f"of its own ({_FREQUENCIES})"
    if kind == "none" or factor == 1.0:
        return None
    if kind == "linear" and factor:
        return {"rope_type": "linear", "factor": float(factor)}
    if kind == "yarn" and factor and before:
        return {
            "rope_type": "yarn",
            "factor": float(factor),
            "original_max_position_embeddings": int(before),
        }
    raise ValueError(
        f"{first} has RoPE scaling {kind}, which is not read from GGUF files; give the folder that it was made of"
    )


def _value(reader: GGUFReader, key: str) -> Any:
    field = reader.fields.get(key)
    if field is None:
        return None
    return field.contents()


def _by_parameter(
    first: Path,
    kind: str,
    names: Sequence[str],
    mapped: Mapping[str, str],
    tensors: Sequence[ReaderTensor],
) -> dict[str, list[ReaderTensor]]:
    """Group tensors by the parameter that they hold; a stack of experts has two."""
    from gguf import dequantize

    held: dict[str, list[ReaderTensor]] = {}
    spare = []
    for one in tensors:
        try:
            dequantize(one.data.reshape(-1, one.data.shape[-1])[:1], one.tensor_type)
        except NotImplementedError as error:
            stored = one.tensor_type.name
            raise ValueError(
                f"{first}: {one.name} is stored as {stored}, which cannot be dequantised"
            ) from error
        name = mapped.get(one.name) or mapped.get(one.name.removesuffix(".weight"))
        if name is not None:
            held.setdefault(name, []).append(one)
        elif one.name != _FREQUENCIES:
            spare.append(one.name)
    if spare:
        raise ValueError(f"{first} has tensors that are no parameter of {kind}: {first_few(spare, 3)}")
    if missing := [name for name in names if name not in held]:
        raise ValueError(f"{first} lacks the tensors of {first_few(missing, 3)}, which {kind} has")
    return held


def _plan_tensors(
    first: Path, architecture: str, config: Any, tensors: Sequence[ReaderTensor], dtype: torch.dtype
) -> list[PlannedTensor]:
    """Plan the parameters of the model, from the tensors that hold them; errors as `_by_parameter`."""
    from gguf import dequantize
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = {name: tuple(one.shape) for name, one in model.state_dict().items()}
    make_processor: Any = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
    processor = make_processor(config=config.to_dict())
    try:
        mapped = get_gguf_hf_weights_map(model, processor)
    except NotImplementedError as error:
        raise ValueError(
            f"{first} is of {config.model_type}, whose GGUF tensors have no known names"
        ) from error
    untied = [name for name in names if name != "lm_head.weight" or not config.tie_word_embeddings]
    held = _by_parameter(first, config.model_type, untied, mapped, tensors)

    def rows(name: str) -> Iterator[Tensor]:
        pending: dict[str, dict[str, Tensor]] = {"tensors": {}}
        for one in held[name]:
            values = dequantize(one.data, one.tensor_type)
            with _faults(f"{first}: {one.name} does not fit its metadata"):
                done = processor.process(
                    weights=values, name=one.name, tensor_key_mapping=mapped, parsed_parameters=pending
                )
            if done.name is not None:
                pending["tensors"][name] = torch.from_numpy(done.weights.copy())
        (value,) = pending["tensors"].values()
        if tuple(value.shape) != names[name]:
            raise ValueError(
                f"{first}: {name} has the shape {tuple(value.shape)}, and its metadata asks for {names[name]}"
            )
        yield value

    rounded = dtype != torch.float32
    return [PlannedTensor(name, names[name], dtype, rounded, partial(rows, name)) for name in held]
