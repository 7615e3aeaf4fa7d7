"""Random weights for a configuration, to measure the speed of models too large to fetch.

A config.json takes the place of a model's folder. Its matrices are normal numbers that follow from their names, so that
every rank has slices of the same ones; gains are 1 and shifts 0.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surgeon.checkpoint.imported import text_entries, translate_entries, wrapper_of
from surgeon.checkpoint.stored import Checkpoint, Wrapped
from surgeon.checkpoint.tensor_file import StoredTensor, TensorFiles, read_json
from surgeon.language.sublayer import Sublayer
from surgeon.models.families import Family
from surgeon.models.weights import Factors, ModelWeights, WeightMatrix
from surgeon.words import first_line

SPREAD = 0.02  # the standard deviation of a matrix's numbers, and of those of the product of two factors


@dataclass(eq=False)
class RandomTensor(StoredTensor):
    """Random numbers that follow from a tensor's name, made anew for every reading."""

    paths: tuple[Path, ...]
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device

    def read(self) -> Tensor:
        made = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        if made.dim() > 1:
            return normal_(made, SPREAD, self.name)
        return made.fill_(float(self.name.endswith("weight")))


class RandomCheckpoint(Checkpoint):
    """A configuration, and random numbers where a model of it has weights.

    Args:
        path: of the config.json.
        device: to make them on; a GPU makes others than a CPU.
        config: its content, where there is no such file.
    """

    def __init__(self, path: Path, device: torch.device | str = "cpu", config: Any = None) -> None:
        from transformers import AutoModelForCausalLM  # ranks that read files start faster without it

        from surgeon.checkpoint.config import read_config_only

        TensorFiles.__init__(self)
        self.raw = self
        self.weight_files = {path}
        self.folder = path
        self.where = str(path)
        if config is None:
            config, _ = read_config_only(path)
            self.entries = read_json(path)
            self.config, _ = translate_entries(text_entries(self.entries))
        else:
            self.entries = self.config = config.to_dict()
        if (wrapper := wrapper_of(self.entries)) is not None:
            self.wrapped = Wrapped(wrapper, TensorFiles(), self.entries)
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.bfloat16)
        except Exception as error:  # whatever it trips over is a fault of the file
            raise ValueError(
                f"{path} describes no model that can be built ({first_line(error)})"
            ) from error
        self.tensors = {  # of tied ones, the first
            name: RandomTensor(
                (path,), name, parameter.dtype, tuple(parameter.shape), torch.device(device)
            )
            for name, parameter in model.named_parameters()
        }


@dataclass(frozen=True, eq=False)
class RandomFactors:
    """A `FactorSource` of random numbers: nothing is factorised."""

    device: torch.device | str = "cpu"

    def factors(self, sublayer: Sublayer, role: str, matrix: WeightMatrix) -> Factors:
        """Return (rank, in_features) and (out_features, rank), in the matrix's dtype."""
        (outputs, inputs), rank = matrix.shape, sublayer.rank(role)
        assert rank is not None
        name = f"{replace(sublayer, ranks=())} {role} {rank}"
        first, second = (
            torch.empty(shape, dtype=matrix.dtype, device=self.device)
            for shape in ((rank, inputs), (outputs, rank))
        )
        return Factors(
            normal_(first, SPREAD, f"{name} first"), normal_(second, rank**-0.5, f"{name} second")
        )


def normal_(tensor: Tensor, spread: float, name: str) -> Tensor:
    """Fill a tensor with normal numbers that follow from a name; one on the meta device stays empty."""
    if tensor.is_meta:
        return tensor
    generator = torch.Generator(tensor.device).manual_seed(zlib.crc32(name.encode()))
    return tensor.normal_(0.0, spread, generator=generator)


def open_weights(
    path: Path, family: Family, head_dim: int, device: torch.device | str = "cpu"
) -> ModelWeights:
    """Return the weights of a checkpoint's folder, or random ones for a config.json, made on a device."""
    if path.is_file():
        return ModelWeights(RandomCheckpoint(path, device), family, head_dim, RandomFactors(device))
    return ModelWeights(Checkpoint(path), family, head_dim)
