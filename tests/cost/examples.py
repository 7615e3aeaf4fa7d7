"""Hardware of round figures, and models without weights."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

from surgeon.cost.hardware import Hardware, parse_hardware
from surgeon.models.shapes import ModelShapes
from surgeon.opened import Model

ROUND = """\
name: round
devices: 8
device:
  memory: 1e12
  bandwidth: 1e9
  flops: {float32: 1e12, bfloat16: 2e12}
  shares: {flops: 1, bandwidth: 1}
host: {launch: 0, graph: 0, collective: 0, forward: 0, asynchronous: true}
links:
  wire: {bandwidth: 1e6, algorithms: [{kind: ring, base: 0, hop: 1e-3, share: 1}]}
networks:
  net: {bandwidth: 1e5, algorithms: [{kind: ring, base: 0, hop: 1e-2, share: 1}]}
"""


def hardware(**replaced: str) -> Hardware:
    """Round hardware, some of whose texts are replaced."""
    text = ROUND
    for old, new in replaced.items():
        key = f"{old}: "
        start = text.index(key) + len(key)
        end = min(place for place in (text.find(each, start) for each in (",", "}", "\n")) if place > 0)
        text = text[:start] + new + text[end:]
    return parse_hardware(text)


SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 100,
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "dtype": "float32",
}


def model(model_type: str = "llama", **config: Any) -> Model:
    """A small model, by its configuration alone."""
    return Model.of_config(AutoConfig.for_model(model_type, **(SIZES | config)), model_type)


def shapes(model_type: str = "llama", **config: Any) -> ModelShapes:
    """A small model's."""
    return model(model_type, **config).shapes
