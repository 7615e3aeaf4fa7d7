"""Weights that lie nowhere: random numbers for a configuration, to measure the speed of models too large to fetch.

A config.json stands for such a model where others have a folder. Its matrices are normal numbers that follow from their
names, so that every rank has slices of the same ones; gains are 1 and shifts 0.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surgeon.checkpoint.imported import uniform
from surgeon.checkpoint.read import Checkpoint, Wrapped, read_json
from surgeon.checkpoint.stored import StoredModel
from surgeon.checkpoint.tensor_file import Entry, TensorFiles
from surgeon.errors import first_line
from surgeon.language.sublayer import Sublayer
from surgeon.models.families import Family
from surgeon.models.weights import Factors, ModelWeights, WeightMatrix
from surgeon.models.wrappers import text_entries, wrapper_of

SPREAD = 0.02  # the standard deviation of a matrix's numbers, and of those of the product of two factors


class RandomCheckpoint(Checkpoint):
    """A configuration, and random numbers where a model of it has weights.

    Args:
        path: of the config.json.
        device: to make them on; a GPU makes others than a CPU.
        config: what it says, where there is no such file.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is no configuration of an architecture that is supported.
    """

    def __init__(self, path: Path, device: torch.device | str = "cpu", config: Any = None) -> None:
        from transformers import AutoModelForCausalLM  # ranks that read files start faster without it

        from surgeon.checkpoint.config import read_config_only

        TensorFiles.__init__(self)
        self.raw = self
        self.folder = path
        self.where = str(path)
        entries = read_json(path) if config is None else config.to_dict()
        if (wrapper := wrapper_of(entries)) is not None:
            self.wrapped = Wrapped(wrapper, TensorFiles(), entries)
        self.config = uniform(text_entries(entries)).entries if config is None else entries
        self._device = torch.device(device)
        parsed = read_config_only(path)[0] if config is None else config
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(parsed, dtype=parsed.dtype or torch.bfloat16)
        except Exception as error:  # whatever it trips over is a fault of the file
            raise ValueError(f"{path} describes no model that can be built ({first_line(error)})") from error
        for name, parameter in model.named_parameters():  # of tied ones, the first
            self.files[name] = path
            self._entries[name] = Entry(parameter.dtype, tuple(parameter.shape), 0, parameter.nbytes)

    def tensor(self, name: str) -> Tensor:
        """One whole tensor, made anew."""
        entry = self._entry(name)
        made = torch.empty(entry.shape, dtype=entry.dtype, device=self._device)
        if made.dim() > 1:
            return normal_(made, SPREAD, name)
        return made.fill_(float(name.endswith("weight")))

    def part(self, name: str, dim: int, first: int, end: int) -> Tensor:
        """Elements first..end-1 along one dimension of it; the rest is not kept."""
        return self.tensor(name).narrow(dim, first, end - first).clone()


class RandomFactors:
    """A `FactorSource` of random numbers: what would be factorised is not made.

    Args:
        device: to make them on.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = device

    def factors(self, sublayer: Sublayer, role: str, matrix: WeightMatrix) -> Factors:
        """Factors in place of a matrix, (rank, in_features) and (out_features, rank), in its dtype."""
        (outputs, inputs), rank = matrix.shape, sublayer.rank(role)
        assert rank is not None
        name = f"{replace(sublayer, ranks=())} {role} {rank}"
        first, second = (
            torch.empty(shape, dtype=matrix.dtype, device=self._device) for shape in ((rank, inputs), (outputs, rank))
        )
        return Factors(normal_(first, SPREAD, f"{name} first"), normal_(second, rank**-0.5, f"{name} second"))


def normal_(tensor: Tensor, spread: float, name: str) -> Tensor:
    """Fill a tensor with normal numbers that follow from a name; one on the meta device has none."""
    if tensor.is_meta:
        return tensor
    generator = torch.Generator(tensor.device).manual_seed(zlib.crc32(name.encode()))
    return tensor.normal_(0.0, spread, generator=generator)


def open_random(path: Path) -> StoredModel:
    """The model of a config.json, with random weights.

    Raises:
        FileNotFoundError, ValueError: as `RandomCheckpoint`.
    """
    from surgeon.checkpoint.config import read_config_only

    return StoredModel(str(path), RandomCheckpoint(path), *read_config_only(path))


def open_weights(path: Path, family: Family, head_dim: int, device: torch.device | str = "cpu") -> ModelWeights:
    """The weights of a checkpoint's folder, or random ones for a config.json, made on a device."""
    if path.is_file():
        return ModelWeights(RandomCheckpoint(path, device), family, head_dim, RandomFactors(device))
    return ModelWeights(Checkpoint(path), family, head_dim)
