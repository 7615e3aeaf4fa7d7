"""A model in memory is trained on text: to heal it after an edit, or from scratch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from peft import PeftModel
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments
from transformers.integrations.integration_utils import TensorBoardCallback

from surgeon.language.program import Program
from surgeon.models.edit import program_of
from surgeon.progress import progress
from surgeon.quality.text import TextQuality
from surgeon.training.arguments import join_processes, share_of_batch, training_arguments
from surgeon.training.callbacks import EarlyEnd, Recorder
from surgeon.training.checkpoints import step_of
from surgeon.training.distill.distiller import Distiller
from surgeon.training.distill.kept_logits import KeptIdentity, keep_logits
from surgeon.training.held_out import HeldOutQuality, Measure
from surgeon.training.resume import TEACHER_FOLDER, alone, open_run
from surgeon.training.run_log import RunLog
from surgeon.training.scope import add_adapters, called_classes, choose_parameters
from surgeon.training.settings import TrainSettings
from surgeon.training.texts import TrainTexts
from surgeon.training.trainer import LossParts, ModelTrainer

_STAGES = ("original", "before", "after")


@dataclass(frozen=True)
class RunFigures:
    """What a run came to, in numbers.

    Attributes:
        steps: that were made; fewer than asked for where it ended early.
        tokens: of training text, counted as often as they were seen.
        seconds: that it took, measurements included.
        original, before, after: quality on the held-out text, of the original (None where there is none), and of the
            model before and after its training.
    """

    steps: int
    tokens: int
    seconds: float
    original: TextQuality | None
    before: TextQuality
    after: TextQuality

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        stages = {name: getattr(self, name) for name in _STAGES}
        told = {name: None if one is None else one.to_json() for name, one in stages.items()}
        return {"steps": self.steps, "tokens": self.tokens, "seconds": self.seconds} | told

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> RunFigures:
        """The inverse of `to_json`."""
        stages: dict[str, Any] = {
            name: None if said[name] is None else TextQuality.from_json(said[name]) for name in _STAGES
        }
        return RunFigures(said["steps"], said["tokens"], said["seconds"], **stages)


@dataclass(frozen=True)
class Trained(RunFigures):
    """What a run came to.

    Attributes:
        model: edited, trained; with its adapters, where there are any (`merged` has them in its matrices).
    """

    model: Any

    @property
    def figures(self) -> RunFigures:
        """The numbers alone, without the model."""
        return RunFigures(self.steps, self.tokens, self.seconds, self.original, self.before, self.after)

    def merged(self) -> PreTrainedModel:
        """The model with its adapters merged into its matrices; they are gone from it then."""
        found: PreTrainedModel = self.model.merge_and_unload() if isinstance(self.model, PeftModel) else self.model
        return found


@dataclass(frozen=True)
class TrainingTask:
    """What a model is trained towards, and judged by.

    Attributes:
        held_out: measures it meanwhile.
        towards: has its loss; None for the text's.
        callbacks: are called by the Trainer, after those of the run itself.
        uses_all: whether every parameter that is trained has a share in every loss. Processes that train a model
            together then need not find out from its outputs, which a loss of streams inside it does not come from.
    """

    held_out: Measure
    towards: LossParts | None = None
    callbacks: Sequence[TrainerCallback] = ()
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
    """Train a model; a run that was killed goes on where it was.

    Args:
        model: edited (`surgeon.edit`; with the dense program if it is unedited), with numbers of at least 32 bits.
            It is trained in place.
        folder: for checkpoints, tables and TensorBoard's files.
        original: loads what divergence is from, and what is distilled; None where it is not known. It is held only as
            long as it is needed.
        program: the model's, in the numbers of the original's layers; by default the one that it runs.
        identity: what the model follows from, as JSON values: another one's run in the folder is not gone on with.
            Under "original" is the hash of the original.
        device: "cpu" or "cuda".
        task: what the model is trained towards and judged by, where that is another thing than the text alone.

    Returns:
        What came of it; None in every process but the first, where there are several.

    Raises:
        ValueError: if settings, text and model do not fit, or the folder has another run.
        OSError: if the folder cannot be written, is another run's at the moment, or the disk is too full.
    """
    with alone(folder, device):
        return _train(model, texts, settings, folder, original, program, identity, device, task)


def _train(
    model: PreTrainedModel,
    texts: TrainTexts,
    settings: TrainSettings,
    folder: Path,
    original: Callable[[], PreTrainedModel] | None,
    program: Program | None,
    identity: dict[str, Any] | None,
    device: str,
    task: TrainingTask | None,
) -> Trained | None:
    steps = settings.steps_on(len(texts.training.ids))
    arguments = _arguments(model, settings, folder, steps, device)
    known = {
        **(identity or {}),
        "settings": settings.to_json(),
        "data": texts.training.digest,
        "held_out": texts.held_out.digest,
    }
    checkpoint = _agreed(lambda: open_run(folder, known))
    program = program or program_of(model)
    if task is not None and settings.distillation is not None:
        raise ValueError("a model with a task of its own is not distilled as well; leave the distillation out")
    task = task or TrainingTask(*_teaching(original, program, texts, settings, folder, known))
    if task.uses_all and arguments.ddp_find_unused_parameters is None:
        arguments.ddp_find_unused_parameters = False
    caches = model.config.use_cache
    model = prepared(model, settings, program)
    with _run(model, texts, settings, arguments, task, checkpoint) as (trainer, recorder):
        before = None if recorder.log is None else _first_quality(recorder.log, model, task.held_out)
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        trained = trainer.whole_model()
    if trained is None or before is None:
        return None
    after = task.held_out.measure(trained, trainer.state.global_step)
    whole: Any = trained.get_base_model() if isinstance(trained, PeftModel) else trained
    whole.config.use_cache = caches  # which the Trainer has turned off
    made = trainer.state.global_step
    tokens = made * settings.batch * texts.training.ids.shape[1]
    return Trained(made, tokens, recorder.seconds, task.held_out.original, before, after, trained)


def _agreed(open_folder: Callable[[], Path | None]) -> Path | None:
    """Where the run goes on, as the first process of several finds it."""
    state = PartialState()
    found = [open_folder() if state.is_main_process else None]
    broadcast_object_list(found, from_process=0)
    return found[0]


def _first_quality(log: RunLog, model: Any, held_out: Measure) -> TextQuality:
    """What the model was before the first step; measured if it was not yet."""
    found = log.first_quality()
    if found is None:
        found = held_out.measure(model, 0)
        log.held_out(0, 0.0, found)
    return found


def prepared(model: PreTrainedModel, settings: TrainSettings, program: Program) -> Any:
    """The model with what is trained of it, or with adapters.

    Raises:
        ValueError: if nothing is in scope.
    """
    for parameter in model.parameters():  # factors may be transposed, which cannot be shared out among processes
        parameter.data = parameter.data.contiguous()
    if settings.lora is not None:
        torch.manual_seed(settings.seed)  # adapters begin with random numbers
        return add_adapters(model, settings.scope, program, settings.lora)
    choose_parameters(model, settings.scope, program)
    return model


def _teaching(
    load_original: Callable[[], PreTrainedModel] | None,
    program: Program,
    texts: TrainTexts,
    settings: TrainSettings,
    folder: Path,
    known: dict[str, Any],
) -> tuple[HeldOutQuality, Distiller | None]:
    """What the original has to say: on held-out text, and of the training text where it is distilled."""
    wanted = settings.distillation
    if load_original is None:
        if wanted is not None:
            raise ValueError("there is no original to distil from; name it with --teacher")
        return HeldOutQuality(texts.held_out, None), None
    original = load_original()
    held_out = HeldOutQuality(texts.held_out, original)
    if wanted is None:
        return held_out, None
    if wanted.kept is None:
        return held_out, Distiller(wanted, program, original)
    ids = texts.training.ids
    computed = str(original.dtype).removeprefix("torch.")
    windows, window = ids.shape
    digest = texts.training.digest
    same = KeptIdentity(str(known.get("original")), computed, digest, windows, window, wanted.kept, wanted.temperature)
    return held_out, Distiller(wanted, program, keep_logits(original, ids, folder / TEACHER_FOLDER, same))


def _arguments(
    model: PreTrainedModel, settings: TrainSettings, folder: Path, steps: int, device: str
) -> TrainingArguments:
    processes, _ = join_processes(device)
    share = share_of_batch(settings, processes.num_processes)
    return training_arguments(settings, folder, steps, share, device, called_classes(model))


@contextmanager
def _run(
    model: Any,
    texts: TrainTexts,
    settings: TrainSettings,
    arguments: TrainingArguments,
    task: TrainingTask,
    checkpoint: Path | None,
) -> Iterator[tuple[ModelTrainer, Recorder]]:
    """A Trainer with everything that watches it."""
    folder, windows = Path(str(arguments.output_dir)), texts.training.ids
    done = 0 if checkpoint is None else step_of(checkpoint)
    log = RunLog(folder, checkpoint) if arguments.should_save else None
    recorder = Recorder(log, settings.batch * windows.shape[1])
    callbacks: list[TrainerCallback] = [recorder]
    if log is not None:
        from torch.utils.tensorboard import SummaryWriter

        callbacks.append(TensorBoardCallback(SummaryWriter(str(folder / "tensorboard"), purge_step=done)))
    if settings.patience is not None:
        callbacks.append(EarlyEnd(settings.patience))
    callbacks += task.callbacks
    trainer = ModelTrainer(model, arguments, windows, task.held_out, settings.batch, task.towards, callbacks)
    recorder.trainer = trainer
    if log is not None:
        trainer.carried = log.files
    told = progress("training", arguments.max_steps, "steps", done, recorder.note)
    with told if log is not None else nullcontext(recorder.advance) as advance:
        recorder.advance = advance
        yield trainer, recorder
