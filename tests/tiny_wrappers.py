"""Tiny random models around text decoders, and images for them, as processors would hand them over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Llama4Config,
    Llama4ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from tests.tiny_models import HIDDEN, VOCABULARY, disturb

IMAGE = 5  # the token in whose places features of images stand
_TEXT = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
_PICTURE = {"patch_size": 4, "image_size": 16}


def _mistral3() -> tuple[PreTrainedModel, dict[str, Any]]:
    text = {"model_type": "mistral", **_TEXT, "sliding_window": 5}
    vision = {"model_type": "pixtral", **_VISION, **_PICTURE, "head_dim": 8}
    config = Mistral3Config(
        text_config=text, vision_config=vision, image_token_index=IMAGE, tie_word_embeddings=False
    )
    images = {"pixel_values": torch.randn(1, 3, 16, 16), "image_sizes": torch.tensor([[16, 16]])}
    return Mistral3ForConditionalGeneration(config), images


def _gemma3() -> tuple[PreTrainedModel, dict[str, Any]]:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    text = _TEXT | {"sliding_window": 5, "layer_types": kinds}
    tokens = {
        "mm_tokens_per_image": 4,
        "image_token_index": IMAGE,
        "boi_token_index": 6,
        "eoi_token_index": 7,
    }
    config = Gemma3Config(text_config=text, vision_config=_VISION | _PICTURE, **tokens)
    return Gemma3ForConditionalGeneration(config), {"pixel_values": torch.randn(1, 3, 16, 16)}


def _qwen3_vl() -> tuple[PreTrainedModel, dict[str, Any]]:
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
    vision = {"depth": 3, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4}
    vision |= {
        "out_hidden_size": HIDDEN,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    }
    tokens = {
        "image_token_id": IMAGE,
        "video_token_id": 6,
        "vision_start_token_id": 7,
        "vision_end_token_id": 8,
    }
    config = Qwen3VLConfig(text_config=_TEXT | {"rope_parameters": rope}, vision_config=vision, **tokens)
    images = {"pixel_values": torch.randn(16, 96), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    return Qwen3VLForConditionalGeneration(config), images


def _qwen3_5() -> tuple[PreTrainedModel, dict[str, Any]]:
    """Layers 1 and 2 of its text decoder have linear attention."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    text = _TEXT | {"rope_parameters": rope | {"mrope_section": [1, 1, 0], "mrope_interleaved": True}}
    text |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    text |= {"linear_key_head_dim": 8, "linear_value_head_dim": 12}
    text |= {"layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]}
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4}
    vision |= {"out_hidden_size": HIDDEN, "num_position_embeddings": 16}
    tokens = {
        "image_token_id": IMAGE,
        "video_token_id": 6,
        "vision_start_token_id": 7,
        "vision_end_token_id": 8,
    }
    config = Qwen3_5Config(text_config=text, vision_config=vision, **tokens)
    images = {"pixel_values": torch.randn(16, 96), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    return Qwen3_5ForConditionalGeneration(config), images


def _llama4() -> tuple[PreTrainedModel, dict[str, Any]]:
    """Layer 1 of its text decoder looks at everything; layers 1 and 3 are mixtures."""
    text = _TEXT | {
        "intermediate_size": 12,
        "intermediate_size_mlp": 48,
        "num_local_experts": 4,
        "floor_scale": 3,
    }
    text |= {"interleave_moe_layer_step": 2, "no_rope_layers": [1, 0, 1, 1], "attention_chunk_size": 5}
    vision = (
        _VISION
        | _PICTURE
        | {"intermediate_size": 64, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}
    )
    vision |= {"projector_input_dim": 24, "projector_output_dim": 24, "vision_output_dim": 24}
    config = Llama4Config(text_config=text, vision_config=vision, image_token_index=IMAGE)
    return Llama4ForConditionalGeneration(config), {"pixel_values": torch.randn(1, 3, 16, 16)}


_MAKERS: dict[str, Callable[[], tuple[PreTrainedModel, dict[str, Any]]]] = {
    "mistral3": _mistral3,
    "gemma3": _gemma3,
    "qwen3_vl": _qwen3_vl,
    "qwen3_5": _qwen3_5,
    "llama4": _llama4,
}
WRAPPED = tuple(_MAKERS)


def tiny_wrapper(model_type: str) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A random model, in evaluation mode, and what it takes for a text with an image in it."""
    torch.manual_seed(0)
    model, images = _MAKERS[model_type]()
    disturb(model)
    text = torch.randint(9, VOCABULARY, (1, 12))
    text[:, 2:6] = IMAGE
    inputs = images | {"input_ids": text}
    if model_type in ("gemma3", "qwen3_vl", "qwen3_5"):
        inputs["token_type_ids" if model_type == "gemma3" else "mm_token_type_ids"] = (
            text == IMAGE
        ).int()
    return model.eval(), inputs


def save_wrapper(model: PreTrainedModel, folder: Path) -> Path:
    """Write it as `transformers` does, with the files of a processor beside it."""
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"size": 16}')
    (folder / "processor_config.json").write_text('{"processor_class": "TinyProcessor"}')
    return folder
