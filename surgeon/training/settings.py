"""Settings of training: of what, towards what, for how long."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from pydantic import ConfigDict, Field, Strict

from surgeon.errors import did_you_mean
from surgeon.training.distiller import Distillation
from surgeon.training.token_store import ALL_TOKENS
from surgeon.words import plural

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
        epochs: passes over the text; where `steps` is given, it rules.
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
        self._check_scope()
        for name in (
            "lora",
            "steps",
            "batch",
            "micro_batch",
            "evaluate_every",
            "save_every",
            "patience",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name.replace('_', ' ')} must be at least 1, not {value}")
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

    def _check_scope(self) -> None:
        for name, known in (("scope", SCOPES), ("router", ROUTERS)):
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"there is no {name} {value!r}; {did_you_mean(value, known)}")
        if self.scope == "routers" and self.router == "frozen":
            raise ValueError(
                "the scope routers trains nothing else, and they are to be frozen; leave one of them out"
            )
        if self.lora is not None and self.scope in ("norms", "edited-norms"):
            raise ValueError(
                f"adapters (lora) are for matrices, and the scope {self.scope} trains none; leave one of them out"
            )

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
        asks_steps = self.steps is not None or self.epochs is None
        if asks_steps and (rounds := steps * self.batch / windows) > 1:
            notes.append(
                f"the steps go through {steps * self.batch:,} windows, and the training text has {windows:,}: each is "
                f"trained on {rounds:.3g} times"
            )
        return notes

    def tokens_on(self, window: int) -> int:
        """Most tokens of training text that the run reads, in windows of this many."""
        if self.steps is None and self.epochs is not None:
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
