"""The checkpoints of a run while it goes on: each is there whole or not at all, whenever the run is killed."""

from __future__ import annotations

import math
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed import DistNetworkError
from transformers import Trainer

from surgeon.checkpoint.verify import sync
from surgeon.errors import first_line, is_full_disk
from surgeon.exports.staging import check_space, show_bytes
from surgeon.training.manifest import STATE_FILE, fault_of, write_manifest

WEIGHTS_FILE = "model.safetensors"  # as the Trainer reads it again
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
OTHERS_ENDED = "another process of this run has ended; the reason is what it says"
_OTHERS_ENDED_WORDS = ("Connection reset by peer", "Connection closed by peer", "Broken pipe")
_SAVING, _REMOVING = ".saving", ".removing"
_STATES_OF_ADAM = 2  # numbers that it keeps for each one that is trained


def checkpoints_of(folder: Path) -> dict[int, Path]:
    """The checkpoints of a run by the steps it had made, in their order."""
    found = {int(match[1]): path for path in folder.iterdir() if (match := _CHECKPOINT.fullmatch(path.name))}
    return dict(sorted(found.items()))


def newest_checkpoint(folder: Path) -> Path | None:
    """The last checkpoint of a run that is whole, None where there is none at all; warns of later ones that are not.

    Raises:
        ValueError: if none is whole, naming what the last one lacks.
    """
    faults: dict[Path, str] = {}
    for path in reversed(checkpoints_of(folder).values()):
        fault = fault_of(path)
        if fault is None:
            for broken, what in faults.items():
                warnings.warn(f"{broken} {what}; the run goes on from {path.name}, before it", stacklevel=2)
            return path
        faults[path] = fault
    if faults:
        last, what = next(iter(faults.items()))
        raise ValueError(
            f"{last} {what}, and there is no whole checkpoint before it to go on from; put back what is missing, or "
            f"remove {folder} to begin the run again"
        )
    return None


def step_of(checkpoint: Path) -> int:
    """How many steps the run had made when this checkpoint was written."""
    match = _CHECKPOINT.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1])


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
        elif path.name.startswith(".") and path.name.endswith(".part"):
            path.unlink()


def others_have_ended(error: RuntimeError) -> bool:
    """Whether an error of processes that train together says that another one of them is there no more."""
    return isinstance(error, DistNetworkError) or any(words in str(error) for words in _OTHERS_ENDED_WORDS)


class CheckpointingTrainer(Trainer):
    """A Trainer whose checkpoints hold what is trained, and appear under their names when they are whole.

    What is frozen is left out: it follows from the model that is healed.

    Attributes:
        carried: files beside the checkpoints, each of which gets a copy of them as they are at its step.
    """

    carried: Sequence[Path] = ()
    _writing: Path | None = None

    def train(self, resume_from_checkpoint: str | bool | None = None, *others: Any, **options: Any) -> Any:
        """As Trainer's.

        Raises:
            OSError: if the disk has no room for the run's checkpoints, or another process of the run has ended.
            ValueError: if those that are there are of something else.
        """
        if self.args.should_save:
            self.require_room()
        try:
            return super().train(resume_from_checkpoint, *others, **options)
        except RuntimeError as error:
            if self.args.world_size == 1 or not others_have_ended(error):
                raise
            raise OSError(OTHERS_ENDED) from error

    def require_room(self) -> None:
        """Refuse a run whose checkpoints the disk cannot hold.

        Raises:
            OSError: with the folder, what is needed, and what is there.
        """
        at_once = self._kept() + 1  # the oldest is removed when the newest is whole
        there = len(checkpoints_of(self._folder)) if self._folder.is_dir() else 0
        check_space(self._folder, max(1, at_once - there) * self.checkpoint_bytes())

    def checkpoint_bytes(self) -> int:
        """About as many bytes as a checkpoint takes: what is trained, and what Adam keeps of it."""
        trained = sum(one.numel() * one.element_size() for _, one in trained_parameters(self.model))
        return (1 + _STATES_OF_ADAM) * trained

    @property
    def _folder(self) -> Path:
        return Path(str(self.args.output_dir))

    def _kept(self) -> int:
        """How many checkpoints are there at most, the best one among them."""
        limit = self.args.save_total_limit
        total = math.ceil(self.args.max_steps / max(1, int(self.args.save_steps)))
        fewest = 2 if self.args.load_best_model_at_end else 1
        return total if limit is None or limit < 1 else min(total, max(fewest, limit))

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._writing is None else str(self._writing)

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        self._writing = self._folder / _SAVING
        try:
            super()._save_checkpoint(model, trial)
            self._publish(self._writing / f"checkpoint-{self.state.global_step}")
            return
        except Exception as error:
            if not is_full_disk(error):
                raise
        finally:
            if self.args.should_save:
                shutil.rmtree(self._writing, ignore_errors=True)
            self._writing = None
        # Raised outside the handler, to stand for itself: it says more than the error that it comes from.
        raise OSError(
            f"the disk of {self._folder} filled up at step {self.state.global_step}: a checkpoint takes about "
            f"{show_bytes(self.checkpoint_bytes())}; earlier ones are whole, so make room, and run the same command "
            "again to go on"
        )

    def _publish(self, written: Path) -> None:
        """Give a checkpoint that every process has written its name, and remove those that are not needed any more."""
        self._name_best()
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            self.state.save_to_json(str(written / STATE_FILE))
            for path in self.carried:
                shutil.copyfile(path, written / path.name)
            write_manifest(written)
            for path in (*(each for each in written.rglob("*") if each.is_file()), written):
                sync(path)
            target = self._folder / written.name
            if target.exists():
                remove_checkpoint(target)
            written.rename(target)
            sync(self._folder)
            self._rotate()
        self.accelerator.wait_for_everyone()

    def _name_best(self) -> None:
        """Say where the best checkpoint is: where this run's are, wherever they were before."""
        best = self.state.best_global_step if self.args.load_best_model_at_end else None
        self.state.best_model_checkpoint = str(self._folder / f"checkpoint-{best}") if best else None

    def _made(self) -> dict[int, Path]:
        """The checkpoints up to the step that the run is at; later ones are broken, and will be made again."""
        there = checkpoints_of(self._folder) if self._folder.is_dir() else {}
        return {step: path for step, path in there.items() if step <= self.state.global_step}

    def _rotate(self) -> None:
        there = self._made()
        best = {self.state.best_global_step} & set(there) if self.args.load_best_model_at_end else set()
        newest = [step for step in reversed(there) if step not in best]
        for step in newest[max(1, self._kept() - len(best)) :]:
            remove_checkpoint(there[step])

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write what is trained; `state_dict`, gathered from sharded parameters, is written as it is."""
        if not self.args.should_save or self.is_fsdp_enabled:  # FSDP's are written with the optimiser's state
            return
        folder = Path(output_dir or self._folder)
        folder.mkdir(parents=True, exist_ok=True)
        model: Any = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        if isinstance(model, PeftModel):
            # Whether the vocabulary has changed would be looked up on the hub.
            model.save_pretrained(str(folder), state_dict=state_dict, save_embedding_layers=False)
        else:
            state = state_dict if state_dict is not None else dict(trained_parameters(model))
            save_file(_stored(state), folder / WEIGHTS_FILE, metadata={"format": "pt"})

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        with _reading(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with _reading(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        name = "rng_state.pth" if self.args.world_size == 1 else f"rng_state_{self.args.process_index}.pth"
        if checkpoint is not None and self.args.should_save and not (Path(checkpoint) / name).is_file():
            warnings.warn(
                f"{checkpoint} was written by another number of processes than there are now; where the model has "
                "dropout, its random numbers are others",
                stacklevel=1,
            )
        with _reading(checkpoint):
            super()._load_rng_state(checkpoint)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Refuse a checkpoint that is not of what is trained."""
        if self.is_fsdp_enabled:
            return
        trained = {name for name, _ in trained_parameters(self.model)}
        odd = sorted(trained & set(load_result.missing_keys)) + list(load_result.unexpected_keys)
        if odd:
            raise ValueError(f"the checkpoint is not of what is trained now: {odd[0]}")

    def _init_training_state(self, *arguments: Any, **options: Any) -> Any:
        found = super()._init_training_state(*arguments, **options)
        self._require_best()
        if self.args.should_save:
            self._rotate()  # a run that was killed may not have come to it
        return found

    def _load_best_model(self) -> None:
        self._require_best()  # else the last weights would be taken for the best ones
        super()._load_best_model()

    def _require_best(self) -> None:
        self._name_best()
        best = self.state.best_model_checkpoint
        if best is None:
            return
        fault = fault_of(Path(best)) if Path(best).is_dir() else "is gone"
        if fault is not None:
            raise ValueError(f"{best}, which has the best weights, {fault}; remove {self._folder} to begin again")


@contextmanager
def _reading(checkpoint: str | None) -> Iterator[None]:
    """Say which checkpoint cannot be read. Its pickles are never loaded but with `weights_only`, which refuses code."""
    try:
        yield
    except (OSError, EOFError, KeyError, RuntimeError, ValueError, UnpicklingError, SafetensorError) as error:
        raise ValueError(
            f"{checkpoint} cannot be read ({first_line(error)}); remove it, and the same command goes on from the one "
            "before it"
        ) from error


def trained_parameters(model: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that are trained, by name; each once."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def _stored(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as safetensors writes them: in one piece; one that shares its numbers with an earlier one is left out."""
    found: dict[tuple[int, Any], Tensor] = {}
    kept: dict[str, Tensor] = {}
    for name, value in state.items():
        tensor = value.detach()
        key = (tensor.data_ptr(), tensor.shape) if tensor.numel() else (id(tensor), tensor.shape)
        if key not in found:
            found[key] = tensor
            kept[name] = tensor.contiguous()
    return kept
