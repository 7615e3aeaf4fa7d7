"""Steps of training that mind what may go wrong: too little memory, and numbers that are not finite."""

from __future__ import annotations

import math
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import TrainingArguments

from surgeon.errors import first_line, is_out_of_memory
from surgeon.training.checkpoints import CheckpointingTrainer
from surgeon.training.texts import RunOrder

_WINDOWS_SHOWN = 16


class SteppingTrainer(CheckpointingTrainer):
    """A Trainer that takes a process's windows of a step at once, and divides them into micro-batches itself.

    So a step that runs out of memory is made again with smaller ones. A step whose loss or gradient is not finite is
    not taken, and ends the run.

    Attributes:
        order: which windows each step is made on.
        batch: how many a step has, over all processes.
        micro_batch: windows per forward pass of one process; it may shrink.
    """

    order: RunOrder
    batch: int
    _loss: Tensor

    def __init__(self, model: Any, arguments: TrainingArguments, *others: Any, **options: Any) -> None:
        self.micro_batch = arguments.per_device_train_batch_size
        arguments.per_device_train_batch_size *= arguments.gradient_accumulation_steps
        arguments.gradient_accumulation_steps = 1
        super().__init__(model, arguments, *others, **options)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Add the gradient of the mean loss over the windows of this process; returns that loss.

        Raises:
            ValueError: if one window at a time is too much for the memory, or there are several processes, of which
                one alone cannot begin a step anew.
        """
        del num_items_in_batch
        windows = len(inputs["input_ids"])
        before, told = _RandomState.now(self.args.device), self.told()
        while True:
            try:
                self._loss = self._accumulate(model, inputs)
                return self._loss
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                said = first_line(error)
            # Outside the handler, whose exception holds on to the tensors of the step.
            model.zero_grad()
            if self.args.device.type == "cuda":
                torch.cuda.empty_cache()
            self._shrink(windows, said)
            before.restore()
            self.tell_again(told)

    def told(self) -> Any:
        """What the loss has noted beside its value."""

    def tell_again(self, told: Any) -> None:
        """Forget what the loss has noted since then."""

    def _accumulate(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        windows = len(inputs["input_ids"])
        first = self.state.global_step * self.batch + self.args.process_index * windows
        inputs = inputs | {"place": torch.arange(first, first + windows)}
        starts = range(0, windows, self.micro_batch)
        self.current_gradient_accumulation_steps = len(starts)
        total = torch.zeros((), device=self.args.device)
        for start in starts:
            last = start == starts[-1]
            part = {name: value[start : start + self.micro_batch] for name, value in inputs.items()}
            with self._unsynchronised(model, last):
                total = total + super().training_step(model, part)
        return total

    def _unsynchronised(self, model: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Processes exchange their gradients at the last micro-batch only."""
        state = self.accelerator.gradient_state
        state._set_sync_gradients(last)
        deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED  # which goes by the line above
        each = state.plugin_kwargs.get("sync_each_batch", False)
        return nullcontext() if last or each or deepspeed else self.accelerator.no_sync(model)

    def _shrink(self, windows: int, said: str) -> None:
        """Go on with smaller micro-batches: of at most half as many windows, so that they divide those of a step."""
        step, size = self.state.global_step + 1, min(self.micro_batch, windows)
        spent = f"out of memory at step {step} with {_windows(size)} at a time in a process ({said})"
        if size == 1:
            raise ValueError(
                f"out of memory at step {step} with one window at a time ({said}); use a smaller window, "
                "--trainer-arg gradient_checkpointing=true, or train fewer weights (adapters, norms only)"
            )
        if self.args.world_size > 1 or self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ValueError(f"{spent}; use a smaller micro-batch than {size} in another -o")
        self.micro_batch = max(half for half in range(1, size // 2 + 1) if windows % half == 0)
        warnings.warn(
            f"out of memory at step {step} with {_windows(size)} at a time; the step is made again with "
            f"{self.micro_batch} at a time, and so are all after it (the batch stays as it is)",
            stacklevel=1,
        )

    def _run_epoch(self, *arguments: Any, **options: Any) -> None:
        if not self.control.should_training_stop:  # a run that goes on may already have been at its end
            super()._run_epoch(*arguments, **options)  # type: ignore[no-untyped-call]

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The gradient's norm; here every process has the same gradient, and no step has been taken yet.

        Raises:
            ValueError: if it, or the loss, is not finite.
        """
        norm = super()._get_grad_norm(model, grad_norm)  # type: ignore[no-untyped-call]
        loss = float(self.accelerator.reduce(self._loss, "mean") if self.args.world_size > 1 else self._loss)
        if not math.isfinite(loss):
            raise self.not_finite(f"the loss is {loss}")
        # With fp16, steps whose scaled gradient is too large are left out.
        scaled = getattr(self.accelerator, "scaler", None) is not None
        if norm is not None and not scaled and not math.isfinite(float(norm)):
            raise self.not_finite(f"the gradient's norm is {float(norm)}")
        return norm

    def not_finite(self, what: str) -> ValueError:
        """An error of the step that is being made.

        Args:
            what: is not finite.
        """
        step = self.state.global_step
        windows = list(islice(self.order, step * self.batch, (step + 1) * self.batch))
        shown = ", ".join(map(str, windows[:_WINDOWS_SHOWN]))
        more = f" and {len(windows) - _WINDOWS_SHOWN} more" if len(windows) > _WINDOWS_SHOWN else ""
        return ValueError(
            f"{what} at step {step + 1}, made on windows {shown}{more} of the training text; that step is not taken, "
            f"and {self.last_good()}"
        )

    def last_good(self) -> str:
        """Where weights are that were finite, and what to do; the end of a message."""
        there = self._made()
        where = f"the weights after step {max(there)} are in {there[max(there)]}" if there else "no weights were kept"
        return (
            f"{where}; use a lower learning rate than {self.args.learning_rate:g}, or a warmup, in another -o (this "
            "run would come to the same again)"
        )


@dataclass(frozen=True)
class _RandomState:
    """Where the random numbers of dropout are."""

    cpu: Tensor
    cuda: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> _RandomState:
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None)

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)


def _windows(count: int) -> str:
    return f"{count} windows" if count > 1 else "one window"
