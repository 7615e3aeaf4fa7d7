"""The Llama that racks and pipelines train: its sizes, its initial weights, its text, and stretches of its layers.

Head and embedding are two matrices, as each rack has a head of its own anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, get_scheduler
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from surgeon.demo import demo_data, demo_training_data
from surgeon.quality.data import Windows, digest_of
from surgeon.quality.sources import DEMO, DEMO_TRAINING
from surgeon.training.settings import TrainSettings
from surgeon.training.texts import RunOrder, TrainingText, TrainTexts

BYTES = 256  # in the place of a vocabulary
NO_DECAY = ("norm", "bias")  # in the names of parameters that transformers' Trainer does not decay


def byte_texts(window: int, windows: int) -> TrainTexts:
    """The beginning of the demo model's training text, and a window that it never saw, as bytes.

    So a small model is not mostly embedding, and tokens per parameter mean what they mean for large ones.
    """
    training = _cut_bytes(demo_training_data(), DEMO_TRAINING, window, windows)
    return TrainTexts(TrainingText.of(training), _cut_bytes(demo_data(), DEMO, window, 1))


def _cut_bytes(texts: Iterable[str], source: str, window: int, count: int) -> Windows:
    whole = b"\n\n".join(text.encode() for text in texts)[: window * count]
    windows = torch.frombuffer(bytearray(whole), dtype=torch.uint8).long().view(-1, window)
    return Windows(windows, f"{source} (bytes)", digest_of(windows))


def config_of(hidden: int, layers: int, window: int) -> LlamaConfig:
    """A Llama of this width with four heads; a feed-forward is 8/3 as wide as the stream."""
    return LlamaConfig(
        vocab_size=BYTES,
        hidden_size=hidden,
        intermediate_size=-(-8 * hidden // 3 // 8) * 8,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=window,
        tie_word_embeddings=False,
        use_cache=False,
    )


def build(config: LlamaConfig, seed: int) -> PreTrainedModel:
    """The model with its initial weights, float32."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


def head_units(config: LlamaConfig) -> float:
    """The computation of the output head, in layers."""
    hidden = config.hidden_size
    shared = config.num_key_value_heads / config.num_attention_heads
    layer = (2 + 2 * shared) * hidden**2 + 3 * hidden * config.intermediate_size
    return float(config.vocab_size * hidden / layer)


class Stretch(nn.Module):
    """Consecutive layers of a Llama, with the embedding if they are the first ones, with norm and head if the last.

    Its parameters have the names that they have in the whole model, without "model.".
    """

    def __init__(self, model: PreTrainedModel, layers: range) -> None:
        super().__init__()
        whole: Any = model.model
        self.config: LlamaConfig = whole.config
        self.span = layers
        self.embed_tokens = whole.embed_tokens if layers.start == 0 else None
        self.layers = nn.ModuleDict({str(layer): whole.layers[layer] for layer in layers})
        self.norm: Any = None
        self.lm_head: Any = None
        if layers.stop == len(whole.layers):
            self.norm = whole.norm
            self.lm_head = model.lm_head
        self.rotary = LlamaRotaryEmbedding(config=whole.config)

    def forward(self, stream: Tensor) -> Tensor:
        """From tokens, (windows, tokens), or a stream with a last axis of the hidden size, to a stream or logits."""
        stream = self.run(stream)
        if self.lm_head is None:
            return stream
        return self.predict(stream)

    def run(self, stream: Tensor) -> Tensor:
        """The layers alone, of the first ones with the embedding."""
        if self.embed_tokens is not None:
            stream = self.embed_tokens(stream)
        return run_layers(self.layers.values(), self.rotary, stream)

    def predict(self, stream: Tensor) -> Tensor:
        """Logits from the stream behind the last layers."""
        logits: Tensor = self.lm_head(self.norm(stream))
        return logits

    @property
    def units(self) -> float:
        """The computation of a forward pass, in layers."""
        head = 0.0 if self.lm_head is None else head_units(self.config)
        return len(self.span) + head


def run_layers(layers: Any, rotary: nn.Module, stream: Tensor) -> Tensor:
    """Layers one after the other; without a mask they are causal."""
    places = rotary(stream, torch.arange(stream.shape[1], device=stream.device)[None])
    for layer in layers:
        stream = layer(stream, position_embeddings=places)
    return stream


def whole_name(name: str) -> str:
    """The name of a stretch's parameter in the whole model."""
    if name.startswith("lm_head"):
        return name
    return f"model.{name}"


def load_stretch(config: LlamaConfig, layers: range, weights: Path) -> Stretch:
    """A stretch with its numbers alone read from a file of the whole model's."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    stretch = Stretch(model, layers)
    with safe_open(weights, framework="pt") as file:
        found = {name: file.get_tensor(whole_name(name)) for name, _ in stretch.named_parameters()}
    stretch.load_state_dict(found, assign=True)
    stretch.rotary = LlamaRotaryEmbedding(config=config)
    return stretch.train()


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """The mean negative log-likelihood per predicted token of windows, (windows, tokens)."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def cut(layers: int, parts: int) -> list[range]:
    """Layers in so many stretches of one length.

    Raises:
        ValueError: if they cannot be.
    """
    if layers % parts:
        raise ValueError(f"{layers} layers cannot be cut into {parts} equal stretches; change --layers")
    size = layers // parts
    return [range(first, first + size) for first in range(0, layers, size)]


@dataclass(frozen=True)
class Optimisation:
    """The steps, as transformers' Trainer makes them with the same settings.

    Attributes:
        batch, micro_batch: windows in a step, and in a forward pass.
        norm: gradients longer than this are made this long.
    """

    steps: int
    batch: int
    micro_batch: int
    rate: float
    warmup: int
    decay: float = 0.1
    schedule: str = "cosine"
    norm: float = 1.0
    seed: int = 0

    @property
    def micro_batches(self) -> int:
        """In a step."""
        return self.batch // self.micro_batch

    def settings(self) -> TrainSettings:
        """The same for surgeon's own runs, whose checkpoints and measurements come at the end only."""
        return TrainSettings(
            scope="all",
            steps=self.steps,
            batch=self.batch,
            micro_batch=self.micro_batch,
            learning_rate=self.rate,
            schedule=self.schedule,
            warmup=self.warmup,
            seed=self.seed,
            evaluate_every=self.steps,
            save_every=self.steps,
            arguments={"weight_decay": self.decay, "max_grad_norm": self.norm},
        )

    def batches(self, ids: Tensor) -> Iterator[Tensor]:
        """The windows of every step, (batch, tokens)."""
        order = iter(RunOrder(len(ids), self.steps, self.batch, self.seed))
        while chosen := list(islice(order, self.batch)):
            yield ids[chosen]

    def optimiser(self, named: Sequence[tuple[str, nn.Parameter]]) -> tuple[torch.optim.AdamW, Any]:
        """AdamW on parameters by their names, and the schedule of its learning rate."""
        free = [one for name, one in named if any(part in name for part in NO_DECAY)]
        decayed = [one for name, one in named if not any(part in name for part in NO_DECAY)]
        groups = [{"params": decayed, "weight_decay": self.decay}, {"params": free, "weight_decay": 0.0}]
        optimiser = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=self.rate, fused=True
        )
        return optimiser, get_scheduler(self.schedule, optimiser, self.warmup, self.steps)
