"""transformers' Trainer on a model with a program: its loss, its order of windows, what it measures meanwhile."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from peft import PeftModel
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback, TrainingArguments

from surgeon.quality.text import TextQuality
from surgeon.training.held_out import Measure
from surgeon.training.steps import SteppingTrainer
from surgeon.training.texts import RunOrder, TrainingWindows


class LossParts(Protocol):
    """What a model is trained towards beside the text, or in its place."""

    def loss(self, model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """The mean loss of a micro-batch under "loss", in nats per predicted token, and its parts by their names.

        Args:
            inputs: (windows, tokens) `input_ids` and `labels`; and, (windows,), `index`, which training windows they
                are, and `place`, at which places of the run's order they stand: step s has those from s * batch on.
        """


class ModelTrainer(SteppingTrainer):
    """A Trainer whose loss is the text's or a distillation's, and whose evaluation is a `Measure`.

    Attributes:
        latest: what was measured last on held-out text.
        empty: where parameters are shared out among processes, the model without numbers, to be filled with all.
    """

    latest: TextQuality | None = None

    def __init__(
        self,
        model: PreTrainedModel | nn.Module,
        arguments: TrainingArguments,
        windows: Tensor,
        held_out: Measure,
        batch: int,
        towards: LossParts | None = None,
        callbacks: Sequence[TrainerCallback] = (),
    ) -> None:
        data = TrainingWindows(windows)
        self.order = RunOrder(len(windows), arguments.max_steps, batch, arguments.seed)
        self.batch, self.held_out, self.towards = batch, held_out, towards
        self._parts: dict[str, Tensor] = {}
        self._counted = 0
        self.empty: nn.Module | None = None
        super().__init__(model, arguments, train_dataset=data, eval_dataset=data, callbacks=list(callbacks))
        self.remove_callback(PrinterCallback)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            self.empty = meta_copy(model)
        self.model_accepts_loss_kwargs = False  # every micro-batch's loss is a mean over as many tokens

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        wanted, state = self.args.fsdp_plugin_args, self.accelerator.state
        if wanted is not None and state.distributed_type == DistributedType.MULTI_CPU:
            # On CPUs accelerate would train replicas, without a word.
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**wanted)
            state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
            self.is_fsdp_enabled = True

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self.empty is None or not state_dict:
            super()._save(output_dir, state_dict)
            return
        sharded, self.model = self.model, filled(self.empty, state_dict)
        try:
            super()._save(output_dir)
        finally:
            self.model = sharded

    def whole_model(self) -> Any:
        """The model in one piece, in the first process; None in the others."""
        if self.empty is None:
            # Without what mixed precision has put around its forward pass.
            plain = self.accelerator.unwrap_model(self.model_wrapped, keep_fp32_wrapper=False, keep_torch_compile=False)
            return plain if self.args.should_save else None
        state = self.accelerator.get_state_dict(self.model_wrapped)
        return filled(self.empty, state) if self.args.should_save else None

    def _get_train_sampler(self, train_dataset: Dataset[Any] | None = None) -> RunOrder:
        del train_dataset
        return self.order

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The mean loss of a micro-batch, in nats per predicted token."""
        del num_items_in_batch
        if self.towards is None:
            loss, outputs = text_loss(model, inputs["input_ids"])
        else:
            parts = self.towards.loss(model, inputs)
            loss, outputs = parts.pop("loss"), {}
            for name, part in parts.items():
                self._parts[name] = self._parts.get(name, 0) + part.detach()
            self._counted += 1
        return (loss, outputs) if return_outputs else loss

    def told(self) -> tuple[dict[str, Tensor], int]:
        return dict(self._parts), self._counted

    def tell_again(self, told: tuple[dict[str, Tensor], int]) -> None:
        self._parts, self._counted = told

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self._counted:
            gathered = {name: self.accelerator.reduce(part, "mean") for name, part in self._parts.items()}
            logs |= {name: float(part) / self._counted for name, part in gathered.items()}
            self._parts, self._counted = {}, 0
        super().log(logs, start_time)

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Measure on held-out text; every process does all of it, as sharded models need."""
        try:
            self.latest = self.held_out.measure(self.model_wrapped, self.state.global_step)
        except ValueError as error:
            raise ValueError(
                f"held-out text after step {self.state.global_step}: {error} {self.last_good()}"
            ) from error
        metrics = {"eval_loss": math.log(self.latest.perplexity), "eval_perplexity": self.latest.perplexity}
        if self.latest.divergence is not None:
            metrics["eval_divergence"] = self.latest.divergence
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def text_loss(model: nn.Module, ids: Tensor) -> tuple[Tensor, Mapping[str, Any]]:
    """The mean negative log-likelihood per predicted token of windows, (windows, tokens), and the model's output."""
    output = model(input_ids=ids, use_cache=False)
    logits = output.logits[:, :-1].flatten(0, 1)
    return functional.cross_entropy(logits.float(), ids[:, 1:].flatten().to(logits.device)), output


def meta_copy(model: nn.Module) -> nn.Module:
    """The same modules without numbers, to take in a state dict that was gathered from sharded ones."""
    empty = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        for parameter in model.parameters()
    }
    copied: nn.Module = copy.deepcopy(model, dict[int, Any](empty))
    return copied


def filled(empty: nn.Module, state: dict[str, Any]) -> nn.Module:
    """A copy without numbers, with those of a whole state dict."""
    missing = empty.load_state_dict(state, strict=False, assign=True).missing_keys
    whole: Any = empty.get_base_model() if isinstance(empty, PeftModel) else empty
    whole.tie_weights()
    assert not any(parameter.is_meta for parameter in empty.parameters()), missing
    return empty
