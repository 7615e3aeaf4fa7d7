"""`surgeon export`: write an edited model as a checkpoint that other software loads, proven before it gets its name.

A plan comes first: the form, and every tensor with its sources. A checkpoint appears under its name whole, or not at
all, and replaces nothing but another one.
"""

from __future__ import annotations

import copy
import math
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedConfig

from surgeon.checkpoint.belongings import (
    CARD_FILE,
    CARRIED,
    CODAS,
    TEMPLATES,
    Companions,
    companions_of,
    inherit,
    kind_of,
    left_behind,
)
from surgeon.checkpoint.describe import Training, layers_by_recipe
from surgeon.checkpoint.factor_cache import FactorCache
from surgeon.checkpoint.forms import FORMS, PROGRAM, Layout, lay_out
from surgeon.checkpoint.forms.planning import plan_copy
from surgeon.checkpoint.stored import QUANTIZATION, REPORT_FILE, StoredModel, Wrapped
from surgeon.checkpoint.tensor_file import (
    FileRecord,
    PlannedTensor,
    Writing,
    read_json,
    shard_limit,
    split_into_shards,
)
from surgeon.exports.prove import Proof, original_model, prove, reference_of, require_alike
from surgeon.findings.card import write_card
from surgeon.findings.measured import CardScore, Identity
from surgeon.language.operations.applied import runs_whole_layers
from surgeon.language.program import Program
from surgeon.machine import Background, one_at_a_time, show_size, torch_threads
from surgeon.models.weights import FactorSource, TruncatedSVD
from surgeon.opened import Model, versions
from surgeon.processes.files import (
    check_space,
    is_full_disk,
    publish,
    scratch,
    sync_tree,
    write_json,
)
from surgeon.progress import Advance, stretch
from surgeon.version import __version__
from surgeon.words import did_you_mean, first_few

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
    def stored_tensors(self) -> list[PlannedTensor]:
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
        return sum(tensor.num_bytes for tensor in self.stored_tensors)

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
        factors = 0
        if self.makes_factors:
            made = [tensor for tensor in self.tensors if tensor.name.endswith(FACTOR_ENDINGS)]
            factors = sum(math.prod(one.shape) * max(4, one.dtype.itemsize) for one in made)
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
        config.pop(QUANTIZATION, None)
        if (said := quantisation(self.original, self.layout, self.tensors)) is not None:
            config[QUANTIZATION] = said
        return config | entries

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
    for what, given, choices in (("form", form, ("auto", *FORMS)), ("dtype", dtype, tuple(DTYPES))):
        if given is not None and given not in choices:
            raise ValueError(f"unknown {what} {given!r}; {did_you_mean(given, choices)}")


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

    def new_names(name: str) -> list[str]:
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
        copy.deepcopy(checkpoint.entries.get(QUANTIZATION) or checkpoint.config[QUANTIZATION]), new_names
    )
    dense = list(
        dict.fromkeys(stored(one.name).rpartition(".")[0] for one in tensors if one.dequantised)
    )
    if not dense:
        return followed
    method = followed["quant_method"]
    if method == "gptq":
        patterns: dict[str, Any] = {rf"-:^{re.escape(module)}$": {} for module in dense}
        return followed | {_BY_PATTERN: (followed.get(_BY_PATTERN) or {}) | patterns}
    keys = _LEFT_ALONE[method]
    key = next((one for one in keys if followed.get(one) is not None), keys[0])
    # A list that is not there stands for the head alone.
    head = stored(f"{original.family.head}.weight").removesuffix(".weight")
    return followed | {key: [*(followed.get(key) or [head]), *dense]}


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


TOKENIZER_CONFIG = "tokenizer_config.json"


# What lies in a checkpoint's folder beside the files that surgeon.json lists, and those that models hand on.
FILES = (
    "config.json",
    REPORT_FILE,
    CARD_FILE,
    ".gitattributes",
    "*.safetensors",
    "*.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model.bin.index.json",
    "modeling_*.py",
    "configuration_*.py",
    f"{CODAS}/codas.json",
    f"{CODAS}/rack-*.safetensors",
    f"{TEMPLATES}/*.jinja",
)
MOST_NAMED = 3  # of the things in the way


@contextmanager
def stage_folder(target: Path, overwrite: bool = False) -> Iterator[Path]:
    """Give a new, empty folder beside the target; when the block ends, it becomes the target.

    If the block raises, the folder is removed and the target is as it was.

    Args:
        overwrite: replace an existing checkpoint folder (the old one stays whole until the new one is).
    """
    target = Path.cwd() / target
    check_target(target, overwrite)
    with scratch(target) as folder:
        yield folder
        sync_tree(folder)
        check_target(target, overwrite)  # it may have come into being meanwhile
        publish(folder, target)


def check_target(target: Path, overwrite: bool) -> None:
    """Refuse a target that exists, unless it is empty, or a checkpoint that may be overwritten (`why_kept`)."""
    if not os.path.lexists(target):
        return
    if not target.is_dir() or target.is_symlink():
        raise FileExistsError(f"{target} exists and is not a folder; choose another name")
    if not any(target.iterdir()):
        return
    if not overwrite:
        raise FileExistsError(
            f"{target} exists and is not empty; choose another name, or pass `overwrite`"
        )
    reason = why_kept(target)
    if reason is not None:
        raise FileExistsError(
            f"{target} {reason}, so `overwrite` does not replace it; choose another name, or clear it yourself"
        )


def why_kept(folder: Path) -> str | None:
    """Say why a folder must not be replaced, as the end of a sentence; None if it is a checkpoint and no more.

    A checkpoint has the surgeon.json of an export, or a config.json with a model's type beside safetensors weights.
    """
    report = _object(folder / "surgeon.json")
    config = _object(folder / "config.json")
    exported = all(isinstance(report.get(key), str) for key in ("surgeon", "form", "program"))
    is_model = isinstance(config.get("model_type"), str) and any(folder.glob("*.safetensors"))
    if not exported and not is_model:
        return "is no checkpoint: it has no surgeon.json of an export, and no config.json with a model_type and weights"
    listed = report.get("files") if exported else None
    listed_names = set(listed) if isinstance(listed, dict) else set()
    others = sorted(path.name for path in folder.iterdir() if not _belongs(path, folder, listed_names))
    if others:
        return f"holds what is no part of a checkpoint ({first_few(others, MOST_NAMED)})"
    return None


def _belongs(path: Path, folder: Path, listed_names: set[str]) -> bool:
    """Tell whether a checkpoint has such a file, or folder of nothing else; none has links."""
    name = path.relative_to(folder).as_posix()
    if path.is_symlink():
        return False
    if path.is_dir():
        inside = [*path.iterdir()]
        return bool(inside) and all(_belongs(one, folder, listed_names) for one in inside)
    patterns = (one for one in FILES if one.count("/") == name.count("/"))
    is_known = name in listed_names or any(fnmatchcase(name, one) for one in patterns)
    return path.is_file() and (is_known or ("/" not in name and kind_of(name) in CARRIED))


def _object(path: Path) -> dict[str, Any]:
    """Read a JSON file's object; empty if there is none."""
    try:
        if path.is_file():
            return read_json(path)
        return {}
    except (OSError, ValueError):
        return {}


def write_export(
    plan: ExportPlan,
    target: Path,
    overwrite: bool = False,
    recipe: str | None = None,
    advance: Advance = lambda _: None,
    measured: Sequence[CardScore] = (),
    alive: Callable[[Tensor], Tensor] | None = None,
    training: Training | None = None,
    complete: Callable[[Path], None] = lambda _: None,
) -> Proof:
    """Write the checkpoint, prove it, and give it its name.

    Args:
        overwrite: replace an existing checkpoint under the target's name.
        recipe: the recipe's text, to be kept in surgeon.json.
        advance: called with bytes gone through, in all `plan.passes` times `plan.weight_bytes`.
        measured: for the model card.
        alive: logits (batch, tokens, vocabulary) on tokens of a model in memory that the original was written from.
        training: of that model, whose original is another one then; its recipe counts.
        complete: adds files that belong to the checkpoint to its folder, before that gets its name.

    Raises:
        NotProven: if the written checkpoint does not compute the program, or that is not of the recipe that the model
            was trained with.
        FileExistsError: if the target is in the way.
        OSError: if the disk is full or cannot be written. On any error, the target is as it was before.
    """
    original = plan.original
    size = plan.weight_bytes
    source = original.checkpoint
    check_apart(source.folder, target)
    check_target(target, overwrite)
    needed = plan.needed_bytes
    check_space(target.parent, needed)
    for note in plan.notes:
        warnings.warn(note, stacklevel=2)
    edits = edit_record(plan, recipe, training)
    advance = one_at_a_time(advance)
    hashing = Background(source.model_hash)  # reads all files once more, beside everything else
    try:
        with ExitStack() as stack:
            # One thread for each thing that goes on at once; factors are long work of one, and get all but one core.
            stack.enter_context(
                torch_threads(max(1, torch.get_num_threads() - 1) if plan.has_factors else 1)
            )
            if plan.makes_factors:
                stack.enter_context(plan.factors.inside(stack.enter_context(scratch(target))))

            # Stage: a folder beside the target, with everything but the weights.
            folder = stack.enter_context(stage_folder(target, overwrite))
            write_json(folder / "config.json", plan.config())
            for name, path in plan.companions.files.items():  # links as the files that they lead to
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(path, folder / name)
            if (shipped := plan.layout.form.shipped) is not None:
                (folder / shipped.file_name).write_text(shipped.text())
                keep_tokenizer_class(folder, original.config)

            # Write, and read back what was written, while the original runs with the program.
            shards = split_into_shards(plan.stored_tensors, shard_limit(source.weight_files))
            with Writing(folder, shards, advance) as writing:
                with stretch(advance, size) as read:
                    reference = reference_of(original, plan.program, read, plan.factors)
                if alive is not None:
                    require_alike(reference, alive, {source.dtype(name) for name in source.names()})

                # Prove: run what is written, as far as it is, and compare.
                with stretch(advance, (plan.passes - 2) * size) as read:
                    proof = prove(reference, folder, plan.layout.form, plan.tensors, writing.wait, read)
                records = writing.finish()

            # Name: the last words, and then the folder becomes the target as the block ends.
            hashing.result()
            names = sorted(
                one.relative_to(folder).as_posix() for one in folder.rglob("*") if one.is_file()
            )
            companions = plan.companions
            report = {
                "surgeon": __version__,
                "source": source_record(original, companions.folder),
                **edits,
                "companions": {"carried": sorted(companions.files), "left_behind": companions.left},
                "proof": asdict(proof),
                "files": {
                    name: asdict(records.get(name) or FileRecord.of(folder / name)) for name in names
                },
                "versions": versions(),
            }
            write_json(folder / REPORT_FILE, report)
            inherited = write_card(folder, target.absolute().name, measured)
            complete(folder)
    except OSError as error:
        if not is_full_disk(error):
            raise
    else:
        for note in inherited.notes:
            warnings.warn(f"the base model's card: {note}", stacklevel=2)
        return proof
    # Raised outside the handler, to stand for itself: it says more than the system's error that it comes from.
    raise OSError(
        f"the disk of {target.parent} filled up: {show_size(needed)} are needed; what was written is removed"
    )


def check_apart(source: Path, target: Path) -> None:
    """Refuse a target that is the original's folder, or lies around or inside it."""
    first = source.resolve()
    second = target.resolve()
    if first == second or first in second.parents or second in first.parents:
        raise ValueError(
            f"the target {target} and the model's folder {source} must lie apart; choose another target"
        )


def keep_tokenizer_class(folder: Path, config: Any) -> None:
    """Have `AutoTokenizer` open a written checkpoint's tokenizer in the original's class, if any.

    It goes by the model type where the tokenizer's files name no class (GPT-2's own do not), or one known to be wrong
    for that type (Phi3's); a type of the checkpoint's own would get another class, and so other tokens.
    """
    try:
        wanted = type(AutoTokenizer.from_pretrained(folder, config=config, trust_remote_code=False))
        written = PreTrainedConfig.from_dict(read_json(folder / "config.json"))
        found = type(AutoTokenizer.from_pretrained(folder, config=written, trust_remote_code=False))
    except Exception:  # noqa: BLE001 - a tokenizer that cannot be read is copied as it is
        return
    if found is not wanted:
        path = folder / TOKENIZER_CONFIG
        stored = read_json(path) if path.exists() else {}
        write_json(path, stored | {"tokenizer_class": wanted.__name__})


def edit_record(plan: ExportPlan, recipe: str | None, training: Training | None) -> dict[str, Any]:
    """Return surgeon.json's record of the edit."""
    program = plan.program if training is None else training.recipe_program
    record = {
        "form": plan.layout.form.name,
        "reason": plan.layout.reason,
        "program": str(program),
        "effective_depth": program.effective_depth(plan.original.family.steps_per_layer),
        "sync_points_on_two_ranks": program.sync_points(2),
        "recipe": recipe,
    }
    if training is None:
        return record
    whose = layers_by_recipe(program, plan.program)
    return record | {
        "recipe": training.recipe,
        "source": training.source,
        "trained": training.training,
        # For each layer, the original's layers that it is made of.
        "stored_layers": [
            list(
                dict.fromkeys(
                    of
                    for one in layer.sublayers
                    for at in one.layers
                    for of in whose.get((one.kind, at), ())
                )
            )
            for layer in plan.layout.layers
        ],
    }


def source_record(original: Model, home: Path | None = None) -> dict[str, Any]:
    """Return surgeon.json's record of the original; its files are read for their hash, once."""
    return {
        "model": original.public_name,
        "num_layers": original.num_layers,
        **({} if original.own is None else {"program": str(original.own)}),
        "parameters": original.parameters,
        "model_hash": original.hash,
        "card": inherit(home or original.folder).to_json(),
        **original.gguf,
    }
