"""Checkpoint folders, and models by them: configuration and headers of the weights have been read, and nothing else.

Opening a folder checks all headers, so that a truncated or missing file is an error before any work begins. Tensors, or
parts of them, come straight from the safetensors files when they are asked for.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from surgeon.checkpoint.imported import Prefixes, Wrapper, replace_prefix, translate_model, wrapper_of
from surgeon.checkpoint.tensor_file import (
    INDEX_FILE,
    SINGLE_FILE,
    StoredTensor,
    TensorFiles,
    blocks_of,
    read_json,
)
from surgeon.language.program import Program
from surgeon.machine import gpu_with_room
from surgeon.models.families import Family, family_of
from surgeon.models.weights import ModelWeights, Names
from surgeon.models.weights.quantised import Quantised, quantised_matrices

TIED = "tie_word_embeddings"
# Entries of a parsed configuration that are not of the decoder alone, or say how it was read.
_NOT_OF_THE_TEXT = frozenset(
    ("model_type", "architectures", "transformers_version", "_name_or_path", "dtype", TIED)
)


@dataclass(frozen=True)
class Wrapped:
    """A text decoder inside its wrapper.

    Attributes:
        files: all tensors of the folder, by the names that they are stored under.
        entries: its config.json.
    """

    wrapper: Wrapper
    files: TensorFiles
    entries: dict[str, Any]

    @cached_property
    def prefixes(self) -> Prefixes:
        """Beginnings of names of tensors in this folder, and in the text decoder alone."""
        names = self.files.names()
        ways = (way for way in self.wrapper.names if any(name.startswith(way[0][0]) for name in names))
        return next(ways, self.wrapper.names[0])

    def stored_name(self, name: str) -> str:
        """Return the name that files of this folder have for a tensor of the text decoder."""
        found = replace_prefix(name, [(own, stored) for stored, own in self.prefixes])
        assert found is not None, name
        return found

    @property
    def around(self) -> list[str]:
        """Stored names of the tensors outside the text decoder."""
        return [name for name in self.files.names() if replace_prefix(name, self.prefixes) is None]

    def around_text(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return config.json of the same wrapper around another text decoder.

        Entries that do not differ stay as they are written here: they may say more than a text needs (positions in
        images), or leave out the default.

        Args:
            config: the entries of a causal language model's config.json.
        """
        from transformers import CONFIG_MAPPING  # takes a second, and who only reads does without

        before = self.wrapper.text_entries(self.entries)
        read = CONFIG_MAPPING[before["model_type"]].from_dict
        old, new = (read(dict(one)).to_dict() for one in (before, config))
        changed = {
            key: new[key]
            for key in new.keys() - _NOT_OF_THE_TEXT
            if key not in old or old[key] != new[key]
        }
        entries = self.entries | {self.wrapper.text: self.entries[self.wrapper.text] | changed}
        if before[TIED] == config.get(TIED, before[TIED]):
            return entries
        return entries | {TIED: config[TIED]}


WEIGHTS_KEY = "transformers_weights"  # of config.json: another file, or index, to load in place of these
WEIGHTS_ENDINGS = (".safetensors", ".safetensors.index.json")
PICKLES = (".pt", ".pth", ".bin", ".pkl", ".pickle")
PICKLE = "a pickle, which can run code as it is opened, and so is never read"
UNPICKLE = (
    "open it in the software that wrote it, and write its state_dict() with safetensors.torch.save_file as "
    f"{SINGLE_FILE}, beside the config.json of its architecture"
)
REPORT_FILE = "surgeon.json"  # in which a checkpoint says what it was made of
ADAPTER_FILE = "adapter_config.json"
QUANTIZATION = "quantization_config"  # of config.json: how weights are stored in few bits
# Entries of config.json that change nothing of what is computed: who wrote it and for which software, how training was
# begun, and the dtype, which the weights themselves have.
NOT_COMPUTED = frozenset(
    (
        "_name_or_path",
        "_commit_hash",
        "transformers_version",
        "architectures",
        "auto_map",
        "dtype",
        "torch_dtype",
        "use_cache",
        "initializer_range",
        WEIGHTS_KEY,
    )
)


class Dequantised(StoredTensor):
    """A quantised matrix, read as numbers in memory of their own."""

    def __init__(self, matrix: Quantised, stored: TensorFiles) -> None:
        self.matrix = matrix
        self.parts = [stored[name] for name in matrix.parts.values()]
        self.paths = tuple(path for one in self.parts for path in one.paths)
        self.dtype = matrix.dtype

    @cached_property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]  # it may stand in a tensor that is not written yet
        return self.matrix.shape

    @property
    def num_bytes(self) -> int:
        return sum(one.num_bytes for one in self.parts)

    def read(self) -> Tensor:
        return self.matrix.whole()

    def part(self, dim: int, first: int, end: int) -> Tensor:
        return self.matrix.part(dim, first, end)


class Checkpoint(TensorFiles):
    """A folder with config.json and safetensors weights, one file or sharded; symbolic links are followed.

    A quantised matrix has the name and shape that its architecture gives it, and is read as float32 numbers; the
    tensors that hold it are not among the names.

    Attributes:
        folder: where it lies.
        entries: the parsed config.json.
        config: the same as surgeon sees it; inside a wrapper, the text decoder's own.
        wrapped: the wrapper around the text decoder, if any.
        weight_files: the safetensors files, of the tensors around a text decoder, too.
        raw: its tensors as they are stored.
        quantised: the matrices that several of those hold, by name.
        imported: whether config and tensors, stored in another way, are seen as in the program form.

    Raises:
        FileNotFoundError: if config.json, the weights or one of their shards is missing.
        ValueError: if a file is truncated or is not what it claims to be, an adapter lies in the folder, or weights are
            quantised in an unknown way.
    """

    needed_by = "its config.json"
    wrapped: Wrapped | None = None
    quantised: Mapping[str, Quantised] = {}
    imported = False

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.where = str(folder)
        if (folder / ADAPTER_FILE).exists():
            raise ValueError(
                f"{folder} holds an adapter ({ADAPTER_FILE}), which transformers would apply where peft is installed, "
                "and nothing else would; merge it into its model (peft's merge_and_unload), or move it elsewhere"
            )
        self.entries = entries = read_json(folder / "config.json")
        self._weights_hash = ""
        self._hashing = Lock()
        for file, names in self._index().items():
            self._add(folder / file, names)
        if not self.tensors:
            raise ValueError(f"{folder} holds no tensors")
        self.weight_files = {path for one in self.tensors.values() for path in one.paths}
        config = entries
        if (wrapper := wrapper_of(entries)) is not None:
            config = wrapper.text_entries(entries)
            self.wrapped = Wrapped(wrapper, self.copy(), entries)
            inside = {
                replace_prefix(name, self.wrapped.prefixes): one for name, one in self.tensors.items()
            }
            self.tensors = {name: one for name, one in inside.items() if name is not None}
        self.config, self.tensors = translate_model(config, self)
        self.imported = self.config != config
        self.raw = self.copy()
        self.quantised = quantised_matrices(
            self.raw, entries.get(QUANTIZATION) or config.get(QUANTIZATION)
        )
        matrices: dict[str, StoredTensor] = {
            name: Dequantised(matrix, self.raw) for name, matrix in self.quantised.items()
        }
        owner = {part: name for name, matrix in self.quantised.items() for part in matrix.parts.values()}
        own = {name: owner.get(name, name) for name in self.tensors}
        self.tensors = {
            own[name]: matrices.get(own[name], one) for name, one in self.raw.tensors.items()
        }

    def _index(self) -> dict[str, set[str]]:
        """Map the weight files that `transformers` would load to the tensors that the index says are in each.

        Of one file and an index beside it, that is the file.
        """
        index = self.folder / self._weights_file()
        if index.suffix == ".safetensors":
            return {index.name: set()}
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{index} has no weight_map; it should map tensor names to files")
        shards: dict[str, set[str]] = {}
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file or not file.isprintable():
                raise ValueError(f"{index} names a file outside the folder: {str(file)[:200]!r}")
            if not file.endswith(".safetensors"):
                raise ValueError(f"{index} names {file[:200]!r}; only *.safetensors files are read")
            shards.setdefault(file, set()).add(name)
        for file in sorted(shards):
            if not (self.folder / file).exists():
                raise FileNotFoundError(f"{self.folder / file} is missing: {index.name} names it")
        return dict(sorted(shards.items()))

    def _weights_file(self) -> str:
        """Return the name of the one file, or of the index of several."""
        named = self.entries.get(WEIGHTS_KEY)
        if named is not None:
            if (
                not isinstance(named, str)
                or Path(named).name != named
                or not named.endswith(WEIGHTS_ENDINGS)
            ):
                raise ValueError(
                    f"{self.folder / 'config.json'} should name a *{' or *'.join(WEIGHTS_ENDINGS)} of its folder as "
                    f"{WEIGHTS_KEY}, not {str(named)[:200]!r}"
                )
            if not (self.folder / named).is_file():
                raise FileNotFoundError(
                    f"{self.folder / named} is missing: config.json names it as {WEIGHTS_KEY}"
                )
            return named
        for name in (SINGLE_FILE, INDEX_FILE):
            if (self.folder / name).exists():
                return name
        pickled = sorted(path.name for path in self.folder.iterdir() if path.suffix.lower() in PICKLES)
        found = ""
        if pickled:
            found = f" ({pickled[0]} is {PICKLE}: {UNPICKLE})"
        raise FileNotFoundError(
            f"{self.folder} has no {SINGLE_FILE} and no {INDEX_FILE}; only safetensors weights are read{found}"
        )

    @property
    def file_names(self) -> frozenset[str]:
        """The weight files in use, and their index."""
        return frozenset({self._weights_file(), *(path.name for path in self.weight_files)})

    def model_hash(self) -> str:
        """Return SHA-256 over the weights and over config.json but for its order and `NOT_COMPUTED`."""
        meant = {key: value for key, value in self.entries.items() if key not in NOT_COMPUTED}
        text = json.dumps(meant, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(f"{text}\n{self.weights_hash()}".encode()).hexdigest()

    def weights_hash(self) -> str:
        """Return SHA-256 over the names and contents of the weight files, read once by all threads."""
        with self._hashing:
            if not self._weights_hash:
                digest = hashlib.sha256()
                for path in sorted(self.weight_files):
                    digest.update(path.name.encode())
                    with path.open("rb", buffering=0) as file:
                        for block in blocks_of(file, path.stat().st_size, path):
                            digest.update(block)
                self._weights_hash = digest.hexdigest()
            return self._weights_hash


@dataclass(frozen=True)
class StoredModel:
    """A model by its configuration and the headers of its weights, as far as forms and loading need it.

    `surgeon.opened.Model` extends it.

    Attributes:
        name: as the user named it: a folder, a hub name, or "demo".
        files: with the headers of its weights; None of a model known by its configuration alone.
        config: as `transformers` reads it.
        own: the program of an edited or native-track checkpoint; None where it runs its layers one after the other.
    """

    name: str
    files: Checkpoint | None
    config: Any
    own: Program | None = None

    @property
    def checkpoint(self) -> Checkpoint:
        """Files, with the headers of the weights; ValueError if there is only a configuration."""
        if self.files is None:
            raise ValueError(
                f"{self.name} was opened by its configuration alone, and this needs its files; open it with its weights"
            )
        return self.files

    @property
    def wrapped(self) -> Wrapped | None:
        """The wrapper around it, if it is the text decoder of a larger model."""
        if self.files is None:
            return None
        return self.files.wrapped

    @property
    def folder(self) -> Path:
        return self.checkpoint.folder

    @cached_property
    def family(self) -> Family:
        return family_of(self.config)

    @property
    def num_layers(self) -> int:
        """Number of stored layers."""
        return int(self.config.num_hidden_layers)

    @property
    def program(self) -> Program:
        """The checkpoint's own program, or its layers one after the other."""
        return self.own or Program.dense(self.num_layers, self.family.steps_per_layer)

    @cached_property
    def weights(self) -> ModelWeights:
        """Stored tensors by layer and role, read on demand."""
        return ModelWeights(self.checkpoint, self.family, self.family.head_dim(self.config))

    @property
    def parameters(self) -> int:
        """Number of elements of its tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.checkpoint.tensors.values())

    @property
    def size(self) -> int:
        """Bytes of its tensors in their files."""
        return sum(tensor.num_bytes for tensor in self.checkpoint.tensors.values())

    @property
    def embedding(self) -> StoredTensor:
        """The stored embedding; the head, where the two are one and stored under its name."""
        path = f"{self.family.embedding}.weight"
        return self.checkpoint[Names(self.checkpoint, self.family).stored_name(path)]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the embedding is stored.

        config.json and other tensors do not count: the stream begins as rows of the embedding, norms are often kept in
        more digits, and buffers may be of any kind.
        """
        return self.embedding.dtype

    def compute_dtype(self, device: torch.device | str) -> torch.dtype:
        """Return the dtype to compute in: the embedding's, but float32 for 16-bit weights on a CPU.

        Many CPUs compute 16-bit matrix products hundreds of times slower than float32 ones, and numbers should not
        depend on the CPU.
        """
        if torch.device(device).type == "cpu" and self.dtype in (torch.float16, torch.bfloat16):
            return torch.float32
        return self.dtype

    def describe_dequantising(self, dtype: str, packed: bool = False) -> str | None:
        """Say in a line that its quantised weights are computed with in a dtype; None without any."""
        if not self.schemes:
            return None
        how = "are dequantised as they are read, and"
        if packed:
            how = "stay so in memory, and are"
        return f"the weights of {self.name} stored as {', '.join(self.schemes)} {how} computed with in {dtype}"

    @property
    def schemes(self) -> list[str]:
        """Descriptions of how its quantised weights are stored."""
        return list(dict.fromkeys(one.scheme.description for one in self.checkpoint.quantised.values()))

    def bytes_on(self, device: torch.device | str, program: Program | None = None) -> int:
        """Return the memory of a loaded model: its stored weights, and what an edit derives from them."""
        numbers = self.parameters
        runs = program or self.own
        for sublayer in dict.fromkeys(() if runs is None else runs.sublayers()):
            # Its own program's factors and narrow layers are stored.
            changed = program is not None and (sublayer.ranks or sublayer.width is not None)
            if len(sublayer.layers) > 1 or sublayer.piece is not None or changed:
                numbers += sublayer.parameters(self.family.layer_shapes(self.config))
        return numbers * self.compute_dtype(device).itemsize

    def device_map(self, program: Program | None = None) -> Any:
        """Return the GPU with room for all of it, else "auto", as `load` takes it."""
        return gpu_with_room(self.bytes_on("cuda", program)) or "auto"
