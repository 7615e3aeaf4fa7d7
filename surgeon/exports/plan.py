"""What an export will write: the model, the form, and every tensor with its sources; nothing has been written yet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from surgeon.checkpoint.companions import Companions, companions_of, left_behind
from surgeon.checkpoint.factor_cache import FactorCache
from surgeon.checkpoint.forms import FORMS, PROGRAM, Layout, PlannedTensor, lay_out
from surgeon.checkpoint.forms.planning import carried
from surgeon.checkpoint.forms.quantisation import quantisation
from surgeon.checkpoint.read import QUANTIZATION, Wrapped
from surgeon.errors import did_you_mean
from surgeon.exports.prove import original_model
from surgeon.findings.measured import Identity
from surgeon.language.operations.within import runs_whole_layers
from surgeon.language.program import Program
from surgeon.models.weights import FactorSource, TruncatedSVD
from surgeon.opened import Model

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
FACTOR_ENDINGS = (".first.weight", ".second.weight")
JSON_ALLOWANCE = 1 << 18  # room for the small files that are written beside the weights, in bytes


def check_exportable(model: Model, program: Program | None = None) -> None:
    """Refuse what no export can be made of.

    Args:
        program: that is to be exported, by default its own.

    Raises:
        ValueError: if the model is an edited one, which does not run each of its layers whole and once, a
            tensor is missing or does not fit config.json, or there is one that surgeon does not know.
    """
    folder = model.folder
    is_edited = model.form.shipped is not None and not model.checkpoint.imported
    if is_edited and (model.own is None or not runs_whole_layers(model.own, model.num_layers)):
        raise ValueError(
            f"{folder} is an edited checkpoint already ({model.form} form); "
            "export the original model, with one recipe that does everything"
        )
    _, match = original_model(model, program, buffers=False)
    layers = model.weights.names.layers
    for tensor in match.unexpected:
        if not tensor.startswith(layers):  # further layers may lie idle
            raise ValueError(f"{tensor} is no tensor of {model.family.name} that surgeon knows; it cannot be exported")


@dataclass(frozen=True)
class ExportPlan:
    """What an export will write; nothing has been written yet, and no weights read.

    Attributes:
        layout: the form, the reason for it, and the layers.
        tensors: all of the checkpoint's, but for what is around a text decoder.
        companions: files to be copied, and what is left behind.
        dtype: the dtype asked for, a key of DTYPES, or None to keep each tensor's own.
        factors: of matrices that the program has a rank for.
        wrapped: what the layers stand in, if they are a text decoder's.
    """

    original: Model
    program: Program
    layout: Layout
    tensors: list[PlannedTensor]
    companions: Companions
    dtype: str | None
    factors: FactorCache
    wrapped: Wrapped | None = None

    @cached_property
    def stored(self) -> list[PlannedTensor]:
        """What files hold: the tensors, and around a text decoder everything else, as it is."""
        if self.wrapped is None:
            return self.tensors
        of_text, of_others = self.layout.form.names_inside(self.wrapped)
        carried_on = [carried(self.wrapped.files, name) for name in self.wrapped.around]
        renamed = [replace(tensor, name=of_text(tensor.name)) for tensor in self.tensors]
        return renamed + [replace(tensor, name=of_others(tensor.name)) for tensor in carried_on]

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.stored)

    def identity(self, name: str) -> Identity:
        """What measurements must be of, for the card of a checkpoint that is not written yet; weights are read."""
        return Identity(name, None, self.program, self.original.hash, self.program, self.original.program)

    @property
    def passes(self) -> int:
        """How often the weights are gone through: the original's run, writing, and one or two runs to prove it."""
        if any(tensor.rounded for tensor in self.tensors):
            return 4
        return 3

    @property
    def needed_bytes(self) -> int:
        """Room that the checkpoint takes on the disk, and the factors that are made for it, in float32 at least."""
        made = [tensor for tensor in self.tensors if self.makes_factors and tensor.name.endswith(FACTOR_ENDINGS)]
        factors = sum(torch.Size(tensor.shape).numel() * max(4, tensor.dtype.itemsize) for tensor in made)
        beside = sum(path.stat().st_size for path in self.companions.files.values())
        return self.weight_bytes + factors + beside + JSON_ALLOWANCE

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
        if self.wrapped is not None:
            config = self.wrapped.around_text(config)
        if self.dtype is not None:
            config.pop("torch_dtype", None)
            config["dtype"] = self.dtype
        entries = form.class_entries(self.original, self.layout)
        outside = {key: value for key, value in config.items() if key != QUANTIZATION}
        said = quantisation(self.original, self.layout, self.tensors)
        return (outside if said is None else outside | {QUANTIZATION: said}) | entries

    @property
    def notes(self) -> Iterator[str]:
        """What there is to know of it before it is written, a line each."""
        if left := left_behind(self.companions.left):
            yield f"left behind in {self.companions.folder}: {left}"
        if self.original.checkpoint.quantised:
            yield self._of_quantised

    @property
    def _of_quantised(self) -> str:
        """What becomes of quantised matrices."""
        schemes = ", ".join(self.original.schemes)
        kept = {tensor.part_of for tensor in self.tensors} - {None}
        computed = [tensor for tensor in self.tensors if tensor.dequantised]
        if not computed:
            return f"all {len(kept)} matrices stored as {schemes} stay so, bit for bit"
        stored = str(computed[0].dtype).removeprefix("torch.")
        left = f"the other {len(kept)} stay so" if kept else "none stays so"
        made = f"{len(computed)} matrices made of those stored as {schemes}"
        return f"{made} are dequantised, and stored in {stored}; {left}"


def plan_export(
    original: Model,
    program: Program,
    form: str = "auto",
    dtype: str | None = None,
    factors: FactorSource | None = None,
    companions: Companions | None = None,
    wrapped: Wrapped | None = None,
) -> ExportPlan:
    """Decide what to write.

    Args:
        form: "plain", "fused", "program", or "auto" for the most portable one that is exact.
        dtype: of the written weights, a key of DTYPES; by default each tensor keeps its own.
        factors: of matrices that the program has a rank for; by default their truncated singular values.
        companions: what goes along; by default what lies beside the model's weights.
        wrapped: what a text decoder is to stand in; by default what it stands in already.

    Raises:
        ValueError: if the program does not fit the model or the form, or as `check_exportable`.
        FileNotFoundError: as `companions_of`.
    """
    check_exportable(original, program)
    check_storage(form, dtype)
    original.check(program)
    wrapped = wrapped or original.wrapped
    layout = layout_of(original, program, form, wrapped)
    if isinstance(factors, FactorCache):
        kept = factors
    else:
        kept = FactorCache(factors or TruncatedSVD())
    tensors = layout.form.tensors(original, layout, None if dtype is None else DTYPES[dtype], kept)
    companions = companions or companions_of(original.folder, original.checkpoint.file_names)
    return ExportPlan(original, program, layout, tensors, companions, dtype, kept, wrapped)


def layout_of(original: Model, program: Program, form: str = "auto", wrapped: Wrapped | None = None) -> Layout:
    """The layers that a program of a model is stored as; `wrapped` as `plan_export` takes it.

    Raises:
        ValueError: as `Model.check`; or if the program does not fit the form.
    """
    original.check(program)
    # What else the config.json of its own program form says is of its own program.
    is_of_its_own = original.own is not None and original.form is PROGRAM and not original.checkpoint.imported
    if is_of_its_own and form == "auto":
        form = PROGRAM.name
    if is_of_its_own and form != PROGRAM.name:
        raise ValueError(f"{original.name} runs a program of its own, which only the program form has; leave form out")
    return lay_out(program, original.family, original.config, form, wrapped=wrapped or original.wrapped)


def check_storage(form: str, dtype: str | None) -> None:
    """Refuse a form or a dtype that nothing is stored in, before any work.

    Raises:
        ValueError: naming it.
    """
    for what, given, known in (("form", form, ("auto", *FORMS)), ("dtype", dtype, tuple(DTYPES))):
        if given is not None and given not in known:
            raise ValueError(f"unknown {what} {given!r}; {did_you_mean(given, known)}")
