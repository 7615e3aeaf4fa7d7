"""Settings of training: of what, towards what, for how long; and transformers' TrainingArguments that follow."""

from __future__ import annotations

import copy
import json
import math
import os
from argparse import ArgumentError, Namespace
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any

import torch
from accelerate import PartialState
from accelerate.utils import str_to_bool
from pydantic import ConfigDict, Field, Strict
from transformers import HfArgumentParser, Trainer, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.training_args import OptimizerNames

from surgeon.checkpoint.tensor_file import read_json
from surgeon.machine import avoid_cudnn_attention, describe_gpu
from surgeon.opened import choose_device
from surgeon.training.token_store import ALL_TOKENS
from surgeon.words import did_you_mean, first_line, plural, show_value

SCOPES = ("edited", "all", "norms", "edited-norms", "routers")
ROUTERS = ("trained", "frozen")
DEFAULT_STEPS = 1000
Count = Annotated[int, Strict()]  # of at least 1
LEARNING_RATE = 1e-4
LORA_LEARNING_RATE = 1e-3
_ALONE = """
    optim weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm lr_scheduler_kwargs neftune_noise_alpha
    bf16 fp16 tf32 activation_checkpointing gradient_checkpointing torch_compile torch_compile_backend
    torch_compile_mode torch_empty_cache_steps logging_strategy logging_steps logging_first_step report_to
    save_total_limit dataloader_num_workers accelerator_config ddp_find_unused_parameters ddp_bucket_cap_mb
    ddp_static_graph fsdp deepspeed
"""
# Arguments of TrainingArguments that have an effect here, each with others of which one has to be given, too.
TAKEN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_ALONE.split(), ()),
    **dict.fromkeys(("optim_args", "optim_target_modules"), ("optim",)),
    "activation_checkpointing_kwargs": ("activation_checkpointing", "gradient_checkpointing"),
    "gradient_checkpointing_kwargs": ("gradient_checkpointing", "activation_checkpointing"),
    "run_name": ("report_to",),
    "fsdp_config": ("fsdp",),
}
# Those that the run decides, with surgeon's own option.
DECIDED = {
    "output_dir": "output",
    "max_steps": "steps",
    "num_train_epochs": "epochs",
    "per_device_train_batch_size": "batch and micro_batch",
    "gradient_accumulation_steps": "batch and micro_batch",
    "learning_rate": "learning_rate",
    "lr_scheduler_type": "schedule",
    "warmup_steps": "warmup",
    "seed": "seed",
    "data_seed": "seed",
    "use_cpu": "device",
    "eval_strategy": "evaluate_every",
    "eval_steps": "evaluate_every",
    "save_strategy": "save_every",
    "save_steps": "save_every",
    "load_best_model_at_end": "patience",
    "local_rank": "torchrun or accelerate launch",
    "resume_from_checkpoint": "the same command again, which goes on where it was",
}


def check_taken(name: str) -> None:
    """Refuse an argument of the Trainer that would do nothing, or that the run decides."""
    if name in DECIDED:
        raise ValueError(f"{name} is decided by the run; use surgeon's own {DECIDED[name]}")
    if name not in TAKEN:
        raise ValueError(
            f"{name} is no argument of the Trainer that has an effect here; {did_you_mean(name, TAKEN)}"
        )


def check_trainer_arguments(given: Mapping[str, Any]) -> None:
    """Refuse arguments that are not taken, or do nothing without another."""
    for name in given:
        check_taken(name)
        if TAKEN[name] and not any(map(given.get, TAKEN[name])):
            raise ValueError(
                f"{name} does nothing without {' or '.join(TAKEN[name])}; give that, too, or leave it out"
            )


@dataclass(frozen=True)
class PaperPreset:
    """A paper's hyperparameters, as values of `TrainSettings`.

    Attributes:
        source: section of the paper.
        data: as `datasets` loads it; None where the paper does not say.
    """

    source: str
    values: dict[str, Any]
    data: str | None = None


PRESETS = {
    "lp": PaperPreset(
        "Layer Parallelism, section 5 and table 2",
        {
            "scope": "edited",
            "batch": 32,
            "learning_rate": 1e-4,
            "schedule": "linear",
            "warmup": 0,
            "steps": 4096,
        },
        data="RedPajama, a script that datasets 4 does not load; DKYoon/SlimPajama-6B::train stands in for it",
    ),
    "ladder": PaperPreset(
        "Ladder Residual, section 4.2",
        {
            "scope": "all",
            "batch": 32,
            "learning_rate": 5e-6,
            "schedule": "cosine",
            "warmup": 200,
            "epochs": 2.0,
        },
        data="BAAI/Infinity-Instruct:7M:train and BAAI/Infinity-Instruct:Gen:train (conversations)",
    ),
}


def preset(name: str) -> PaperPreset:
    """Find a preset."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; {did_you_mean(name, PRESETS)}")
    return PRESETS[name]


PARTS = ("logits", "hidden", "text")


@dataclass(frozen=True)
class Distillation:
    """Weights of what an edited model learns from its original.

    Attributes:
        logits: weight of the divergence from the original's predictions.
        hidden: weight of the relative error of the stream.
        text: weight of the text's negative log-likelihood.
        temperature: divides both models' logits for their divergence.
        kept: number of the original's logits that are kept on disk for each token, instead of an original in memory;
            None for the latter.

    Raises:
        ValueError: if nothing is taken from the original, a weight is negative, the temperature is not above 0, or
            hidden streams are asked for where only logits are kept.
    """

    logits: float = 1.0
    hidden: float = 0.0
    text: float = 0.0
    temperature: float = 1.0
    kept: int | None = None

    def __post_init__(self) -> None:
        _check_types(self)
        for name in PARTS:
            weight = getattr(self, name)
            if not (math.isfinite(weight) and weight >= 0):
                raise ValueError(f"the weight of {name} must be a number from 0 on, not {weight}")
        if not self.logits and not self.hidden:
            raise ValueError(
                "distillation needs a weight above 0 for logits or hidden; without, train on text alone"
            )
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(f"the temperature must be a number above 0, not {self.temperature}")
        if self.kept is None:
            return
        if self.kept < 1:
            raise ValueError(
                f"at least 1 of the original's logits has to be kept for each token, not {self.kept}"
            )
        if self.hidden:
            raise ValueError(
                "hidden streams need the original in memory; keep no logits on disk, or give hidden 0"
            )

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(name for name in PARTS if getattr(self, name))


@dataclass(frozen=True)
class TrainSettings:
    """Settings of a training run; it checks itself.

    Attributes:
        scope: trained parameters: those of the "edited" sublayers, "all", "norms", "edited-norms" of the edited
            sublayers alone, or the "routers" of mixtures of experts.
        router: whether routers of mixtures are "trained" where they are in scope, or "frozen".
        lora: rank of adapters that are trained in place of the matrices in scope; None trains the matrices.
        distillation: from the original; None learns the text alone.
        steps: of the optimiser; None for as many as `epochs` takes.
        epochs: passes over the text, in place of `steps`.
        batch: windows per step, over all processes and micro-batches.
        micro_batch: windows per forward pass of one process; None for all that a process has of a batch.
        learning_rate: at its highest; None for the default of what is trained.
        schedule: as `transformers` names it: linear, cosine, constant, ...
        warmup: steps in which the learning rate rises.
        evaluate_every, save_every: steps between measurements on held-out text, and between checkpoints.
        patience: measurements in a row that may be no better than the best one before them; then the run ends, with the
            best one's weights. None never ends early, and keeps the last weights.
        arguments: further arguments of transformers' TrainingArguments, of those in `TAKEN`.
    """

    # Annotations are for where it is read.
    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    scope: str = "edited"
    router: Annotated[str, Strict()] = "trained"
    lora: Count | None = None
    distillation: Distillation | None = None
    steps: Count | None = None
    epochs: Annotated[float, Strict()] | None = None
    batch: Count = 8
    micro_batch: Count | None = None
    learning_rate: Annotated[float, Strict()] | None = None
    schedule: Annotated[str, Strict()] = "linear"
    warmup: Annotated[int, Strict()] = 0
    seed: Annotated[int, Strict(), Field(ge=0)] = 0
    evaluate_every: Count = 100
    save_every: Count = 100
    patience: Count | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_types(self)
        for name, choices in (("scope", SCOPES), ("router", ROUTERS)):
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"there is no {name} {value!r}; {did_you_mean(value, choices)}")
        if self.scope == "routers" and self.router == "frozen":
            raise ValueError(
                "the scope routers trains nothing else, and they are to be frozen; leave one of them out"
            )
        if self.lora is not None and self.scope in ("norms", "edited-norms"):
            raise ValueError(
                f"adapters (lora) are for matrices, and the scope {self.scope} trains none; leave one of them out"
            )
        if self.steps is not None and self.epochs is not None:
            raise ValueError(
                f"steps ({self.steps}) and epochs ({self.epochs:g}) both say how long; leave one of them out"
            )
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            raise ValueError(f"epochs must be above 0, not {self.epochs}")
        if self.warmup < 0:
            raise ValueError(f"warmup must be at least 0 steps, not {self.warmup}")
        if self.learning_rate is not None and not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning rate must be above 0, not {self.learning_rate}")
        if self.micro_batch is not None and self.batch % self.micro_batch:
            raise ValueError(
                f"a batch of {self.batch} windows is no multiple of a micro-batch of {self.micro_batch}; change one"
            )
        check_trainer_arguments(self.arguments)

    @property
    def rate(self) -> float:
        if self.learning_rate is not None:
            return self.learning_rate
        if self.lora is None:
            return LEARNING_RATE
        return LORA_LEARNING_RATE

    def steps_on(self, windows: int) -> int:
        """Number of steps with this many windows of training text."""
        if windows < self.batch:
            raise ValueError(
                f"the training text has {plural(windows, 'window')}, fewer than one batch of {self.batch}; give more "
                "text, or a smaller batch or window"
            )
        if self.steps is not None:
            return self.steps
        if self.epochs is None:
            return DEFAULT_STEPS
        return max(1, round(self.epochs * windows / self.batch))

    def notes_on(self, windows: int) -> list[str]:
        steps = self.steps_on(windows)
        notes = list[str]()
        if self.warmup >= steps:
            notes.append(
                f"the learning rate rises over {plural(self.warmup, 'step')}, and the run has {steps}: it never comes "
                f"to {self.rate:g}; use a warmup below {steps}, or more steps"
            )
        if self.epochs is None and (rounds := steps * self.batch / windows) > 1:
            notes.append(
                f"the steps go through {steps * self.batch:,} windows, and the training text has {windows:,}: each is "
                f"trained on {rounds:.3g} times"
            )
        return notes

    def tokens_on(self, window: int) -> int:
        """Most tokens of training text that the run reads, in windows of this many."""
        if self.epochs is not None:
            return ALL_TOKENS
        return self.steps_on(self.batch) * self.batch * window

    @property
    def method(self) -> str:
        names = {
            "edited": "edited sublayers",
            "all": "all weights",
            "edited-norms": "norms of edited sublayers",
        }
        what = names.get(self.scope, self.scope)
        what = what if self.router == "trained" else f"{what} but routers"
        trained = what if self.lora is None else f"adapters of rank {self.lora} on {what}"
        if self.distillation is None:
            return trained
        return f"{trained}, distilled from the original"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"arguments": dict(self.arguments), "learning_rate": self.rate}


# What fields take, by what their annotations have; of `Count` at least 1.
_TAKES: dict[str, tuple[Any, str]] = {
    "Mapping": (Mapping, "a mapping"),
    "Distillation": (Distillation, "a Distillation"),
    "Count": (Integral, "a whole number"),
    "int": (Integral, "a whole number"),
    "float": (Real, "a number"),
    "str": (str, "a text"),
}


def _check_types(settings: Distillation | TrainSettings) -> None:
    """Refuse values of other types than their fields', and counts below 1."""
    for each in fields(settings):
        value = getattr(settings, each.name)
        name = next(name for name in _TAKES if name in str(each.type))
        kind, words = _TAKES[name]
        if value is None and "None" in str(each.type):
            continue
        if isinstance(value, bool) or not isinstance(value, kind):
            raise ValueError(f"{each.name} must be {words}, not {show_value(value)}")
        if name == "Count" and value < 1:
            raise ValueError(f"{each.name.replace('_', ' ')} must be at least 1, not {value}")
        if kind in (Integral, Real) and not isinstance(value, int | float):
            # NumPy's, which no record can hold.
            object.__setattr__(settings, each.name, int(value) if kind is Integral else float(value))


_OF_OPTIMISERS = ("optim_args", "optim_target_modules", "adam_beta1", "adam_beta2", "adam_epsilon")


class OneDevice(TrainingArguments):
    """Arguments of a process that computes on one device, however many there are.

    transformers' own replicate the model on all devices (nn.DataParallel), take the batch of each for the batch, and
    lose hooks on the model's streams. Several devices take a process each.
    """

    @property
    def n_gpu(self) -> int:
        return min(1, int(super().n_gpu))


def parse_trainer_arguments(texts: Iterable[str] | Mapping[str, Any] | None) -> dict[str, Any]:
    """Parse arguments of TrainingArguments from texts like "gradient_checkpointing=true"; a mapping is copied.

    Raises:
        ValueError: if one has no "=", is unknown, is not taken (`check_taken`), or its value cannot be read.
    """
    if isinstance(texts, Mapping):
        return dict(texts)
    found: dict[str, Any] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"the trainer argument {text!r} has no value; write it as NAME=VALUE")
        name = name.strip().lstrip("-").replace("-", "_")
        found[name] = read_trainer_argument(name, value.strip())
    check_trainer_arguments(found)
    return found


def read_trainer_argument(name: str, value: str) -> Any:
    """Read the value of one of TrainingArguments' arguments from its text, by the argument's type.

    Raises:
        ValueError: if there is no such argument, it is not taken, or the value cannot be read.
    """
    check_taken(name)
    kind: Any = TrainingArguments
    parser = HfArgumentParser(kind, allow_abbrev=False, exit_on_error=False)
    try:
        given: Namespace = parser.parse_args(["--output_dir", ".", f"--{name}", value])
    except (ArgumentError, ValueError) as error:
        raise ValueError(f"{name}={value} cannot be read ({first_line(error)})") from error
    return {"true": True, "false": False}.get(value.lower(), getattr(given, name))


def training_arguments(
    settings: TrainSettings,
    folder: Path,
    steps: int,
    micro_batch: int,
    device: str = "cpu",
) -> TrainingArguments:
    """Make the arguments of a run.

    Args:
        folder: of the run.
        steps: of the optimiser.
        micro_batch: windows per forward pass of one process.
        device: "cpu" or "cuda".

    Raises:
        ValueError: if an argument is not accepted.
    """
    given: dict[str, Any] = {
        "logging_steps": 10,
        "save_total_limit": 2,
        "max_grad_norm": 1.0,
        "report_to": [],
        "weight_decay": 0.0,
        **settings.arguments,
    }
    decided: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": steps,
        "per_device_train_batch_size": micro_batch,
        "learning_rate": settings.rate,
        "lr_scheduler_type": settings.schedule,
        "warmup_steps": settings.warmup,
        "seed": settings.seed,
        "eval_strategy": "steps",
        "eval_steps": settings.evaluate_every,
        "save_strategy": "steps",
        "save_steps": settings.save_every,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": False,
        "logging_nan_inf_filter": False,
        "disable_tqdm": True,
        "use_cpu": device == "cpu",
        "remove_unused_columns": False,
        "label_names": ["labels"],
        "dataloader_drop_last": True,
        "dataloader_pin_memory": device != "cpu",
        "train_sampling_strategy": "sequential",  # the windows come in the run's own order
    }
    if settings.patience is not None:
        decided |= {"load_best_model_at_end": True, "save_steps": settings.evaluate_every}
    try:
        if given.get("fsdp"):
            processes = PartialState(cpu=device == "cpu").num_processes
            given["fsdp_config"] = check_sharding(
                _read_configuration(given.get("fsdp_config")), processes
            )
        if "accelerator_config" in given:
            config = given["accelerator_config"] = _read_configuration(given["accelerator_config"])
            of_steps = config.get("gradient_accumulation_kwargs") or {}
            # What else it has would change which windows a step is made on.
            odd = {*config} - {"non_blocking", "gradient_accumulation_kwargs"} | {*of_steps} - {
                "sync_each_batch"
            }
            if odd:
                raise ValueError(
                    f"accelerator_config: {min(odd)} is decided by the run; what is taken is non_blocking, and "
                    "sync_each_batch of gradient_accumulation_kwargs"
                )
        arguments = OneDevice(**given | decided)
        # With this config ZeRO 3 would shard every model that is read, an original, too.
        unset_hf_deepspeed_config()
    except (ImportError, TypeError) as error:
        raise ValueError(f"transformers does not take these arguments ({first_line(error)})") from error
    if arguments.mixed_precision == "fp16" and device == "cpu":
        raise ValueError("fp16 does nothing on a CPU; use bf16, or leave it out")
    _require_effect(arguments, settings.arguments)
    arguments.gradient_accumulation_steps = settings.batch // (micro_batch * arguments.world_size)
    return arguments


def _require_effect(arguments: TrainingArguments, given: Mapping[str, Any]) -> None:
    """Refuse arguments that do nothing with the chosen optimiser."""
    defaults = {each.name: each.default for each in fields(TrainingArguments) if each.init}
    for name in [name for name in _OF_OPTIMISERS if name in given]:
        others = copy.copy(arguments)
        setattr(others, name, defaults[name])
        if getattr(arguments, name) == getattr(others, name):
            continue
        try:
            found, without = (Trainer.get_optimizer_cls_and_kwargs(each) for each in (arguments, others))
        except (ImportError, ValueError):
            continue  # one that asks for a model, or for a package, is heard or refused later
        if found == without:
            raise ValueError(
                f"{name} does nothing with the optimiser {OptimizerNames(arguments.optim).value}; leave it out"
            )


def _read_configuration(given: Any) -> dict[str, Any]:
    if isinstance(given, str):
        given = json.loads(given) if given.startswith("{") else read_json(Path(given))
    return dict(given or {})


def share_of_batch(settings: TrainSettings, processes: int) -> int:
    """Number of windows of a batch that one process has, or the micro-batch if that is given."""
    if settings.batch % processes:
        raise ValueError(
            f"{processes} processes cannot share a batch of {settings.batch} windows; change the batch"
        )
    share = min(settings.batch // processes, settings.micro_batch or settings.batch)
    if settings.batch % (share * processes):
        raise ValueError(
            f"{processes} processes of {share} windows each do not divide a batch of {settings.batch}; change the "
            "batch or the micro-batch"
        )
    return share


def join_processes(device: str) -> tuple[PartialState, str]:
    """Join the processes of a run, one or those of accelerate or torchrun, and choose their device.

    Args:
        device: "cpu", "cuda", or "auto" for the latter where there is one.
    """
    avoid_cudnn_attention()
    if is_launched_sharded():
        # Every process reads all weights: each needs an original, and accelerate fills only the first's.
        os.environ[ON_ONE] = "false"
    where = choose_device(device)
    return PartialState(cpu=where == "cpu"), where


def describe_devices(processes: PartialState, where: str) -> str:
    """Describe the devices of a run for people; empty for a CPU."""
    if where == "cpu":
        return ""
    if processes.num_processes > 1:
        return f"on {processes.num_processes} GPUs, one for each process"
    on_gpu = f"on {describe_gpu(torch.device('cuda', 0))}"
    if torch.cuda.device_count() == 1:
        return on_gpu
    return f"{on_gpu}; accelerate launch or torchrun trains on several, CUDA_VISIBLE_DEVICES chooses another one"


# Variables that accelerate launch sets for FSDP.
LAUNCHED, ON_ONE = "ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"
_TAKEN = {"version", "reshard_after_forward", "cpu_offload", "state_dict_type"}


def check_sharding(config: Mapping[str, Any], processes: int) -> dict[str, Any]:
    """Convert FSDP's configuration for TrainingArguments."""
    if processes == 1:
        raise ValueError(
            "fsdp shares parameters out among processes, and there is one; start several with torchrun or accelerate "
            "launch, or leave fsdp out"
        )
    found = {name.removeprefix("fsdp_"): value for name, value in config.items()}
    if odd := sorted(found.keys() - _TAKEN):
        raise ValueError(
            f"fsdp_config: {odd[0]} has no effect here; what is gathered together follows from the program, and what "
            f"is taken is {', '.join(sorted(_TAKEN))}"
        )
    check_fsdp_version(found.get("version", 2))
    return found


def is_launched_sharded() -> bool:
    """Tell whether accelerate launch asks for FSDP."""
    return bool(str_to_bool(os.environ.get(LAUNCHED, "false")))


def check_fsdp_version(version: Any) -> None:
    """Refuse FSDP1."""
    if int(version) != 2:
        raise ValueError(f"fsdp_version {version} does not know programs; use 2")
