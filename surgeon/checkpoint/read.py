"""Reading a checkpoint folder: its configuration, and tensors or parts of them straight from the safetensors files.

Everything is checked when the folder is opened (headers only, no weights are read), so that a truncated or missing
file is said before any work begins.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from surgeon.checkpoint.belongings import patterns_for_the_hub
from surgeon.checkpoint.header import StoredTensor, parse_json, read_header
from surgeon.demo import demo_model
from surgeon.named import is_hub_name, on_disk

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_KEY = "transformers_weights"  # of config.json: another file, or index, to load in place of these
WEIGHTS_ENDINGS = (".safetensors", ".safetensors.index.json")
ADAPTER_FILE = "adapter_config.json"
DEMO = "demo"
# Of a model on the hub: what it consists of, what goes on with it, and code that a configuration may name.
WANTED = ("*.json", "*.safetensors", "README.md", "*.py", *patterns_for_the_hub())
# Entries of config.json that change nothing of what is computed: who wrote it and for which software, how training was
# begun, and the dtype, which the weights themselves have.
NOT_COMPUTED = frozenset(
    (
        *("_name_or_path", "_commit_hash", "transformers_version", "architectures", "auto_map"),
        *("dtype", "torch_dtype", "use_cache", "initializer_range", WEIGHTS_KEY),
    )
)
# Bytes that are read or written at a time, as cp does: they stay in the processor's cache.
BLOCK = 1 << 18


def locate(path_or_name: str | Path) -> Path:
    """The folder of a model given as a folder, as "demo" for the one that ships with surgeon, or as a hub name.

    A hub model is downloaded, or taken from the hub's cache.

    Raises:
        FileNotFoundError: if it is neither.
    """
    name, there = str(path_or_name), on_disk(path_or_name)
    if there is not None:
        if not there.is_dir():
            raise FileNotFoundError(f"{there} is a file; a model is a folder with config.json and *.safetensors")
        return there
    if name == DEMO:
        return demo_model()
    if not is_hub_name(name):
        raise FileNotFoundError(f"there is no model folder {name}")
    from huggingface_hub import snapshot_download

    from surgeon.checkpoint.offline import without_retries

    try:
        with without_retries():
            return Path(snapshot_download(name, allow_patterns=[*WANTED]))
    except Exception as error:
        raise FileNotFoundError(
            f"{name} is no folder here, and could not be fetched from the hub ({type(error).__name__}); "
            "check the name and the connection, or give the path of a local folder"
        ) from error


class Checkpoint:
    """A folder with config.json and safetensors weights, one file or sharded.

    Files are opened anew whenever something is read: one that stays open keeps all that was ever read of it in memory.
    Symbolic links are followed where they stay in the folder, or lead to the blobs of the hub cache that it lies in.

    Attributes:
        folder: where it lies.
        config: the parsed config.json.
        files: the safetensors file that holds each tensor, by tensor name.

    Raises:
        FileNotFoundError: if config.json, the weights or one of their shards is missing.
        ValueError: if a file is truncated, is not what it claims to be, or lies outside the folder, or an adapter lies
            in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if (folder / ADAPTER_FILE).exists():
            raise ValueError(
                f"{folder} holds an adapter ({ADAPTER_FILE}), which transformers would apply where peft is installed, "
                "and nothing else would; merge it into its model (peft's merge_and_unload), or move it elsewhere"
            )
        check_inside(folder, folder / "config.json")
        self.config = read_json(folder / "config.json")
        self._stored: dict[str, StoredTensor] = {}
        self.files: dict[str, Path] = {}
        self._weights_hash = ""
        self._hashing = Lock()
        for file, names in self._index().items():
            self._add(folder / file, names)
        if not self.files:
            raise ValueError(f"{folder} holds no tensors")

    def _index(self) -> dict[str, set[str]]:
        """The weight files, and the tensors that the index says are in each: those that `transformers` would load.

        Of one file and an index beside it, that is the file, and the index with its shards lies idle.
        """
        index = self.folder / self._weights_file()
        if index.suffix == ".safetensors":
            return {index.name: set()}
        check_inside(self.folder, index)
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
        named = self.config.get(WEIGHTS_KEY)
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
        raise FileNotFoundError(
            f"{self.folder} has no {SINGLE_FILE} and no {INDEX_FILE}; only safetensors weights are read"
        )

    def _add(self, path: Path, expected: set[str]) -> None:
        """Take in one file's tensors, those too that the index forgets: whatever loads the file, loads them."""
        check_inside(self.folder, path)
        held = read_header(path)
        for name in sorted(expected - held.keys()):
            raise ValueError(f"tensor {name!r} is not in {path.name}, where the index says it is")
        for name, stored in held.items():
            if name in self.files:
                raise ValueError(
                    f"tensor {name!r} is in {self.files[name].name} and in {path.name} of {self.folder}; "
                    "which of them is meant cannot be known"
                )
            self.files[name] = path
            self._stored[name] = stored

    def __contains__(self, name: str) -> bool:
        return name in self.files

    @property
    def where(self) -> str:
        """What error messages call it."""
        return str(self.folder)

    @property
    def file_names(self) -> frozenset[str]:
        """The weight files in use, and their index."""
        return frozenset({self._weights_file(), *(path.name for path in self.files.values())})

    def names(self) -> list[str]:
        """All tensor names, file by file."""
        return list(self.files)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        return self._of(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor, without reading it."""
        return self._of(name).dtype

    def tensor(self, name: str) -> Tensor:
        """One whole tensor; what is not looked at of it is not read."""
        with self._open(name) as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def part(self, name: str, dim: int, first: int, end: int) -> Tensor:
        """Elements first..end-1 along one dimension (0 or 1) of a tensor; nothing else is read."""
        with self._open(name) as file:
            view = file.get_slice(name)
            part: Tensor = view[first:end] if dim == 0 else view[:, first:end]
        return part

    def blocks(self, name: str) -> Iterator[memoryview]:
        """A tensor's bytes as they are stored, a block at a time; each is valid until the next one is asked for.

        Raises:
            OSError: if the file has become shorter.
        """
        stored, path = self._of(name), self.files[name]
        with path.open("rb", buffering=0) as file:
            file.seek(stored.begin)
            yield from blocks_of(file, stored.end - stored.begin, path)

    def _of(self, name: str) -> StoredTensor:
        if name not in self._stored:
            raise ValueError(f"{self.folder} has no tensor {name!r}, which its config.json asks for")
        return self._stored[name]

    def _open(self, name: str) -> Any:
        self._of(name)
        return safe_open(self.files[name], framework="pt")

    def model_hash(self) -> str:
        """SHA-256 over what config.json says of the model and over its weights: which model this is.

        The order of config.json's entries does not count, nor do those that change nothing of what is computed.
        """
        meant = {key: value for key, value in self.config.items() if key not in NOT_COMPUTED}
        text = json.dumps(meant, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(f"{text}\n{self.weights_hash()}".encode()).hexdigest()

    def weights_hash(self) -> str:
        """SHA-256 over the names and contents of the weight files, which are read once, whichever threads ask."""
        with self._hashing:
            if not self._weights_hash:
                digest = hashlib.sha256()
                for path in sorted(set(self.files.values())):
                    digest.update(path.name.encode())
                    with path.open("rb", buffering=0) as file:
                        for block in blocks_of(file, path.stat().st_size, path):
                            digest.update(block)
                self._weights_hash = digest.hexdigest()
            return self._weights_hash


@dataclass(frozen=True)
class Stored:
    """One tensor in a checkpoint's files."""

    checkpoint: Checkpoint
    name: str

    def tensor(self) -> Tensor:
        """The whole tensor; what is not looked at of it is not read."""
        return self.checkpoint.tensor(self.name)

    def rows(self, count: int) -> Iterator[Tensor]:
        """All rows in order, so many at a time."""
        end = self.checkpoint.shape(self.name)[0]
        for first in range(0, end, count):
            yield self.checkpoint.part(self.name, 0, first, min(first + count, end))

    def blocks(self) -> Iterator[memoryview]:
        """Its bytes, a block at a time."""
        return self.checkpoint.blocks(self.name)


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


def check_inside(folder: Path, path: Path) -> None:
    """Refuse a file of a checkpoint that is a symbolic link to somewhere else.

    A link may lead to a file in the folder, or to the blobs of the hub cache (beside its `snapshots`).

    Raises:
        ValueError: naming the link and where it leads.
    """
    real, home = path.resolve(), folder.resolve()
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(allowed in real.parents for allowed in homes):
        raise ValueError(
            f"{path} is a symbolic link out of the folder, to {real}; put the file itself there, or name the folder "
            "in which it lies"
        )


def blocks_of(file: FileIO, size: int, path: Path) -> Iterator[memoryview]:
    """The next bytes of an unbuffered file, a block at a time, all in one buffer.

    Raises:
        OSError: if it has fewer.
    """
    buffer = memoryview(bytearray(min(size, BLOCK)))
    while size:
        count = file.readinto(buffer[: min(size, BLOCK)])
        if not count:
            raise OSError(f"{path} became shorter while it was read")
        yield buffer[:count]
        size -= count
