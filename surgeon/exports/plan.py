"""The plan of an export: the model, the form, and every tensor with its sources; nothing has been written yet."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from surgeon.checkpoint.belongings import Companions, companions_of, left_behind
from surgeon.checkpoint.factor_cache import FactorCache
from surgeon.checkpoint.forms import FORMS, PROGRAM, Layout, PlannedTensor, lay_out
from surgeon.checkpoint.forms.planning import plan_copy
from surgeon.checkpoint.stored import QUANTIZATION, StoredModel, Wrapped
from surgeon.errors import did_you_mean
from surgeon.exports.prove import original_model
from surgeon.findings.measured import Identity
from surgeon.language.operations.applied import runs_whole_layers
from surgeon.language.program import Program
from surgeon.models.weights import FactorSource, TruncatedSVD
from surgeon.opened import Model

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
FACTOR_ENDINGS = (".first.weight", ".second.weight")
JSON_ALLOWANCE = 1 << 18  # room for the small files that are written beside the weights, in bytes


def check_exportable(model: Model, program: Program | None = None) -> None:
    """Refuse models that cannot be exported."""
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
            raise ValueError(
                f"{tensor} is no tensor of {model.family.name} that surgeon knows; it cannot be exported"
            )


@dataclass(frozen=True)
class ExportPlan:
    """Everything that an export will write; no weights have been read.

    Attributes:
        layout: the form, the reason for it, and the layers.
        tensors: all of the checkpoint's, but for those around a text decoder.
        companions: files to be copied, and those left behind.
        dtype: the dtype asked for, a key of DTYPES, or None to keep each tensor's own.
        factors: of matrices that the program has a rank for.
    """

    original: Model
    program: Program
    layout: Layout
    tensors: list[PlannedTensor]
    companions: Companions
    dtype: str | None
    factors: FactorCache

    @cached_property
    def stored(self) -> list[PlannedTensor]:
        """The tensors, and around a text decoder everything else, as it is."""
        wrapped = self.layout.wrapped
        if wrapped is None:
            return self.tensors
        of_text, of_others = self.layout.form.names_inside(wrapped)
        carried_on = [plan_copy(wrapped.files, name) for name in wrapped.around]
        renamed = [replace(tensor, name=of_text(tensor.name)) for tensor in self.tensors]
        return renamed + [replace(tensor, name=of_others(tensor.name)) for tensor in carried_on]

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.stored)

    def identity(self, name: str) -> Identity:
        """Identify the checkpoint for its card before it is written; weights are read."""
        return Identity(
            name, None, self.program, self.original.hash, self.program, self.original.program
        )

    @property
    def passes(self) -> int:
        """Readings of the weights: the original's run, writing, and one or two runs to prove it."""
        if any(tensor.rounded for tensor in self.tensors):
            return 4
        return 3

    @property
    def needed_bytes(self) -> int:
        """Bytes on the disk: of the checkpoint, and of factors made for it, in float32 at least."""
        made = [
            tensor
            for tensor in self.tensors
            if self.makes_factors and tensor.name.endswith(FACTOR_ENDINGS)
        ]
        factors = sum(
            torch.Size(tensor.shape).numel() * max(4, tensor.dtype.itemsize) for tensor in made
        )
        beside = sum(path.stat().st_size for path in self.companions.files.values())
        return self.weight_bytes + factors + beside + JSON_ALLOWANCE

    @property
    def has_factors(self) -> bool:
        """True if the program has ranks."""
        return any(sublayer.ranks for sublayer in self.program.sublayers())

    @property
    def makes_factors(self) -> bool:
        """True if factors are still to be made, once for both runs and for writing."""
        return self.has_factors and self.factors.folder is None

    def config(self) -> dict[str, Any]:
        """Return config.json of the new checkpoint."""
        form = self.layout.form
        config = form.config(self.original, self.layout, self.tensors)
        if self.layout.wrapped is not None:
            config = self.layout.wrapped.around_text(config)
        if self.dtype is not None:
            config.pop("torch_dtype", None)
            config["dtype"] = self.dtype
        entries = form.class_entries(self.original, self.layout)
        outside = {key: value for key, value in config.items() if key != QUANTIZATION}
        said = quantisation(self.original, self.layout, self.tensors)
        return (outside if said is None else outside | {QUANTIZATION: said}) | entries

    @property
    def notes(self) -> Iterator[str]:
        """Notes for the user before it is written, a line each."""
        if left := left_behind(self.companions.left):
            yield f"left behind in {self.companions.folder}: {left}"
        if not self.original.checkpoint.quantised:
            return
        schemes = ", ".join(self.original.schemes)
        kept = {tensor.part_of for tensor in self.tensors} - {None}
        computed = [tensor for tensor in self.tensors if tensor.dequantised]
        if not computed:
            yield f"all {len(kept)} matrices stored as {schemes} stay so, bit for bit"
            return
        stored = str(computed[0].dtype).removeprefix("torch.")
        if kept:
            left = f"the other {len(kept)} stay so"
        else:
            left = "none stays so"
        made = f"{len(computed)} matrices made of those stored as {schemes}"
        yield f"{made} are dequantised, and stored in {stored}; {left}"


def plan_export(
    original: Model,
    program: Program,
    form: str = "auto",
    dtype: str | None = None,
    factors: FactorSource | None = None,
    companions: Companions | None = None,
    wrapped: Wrapped | None = None,
) -> ExportPlan:
    """Choose a form and plan its tensors.

    Args:
        form: "plain", "fused", "program", or "auto" for the most portable one that is exact.
        dtype: of the written weights, a key of DTYPES; by default each tensor keeps its own.
        factors: of matrices that the program has a rank for; by default their truncated singular values.
        companions: files that go along; by default those beside the model's weights.
        wrapped: a wrapper for the text decoder; by default its own.
    """
    check_exportable(original, program)
    check_storage(form, dtype)
    original.check(program)
    layout = layout_of(original, program, form, wrapped)
    if isinstance(factors, FactorCache):
        kept = factors
    else:
        kept = FactorCache(factors or TruncatedSVD())
    tensors = layout.form.tensors(original, layout, DTYPES.get(dtype or ""), kept)
    companions = companions or companions_of(original.folder, original.checkpoint.file_names)
    return ExportPlan(original, program, layout, tensors, companions, dtype, kept)


def layout_of(
    original: Model, program: Program, form: str = "auto", wrapped: Wrapped | None = None
) -> Layout:
    """Lay out a program of a model; `wrapped` as `plan_export` takes it."""
    original.check(program)
    # What else the config.json of its own program form says is of its own program.
    is_of_its_own = (
        original.own is not None and original.form is PROGRAM and not original.checkpoint.imported
    )
    if is_of_its_own and form == "auto":
        form = PROGRAM.name
    if is_of_its_own and form != PROGRAM.name:
        raise ValueError(
            f"{original.name} runs a program of its own, which only the program form has; leave form out"
        )
    return lay_out(program, original.family, original.config, form, wrapped=wrapped or original.wrapped)


def check_storage(form: str, dtype: str | None) -> None:
    """Refuse an unknown form or dtype before any work."""
    for what, given, known in (("form", form, ("auto", *FORMS)), ("dtype", dtype, tuple(DTYPES))):
        if given is not None and given not in known:
            raise ValueError(f"unknown {what} {given!r}; {did_you_mean(given, known)}")


# Where each method lists the modules that it leaves alone, by name: the first of these that is there is read.
_LEFT_ALONE = {
    "fp8": ("modules_to_not_convert", "ignored_layers"),
    "awq": ("modules_to_not_convert",),
    "mxfp4": ("modules_to_not_convert",),
    "compressed-tensors": ("ignore",),
    "bitsandbytes": ("llm_int8_skip_modules",),
}
_BY_PATTERN = "dynamic"  # of GPTQ: patterns of modules, of which "-:" leaves those that match alone


def quantisation(
    original: StoredModel, layout: Layout, tensors: Sequence[PlannedTensor]
) -> dict[str, Any] | None:
    """Return the quantization_config of a checkpoint; None where nothing in it is quantised any more.

    Entries that name layers of the text decoder follow them to their new numbers; dequantised modules are named among
    those left alone.
    """
    checkpoint = original.checkpoint
    if not any(tensor.part_of is not None for tensor in tensors):
        return None
    wrapped = original.wrapped
    layers = original.family.layers
    stored: Callable[[str], str] = str
    before = ""
    if wrapped is not None:
        stored = wrapped.stored_name
        before = re.escape(stored(f"{layers}.").removesuffix(f"{layers.rpartition('.')[2]}."))
    number = re.compile(rf"{before}(?<![^.\\^*(:]){layers.rpartition('.')[2]}(\\?\.)(\d+)(?!\d)")

    def renamed(name: str) -> list[str]:
        """List the new names of a module, whose layer may lie in several, or in none."""
        match = number.search(name)
        if match is None:
            return [name]
        return [
            f"{name[: match.start(2)]}{new}{name[match.end(2) :]}"
            for new, layer in enumerate(layout.layers)
            if int(match[2]) in layer.sources
        ]

    followed: dict[str, Any] = _rename_modules(
        copy.deepcopy(checkpoint.entries.get(QUANTIZATION) or checkpoint.config[QUANTIZATION]), renamed
    )
    dense = list(
        dict.fromkeys(stored(one.name).rpartition(".")[0] for one in tensors if one.dequantised)
    )
    method = followed["quant_method"]
    head = stored(f"{original.family.head}.weight").removesuffix(".weight")
    if method == "gptq":
        patterns: dict[str, Any] = {rf"-:^{re.escape(module)}$": {} for module in dense}
        return followed | ({_BY_PATTERN: (followed.get(_BY_PATTERN) or {}) | patterns} if dense else {})
    keys = _LEFT_ALONE[method]
    key = next((one for one in keys if followed.get(one) is not None), keys[0])
    if dense:  # a list that is not there stands for the head alone
        followed[key] = [*(followed.get(key) or [head]), *dense]
    return followed


def _rename_modules(said: Any, renamed: Callable[[str], list[str]]) -> Any:
    """Rename modules, in lists or as keys, once for each layer that holds them."""
    if isinstance(said, dict):
        return {
            new: _rename_modules(value, renamed) for key, value in said.items() for new in renamed(key)
        }
    if isinstance(said, list):
        names = (
            renamed(one) if isinstance(one, str) else [_rename_modules(one, renamed)] for one in said
        )
        return [new for one in names for new in one]
    return said
