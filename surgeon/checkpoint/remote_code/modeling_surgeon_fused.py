"""A Llama whose layers differ in width, as `surgeon export` writes it when it fuses layers that run side by side.

Layers that read the same input and add up their outputs are one layer with all of their heads and neurons. The only
change to the stock model is that layer i is built from `config.per_layer_config[i]`, which holds its widths.
"""

from typing import Any

from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


class FusedLlamaModel(LlamaModel):
    """`LlamaModel` with a width of its own for every layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        widths: Any = config.per_layer_config
        self.layers = nn.ModuleList([LlamaDecoderLayer(widths[i], i) for i in range(config.num_hidden_layers)])
        attentions: Any = [layer.self_attn for layer in self.layers]
        for attention in attentions:
            attention.config = config  # one for all, so that set_attn_implementation reaches every layer
        self.post_init()  # type: ignore[no-untyped-call]


class FusedLlamaForCausalLM(LlamaForCausalLM):
    """`LlamaForCausalLM` on a `FusedLlamaModel`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model = FusedLlamaModel(config)
        self.post_init()  # type: ignore[no-untyped-call]
