"""transformers' Trainer on a model with a program: loss, steps, checkpoints, measurements.

Private methods of the Trainer are overridden only where there is no public hook; each such method says why.
"""

from __future__ import annotations

import copy
import math
import shutil
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from surgeon.errors import Diverged, is_out_of_memory
from surgeon.machine import show_size
from surgeon.models.edit import ASKS_FOR_ROUTERS, EditedLayers
from surgeon.models.lora import PeftModel
from surgeon.processes.files import is_full_disk
from surgeon.quality.summary import Quality
from surgeon.training.checkpoints import (
    WEIGHTS_FILE,
    RunCheckpoints,
    checkpoint_bytes,
    drop_shared,
    naming_unreadable,
    trained_parameters,
)
from surgeon.training.head_loss import LossParts, text_loss
from surgeon.training.scope import follow_checkpoint, routers_of, shard_parameters
from surgeon.training.texts import RunOrder, TrainingText, TrainingWindows
from surgeon.training.token_store import IGNORED, attends_across
from surgeon.words import first_few, first_line, plural

_WINDOWS_NAMED = 16


# Measures a model after so many steps, without dropout.
Measure = Callable[[nn.Module, int], Quality]


class ModelTrainer(Trainer):
    """A Trainer whose loss is the text's or a distillation's, and whose evaluation is a `Measure`.

    A step whose loss or gradient is not finite is not taken, and ends the run. Checkpoints hold what is trained
    (`RunCheckpoints`).

    Attributes:
        balance: of a mixture's experts, whose loss is added.
        order: of windows, over all steps.
        batch: windows of a step, over all processes.
        checkpoints: of the run.
        empty: where parameters are sharded, the model without numbers, to be filled with all.
    """

    def __init__(
        self,
        model: PreTrainedModel | nn.Module,
        arguments: TrainingArguments,
        text: TrainingText,
        measure: Measure,
        towards: LossParts | None = None,
    ) -> None:
        of_process = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
        self.batch = of_process * arguments.world_size
        self.order = RunOrder(len(text), arguments.max_steps, self.batch, arguments.seed, text.parts)
        self.checkpoints = RunCheckpoints(arguments)
        self.measure = measure
        self.towards = towards
        self.balance = ExpertBalance(model)
        # Parts of the loss, summed over the micro-batches since the last log.
        self._parts: dict[str, Tensor] = {}
        self._counted = 0
        self._loss = torch.zeros(())  # of a step
        # Tokens in a micro-batch of it, on average; None where all have as many.
        self._predicted: Tensor | None = None
        self.data = data = TrainingWindows(text, self.order)
        config: Any = model.config
        if "position_ids" in text.rows.column_names and attends_across(config):
            warnings.warn(
                f"attentions of {config.model_type} see across the borders of documents in a window; only positions "
                "and what is predicted go by documents",
                stacklevel=2,
            )
        super().__init__(
            model, arguments, train_dataset=data, eval_dataset=data, callbacks=[self.checkpoints]
        )
        self.remove_callback(PrinterCallback)
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        self.empty: nn.Module | None = None
        if sharded:
            numberless = {
                id(one): nn.Parameter(torch.empty_like(one, device="meta"), one.requires_grad)
                for one in model.parameters()
            }
            self.empty = copy.deepcopy(model, dict[int, Any](numberless))
        self.model_accepts_loss_kwargs = False  # what is predicted is counted here (`get_batch_samples`)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        unset_hf_deepspeed_config()  # which accelerate has set again
        self.is_fsdp_enabled = shard_parameters(self.accelerator, self.args.fsdp_plugin_args)

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *others: Any, **options: Any
    ) -> Any:
        """Train, or resume, as the Trainer does.

        Raises:
            OSError: if the disk has no room for the run's checkpoints, or fills up.
            ValueError: if existing checkpoints are of something else.
        """
        if self.args.should_save:
            self.checkpoints.require_room(self.model, self._saves_frozen)
        if isinstance(resume_from_checkpoint, str):
            follow_checkpoint(self.accelerator, Path(resume_from_checkpoint))
            # Each process has a state of the random numbers of its own.
            checkpoint = Path(resume_from_checkpoint)
            name = (
                "rng_state.pth"
                if self.args.world_size == 1
                else f"rng_state_{self.args.process_index}.pth"
            )
            if self.args.should_save and not (checkpoint / name).is_file():
                warnings.warn(
                    f"{checkpoint} was written by another number of processes than there are now; where the model has "
                    "dropout, its random numbers are others",
                    stacklevel=1,
                )
        try:
            return super().train(resume_from_checkpoint, *others, **options)
        except Exception as error:
            if not is_full_disk(error):
                raise
        finally:
            if self.args.should_save:
                shutil.rmtree(self.checkpoints.staging, ignore_errors=True)
        # Raised outside the handler, to stand for itself: it says more than the error that it comes from.
        needed = show_size(checkpoint_bytes(self.model, self._saves_frozen))
        raise OSError(
            f"the disk of {self.checkpoints.folder} filled up at step {self.state.global_step}: a checkpoint takes "
            f"about {needed}; earlier ones are whole, so make room, and run the same command again to go on"
        )

    @property
    def _saves_frozen(self) -> bool:
        """True where checkpoints have frozen parameters, too: those of FSDP and DeepSpeed, but for adapters."""
        return self.empty is not None and not isinstance(self.model, PeftModel)

    def whole_model(self) -> Any:
        """The model in one piece; None in all processes but the first."""
        whole: Any
        if self.empty is None:
            # Without what mixed precision has put around its forward pass.
            whole = self.accelerator.unwrap_model(
                self.model_wrapped, keep_fp32_wrapper=False, keep_torch_compile=False
            )
        else:
            state = self.accelerator.get_state_dict(self.model_wrapped)
            if self.args.should_save:
                missing = self.empty.load_state_dict(state, strict=False, assign=True).missing_keys
                whole = self.empty
                tied: Any = whole.get_base_model() if isinstance(whole, PeftModel) else whole
                tied.tie_weights()
                assert not any(parameter.is_meta for parameter in whole.parameters()), missing
        return whole if self.args.should_save else None

    # Steps

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """Get the micro-batches of a step; none where a resumed run had ended early, which the Trainer notices late."""
        if self.control.should_training_stop:
            return [], None
        samples: tuple[list[Any], Tensor | int | None] = super().get_batch_samples(
            epoch_iterator, num_batches, device
        )
        self._loss = torch.zeros((), device=device)
        if self.data.has_labels:  # all that is predicted in a step counts alike
            counts = torch.stack([predicted_tokens(part) for part in samples[0]])
            mean = counts.float().to(device).mean()
            if self.args.world_size > 1:
                mean = self.accelerator.reduce(mean, "mean")
            self._predicted = mean.clamp_min(torch.finfo(torch.float32).tiny)
        return samples

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *others: Any) -> Tensor:
        """Add the gradient of the mean loss of a micro-batch; returns that loss."""
        try:
            loss = super().training_step(model, inputs, *others)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise ValueError(
                f"out of memory at step {self.state.global_step + 1} with {plural(len(inputs['input_ids']), 'window')} "
                f"at a time ({first_line(error)}); use a smaller micro-batch (the batch stays as it is) or window, "
                "gradient_checkpointing, or train fewer weights (adapters, norms only)"
            ) from error
        self._loss = self._loss + loss
        return loss

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> Any:
        """Compute the mean loss of a micro-batch, in nats per predicted token, with the experts' balance."""
        with self.balance.watch() as seen:
            if self.towards is None:
                parts = {"loss": text_loss(model, inputs)}
            else:
                parts = self.towards(model, inputs)
        if self._predicted is not None:
            share = predicted_tokens(inputs).to(self._predicted) / self._predicted
            parts = {name: part * share.to(part.device) for name, part in parts.items()}
        loss = parts.pop("loss")
        if self.balance.weight:
            parts["balance"] = self.balance.loss(seen)
            loss = loss + self.balance.weight * parts["balance"].to(loss.device)
        for name, part in parts.items():
            self._parts[name] = self._parts.get(name, 0) + part.detach()
        self._counted += bool(parts)
        return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Compute the gradient's norm before any step; every process has the same gradient.

        Private: the public hook `on_pre_optimizer_step` has only the clipped gradient.

        Raises:
            Diverged: if it, or the loss, is not finite.
        """
        norm = super()._get_grad_norm(model, grad_norm)  # type: ignore[no-untyped-call]
        loss = float(
            self.accelerator.reduce(self._loss, "mean") if self.args.world_size > 1 else self._loss
        )
        # With fp16, steps whose scaled gradient is too large are left out.
        scaled = getattr(self.accelerator, "scaler", None) is not None
        if not math.isfinite(loss):
            what = f"the loss is {loss}"
        elif norm is not None and not scaled and not math.isfinite(float(norm)):
            what = f"the gradient's norm is {float(norm)}"
        else:
            return norm
        step = self.state.global_step
        windows = [str(self.order[place]) for place in range(step * self.batch, (step + 1) * self.batch)]
        raise Diverged(
            f"{what} at step {step + 1}, made on windows {first_few(windows, _WINDOWS_NAMED)} of the training text; "
            f"that step is not taken, and {self._last_good()}"
        )

    def _last_good(self) -> str:
        """Name the last finite weights, and what to do; the end of a message."""
        there = self.checkpoints.until(self.state.global_step)
        if there:
            where = f"the weights after step {max(there)} are in {there[max(there)]}"
        else:
            where = "no weights were kept"
        return (
            f"{where}; use a lower learning rate than {self.args.learning_rate:g}, or a warmup, in another output "
            "(this run would come to the same again)"
        )

    # Measurements

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self._counted:
            gathered = {
                name: self.accelerator.reduce(part, "mean") for name, part in self._parts.items()
            }
            logs |= {name: float(part) / self._counted for name, part in gathered.items()}
            self._parts = {}
            self._counted = 0
        super().log(logs, start_time)

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Measure on held-out text, in every process, as sharded models need."""
        found = self.measure_held_out(self.model_wrapped)
        entries = {
            f"eval_{name}": value for name, value in found.estimates.items() if not math.isnan(value)
        }
        metrics = {"eval_loss": math.log(found.perplexity), **entries}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def measure_held_out(self, model: nn.Module) -> Quality:
        """Measure the model as it is now on held-out text."""
        step = self.state.global_step
        try:
            return self.measure(model, step)
        except ValueError as error:
            raise Diverged(f"held-out text after step {step}: {error} {self._last_good()}") from error

    # Checkpoints

    def save_model(self, output_dir: str | None = None, *_: Any, **__: Any) -> None:
        """Write what is trained; all else follows from the model. FSDP and DeepSpeed write by themselves."""
        if self.args.should_save and self.empty is None:
            model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
            folder = Path(output_dir or str(self.args.output_dir))
            folder.mkdir(parents=True, exist_ok=True)
            if isinstance(model, PeftModel):
                # Whether the vocabulary has changed would be looked up on the hub.
                model.save_pretrained(str(folder), save_embedding_layers=False)
            else:
                trained = drop_shared(dict(trained_parameters(model)))
                save_file(trained, folder / WEIGHTS_FILE, metadata={"format": "pt"})

    # Private, as is all of the Trainer that reads a checkpoint: around `train` an error of the checkpoint, which a user
    # is told to remove, could not be told from others.

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        with naming_unreadable(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with naming_unreadable(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Refuse a checkpoint that is not of what is trained.

        Private: the Trainer reads with `strict=False`, and would only warn, of frozen parameters, too, which no
        checkpoint has.
        """
        trained = {name for name, _ in trained_parameters(self.model)}
        odd = sorted(trained & set(load_result.missing_keys)) + list(load_result.unexpected_keys)
        if odd:
            raise ValueError(f"the checkpoint is not of what is trained now: {odd[0]}")


def predicted_tokens(windows: Mapping[str, Tensor]) -> Tensor:
    """Count the predicted tokens of windows."""
    return (windows["labels"][:, 1:] != IGNORED).sum()


class ExpertBalance:
    """The balance loss of a model's experts.

    Attributes:
        weight: of the loss; 0 where the configuration asks for none, or no router is trained.

    Args:
        model: edited, or a wrapper of an edited one.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = next((module for module in model.modules() if isinstance(module, EditedLayers)), None)
        self.weight = 0.0
        self.routers = list[nn.Module]()
        self.top_k = 0
        self._logits = 0
        if layers is None or layers.family.mixture is None:
            return
        config: Any = layers.config
        asked = layers.config_before.get(ASKS_FOR_ROUTERS, getattr(config, ASKS_FOR_ROUTERS, False))
        routers = routers_of(layers)
        if asked and any(each.requires_grad for router in routers for each in router.parameters()):
            self.weight = float(getattr(config, "router_aux_loss_coef", None) or 0.0)
            self.routers = routers
            self.top_k = layers.family.mixture.routing(config).top_k
            self._logits = layers.family.mixture.logits

    @contextmanager
    def watch(self) -> Iterator[list[Tensor]]:
        """Collect the router logits of the next forward pass, (tokens, experts) each; nothing where the weight is 0."""
        seen: list[Tensor] = []

        def keep(_: nn.Module, __: Any, output: Any) -> None:
            seen.append(output[self._logits] if isinstance(output, tuple) else output)

        with ExitStack() as hooks:
            for router in self.routers if self.weight else ():
                hooks.callback(router.register_forward_hook(keep).remove)
            yield seen

    def loss(self, seen: Sequence[Tensor]) -> Tensor:
        """Compute `balance_loss` of collected logits."""
        if not any(each.requires_grad for each in seen):
            raise ValueError(
                "the choices of routers were not seen, as when a model is compiled, or its checkpointed passes are "
                "reentrant; train without torch_compile and use_reentrant, or with output_router_logits: false"
            )
        return balance_loss(seen, self.top_k)


def balance_loss(logits: Sequence[Tensor], top_k: int) -> Tensor:
    """The experts' share of tokens times their share of scores, summed, times their number: k where all are alike.

    Args:
        logits: of each layer, (tokens, experts); layers with different numbers of experts count by their layers.
        top_k: experts of a token, k.

    Returns:
        A number, whose gradient is that of the scores.
    """
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    by_experts = defaultdict[int, list[Tensor]](list)
    for each in logits:
        by_experts[each.shape[-1]].append(each)
    total = torch.zeros((), device=logits[0].device)
    for experts, layers in by_experts.items():
        together: Any = tuple(layers)
        loss: Any = load_balancing_loss_func(together, experts, min(top_k, experts))
        total = total + len(layers) * loss.to(total.device)
    return total / len(logits)
