"""`surgeon export`: write an edited model as a checkpoint that other software loads, proven before it gets its name."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import surgeon
from surgeon.beside import Background, Beside, Stopped, one_at_a_time, torch_threads
from surgeon.checkpoint.awaited import WholeFiles
from surgeon.checkpoint.companions import AUTO_MAP, Companions, companions_of, left_behind
from surgeon.checkpoint.describe import REPORT_FILE, Weights
from surgeon.checkpoint.forms import PROGRAM, Layout, PlannedTensor, StoredModel, form_of, lay_out
from surgeon.checkpoint.inherit import inherit
from surgeon.checkpoint.kept_factors import KeptFactors
from surgeon.checkpoint.load import read_config, stored_program
from surgeon.checkpoint.read import Checkpoint, locate
from surgeon.checkpoint.tokenizer import keep_tokenizer_class
from surgeon.checkpoint.training import Training, layers_by_recipe, layers_of_the_original
from surgeon.checkpoint.verify import FileRecord, ReadBack
from surgeon.checkpoint.write import work_of_writing
from surgeon.errors import did_you_mean
from surgeon.exports.prove import Proof, Reference, original_model, prove, reference_of, require_alike
from surgeon.exports.staging import check_space, check_target, is_full, scratch, show_bytes, staged
from surgeon.language.operations.within import runs_whole_layers
from surgeon.language.program import Program
from surgeon.language.recipe import Recipe
from surgeon.models.edit import check_layers
from surgeon.models.families import Family, family_of
from surgeon.models.recipe_program import recipe_program
from surgeon.models.weights import FactorSource, Names, TruncatedSVD
from surgeon.named import name_of
from surgeon.progress import Advance, stretch
from surgeon.provenance import versions, write_json
from surgeon.results.card import write_card
from surgeon.results.measured import Identity, Measured

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
        """The same of a checkpoint that is open.

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
        _check_tensors(checkpoint, config, family)
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


def _check_tensors(checkpoint: Checkpoint, config: Any, family: Family) -> None:
    """Refuse tensors that are missing, do not fit config.json, or are of no use; further layers may lie idle."""
    _, names = original_model(checkpoint, config, buffers=False)
    layers = Names(checkpoint, family).layers
    for name in names.unexpected:
        if not name.startswith(layers):
            raise ValueError(f"{name} is no tensor of {family.name} that surgeon knows; it cannot be exported")


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
    factors: KeptFactors

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
        """Room that the checkpoint takes on the disk."""
        return self.weight_bytes + self._factor_bytes + self.companions.size + JSON_ALLOWANCE

    @property
    def factors_are_made(self) -> bool:
        """Whether the program has ranks."""
        return any(sublayer.ranks for sublayer in self.program.sublayers())

    @property
    def _factor_bytes(self) -> int:
        """Room for factors while they are made, which takes float32 at least, and are used several times."""
        if self.factors.folder is not None or not self.factors_are_made:
            return 0
        factors = [tensor for tensor in self.tensors if tensor.name.endswith(FACTOR_ENDINGS)]
        return sum(torch.Size(tensor.shape).numel() * max(4, tensor.dtype.itemsize) for tensor in factors)


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
    kept = factors if isinstance(factors, KeptFactors) else KeptFactors(factors or TruncatedSVD())
    tensors = layout.form.tensors(original, layout, None if dtype is None else DTYPES[dtype], kept)
    companions = original.companions if layout.form.shipped is None else original.companions.without_model_code()
    return ExportPlan(original, program, layout, tensors, companions, dtype, kept)


def write_export(
    plan: ExportPlan,
    target: Path,
    overwrite: bool = False,
    recipe: str | None = None,
    advance: Advance = lambda _: None,
    measured: Measured | None = None,
    alive: Callable[[Tensor], Tensor] | None = None,
    training: Training | None = None,
) -> Proof:
    """Write the checkpoint, prove it, and give it its name.

    Args:
        overwrite: replace an existing checkpoint under the target's name.
        recipe: the recipe's text, to be kept in surgeon.json.
        advance: told of every amount of bytes gone through, in all `plan.passes` times `plan.weight_bytes`.
        measured: for the model card.
        alive: logits (batch, tokens, vocabulary) of a model in memory that the original was written from, on tokens.
        training: of that model, whose original is another one then; its recipe counts.

    Raises:
        NotProven: if what was written does not compute what the program does, or it is not that of the recipe that
            the model was trained with.
        FileExistsError: if the target is in the way.
        OSError: if the disk is full or cannot be written. Whatever is raised, what was under the target's name before
            is there as it was, and nothing else.
    """
    source = plan.original.checkpoint
    check_apart(source.folder, target)
    check_target(target, overwrite)
    check_space(target.parent, plan.needed_bytes)
    if left := left_behind(plan.companions.left):
        warnings.warn(f"left behind in {plan.companions.folder}: {left}", stacklevel=2)
    if code := sorted(plan.companions.model_code):
        warnings.warn(
            f"the model's own code goes along ({', '.join(code)}); the proof is of the class that transformers has",
            stacklevel=2,
        )
    told = _told_of(plan, recipe) if training is None else _told_of_training(plan, training)
    # One thread for each of the things that go on side by side; factors are long work of one, and get all but one core.
    threads = max(1, torch.get_num_threads() - 1) if plan.factors_are_made else 1
    with torch_threads(threads), _factors_once(plan, target):
        return _write_and_prove(plan, target, overwrite, told, one_at_a_time(advance), measured, alive)


@contextmanager
def _factors_once(plan: ExportPlan, target: Path) -> Iterator[None]:
    """While inside, factors are made once, for the original's run, for writing and for the proof."""
    if plan.factors.folder is not None or not plan.factors_are_made:
        yield
        return
    with scratch(target) as folder:
        plan.factors.folder = folder
        try:
            yield
        finally:
            plan.factors.folder = None


def _write_and_prove(
    plan: ExportPlan,
    target: Path,
    overwrite: bool,
    told: dict[str, Any],
    advance: Advance,
    measured: Measured | None,
    alive: Callable[[Tensor], Tensor] | None,
) -> Proof:
    source, size = plan.original.checkpoint, plan.weight_bytes
    hashing = Background(source.model_hash)  # reads all files once more, beside everything else
    try:
        with staged(target, overwrite) as partial:
            _write_companions(partial, plan)
            read_back, whole = ReadBack(), WholeFiles()
            write = work_of_writing(source, plan.tensors, partial, whole, advance, read_back.add)
            with read_back, Beside(write) as writing:
                with stretch(advance, size) as read:
                    reference = reference_of(source, plan.original.config, plan.program, read, plan.factors)
                if alive is not None:
                    require_alike(reference, alive, {source.dtype(name) for name in source.names()})
                with stretch(advance, (plan.passes - 2) * size) as read:
                    proof = _prove_beside(writing, plan, reference, partial, whole, read)
                records = writing.result()
                read_back.finish()
            hashing.result()
            report = {"surgeon": surgeon.__version__, "source": source_record(plan.original)} | told
            report["companions"] = plan.companions.to_json()
            write_json(partial / REPORT_FILE, report | _proven(proof, _with_others(partial, records)))
            inherited = write_card(partial, target.absolute().name, measured)
        for note in inherited.notes:
            warnings.warn(f"the base model's card: {note}", stacklevel=2)
        return proof
    except OSError as error:
        if not is_full(error):
            raise
    # Raised outside the handler, to stand for itself: it says more than the system's error that it comes from.
    needed = show_bytes(plan.needed_bytes)
    raise OSError(f"the disk of {target.parent} filled up: {needed} are needed; what was written is removed")


def _prove_beside(
    writing: Beside[dict[str, FileRecord]],
    plan: ExportPlan,
    reference: Reference,
    partial: Path,
    whole: WholeFiles,
    advance: Advance,
) -> Proof:
    """Prove what is being written, of which some files are whole already."""
    try:
        return prove(reference, partial, plan.layout.form, plan.tensors, whole, advance)
    except Stopped:
        writing.result()  # raises what has kept a file from becoming whole
        raise


def _with_others(partial: Path, records: dict[str, FileRecord]) -> dict[str, FileRecord]:
    """What every file in the folder holds; that of those without a record is read."""
    names = sorted(path.relative_to(partial).as_posix() for path in partial.rglob("*") if path.is_file())
    return {name: records[name] if name in records else FileRecord.of(partial / name) for name in names}


def check_apart(source: Path, target: Path) -> None:
    """Refuse a target that is the original's folder, or lies around or inside it.

    Raises:
        ValueError: naming both.
    """
    first, second = source.resolve(), target.resolve()
    if first == second or first in second.parents or second in first.parents:
        raise ValueError(
            f"the target {target} and the model's folder {source} must lie apart; choose another target with -o"
        )


def written_config(plan: ExportPlan) -> dict[str, Any]:
    """config.json of the new checkpoint."""
    form = plan.layout.form
    config = form.config(plan.original, plan.layout, plan.tensors)
    if plan.dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = plan.dtype
    entries = form.class_entries(plan.original, plan.layout)
    if plan.companions.auto_map:
        entries[AUTO_MAP] = plan.companions.auto_map | entries.get(AUTO_MAP, {})
    return config | entries


def _write_companions(partial: Path, plan: ExportPlan) -> None:
    """Everything but the weights and the report."""
    write_json(partial / "config.json", written_config(plan))
    plan.companions.copy_to(partial)
    shipped = plan.layout.form.shipped
    if shipped is not None:
        shutil.copyfile(shipped.file, partial / shipped.file.name)
        keep_tokenizer_class(partial, plan.original.config)


def _told_of(plan: ExportPlan, recipe: str | None) -> dict[str, Any]:
    """What surgeon.json says of what was done."""
    return _done(plan, plan.program) | {"recipe": recipe}


def _told_of_training(plan: ExportPlan, training: Training) -> dict[str, Any]:
    """The same of a trained model: its recipe's program, over the layers of the original that it once was.

    Raises:
        NotProven: if the model runs another program.
    """
    whose = layers_by_recipe(training.recipe_program, plan.program)
    return _done(plan, training.recipe_program) | {
        "recipe": training.recipe,
        "source": training.source,
        "trained": training.training,
        "stored_layers": layers_of_the_original(plan.layout, whose),
    }


def _done(plan: ExportPlan, program: Program) -> dict[str, Any]:
    return {
        "form": plan.layout.form.name,
        "reason": plan.layout.reason,
        "program": str(program),
        "effective_depth": program.effective_depth(plan.original.family.steps_per_layer),
        "sync_points_on_two_ranks": program.sync_points(2),
    }


def source_record(original: Original) -> dict[str, Any]:
    """What surgeon.json says of the original; its files are read for their hash, once."""
    return {
        "model": original.public_name,
        "num_layers": original.config.num_hidden_layers,
        **({} if original.own is None else {"program": str(original.own)}),
        "parameters": Weights.of(original.checkpoint).parameters,
        "model_hash": original.checkpoint.model_hash(),
        "card": inherit(original.companions.folder).to_json(),
    }


def _proven(proof: Proof, files: dict[str, FileRecord]) -> dict[str, Any]:
    """How it was proven, and what was written."""
    return {
        "proof": asdict(proof),
        "files": {name: asdict(record) for name, record in files.items()},
        "versions": versions(),
    }
