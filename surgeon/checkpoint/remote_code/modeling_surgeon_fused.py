"""A decoder whose layers may differ in width, as `surgeon export` writes it when it fuses layers that run side by side.

Layers that read the same input and add up their outputs are one layer with all of their heads and neurons. Whatever
architecture the model had, it is stored as separate linear maps here (q, k, v, o; gate, up, down), so that tensor
parallelism can divide every one of them; config.json says which norm, activation and positions the architecture has,
and `per_layer_config` how wide the layers are that differ from the rest.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, eager_attention_forward
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding, apply_rotary_pos_emb
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

# What layers and models call the keys and values of tokens before: "cache" since transformers 5.24.
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
NORMS: Any = {
    "rms": LlamaRMSNorm,
    "rms_offset": GemmaRMSNorm,
    "layer": nn.LayerNorm,
    "centred": partial(nn.LayerNorm, bias=False),
    "plain": partial(nn.LayerNorm, elementwise_affine=False),
}
MASKS: Any = {
    "full_attention": create_causal_mask,
    "sliding_attention": create_sliding_window_causal_mask,
}


class SurgeonFusedConfig(PreTrainedConfig):
    """Sizes and flags of the layers; the widths are those of layers that `per_layer_config` does not name."""

    model_type = "surgeon_fused"
    keys_to_ignore_at_inference = [CACHE]
    ignore_keys_at_rope_validation = {
        "partial_rotary_factor",
        "llama_4_scaling_beta",
        "max_position_embeddings",
    }
    base_model_tp_plan = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }

    base_model_type: str = ""  # the architecture that the layers come from
    vocab_size: int = 32000
    hidden_size: int = 4096
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    head_dim: int = 128
    intermediate_size: int = 11008
    max_position_embeddings: int = 2048
    norm: str = "rms"  # of NORMS
    norm_eps: float = 1e-6
    parallel_residual: bool = False  # attention and feed-forward read the same stream
    # Factors; vLLM knows that of the logits by this name.
    embedding_scale: float = 1.0
    output_scale: float = 1.0  # of what sublayers add
    logit_scale: float = 1.0
    head_bias: bool = False
    # Attention.
    qkv_bias: bool = False
    o_bias: bool = False
    attention_scaling: float = 1.0
    clip_qkv: float | None = None  # the bound of what is projected to queries, keys and values
    # B and n: of 1 + b * log(1 + floor(position / n)), a factor on queries.
    query_growth: list[float] | None = None
    head_norm: bool = False  # every head's query and key is normed
    head_norm_turns: int = 1  # how many layers' heads take turns
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    # Feed-forward.
    hidden_act: str = "silu"
    gated: bool = True
    up_bias: bool = False
    down_bias: bool = False
    # Positions: rotary ones, or learned ones, added to the embeddings.
    rope_parameters: dict[str, Any] | None = None
    rotary_layers: list[bool] | None = None  # which layers have the rotary ones; None for all
    # Features 2i and 2i + 1 turn as a pair, not i and that half a width further on.
    rotary_neighbours: bool = False
    # A text that grows beyond so many tokens is computed again, its cache thrown away.
    anew_beyond: int | None = None
    learned_positions: int = 0  # rows of their table; 0 for rotary positions
    position_offset: int = 0  # rows before that of position 0
    # Count the tokens that the attention mask has, unless positions are given.
    positions_from_mask: bool = False
    # Training.
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    mlp_dropout: float = 0.0  # of what feed-forwards add
    embedding_dropout: float = 0.0
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None


def make_norm(config: Any) -> nn.Module:
    """Make the norm of the stream before a sublayer."""
    return NORMS[config.norm](config.hidden_size, eps=config.norm_eps)


def in_halves(heads: Tensor, width: int) -> Tensor:
    """Features of heads, (..., head_dim), such that of the first so many the even ones come before the odd ones."""
    turned = heads[..., :width]
    return torch.cat([turned[..., ::2], turned[..., 1::2], heads[..., width:]], -1)


class HeadNorm(nn.Module):
    """An RMS norm of every head, with gains (turns, head_dim).

    The heads of several layers take turns, so that each tensor-parallel rank has whole turns; one that has not gets an
    error. (vLLM puts its own norm, with one gain for all heads, in place of modules that take one input and norm it.)
    """

    def __init__(self, turns: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(turns, head_dim))
        self.eps = eps

    def forward(self, heads: Tensor, num_per_turn: int) -> Tensor:
        """Norm heads, (batch, tokens, heads, head_dim), of which so many in a row come from one layer."""
        x = heads.float()
        x = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)).to(heads.dtype)
        in_turns = x.unflatten(-2, (-1, len(self.weight), num_per_turn))
        return torch.flatten(self.weight[:, None] * in_turns, -4, -2)


class FusedAttention(nn.Module):
    """Attention with all heads of the layers that are stored as this one."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        widths = config.per_layer_config[index]
        q_width, kv_width = (
            n * config.head_dim for n in (widths.num_attention_heads, widths.num_key_value_heads)
        )
        self.config = config  # one for all layers, so that set_attn_implementation reaches them
        self.layer_idx = index
        self.head_dim = config.head_dim
        self.num_key_value_groups = q_width // kv_width
        self.scaling = config.attention_scaling
        self.is_causal = True
        self.sliding_window = (
            config.sliding_window if config.layer_types[index] == "sliding_attention" else None
        )
        self.rotary = not config.learned_positions and (
            config.rotary_layers is None or config.rotary_layers[index]
        )
        self.q_proj = nn.Linear(config.hidden_size, q_width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q_width, config.hidden_size, bias=config.o_bias)
        self.q_norm: Any = None
        self.k_norm: Any = None
        if config.head_norm:
            self.q_norm = HeadNorm(widths.head_norm_turns, config.head_dim, config.norm_eps)
            self.k_norm = HeadNorm(widths.head_norm_turns, config.head_dim, config.norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        cache = kwargs.pop(CACHE, None)
        shape = hidden_states.shape[:-1]
        query, key, value = (one(hidden_states) for one in (self.q_proj, self.k_proj, self.v_proj))
        if (bound := self.config.clip_qkv) is not None:
            query, key, value = (one.clamp(-bound, bound) for one in (query, key, value))
        query, key = (one.view(*shape, -1, self.head_dim) for one in (query, key))
        value = value.view(*shape, -1, self.head_dim).transpose(1, 2)
        if self.q_norm is not None:
            query = self.q_norm(query, self.num_key_value_groups)
            key = self.k_norm(key, 1)
        query = query.transpose(1, 2)
        key = key.transpose(1, 2)
        if self.rotary:
            cos, sin = position_embeddings
            if self.config.rotary_neighbours:  # products do not depend on the order of features
                query = in_halves(query, cos.shape[-1])
                key = in_halves(key, cos.shape[-1])
            query, key = apply_rotary_pos_emb(query, key, cos, sin)
        if self.config.query_growth is not None:
            rate, length = self.config.query_growth
            factors = 1 + rate * torch.log1p(torch.floor(kwargs["position_ids"] / length))
            query = query * factors[:, None, :, None].to(query.dtype)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attention_interface(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        return self.o_proj(output.reshape(*shape, -1).contiguous()), weights


class FusedMLP(nn.Module):
    """A feed-forward with all neurons of the layers that are stored as this one."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        width = config.per_layer_config[index].intermediate_size
        self.up_proj = nn.Linear(config.hidden_size, width, bias=config.up_bias)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=config.down_bias)
        self.gate_proj = (
            nn.Linear(config.hidden_size, width, bias=config.up_bias) if config.gated else None
        )
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor) -> Tensor:
        up = self.up_proj(hidden_states)
        if self.gate_proj is None:
            return self.down_proj(self.act_fn(up))
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * up)


class FusedLayer(GradientCheckpointingLayer):
    """A layer, either of whose sublayers may be as wide as several, or missing."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.skip = getattr(config.per_layer_config[index], "skip", [])
        self.layer_idx = index
        if "attention" not in self.skip:
            self.input_layernorm = make_norm(config)
            self.self_attn = FusedAttention(config, index)
        if "mlp" not in self.skip:
            self.post_attention_layernorm = make_norm(config)
            self.mlp = FusedMLP(config, index)
        self.dropout = nn.Dropout(config.residual_dropout)
        self.mlp_dropout = nn.Dropout(config.mlp_dropout)
        self.scale = config.output_scale
        self.parallel = config.parallel_residual

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        attended = hidden_states
        if "attention" in self.skip:
            # The cache says at which position the next token stands.
            if (cache := kwargs.get(CACHE)) is not None:
                nothing = hidden_states.new_zeros(len(hidden_states), 1, hidden_states.shape[1], 1)
                cache.update(nothing, nothing, self.layer_idx)
        else:
            added = self.self_attn(self.input_layernorm(hidden_states), **kwargs)[0]
            attended = hidden_states + self.dropout(self.scaled(added))
        if "mlp" in self.skip:
            return attended
        read = hidden_states if self.parallel else attended
        added = self.mlp_dropout(self.mlp(self.post_attention_layernorm(read)))
        return attended + self.dropout(self.scaled(added))

    def scaled(self, added: Tensor) -> Tensor:
        """Scale a sublayer's output."""
        if self.scale == 1.0:
            return added
        return added * self.scale


class SurgeonFusedPreTrainedModel(PreTrainedModel):
    """Facts about the model for `transformers`."""

    config_class = SurgeonFusedConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["FusedLayer"]
    _skip_keys_device_placement = [CACHE]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": FusedLayer, "attentions": FusedAttention}


class SurgeonFusedModel(SurgeonFusedPreTrainedModel):
    """The decoder, without the head."""

    def __init__(self, config: SurgeonFusedConfig) -> None:
        super().__init__(config)
        if config.head_norm:  # a rank's gradient of their gains is of its own heads
            norms = dict.fromkeys(
                ("layers.*.self_attn.q_norm", "layers.*.self_attn.k_norm"),
                "replicated_with_grad_allreduce",
            )
            config.base_model_tp_plan = config.base_model_tp_plan | norms
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = self.rotary_emb = None
        if config.learned_positions:
            self.embed_positions = nn.Embedding(config.learned_positions, config.hidden_size)
        else:
            self.rotary_emb = Phi3RotaryEmbedding(config)
        self.dropout = nn.Dropout(config.embedding_dropout)
        self.layers = nn.ModuleList(
            [FusedLayer(config, index) for index in range(config.num_hidden_layers)]
        )
        self.norm = make_norm(config)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        cache = kwargs.pop(CACHE, past_key_values)
        stream = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            seen = 0 if cache is None else cache.get_seq_length()
            if self.config.positions_from_mask and isinstance(attention_mask, Tensor):
                position_ids = (attention_mask.cumsum(-1) * attention_mask - 1)[:, seen:]
            else:
                position_ids = torch.arange(seen, seen + stream.shape[1], device=stream.device)[None]
        given = {"attention_mask": attention_mask, CACHE: cache, "position_ids": position_ids}
        kinds = self.config.layer_types
        masks: Any = attention_mask
        if not isinstance(masks, dict):  # generation with a static cache makes them itself
            masks = {
                kind: MASKS[kind](config=self.config, inputs_embeds=stream, **given)
                for kind in set(kinds)
            }
        if self.config.embedding_scale != 1.0:
            # Rounded to the dtype first, as Gemma does it.
            stream = stream * torch.tensor(self.config.embedding_scale, dtype=stream.dtype)
        if self.embed_positions is not None:
            stream = stream + self.embed_positions(position_ids + self.config.position_offset)
        rotation = (
            None if self.rotary_emb is None else self.rotary_emb(stream, position_ids=position_ids)
        )
        stream = self.dropout(stream)
        for layer, kind in zip(self.layers, kinds, strict=True):
            given["attention_mask"] = masks[kind]
            stream = layer(stream, position_embeddings=rotation, **given, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(stream), **{CACHE: cache})


class SurgeonFusedForCausalLM(SurgeonFusedPreTrainedModel, GenerationMixin):
    """The decoder with its language-model head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: SurgeonFusedConfig) -> None:
        super().__init__(config)
        self.model = SurgeonFusedModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.head_bias)
        self.post_init()

    def prepare_inputs_for_generation(self, input_ids: Any, *arguments: Any, **kwargs: Any) -> Any:
        border = self.config.anew_beyond
        cache = kwargs.get(CACHE)
        if border is not None and cache and cache.get_seq_length() <= border < input_ids.shape[1]:
            kwargs |= {CACHE: None, "next_sequence_length": None}  # all of them
        return super().prepare_inputs_for_generation(input_ids, *arguments, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **{CACHE: past_key_values} | kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            **{CACHE: getattr(outputs, CACHE)},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
