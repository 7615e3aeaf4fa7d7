"""Training of a model in memory on text: to heal it after an edit, or from scratch."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from torch import nn
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments
from transformers.integrations.integration_utils import TensorBoardCallback

from surgeon.checkpoint.codas import Coda
from surgeon.checkpoint.tensor_file import read_json
from surgeon.errors import needs_extra
from surgeon.exports.in_memory import export, export_with_codas
from surgeon.exports.prove import Proof
from surgeon.language.program import Program
from surgeon.machine import available_bytes
from surgeon.models.edit import program_of
from surgeon.models.lora import LoraLayer, PeftModel
from surgeon.models.weights.quantised import PackedTensor
from surgeon.processes.files import lock, make_folder, write_json
from surgeon.progress import progress
from surgeon.quality.head import HeldOutQuality
from surgeon.quality.summary import Quality
from surgeon.training.checkpoints import (
    EarlyEnd,
    RunLog,
    checkpoints_of,
    naming_ended_process,
    newest_checkpoint,
    remove_checkpoint,
    remove_partial,
)
from surgeon.training.distiller import Distiller, TeacherLogits, shared_prefix
from surgeon.training.head_loss import LossParts
from surgeon.training.racks.partition import Racks
from surgeon.training.scope import choose_or_adapt
from surgeon.training.settings import TrainSettings, join_processes, share_of_batch, training_arguments
from surgeon.training.texts import TrainTexts
from surgeon.training.trainer import Measure, ModelTrainer
from surgeon.words import show_value

RECORD_FILE = "run.json"
TEACHER_FOLDER = "teacher"


def run_folder(output: Path) -> Path:
    """The folder of a checkpoint's run, beside it."""
    return output.with_name(f"{output.name}.run")


@contextmanager
def lock_run(folder: Path, device: str) -> Iterator[None]:
    """Keep other runs out of a folder, which is made if it is not there.

    Of several processes the first does. Where a file system has no locks, nobody is kept out.

    Args:
        device: "cpu" or "cuda", of the processes.
    """
    if not PartialState(cpu=device == "cpu").is_main_process:
        yield
        return
    make_folder(folder)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        mine = True
        with suppress(OSError):
            mine = lock(handle)
        if not mine:
            raise OSError(f"another run is writing to {folder}; wait for it, or choose another output")
        yield
    finally:
        os.close(handle)


def open_run(folder: Path, identity: dict[str, Any]) -> Path | None:
    """Begin a run in a folder, or resume the one there, without half-written files.

    Args:
        identity: what the run's weights depend on, as JSON values.

    Returns:
        The Trainer's last whole checkpoint; None where the run begins.

    Raises:
        ValueError: if the folder has a run of something else, naming the difference, or what is there is not whole.
        OSError: if it cannot be written.
    """
    make_folder(folder)
    record = folder / RECORD_FILE
    identity = json.loads(json.dumps(identity))
    if record.is_file():
        require_same(folder, read_record(folder).get("identity"), identity)
    elif checkpoints_of(folder):
        read_record(folder)  # which refuses them: nobody knows of what run they are
    remove_partial(folder)
    newest = newest_checkpoint(folder)
    if newest is None:
        write_json(record, {"identity": identity})
    return newest


def check_settings_kept(folder: Path, settings: TrainSettings) -> None:
    """Refuse settings other than those of the folder's run, before its text is made."""
    if (folder / RECORD_FILE).is_file():
        kept = read_record(folder).get("identity", {}).get("settings")
        require_same(folder, kept, json.loads(json.dumps(settings.to_json())))


def require_same(folder: Path, before: Any, identity: dict[str, Any]) -> None:
    """Refuse a folder's run that follows from something else."""
    if before != identity:
        name = "identity"
        was = before
        is_now: Any = identity
        while isinstance(was, dict) and isinstance(is_now, dict):
            name = next(key for key in [*is_now, *was] if is_now.get(key) != was.get(key))
            was = was.get(name)
            is_now = is_now.get(name)
        raise ValueError(
            f"{folder / RECORD_FILE} is of another run: its {name.replace('_', ' ')} was {show_value(was)}, and now "
            f"it is {show_value(is_now)}; choose another output, or remove {folder}"
        )


def read_record(folder: Path) -> dict[str, Any]:
    """Read the record of a run from its folder."""
    if not (folder / RECORD_FILE).is_file():
        raise FileNotFoundError(
            f"{folder} has no {RECORD_FILE}, which says of what run it is; remove {folder} to begin the run again"
        )
    try:
        return read_json(folder / RECORD_FILE)
    except ValueError as error:
        raise ValueError(f"{error}; remove {folder} to begin the run again") from error


def add_to_record(folder: Path, record: dict[str, Any]) -> None:
    """Add entries to a run's record, or replace them."""
    write_json(folder / RECORD_FILE, read_record(folder) | record)


def finish_run(folder: Path, record: dict[str, Any]) -> None:
    """Complete the record of a run whose result is written, and remove its checkpoints and kept logits; tables stay.

    It may be called again after a kill.

    Args:
        record: results of the run, as JSON values.
    """
    add_to_record(folder, record)
    for checkpoint in checkpoints_of(folder).values():
        remove_checkpoint(checkpoint)
    if (folder / TEACHER_FOLDER).is_dir():
        shutil.rmtree(folder / TEACHER_FOLDER)
    remove_partial(folder)


_BEFORE = "before"  # its training: in the record


@dataclass(frozen=True)
class Trained:
    """The result of a run.

    Attributes:
        steps: that were made; fewer than asked for where it ended early.
        tokens: of training text, counted as often as they were seen.
        seconds: with measurements.
        original, before, after: quality on the held-out text, of the original (None without one), and of the model
            before and after its training.
        model: edited, trained, with its adapters (`merge` has them in its matrices); None where another process has
            it.
    """

    steps: int
    tokens: int
    seconds: float
    original: Quality | None
    before: Quality
    after: Quality
    model: Any = None

    def to_json(self) -> dict[str, Any]:
        numbers = {"steps": self.steps, "tokens": self.tokens, "seconds": self.seconds}
        original = None if self.original is None else self.original.to_json()
        return numbers | {
            "original": original,
            "before": self.before.to_json(),
            "after": self.after.to_json(),
        }

    @classmethod
    def from_json(cls, entries: Mapping[str, Any]) -> Trained:
        qualities = {
            name: entries[name] and Quality.from_json(entries[name])
            for name in ("original", "before", "after")
        }
        return cls(**{**entries, **qualities})

    def merge(self) -> PreTrainedModel:
        """Merge the adapters into the model's matrices, in place."""
        for module in self.model.modules():
            base: Any = module.get_base_layer() if isinstance(module, LoraLayer) else None
            if isinstance(getattr(base, "weight", None), PackedTensor):
                base.weight = nn.Parameter(base.weight.numbers(), requires_grad=False)
        found: PreTrainedModel = (
            self.model.merge_and_unload() if isinstance(self.model, PeftModel) else self.model
        )
        return found


@dataclass(frozen=True)
class TrainedModel:
    """A model that was trained as one, or rack by rack.

    Attributes:
        whole: the result as if it had been trained as one, with the model in memory.
        folder: of the run.
        method: for people.
        racks: None where it was trained as one.
        codas: of every rack but the last.
        results: of every rack, by its coda's prediction; the last one's are the whole model's.
    """

    whole: Trained
    folder: Path
    method: str
    racks: Racks | None = None
    codas: tuple[Coda, ...] = ()
    results: tuple[Trained, ...] = ()

    def lines(self) -> Iterator[str]:
        if self.racks is None:
            return
        for rack, one in zip(self.racks.texts[:-1], self.results, strict=False):
            before = one.before.perplexity
            after = one.after.perplexity
            yield f"rack {rack}: perplexity by its coda {before:.4g} before, {after:.4g} after"

    def record(self, texts: TrainTexts, settings: TrainSettings) -> dict[str, Any]:
        entries = {
            "method": self.method,
            **texts.record(),
            "window": texts.training.window,
            "settings": settings.to_json(),
            "steps": self.whole.steps,
            "tokens": self.whole.tokens,
            "seconds": self.whole.seconds,
        }
        if self.racks is not None:
            each = zip(self.racks.texts, self.results, strict=True)
            entries["racks"] = {
                "coda": self.racks.depth,
                "each": [{"layers": text} | one.to_json() for text, one in each],
            }
        return entries

    def write(self, output: Path, **options: Any) -> Proof:
        """Write a checkpoint, with adapters merged and codas beside it.

        Args:
            options: as `surgeon.export` takes them.

        Raises:
            NotProven: if what was written is not the model, or its program not the one that was trained.
            OSError, ValueError: as `surgeon.export`.
        """
        model = self.whole.merge()
        racks = self.racks
        if racks is None:
            return export(model, output, **options)
        return export_with_codas(
            model, output, racks.texts, racks.ends, racks.depth, self.codas, **options
        )


@dataclass(frozen=True)
class TrainingTask:
    """Loss and measure of a training.

    Attributes:
        measure: measures the model meanwhile, on held-out text.
        towards: the loss; None for the text's.
        callbacks: of the Trainer, after those of the run itself.
        original: quality of the original on that text; None without one.
        uses_all: whether every trained parameter has a share in every loss. Processes need not find that out from the
            model's outputs then, which a loss of streams inside it does not come from.
    """

    measure: Measure
    towards: LossParts | None = None
    callbacks: Sequence[TrainerCallback] = ()
    original: Quality | None = None
    uses_all: bool = False


def train(
    model: PreTrainedModel,
    texts: TrainTexts,
    settings: TrainSettings,
    folder: Path,
    original: Callable[[], PreTrainedModel] | None = None,
    program: Program | None = None,
    identity: dict[str, Any] | None = None,
    device: str = "cpu",
    task: TrainingTask | None = None,
) -> Trained | None:
    """Train a model; a run that was killed resumes.

    Args:
        model: edited (`surgeon.edit`; with the dense program if it is unedited), with numbers of at least 32 bits. It
            is trained in place.
        folder: for checkpoints, tables and TensorBoard's files.
        original: loads the original, for divergence and distillation; None where it is unknown. It is held only as long
            as it is needed.
        program: the model's, in the numbers of the original's layers; by default the one that it runs.
        identity: of the model, as JSON values: another one's run in the folder is not resumed. Under "original" is the
            hash of the original.
        device: "cpu" or "cuda".
        task: what the model is trained towards and judged by, instead of the text alone.

    Returns:
        None in every process but the first, where there are several.

    Raises:
        ValueError: if settings, text and model do not fit, or the folder has another run.
        OSError: if the folder cannot be written, is another run's at the moment, or the disk is too full; or if another
            process of the run has ended.
    """
    if task is not None and settings.distillation is not None:
        raise ValueError(
            "a model with a task of its own is not distilled as well; leave the distillation out"
        )
    text = texts.training
    with lock_run(folder, device), naming_ended_process():
        steps = settings.steps_on(len(text))
        processes, _ = join_processes(device)
        share = share_of_batch(settings, processes.num_processes)
        arguments = training_arguments(settings, folder, steps, share, device)
        run_identity = {
            **(identity or {}),
            "settings": settings.to_json(),
            "mixed_precision": arguments.mixed_precision,  # which accelerate launch may have said
            "data": texts.training.digest,
            "held_out": texts.held_out.digest,
        }
        # The first of several processes opens the folder, and says where the run goes on.
        found = [open_run(folder, run_identity) if processes.is_main_process else None]
        broadcast_object_list(found, from_process=0)
        checkpoint = found[0]
        program = program or program_of(model)
        caches = model.config.use_cache
        # Factors may be transposed, which cannot be shared out among processes.
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()
        torch.manual_seed(settings.seed)  # adapters begin with random numbers
        trained: Any = choose_or_adapt(model, program, settings)
        task = task or _make_task(original, program, texts, settings, folder, trained, arguments)
        if task.uses_all and arguments.ddp_find_unused_parameters is None:
            arguments.ddp_find_unused_parameters = False
        trainer = ModelTrainer(trained, arguments, text, task.measure, task.towards)
        is_first = bool(arguments.should_save)
        tokens = settings.batch * text.window
        log = RunLog(folder if is_first else None, tokens)
        trainer.add_callback(log)
        done = 0 if checkpoint is None else int(checkpoint.name.removeprefix("checkpoint-"))
        if is_first:
            with needs_extra("train", "training"):
                from torch.utils.tensorboard import SummaryWriter

            trainer.add_callback(
                TensorBoardCallback(SummaryWriter(str(folder / "tensorboard"), purge_step=done))
            )
        if settings.patience is not None:
            trainer.add_callback(EarlyEnd(settings.patience))
        for callback in task.callbacks:
            trainer.add_callback(callback)

        bar = (
            progress("training", steps, "steps", done, log.note)
            if is_first
            else nullcontext(log.advance)
        )
        with bar as log.advance:
            if is_first:
                measured = read_record(folder).get(_BEFORE)
                if measured is None:
                    log.before = task.measure(trained, 0)
                    add_to_record(folder, {_BEFORE: log.before.to_json()})
                else:
                    log.before = Quality.from_json(measured)
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
            trained = trainer.whole_model()
        if trained is None:
            return None
        step = trainer.state.global_step
        after = trainer.measure_held_out(trained)
        whole: Any = trained.get_base_model() if isinstance(trained, PeftModel) else trained
        whole.config.use_cache = caches  # which the Trainer has turned off
        return Trained(step, step * tokens, log.seconds, task.original, log.before, after, trained)


def _make_task(
    load_original: Callable[[], PreTrainedModel] | None,
    program: Program,
    texts: TrainTexts,
    settings: TrainSettings,
    folder: Path,
    student: nn.Module,
    arguments: TrainingArguments,
) -> TrainingTask:
    wanted = settings.distillation
    if load_original is None:
        if wanted is not None:
            raise ValueError("there is no original to distil from; name it as the teacher")
        return TrainingTask(HeldOutQuality(texts.held_out, None).measure)
    original: Any = load_original()
    size = sum(one.nbytes for one in (*original.parameters(), *original.buffers()))
    if arguments.device.type == "cuda" and size < available_bytes(arguments.device):
        original.to(arguments.device)
    held_out = HeldOutQuality(texts.held_out, original)
    task = TrainingTask(held_out.measure, original=held_out.original)
    if wanted is None:
        original.to("cpu")  # training needs the room
        return task
    if wanted.kept is None:
        distiller = Distiller(wanted, program, original)
        # A compiled student hides its stream, and noise changes it.
        if not (arguments.torch_compile or arguments.neftune_noise_alpha):
            distiller.shared = shared_prefix(student, distiller.teacher, program)
        return replace(task, towards=distiller.loss)
    stored = TeacherLogits(folder / TEACHER_FOLDER, texts.training, wanted.kept, wanted.temperature)
    stored.make(original)
    original.to("cpu")
    return replace(task, towards=partial(stored.loss, wanted))
