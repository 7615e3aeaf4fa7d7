"""Checkpoints of a run in progress, each whole or not there whenever the run is killed, and its tables."""

from __future__ import annotations

import csv
import math
import re
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from accelerate import PartialState
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed import DistNetworkError
from transformers import (
    EarlyStoppingCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import TRAINER_STATE_NAME

from surgeon.checkpoint.tensor_file import FileRecord, change_of, read_json
from surgeon.processes.files import HALF_WRITTEN, check_space, publish, sync_tree, whole_file, write_json
from surgeon.progress import Advance
from surgeon.quality.summary import Quality
from surgeon.words import first_line

WEIGHTS_FILE = "model.safetensors"  # as the Trainer reads it again
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
OTHERS_ENDED = "another process of this run has ended; the reason is what it says"
_OTHERS_ENDED_WORDS = ("Connection reset by peer", "Connection closed by peer", "Broken pipe")
_SAVING = ".saving"
_REMOVING = ".removing"
_STATES_OF_ADAM = 2  # numbers that it keeps for each one that is trained
STATE_FILE = TRAINER_STATE_NAME
MANIFEST_FILE = "files.json"
_HASHED_BYTES = 1 << 20  # files up to this size; a damaged larger one is noticed where it is read


def checkpoints_of(folder: Path) -> dict[int, Path]:
    """List a run's checkpoints by their steps, in order; none without a folder."""
    if not folder.is_dir():
        return {}
    found = {
        int(match[1]): path for path in folder.iterdir() if (match := _CHECKPOINT.fullmatch(path.name))
    }
    return dict(sorted(found.items()))


def newest_checkpoint(folder: Path) -> Path | None:
    """Find the last whole checkpoint of a run, None where there is none at all; warns of later damaged ones."""
    faults: dict[Path, str] = {}
    for path in reversed(checkpoints_of(folder).values()):
        fault = fault_of(path)
        if fault is None:
            for broken, what in faults.items():
                warnings.warn(
                    f"{broken}: {what}; the run goes on from {path.name}, before it", stacklevel=2
                )
            return path
        faults[path] = fault
    if faults:
        last, what = next(iter(faults.items()))
        raise ValueError(
            f"{last}: {what}, and there is no whole checkpoint before it to go on from; put back what is missing, or "
            f"remove {folder} to begin the run again"
        )
    return None


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint under another name, so that no part of it is taken for a whole one."""
    aside = path.with_name(f"{_REMOVING}-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    shutil.rmtree(aside)


def remove_partial(folder: Path) -> None:
    """Remove what a killed run was writing or removing."""
    for path in folder.iterdir():
        if path.name == _SAVING or path.name.startswith(_REMOVING):
            shutil.rmtree(path)
        elif path.match(HALF_WRITTEN):
            path.unlink()


@contextmanager
def naming_ended_process() -> Iterator[None]:
    """Replace the error of a broken connection by one that says that another process has ended."""
    try:
        yield
    except RuntimeError as error:
        if not _have_ended(error):
            raise
        raise OSError(OTHERS_ENDED) from error


def _have_ended(error: BaseException) -> bool:
    return isinstance(error, DistNetworkError) or any(
        words in str(error) for words in _OTHERS_ENDED_WORDS
    )


class RunCheckpoints(TrainerCallback):
    """Publishes a run's checkpoints, keeps the best one, and removes those that are not needed.

    The Trainer writes into a staging folder. Of several processes the first publishes and removes.

    Attributes:
        folder: of the run.
        staging: where checkpoints are written, the Trainer's output folder.
        most: checkpoints that are kept at most, the best one among them.
        keeps_best: whether the best weights are kept, and loaded at the end.
    """

    def __init__(self, arguments: TrainingArguments) -> None:
        self.folder = Path(str(arguments.output_dir))
        self.staging = self.folder / _SAVING
        arguments.output_dir = str(self.staging)
        self.keeps_best = bool(arguments.load_best_model_at_end)
        limit = arguments.save_total_limit
        self.most = math.ceil(arguments.max_steps / max(1, int(arguments.save_steps)))
        if limit is not None and limit >= 1:
            self.most = min(self.most, max(2 if self.keeps_best else 1, limit))

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Refuse to go on without the best weights, and remove checkpoints that a killed run had not come to."""
        self.require_best(state)
        if args.should_save:
            self._remove_needless(state)

    def on_epoch_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Refuse to end without the best weights, which are loaded next: else the last ones were taken for them."""
        self.require_best(state)

    def on_save(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Publish the checkpoint once every process has written its part, and remove others."""
        self.name_best(state)
        processes = PartialState()
        processes.wait_for_everyone()
        if args.should_save:
            written = self.staging / f"checkpoint-{state.global_step}"
            state.save_to_json(str(written / STATE_FILE))
            write_manifest(written)
            sync_tree(written)
            publish(written, self.folder / written.name)
            self._remove_needless(state)
        processes.wait_for_everyone()

    def require_room(self, model: Any, frozen: bool = False) -> None:
        """Refuse a run whose checkpoints the disk cannot hold.

        Args:
            frozen: whether checkpoints have frozen parameters, too.
        """
        at_once = self.most + 1  # the oldest is removed when the newest is whole
        check_space(
            self.folder,
            max(1, at_once - len(checkpoints_of(self.folder))) * checkpoint_bytes(model, frozen),
        )

    def until(self, step: int) -> dict[int, Path]:
        """Checkpoints up to a step; later ones are broken, and will be made again."""
        return {each: path for each, path in checkpoints_of(self.folder).items() if each <= step}

    def name_best(self, state: TrainerState) -> Path | None:
        """Set the best checkpoint's path in the run's state, in this run's folder; None without one."""
        state.best_model_checkpoint = None
        if not (self.keeps_best and state.best_global_step):
            return None
        best = self.folder / f"checkpoint-{state.best_global_step}"
        state.best_model_checkpoint = str(best)
        return best

    def require_best(self, state: TrainerState) -> None:
        """Refuse to go on where the best checkpoint is not whole."""
        best = self.name_best(state)
        if best is None:
            return
        fault = fault_of(best) if best.is_dir() else "it is gone"
        if fault is not None:
            raise ValueError(
                f"{best} has the best weights: {fault}; remove {self.folder} to begin again"
            )

    def _remove_needless(self, state: TrainerState) -> None:
        there = self.until(state.global_step)
        best = {state.best_global_step} & set(there) if self.keeps_best else set()
        newest = [step for step in reversed(there) if step not in best]
        for step in newest[max(1, self.most - len(best)) :]:
            remove_checkpoint(there[step])


class EarlyEnd(EarlyStoppingCallback):
    """Early stopping that resumes with a run, also at its end."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        super().on_train_begin(args, state, control, **kwargs)  # type: ignore[no-untyped-call]
        states: Any = state.stateful_callbacks
        stored = states[type(self).__name__]["attributes"]
        self.early_stopping_patience_counter = stored["early_stopping_patience_counter"]
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True


def trained_parameters(model: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Iterate over the trained parameters by name, each once."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def checkpoint_bytes(model: Any, frozen: bool) -> int:
    """Estimate a checkpoint's size: trained parameters with Adam's state, and frozen ones."""
    trained = sum(one.numel() * one.element_size() for _, one in trained_parameters(model))
    every = sum(one.numel() * one.element_size() for one in model.parameters()) if frozen else trained
    return every + _STATES_OF_ADAM * trained


def drop_shared(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Make tensors contiguous for safetensors; of those that share memory the first is kept."""
    found = set[tuple[int, Any]]()
    unique: dict[str, Tensor] = {}
    for name, value in state.items():
        tensor = value.detach()
        key = (tensor.data_ptr() if tensor.numel() else id(value), tensor.shape)
        if key not in found:
            found.add(key)
            unique[name] = tensor.contiguous()
    return unique


@contextmanager
def naming_unreadable(checkpoint: str | None) -> Iterator[None]:
    """Name a checkpoint that cannot be read.

    Its pickles are only loaded with `weights_only`, which refuses code, but for FSDP's list of shards (`.metadata`),
    for which PyTorch has no other way.
    """
    try:
        yield
    except (
        OSError,
        EOFError,
        KeyError,
        RuntimeError,
        ValueError,
        UnpicklingError,
        SafetensorError,
    ) as error:
        if _have_ended(error):
            raise
        raise ValueError(
            f"{checkpoint} cannot be read ({first_line(error)}); remove it, and the same command goes on from the one "
            "before it"
        ) from error


def write_manifest(checkpoint: Path) -> None:
    """List a checkpoint's files in it, with sizes, and the SHA-256 of small ones."""
    (checkpoint / MANIFEST_FILE).unlink(missing_ok=True)
    listed: dict[str, dict[str, int | str]] = {}
    for path in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
        record = listed[path.relative_to(checkpoint).as_posix()] = {"size": path.stat().st_size}
        if path.stat().st_size <= _HASHED_BYTES:
            record["sha256"] = FileRecord.of(path).sha256
    write_json(checkpoint / MANIFEST_FILE, {"files": listed})


def fault_of(checkpoint: Path) -> str | None:
    """Describe what is wrong with a checkpoint, as in "optimizer.pt is missing"; None where it is whole."""
    if not (checkpoint / MANIFEST_FILE).is_file():
        return f"{MANIFEST_FILE} is missing"
    try:
        files = dict(read_json(checkpoint / MANIFEST_FILE)["files"])
        return next(
            filter(None, (change_of(checkpoint, *each, by_size=True) for each in files.items())), None
        )
    except (KeyError, TypeError, ValueError):
        return f"{MANIFEST_FILE} is damaged"


TRAINING_FILE = "training.csv"
HELD_OUT_FILE = "held_out.csv"
TABLES = {
    TRAINING_FILE: (
        "step",
        "tokens",
        "seconds",
        "loss",
        "learning_rate",
        "logits",
        "hidden",
        "text",
        "balance",
    ),
    HELD_OUT_FILE: (
        *("step", "seconds", "perplexity", "perplexity_low", "perplexity_high"),
        *("divergence", "divergence_low", "divergence_high"),
    ),
}
_NEEDED = {TRAINING_FILE: "loss", HELD_OUT_FILE: "perplexity"}  # by a row of each


class RunLog(TrainerCallback):
    """Writes both tables of a run, of what the Trainer has logged, and moves its progress bar.

    Attributes:
        before: the model's quality before its training.
        advance: moves the progress bar; set in the first process.
        latest: last logged numbers, of training and of held-out text.

    Args:
        folder: of the run; None in every process but the first.
        tokens: of training text in a step.
    """

    before: Quality

    def __init__(self, folder: Path | None, tokens: int) -> None:
        self.folder = folder
        self.tokens = tokens
        self.advance: Advance = lambda _: None
        self.latest: dict[str, Any] = {}
        self._before = 0.0
        self._begun = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds of the run so far, with those of earlier processes."""
        return self._before + time.monotonic() - self._begun

    def note(self) -> str:
        names = ("loss", "divergence" if "divergence" in self.latest else "perplexity")
        return ", ".join(f"{name} {self.latest[name]:.4g}" for name in names if name in self.latest)

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:  # noqa: ARG002
        self._begun = time.monotonic()
        self._before = max([0.0, *(row.get("seconds", 0.0) for row in state.log_history)])
        if self.folder is not None:
            for name, columns in TABLES.items():
                with (
                    whole_file(self.folder / name) as beside,
                    beside.open("w", newline="", encoding="utf-8") as file,
                ):
                    csv.DictWriter(file, columns, lineterminator="\n").writeheader()
            self._add({"step": 0, "seconds": 0.0} | self.before.estimates)
            for row in state.log_history:
                self._add(row)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> Any:  # noqa: ARG002
        self.advance(1)
        if control.should_save or state.global_step >= state.max_steps:
            control.should_log = True  # so that a run that goes on from here has the same rows
        return control

    def on_log(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:  # noqa: ARG002
        row: Any = state.log_history[-1]
        row |= {"tokens": state.global_step * self.tokens, "seconds": self.seconds}
        self.latest |= _rename_quantities(row)
        if self.folder is not None:
            self._add(row)

    def _add(self, row: Mapping[str, Any]) -> None:
        assert self.folder is not None
        numbers = _rename_quantities(row)
        for name, columns in TABLES.items():
            if _NEEDED[name] in numbers:
                with (self.folder / name).open("a", newline="", encoding="utf-8") as file:
                    csv.DictWriter(file, columns, lineterminator="\n").writerow(
                        {column: f"{numbers[column]:.9g}" for column in columns if column in numbers}
                    )


def _rename_quantities(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name.removeprefix("eval_") if name != "eval_loss" else name: value for name, value in row.items()
    }


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read the whole rows of a run's table, without a last one that a kill cut off."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        text = file.read()
    rows = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())
    return [row for row in rows if None not in row and None not in row.values()]
