"""What an export will write: the model, the form, and every tensor with its sources; nothing has been written yet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from surgeon.checkpoint.companions import AUTO_MAP, Companions, companions_of
from surgeon.checkpoint.factor_cache import FactorCache
from surgeon.checkpoint.forms import PROGRAM, Layout, PlannedTensor, StoredModel, form_of, lay_out
from surgeon.checkpoint.load import read_config, stored_program
from surgeon.checkpoint.read import Checkpoint, locate
from surgeon.errors import did_you_mean
from surgeon.exports.prove import original_model
from surgeon.language.operations.within import runs_whole_layers
from surgeon.language.program import Program
from surgeon.language.recipe import Recipe
from surgeon.models.edit import check_layers
from surgeon.models.families import family_of
from surgeon.models.recipe_program import recipe_program
from surgeon.models.weights import FactorSource, Names, TruncatedSVD
from surgeon.named import name_of
from surgeon.results.measured import Identity

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
FACTOR_ENDINGS = (".first.weight", ".second.weight")
JSON_ALLOWANCE = 1 << 18  # room for the small files that are written beside the weights, in bytes


@dataclass(frozen=True)
class Original(StoredModel):
    """The model that is exported.

    Attributes:
        name: as the user named it: a folder or a hub name.
        companions: what belongs to it beside its weights.
        own: its program, where that is not its layers one after the other (native tracks).
    """

    name: str
    companions: Companions
    own: Program | None = None

    @classmethod
    def open(cls, path_or_name: str | Path) -> Original:
        """Check the model's files and read its configuration; no weights are read.

        Raises:
            FileNotFoundError: if there is no such model, or a file of it is missing.
            ValueError: if a file is damaged or lies elsewhere, the architecture is not supported, or the model is an
                edited one, which does not run each of its layers whole and once.
        """
        return cls.of(Checkpoint(locate(path_or_name)), str(path_or_name))

    @classmethod
    def of(cls, checkpoint: Checkpoint, name: str) -> Original:
        """Open the same from a checkpoint that is open already.

        Raises:
            ValueError: as `open`.
        """
        folder = checkpoint.folder
        form, own = form_of(checkpoint), stored_program(checkpoint)
        if form.shipped is not None and (
            own is None or not runs_whole_layers(own, read_config(checkpoint).num_hidden_layers)
        ):
            raise ValueError(
                f"{folder} is an edited checkpoint already ({form} form); "
                "export the original model, with one recipe that does everything"
            )
        if "quantization_config" in checkpoint.config:
            raise ValueError(
                f"{folder} has quantized weights, which cannot be folded or proven; export the unquantized model"
            )
        config = read_config(checkpoint)
        family = family_of(config)
        # Tensors that are missing, do not fit config.json, or are of no use; further layers may lie idle.
        _, match = original_model(checkpoint, config, buffers=False)
        layers = Names(checkpoint, family).layers
        for tensor in match.unexpected:
            if not tensor.startswith(layers):
                raise ValueError(f"{tensor} is no tensor of {family.name} that surgeon knows; it cannot be exported")
        return cls(checkpoint, config, family, name, companions_of(folder, checkpoint.file_names), own)

    @property
    def public_name(self) -> str:
        """Its name without the place where it lies on this machine."""
        return name_of(self.name)

    def program_of(self, recipe: Recipe) -> Program:
        """The program that a recipe makes of this model."""
        return recipe_program(recipe, self.config, self.own)

    @property
    def unedited(self) -> Program:
        """What it runs."""
        return self.own or Program.dense(self.config.num_hidden_layers, self.family.steps_per_layer)


@dataclass(frozen=True)
class ExportPlan:
    """What an export will write; nothing has been written yet, and no weights read.

    Attributes:
        layout: the form, the reason for it, and the layers.
        tensors: all of the checkpoint's.
        companions: files to be copied, and what is left behind.
        dtype: the dtype asked for, a key of DTYPES, or None to keep each tensor's own.
        factors: of matrices that the program has a rank for.
    """

    original: Original
    program: Program
    layout: Layout
    tensors: list[PlannedTensor]
    companions: Companions
    dtype: str | None
    factors: FactorCache

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    def identity(self, name: str) -> Identity:
        """What measurements must be of, for the card of a checkpoint that is not written yet; weights are read."""
        original, source = self.original, self.original.checkpoint
        return Identity(name, None, self.program, source.model_hash(), self.program, original.unedited)

    @property
    def passes(self) -> int:
        """How often the weights are gone through: the original's run, writing, and one or two runs to prove it."""
        return 4 if any(tensor.rounded for tensor in self.tensors) else 3

    @property
    def needed_bytes(self) -> int:
        """Room that the checkpoint takes on the disk, and the factors that are made for it, in float32 at least."""
        made = [tensor for tensor in self.tensors if self.makes_factors and tensor.name.endswith(FACTOR_ENDINGS)]
        factors = sum(torch.Size(tensor.shape).numel() * max(4, tensor.dtype.itemsize) for tensor in made)
        return self.weight_bytes + factors + self.companions.size + JSON_ALLOWANCE

    @property
    def has_factors(self) -> bool:
        """Whether the program has ranks."""
        return any(sublayer.ranks for sublayer in self.program.sublayers())

    @property
    def makes_factors(self) -> bool:
        """Whether there are no factors yet, so that they are made once, for both runs and for writing."""
        return self.has_factors and self.factors.folder is None

    def config(self) -> dict[str, Any]:
        """config.json of the new checkpoint."""
        form = self.layout.form
        config = form.config(self.original, self.layout, self.tensors)
        if self.dtype is not None:
            config.pop("torch_dtype", None)
            config["dtype"] = self.dtype
        entries = form.class_entries(self.original, self.layout)
        if self.companions.auto_map:
            entries[AUTO_MAP] = self.companions.auto_map | entries.get(AUTO_MAP, {})
        return config | entries


def plan_export(
    original: Original,
    program: Program,
    form: str = "auto",
    dtype: str | None = None,
    factors: FactorSource | None = None,
) -> ExportPlan:
    """Decide what to write.

    Args:
        form: "plain", "fused", "program", or "auto" for the most portable one that is exact.
        dtype: of the written weights, a key of DTYPES; by default each tensor keeps its own.
        factors: of matrices that the program has a rank for; by default their truncated singular values.

    Raises:
        ValueError: if the program does not fit the model or the form, or a tensor is missing.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; {did_you_mean(dtype, DTYPES)}")
    check_layers(program, original.config.num_hidden_layers)
    if original.own is not None and form == "auto":
        form = PROGRAM.name  # what else its config.json says is of its own program
    if original.own is not None and form != PROGRAM.name:
        raise ValueError(
            f"{original.name} runs a program of its own, which only the program form has; leave out --form"
        )
    layout = lay_out(program, original.family, original.config, form)
    kept = factors if isinstance(factors, FactorCache) else FactorCache(factors or TruncatedSVD())
    tensors = layout.form.tensors(original, layout, None if dtype is None else DTYPES[dtype], kept)
    companions = original.companions if layout.form.shipped is None else original.companions.without_model_code()
    return ExportPlan(original, program, layout, tensors, companions, dtype, kept)
