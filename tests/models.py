"""Tiny random models that tests make for themselves: no network, no files of anybody else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig, PreTrainedTokenizerFast, Qwen3Config

VOCABULARY = 97
HIDDEN = 32
HEADS = 4
KV_HEADS = 2
TEXT = "The quick brown fox jumps over the lazy dog, and the dog (who had seen it before) went on sleeping: 1234567890."

_SHARED = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_GROUPED = {"num_key_value_heads": KV_HEADS, "intermediate_size": 48}
_CONFIGS = {
    "llama": (LlamaConfig, _GROUPED),
    "qwen3": (Qwen3Config, _GROUPED | {"head_dim": 16}),  # wider than hidden / heads, as Qwen3's often are
    "opt": (OPTConfig, {"ffn_dim": 48, "word_embed_proj_dim": HIDDEN, "pad_token_id": 1, "dropout": 0.0}),
}


def tiny_model(family: str, num_layers: int = 4, seed: int = 0, **config_overrides: Any) -> Any:
    """A random float32 model in evaluation mode, the same for the same arguments.

    Llama and Qwen3 have grouped KV heads (4 and 2). Norm gains and biases are random and far from 1 and 0, so that
    code which forgets them, or takes another layer's, gives visibly other numbers. Llama gets biases when asked:
    `attention_bias=True, mlp_bias=True`.
    """
    config_class, own = _CONFIGS[family]
    config = config_class(num_hidden_layers=num_layers, **(_SHARED | own | config_overrides))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    disturb(model, seed)
    return model.eval()


def disturb(model: nn.Module, seed: int = 0) -> None:
    """Give every weight a size that matters: gains between 0.5 and 1.5, biases and shifts around 0.2, wide matrices."""
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                parameter.copy_(0.2 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
            elif "embed" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(noise / parameter.shape[1] ** 0.5)


def tiny_tokenizer(text: str = TEXT) -> PreTrainedTokenizerFast:
    """A byte-level BPE with a few merges that begins every text with <s>, as Llama's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text] * 2, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def save_checkpoint(
    folder: Path, family: str = "llama", num_layers: int = 4, max_shard_size: str = "1GB", **config_overrides: Any
) -> Path:
    """Write a tiny model with a tokenizer that fits it, as `save_pretrained` does; returns the folder."""
    tokenizer = tiny_tokenizer()
    model = tiny_model(family, num_layers, **({"vocab_size": len(tokenizer)} | config_overrides))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    tokenizer.save_pretrained(folder)
    return folder


def sample_sentences(seed: int = 0) -> Iterator[str]:
    """Endless sentences made of the tokenizer's own words, the same for the same seed."""
    words = TEXT.split()
    generator = torch.Generator().manual_seed(seed)
    while True:
        picks = torch.randint(len(words), (12,), generator=generator).tolist()
        yield " ".join(words[i] for i in picks)
