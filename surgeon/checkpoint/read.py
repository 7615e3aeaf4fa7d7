"""Reading a checkpoint folder: its configuration, and tensors or parts of them straight from the safetensors files.

Everything is checked when the folder is opened (headers only, no weights are read), so that a truncated or missing
file is said before any work begins.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from surgeon.checkpoint.imported import (
    Pair,
    divided_queries,
    factor_pairs,
    in_blocks,
    queries_by_layer,
    repeated_heads,
    uniform,
    with_ranks,
)
from surgeon.checkpoint.tensor_file import Derived, TensorFiles, blocks_of, parse_json
from surgeon.models.families import FAMILIES
from surgeon.models.weights import Names
from surgeon.models.weights.quantised import Quantised, quantised_matrices
from surgeon.models.wrappers import Prefixes, Wrapper, renamed, wrapper_of

TIED = "tie_word_embeddings"
# Entries of a parsed configuration that are not of the decoder alone, or say how it was read.
_NOT_OF_THE_TEXT = frozenset(("model_type", "architectures", "transformers_version", "_name_or_path", "dtype", TIED))


@dataclass(frozen=True)
class Wrapped:
    """A folder's text decoder inside its wrapper.

    Attributes:
        files: all tensors of the folder, by the names that they are stored under.
        entries: its config.json.
    """

    wrapper: Wrapper
    files: TensorFiles
    entries: dict[str, Any]

    @cached_property
    def prefixes(self) -> Prefixes:
        """How its files call the text decoder's tensors."""
        return self.wrapper.prefixes_among(self.files.names())

    def stored_name(self, name: str) -> str:
        """What files in this folder's way call a tensor of the text decoder."""
        found = renamed(name, [(own, stored) for stored, own in self.prefixes])
        assert found is not None, name
        return found

    @property
    def around(self) -> list[str]:
        """The stored names of the tensors that are not the text decoder's."""
        return [name for name in self.files.names() if renamed(name, self.prefixes) is None]

    @property
    def loading(self) -> dict[str, str]:
        """What makes `transformers` load the text decoder alone: patterns of stored names, and what replaces them."""
        return {f"^{stored.replace('.', '[.]')}": own for stored, own in self.prefixes if stored != own}

    def around_text(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """config.json of the same wrapper around another text decoder.

        What does not differ from this one's stays as it is written here: entries may have more to say than a text needs
        (positions in images), or leave out what is the default.

        Args:
            config: the entries of a causal language model's config.json.
        """
        from transformers import CONFIG_MAPPING  # takes a second, and who only reads does without

        before = self.wrapper.text_entries(self.entries)
        read = CONFIG_MAPPING[before["model_type"]].from_dict
        old, new = (read(dict(one)).to_dict() for one in (before, config))
        changed = {key: new[key] for key in new.keys() - _NOT_OF_THE_TEXT if key not in old or old[key] != new[key]}
        entries = self.entries | {self.wrapper.text: self.entries[self.wrapper.text] | changed}
        if before[TIED] == config.get(TIED, before[TIED]):
            return entries
        return entries | {TIED: config[TIED]}


SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_KEY = "transformers_weights"  # of config.json: another file, or index, to load in place of these
WEIGHTS_ENDINGS = (".safetensors", ".safetensors.index.json")
PICKLES = (".pt", ".pth", ".bin", ".pkl", ".pickle")
PICKLE = "a pickle, which can run code as it is opened, and so is never read"
UNPICKLE = (
    "open it in the software that wrote it, and write its state_dict() with safetensors.torch.save_file as "
    f"{SINGLE_FILE}, beside the config.json of its architecture"
)
ADAPTER_FILE = "adapter_config.json"
QUANTIZATION = "quantization_config"  # of config.json: how weights are stored in few bits
# Entries of config.json that change nothing of what is computed: who wrote it and for which software, how training was
# begun, and the dtype, which the weights themselves have.
NOT_COMPUTED = frozenset(
    (
        *("_name_or_path", "_commit_hash", "transformers_version", "architectures", "auto_map"),
        *("dtype", "torch_dtype", "use_cache", "initializer_range", WEIGHTS_KEY),
    )
)


class Checkpoint(TensorFiles):
    """A folder with config.json and safetensors weights, one file or sharded.

    A matrix that is stored quantised has the name and the shape that its architecture gives it, and is read as the
    numbers that it stands for, in float32; the tensors that hold it are not among the names.

    Symbolic links are followed, wherever they lead.

    Attributes:
        folder: where it lies.
        config: the parsed config.json; of a model around a text decoder, what the decoder would have alone.
        wrapped: what is around the text decoder, which these tensors are then; None where nothing is.
        raw: its tensors as they are stored.
        quantised: the matrices that several of those hold, by name.
        imported: whether config and tensors are seen as in the program form, and are stored in another way.

    Raises:
        FileNotFoundError: if config.json, the weights or one of their shards is missing.
        ValueError: if a file is truncated or is not what it claims to be, an adapter lies in the folder, or weights are
            quantised in a way that is not known.
    """

    needed_by = "its config.json"
    wrapped: Wrapped | None = None
    quantised: Mapping[str, Quantised] = {}
    _owner: Mapping[str, str] = {}
    imported = False
    _json: dict[str, Any] | None = None

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.where = str(folder)
        if (folder / ADAPTER_FILE).exists():
            raise ValueError(
                f"{folder} holds an adapter ({ADAPTER_FILE}), which transformers would apply where peft is installed, "
                "and nothing else would; merge it into its model (peft's merge_and_unload), or move it elsewhere"
            )
        self.config = self._json = entries = read_json(folder / "config.json")
        self._weights_hash = ""
        self._hashing = Lock()
        for file, names in self._index().items():
            self._add(folder / file, names)
        if not self.files:
            raise ValueError(f"{folder} holds no tensors")
        if (wrapper := wrapper_of(entries)) is not None:
            self.config = wrapper.text_entries(entries)
            self.wrapped = Wrapped(wrapper, copy.copy(self), entries)
            found = {renamed(name, self.wrapped.prefixes): name for name in self.names()}
            self._keep({own: name for own, name in found.items() if own is not None})
        self._take_in()
        self.raw = self.as_stored()
        self.quantised = quantised_matrices(self.raw, entries.get(QUANTIZATION) or self.config.get(QUANTIZATION))
        self._owner = {part: name for name, matrix in self.quantised.items() for part in matrix.parts.values()}

    def _take_in(self) -> None:
        """See a model that others decomposed or pruned as one in the program form."""
        before = self.config
        found = uniform(self.config)
        self.config = found.entries
        family = FAMILIES.get(str(found.entries.get("model_type")))
        if family is None or (layers := Names(self, family).prefix_of_layers) is None:
            return
        pairs = factor_pairs(family, layers, self)
        if pairs:
            self.config = with_ranks(self.config, family, pairs)
            self._take_in_pairs(pairs.values())
        for layer, times in found.repeats.items():
            for role in ("k", "v"):
                path = f"{layers}{layer}.{family.attention.projection(role).path}"
                for name in (f"{path}.weight", f"{path}.bias"):
                    if name in self:
                        rows, *others = self.shape(name)
                        make = partial(repeated_heads, rows * times // int(self.config["num_key_value_heads"]), times)
                        self._derive(name, Derived((name,), (rows * times, *others), make))
        for name, layer in queries_by_layer(family, layers, self) if found.divides else ():
            self._derive(name, Derived((name,), self.shape(name), partial(divided_queries, layer + 1)))
        self.imported = bool(pairs) or self.config != before

    def _take_in_pairs(self, pairs: Iterable[Pair]) -> None:
        """Know factors by the names that the program form has for them."""
        names = {name: name for name in self.names()}
        for pair in pairs:
            renamed = {"first.weight": (pair.first,), "second.weight": pair.seconds, "second.bias": pair.biases}
            for own, stored in renamed.items():
                if len(stored) == 1:
                    names[f"{pair.path}.{own}"] = names.pop(stored[0])
        self._keep(names)
        for pair in pairs:
            if len(pair.seconds) > 1:
                outputs = sum(self.shape(name)[0] for name in pair.seconds)
                self._derive(f"{pair.path}.second.weight", Derived(pair.seconds, (outputs, pair.rank), in_blocks))
            if len(pair.biases) > 1:
                outputs = sum(self.shape(name)[0] for name in pair.biases)
                self._derive(f"{pair.path}.second.bias", Derived(pair.biases, (outputs,), torch.cat))

    @property
    def whole(self) -> TensorFiles:
        """All tensors of the folder, also those around a text decoder, by the names that they are stored under."""
        if self.wrapped is None:
            return self.raw
        return self.wrapped.files

    @property
    def entries(self) -> dict[str, Any]:
        """config.json as it stands."""
        return self._json or self.config

    def _index(self) -> dict[str, set[str]]:
        """The weight files, and the tensors that the index says are in each: those that `transformers` would load.

        Of one file and an index beside it, that is the file, and the index with its shards lies idle.
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
        """The name of the one file, or of the index of several."""
        named = self.entries.get(WEIGHTS_KEY)
        if named is not None:
            if not isinstance(named, str) or Path(named).name != named or not named.endswith(WEIGHTS_ENDINGS):
                raise ValueError(
                    f"{self.folder / 'config.json'} should name a *{' or *'.join(WEIGHTS_ENDINGS)} of its folder as "
                    f"{WEIGHTS_KEY}, not {str(named)[:200]!r}"
                )
            if not (self.folder / named).is_file():
                raise FileNotFoundError(f"{self.folder / named} is missing: config.json names it as {WEIGHTS_KEY}")
            return named
        for name in (SINGLE_FILE, INDEX_FILE):
            if (self.folder / name).exists():
                return name
        pickled = sorted(path.name for path in self.folder.iterdir() if path.suffix.lower() in PICKLES)
        found = f" ({pickled[0]} is {PICKLE}: {UNPICKLE})" if pickled else ""
        raise FileNotFoundError(
            f"{self.folder} has no {SINGLE_FILE} and no {INDEX_FILE}; only safetensors weights are read{found}"
        )

    def names(self) -> list[str]:
        """All names, file by file."""
        return list(dict.fromkeys(self._owner.get(name, name) for name in self.files))

    def __contains__(self, name: str) -> bool:
        return name in self.quantised or (name in self.files and name not in self._owner)

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self.quantised:
            return self.quantised[name].shape
        return super().shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor; of a quantised one that of its numbers."""
        if name in self.quantised:
            return self.quantised[name].dtype
        return super().dtype(name)

    def num_bytes(self, name: str) -> int:
        """How many bytes a tensor takes in its files."""
        return sum(map(super().num_bytes, self.parts_of(name)))

    def tensor(self, name: str) -> Tensor:
        """One whole tensor, in memory of its own if it is quantised."""
        if name in self.quantised:
            return self.quantised[name].whole()
        return super().tensor(name)

    def part(self, name: str, dim: int, first: int, end: int) -> Tensor:
        """Elements first..end-1 along one dimension of a tensor."""
        if name in self.quantised:
            return self.quantised[name].part(dim, first, end)
        return super().part(name, dim, first, end)

    def parts_of(self, name: str) -> list[str]:
        """The names of the stored tensors that hold one."""
        if name in self.quantised:
            return [*self.quantised[name].parts.values()]
        return [name]

    def without(self, names: Iterable[str]) -> None:
        """Know these tensors no more."""
        for name in names:
            del self.files[name], self._entries[name]

    @property
    def file_names(self) -> frozenset[str]:
        """The weight files in use, and their index."""
        return frozenset({self._weights_file(), *(path.name for path in self.whole.files.values())})

    def model_hash(self) -> str:
        """SHA-256 over what config.json says of the model and over its weights: which model this is.

        The order of config.json's entries does not count, nor do those that change nothing of what is computed.
        """
        meant = {key: value for key, value in self.entries.items() if key not in NOT_COMPUTED}
        text = json.dumps(meant, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(f"{text}\n{self.weights_hash()}".encode()).hexdigest()

    def weights_hash(self) -> str:
        """SHA-256 over the names and contents of the weight files, which are read once, whichever threads ask."""
        with self._hashing:
            if not self._weights_hash:
                digest = hashlib.sha256()
                for path in sorted(set(self.whole.files.values())):
                    digest.update(path.name.encode())
                    with path.open("rb", buffering=0) as file:
                        for block in blocks_of(file, path.stat().st_size, path):
                            digest.update(block)
                self._weights_hash = digest.hexdigest()
            return self._weights_hash


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is not a JSON object, with the line where it stops being one.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path.parent} has no {path.name}; a model is a folder with config.json and *.safetensors"
        )
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} should hold a JSON object, not {type(value).__name__}")
    return value
