"""GGUF files of tiny models, written with the package's own writer as llama.cpp's converter lays them out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter

ARCHITECTURES = {
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "mistral": "llama",
}
ENTRIES = {
    "context_length": ("max_position_embeddings", "n_positions"),
    "block_count": ("num_hidden_layers",),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("norm_epsilon", "layer_norm_eps", "layer_norm_epsilon"),
    "attention.sliding_window": ("sliding_window",),
    "expert_count": ("num_experts",),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "vocab_size": ("vocab_size",),
}


def write_gguf(
    path: Path,
    model: Any,
    tokenizer: Any = None,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    parts: int = 0,
    more: dict[str, np.ndarray] | None = None,
    **metadata: Any,
) -> Path:
    """Write a model of `transformers`; returns the first file.

    Args:
        kind: what matrices are quantised as, where their rows are long enough.
        parts: into so many files, named as llama.cpp names them.
        more: further tensors.
        metadata: further entries, of the architecture; None leaves one out.
    """
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    files = [
        path.with_name(f"{path.stem}-{n:05d}-of-{parts:05d}.gguf") for n in range(1, parts + 1)
    ] or [path]
    writers = [GGUFWriter(file, architecture) for file in files]
    found = {
        key: next(
            (getattr(config, one) for one in names if getattr(config, one, None) is not None), None
        )
        for key, names in ENTRIES.items()
    }
    rope = getattr(config, "rope_parameters", None) or {}
    found["rope.freq_base"] = rope.get("full_attention", rope).get("rope_theta")
    if config.model_type in ("llama", "mistral"):
        found |= {
            "rope.dimension_count": found.pop("attention.key_length"),
            "attention.sliding_window": None,
        }
    for key, value in (found | {key.replace("__", "."): one for key, one in metadata.items()}).items():
        add = {int: writers[0].add_uint32, float: writers[0].add_float32, str: writers[0].add_string}
        if value is not None:
            add[type(value)](f"{architecture}.{key}", value)
    if tokenizer is not None:
        _add_tokenizer(writers[0], tokenizer)
    for place, (name, values) in enumerate([*_tensors(model, architecture), *(more or {}).items()]):
        writer = writers[place * len(writers) // (len(model.state_dict()) + 8)]
        if values.ndim > 1 and values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0:
            writer.add_tensor(name, _quantized(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    for writer in writers:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return files[0]


def _quantized(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Rows as some type; of one that the package only reads, bytes by chance."""
    try:
        return gguf.quantize(values, kind)
    except NotImplementedError:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        shape = (*values.shape[:-1], values.shape[-1] // block * size)
        return np.random.default_rng(0).integers(0, 64, shape, dtype=np.uint8)


def _tensors(model: Any, architecture: str) -> list[tuple[str, np.ndarray]]:
    """Its parameters as llama.cpp has them: Llama's queries and keys in another order, Gemma's gains with 1 added."""
    config = model.config
    kind = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    written = []
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        value = parameter
        stem, _, ending = name.rpartition(".")
        own, ending = names.get_name(stem), f".{ending}"
        if own is None:  # a stack of experts, which is no module
            own, ending = names.get_name(name), ".weight"
        if name.endswith("experts.gate_up_proj"):
            layer = name.split(".")[2]
            gate, up = value.chunk(2, dim=1)
            written += [
                (f"blk.{layer}.ffn_gate_exps.weight", gate),
                (f"blk.{layer}.ffn_up_exps.weight", up),
            ]
            continue
        assert own is not None, name
        if architecture == "llama" and stem.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads
            value = value.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        if architecture in ("gemma2", "gemma3") and "norm" in stem:
            value = value + 1
        if architecture == "gpt2" and "h." in name and ending == ".weight" and value.ndim == 2:
            value = value.T
        if name.endswith("shared_expert_gate.weight"):
            value = value[0]
        written.append((f"{own}{ending}", value))
    return [(name, value.detach().float().contiguous().numpy()) for name, value in written]


def _add_tokenizer(writer: GGUFWriter, tokenizer: Any) -> None:
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = sorted(backend["model"]["vocab"], key=backend["model"]["vocab"].__getitem__)
    special = set(tokenizer.all_special_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if one in special else 1 for one in tokens])
    writer.add_token_merges([" ".join(one) for one in backend["model"]["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(True)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def llama3_factors(head_dim: int, base: float, factor: float, positions: int) -> np.ndarray:
    """What Llama 3 divides its frequencies by, one at a time."""
    found = []
    for place in range(0, head_dim, 2):
        wave = 2 * np.pi * base ** (place / head_dim)
        if wave < positions / 4:
            found.append(1.0)
        elif wave > positions:
            found.append(factor)
        else:
            smooth = (positions / wave - 1) / 3
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, dtype=np.float32)


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits
