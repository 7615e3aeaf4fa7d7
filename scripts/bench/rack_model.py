"""The model that both ways of training over racks share: its sizes, its initial weights, its text, stretches of it.

Head and embedding are two matrices, as each rack of the local method has a head of its own anyway.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from surgeon.checkpoint.locate import locate
from surgeon.checkpoint.texts import open_tokenizer
from surgeon.demo import demo_data, demo_training_data
from surgeon.quality.data import DEMO, Windows, digest_of
from surgeon.quality.sources import DEMO_TRAINING
from surgeon.training.texts import RunOrder, TrainingText, TrainTexts, load_texts

if TYPE_CHECKING:
    from surgeon.training.settings import TrainSettings

ALL_TEXT = 100_000_000  # tokens: more than there are
NO_DECAY = ("norm", "bias")  # in the names of parameters that transformers' Trainer does not decay


@cache
def tokenizer() -> Any:
    """The demo model's."""
    return open_tokenizer(locate(DEMO))


def texts_of(window: int, held_out: int, tokens: int = ALL_TEXT) -> TrainTexts:
    """The beginning of the demo model's training text, and so many tokens that it never saw."""
    return load_texts(tokenizer(), DEMO_TRAINING, window, tokens, DEMO, held_out)


def bytes_of(window: int, held_out: int) -> TrainTexts:
    """All of the demo model's training text, and so much that it never saw, as bytes in place of tokens.

    So a small model is not mostly embedding, and tokens per parameter mean what they mean for large ones.
    """
    training = _cut_bytes(demo_training_data(), DEMO_TRAINING, window, ALL_TEXT)
    return TrainTexts(TrainingText.of(training), _cut_bytes(demo_data(), DEMO, window, held_out))


def _cut_bytes(texts: Iterable[str], source: str, window: int, wanted: int) -> Windows:
    whole = b"\n\n".join(text.encode() for text in texts)[:wanted]
    ids = torch.frombuffer(bytearray(whole[: len(whole) // window * window]), dtype=torch.uint8)
    windows = ids.long().view(-1, window)
    return Windows(windows, f"{source} (bytes)", digest_of(windows))


def config_of(hidden: int, layers: int, window: int, vocabulary: int | None = None) -> LlamaConfig:
    """A Llama of this width; heads are 16 wide or 4 in number, a feed-forward is 8/3 as wide as the stream."""
    heads = 4 if hidden >= 64 else max(1, hidden // 16)
    return LlamaConfig(
        vocab_size=vocabulary or len(tokenizer()),
        hidden_size=hidden,
        intermediate_size=-(-8 * hidden // 3 // 8) * 8,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
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
    """What the output head computes, in layers."""
    hidden, shared = config.hidden_size, config.num_key_value_heads / config.num_attention_heads
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
        last = layers.stop == len(whole.layers)
        self.norm, self.lm_head = (whole.norm, model.lm_head) if last else (None, None)
        self.rotary = LlamaRotaryEmbedding(config=whole.config)

    def forward(self, stream: Tensor) -> Tensor:
        """From tokens, (windows, tokens), or a stream with a last axis of the hidden size, to a stream or logits."""
        stream = self.run(stream)
        return stream if self.lm_head is None else self.predict(stream)

    def run(self, stream: Tensor) -> Tensor:
        """The layers alone, of the first ones with the embedding."""
        if self.embed_tokens is not None:
            stream = self.embed_tokens(stream)
        return run_layers(self.layers.values(), self.rotary, stream)

    def predict(self, stream: Tensor) -> Tensor:
        """Logits from the stream behind the last layers."""
        assert self.norm is not None
        assert self.lm_head is not None
        logits: Tensor = self.lm_head(self.norm(stream))
        return logits

    @property
    def units(self) -> float:
        """What a forward pass computes, in layers."""
        return len(self.span) + (0.0 if self.lm_head is None else head_units(self.config))


def run_layers(layers: Any, rotary: nn.Module, stream: Tensor) -> Tensor:
    """Layers one after the other; without a mask they are causal."""
    places = rotary(stream, torch.arange(stream.shape[1], device=stream.device)[None])
    for layer in layers:
        stream = layer(stream, position_embeddings=places)
    return stream


class Rack(nn.Module):
    """A stretch of layers with a coda of its own: more layers, a norm and a head; the last one's is its own end.

    Args:
        depth: layers of the coda.
        seed: of the run; every rack's coda begins with other numbers that follow from it.
    """

    def __init__(self, stretch: Stretch, depth: int, seed: int) -> None:
        super().__init__()
        self.stretch = stretch
        self.depth, self.is_last = depth, stretch.lm_head is not None
        if not self.is_last:
            config = LlamaConfig.from_dict(stretch.config.to_dict() | {"num_hidden_layers": max(1, depth)})
            private: Any = build(config, (seed + 1) * 1000 + stretch.span.start)
            self.layers, self.norm, self.head = private.model.layers[:depth], private.model.norm, private.lm_head

    def predict(self, passed: Tensor) -> Tensor:
        """The rack's logits from the stream that it hands on."""
        if self.is_last:
            return self.stretch.predict(passed)
        logits: Tensor = self.head(self.norm(run_layers(self.layers, self.stretch.rotary, passed)))
        return logits

    @property
    def coda_units(self) -> float:
        """What the way from the stream to logits computes forward, in layers."""
        return head_units(self.stretch.config) + (0 if self.is_last else self.depth)

    def coda(self) -> list[nn.Parameter]:
        """The coda's parameters, in the same order for every rack."""
        if not self.is_last:
            return [*self.layers.parameters(), *self.norm.parameters(), *self.head.parameters()]
        whole = self.stretch
        last = [whole.layers[str(layer)] for layer in whole.span[len(whole.span) - self.depth :]]
        return [one for each in (*last, whole.norm, whole.lm_head) if each is not None for one in each.parameters()]


def whole_name(name: str) -> str:
    """The name of a stretch's parameter in the whole model."""
    return name if name.startswith("lm_head") else f"model.{name}"


def rack_name(name: str) -> str:
    """The name of a rack's parameter in the whole model, or "coda." and what it is where it is private."""
    return whole_name(name.removeprefix("stretch.")) if name.startswith("stretch.") else f"coda.{name}"


def load_stretch(config: LlamaConfig, layers: range, weights: Path) -> Stretch:
    """A stretch with numbers from a file of the whole model's, of which nothing else is read."""
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
    """How steps are made: what transformers' Trainer does with the same settings.

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

    def settings(self, **arguments: Any) -> TrainSettings:
        """The same for surgeon's own runs, whose checkpoints and measurements come at the end only.

        Args:
            arguments: of transformers' TrainingArguments, beside weight decay and the longest gradient.
        """
        from surgeon.training.settings import TrainSettings

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
            arguments={"weight_decay": self.decay, "max_grad_norm": self.norm} | arguments,
        )

    def batches(self, ids: Tensor) -> Iterator[Tensor]:
        """The windows of every step, (batch, tokens)."""
        order = iter(RunOrder(len(ids), self.steps, self.batch, self.seed))
        while chosen := list(islice(order, self.batch)):
            yield ids[chosen]

    def optimiser(self, named: Sequence[tuple[str, nn.Parameter]]) -> tuple[torch.optim.AdamW, Any]:
        """AdamW on parameters by their names, and the schedule of its learning rate."""
        from transformers import get_scheduler

        free = [one for name, one in named if any(part in name for part in NO_DECAY)]
        decayed = [one for name, one in named if not any(part in name for part in NO_DECAY)]
        groups = [{"params": decayed, "weight_decay": self.decay}, {"params": free, "weight_decay": 0.0}]
        optimiser = torch.optim.AdamW([group for group in groups if group["params"]], lr=self.rate, fused=True)
        return optimiser, get_scheduler(self.schedule, optimiser, self.warmup, self.steps)


def train_whole(
    model: PreTrainedModel, texts: TrainTexts, optimisation: Optimisation, folder: Path
) -> tuple[list[float], PreTrainedModel]:
    """The loss of every step, and the trained model, of surgeon's own run in one process."""
    from surgeon.language.program import Program
    from surgeon.models.edit import edit
    from surgeon.training.run import train
    from surgeon.training.run_log import TRAINING_FILE, read_rows

    settings = optimisation.settings(logging_steps=1)
    edited = edit(model, Program.dense(model.config.num_hidden_layers))
    trained = train(edited, texts, settings, folder)
    assert trained is not None
    return [float(row["loss"]) for row in read_rows(folder / TRAINING_FILE)], trained.model
