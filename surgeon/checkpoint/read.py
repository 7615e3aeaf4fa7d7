"""Reading a checkpoint folder: its configuration, and tensors or parts of them straight from the safetensors files.

Everything is checked when the folder is opened (headers only, no weights are read), so that a truncated or missing
file is said before any work begins.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from surgeon.demo import demo_model

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DEMO = "demo"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def locate(path_or_name: str | Path) -> Path:
    """The folder of a model given as a folder, as "demo" for the one that ships with surgeon, or as a hub name.

    A hub model is downloaded, or taken from the hub's cache.

    Raises:
        FileNotFoundError: if it is neither.
    """
    folder = Path(path_or_name)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise FileNotFoundError(f"{folder} is a file; a model is a folder with config.json and *.safetensors")
    name = str(path_or_name)
    if name == DEMO:
        return demo_model()
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise FileNotFoundError(f"there is no model folder {name}")
    from huggingface_hub import snapshot_download

    from surgeon.quality.offline import without_retries

    patterns = ["*.json", "*.safetensors", "tokenizer*", "*.model", "*.jinja"]
    try:
        with without_retries():
            return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:
        raise FileNotFoundError(
            f"{name} is no folder here, and could not be fetched from the hub ({type(error).__name__}); "
            "check the name and the connection, or give the path of a local folder"
        ) from error


class Checkpoint:
    """A folder with config.json and safetensors weights, one file or sharded.

    Attributes:
        folder: where it lies.
        config: the parsed config.json.
        files: the safetensors file that holds each tensor, by tensor name.

    Raises:
        FileNotFoundError: if config.json, the weights or one of their shards is missing.
        ValueError: if a file is truncated, is not what it claims to be, or lies outside the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = read_json(folder / "config.json")
        self._open: dict[Path, Any] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self.files = self._index()

    def _index(self) -> dict[str, Path]:
        index = self.folder / INDEX_FILE
        if not index.exists():
            single = self.folder / SINGLE_FILE
            if not single.exists():
                raise FileNotFoundError(
                    f"{self.folder} has no {SINGLE_FILE} and no {INDEX_FILE}; only safetensors weights are read"
                )
            return dict.fromkeys(self._read_header(single), single)
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{index} has no weight_map; it should map tensor names to files")
        held: dict[str, set[str]] = {}
        for file in sorted(set(map(str, weight_map.values()))):
            path = self.folder / file
            if Path(file).name != file or (path.resolve().parent != self.folder.resolve() and not path.is_symlink()):
                raise ValueError(f"{index} names a file outside the folder: {file!r}")
            if not path.exists():
                raise FileNotFoundError(f"{path} is missing: {index.name} names it")
            held[file] = self._read_header(path)
        for name, file in weight_map.items():
            if name not in held[file]:
                raise ValueError(f"tensor {name!r} is not in {file}, where {index.name} says it is")
        return {name: self.folder / file for name, file in weight_map.items()}

    def _read_header(self, path: Path) -> set[str]:
        try:
            file = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise ValueError(
                f"{path} is truncated or not a safetensors file ({error}); fetch or copy it again"
            ) from error
        self._open[path] = file
        names = set(file.keys())
        for name in names:
            view = file.get_slice(name)
            self._shapes[name] = tuple(view.get_shape())
            self._dtypes[name] = _dtype(view.get_dtype(), name, path)
        return names

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def names(self) -> list[str]:
        """All tensor names, in the order of the index."""
        return list(self.files)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        self._file(name)
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor, without reading it."""
        self._file(name)
        return self._dtypes[name]

    def tensor(self, name: str) -> Tensor:
        """One whole tensor."""
        tensor: Tensor = self._open[self._file(name)].get_tensor(name)
        return tensor

    def part(self, name: str, dim: int, first: int, end: int) -> Tensor:
        """Elements first..end-1 along one dimension (0 or 1) of a tensor; nothing else is read."""
        view = self._open[self._file(name)].get_slice(name)
        part: Tensor = view[first:end] if dim == 0 else view[:, first:end]
        return part

    def _file(self, name: str) -> Path:
        if name not in self.files:
            raise ValueError(f"{self.folder} has no tensor {name!r}, which its config.json asks for")
        return self.files[name]

    def weights_hash(self) -> str:
        """SHA-256 over the names and contents of the weight files: which weights these are."""
        digest = hashlib.sha256()
        for path in sorted(set(self.files.values())):
            digest.update(path.name.encode())
            with path.open("rb") as file:
                while block := file.read(1 << 22):
                    digest.update(block)
        return digest.hexdigest()


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
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} should hold a JSON object, not {type(value).__name__}")
    return value


def _dtype(name: str, tensor: str, path: Path) -> torch.dtype:
    if name not in DTYPES:
        raise ValueError(
            f"tensor {tensor!r} in {path} has dtype {name}, which is not supported (known: {', '.join(DTYPES)})"
        )
    return DTYPES[name]
