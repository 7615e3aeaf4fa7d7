"""Tiny random models that tests make for themselves: no network, no files of anybody else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Exaone4Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    GlmConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    Llama4TextConfig,
    LlamaConfig,
    MiniMaxM2Config,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoConfig,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

from surgeon.models.families import FAMILIES

# Those without mixtures of experts whose attentions run everywhere.
DENSE_FAMILIES = [
    name for name, one in FAMILIES.items() if one.mixture is None and one.attention.apart is None
]
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
_WINDOW = {"sliding_window": 5}  # shorter than the texts of the tests
# One dense layer, then mixtures of four experts with a shared one.
_LATENT = {
    "num_key_value_heads": HEADS,
    "intermediate_size": 48,
    "moe_intermediate_size": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
# Linear attentions of another number of heads than the others.
_DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
# Mixtures of four experts with a shared one beside them.
_LINEAR = _DELTA | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
}
_CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, _GROUPED),
    "mistral": (MistralConfig, _GROUPED | _WINDOW),
    "ministral": (MinistralConfig, _GROUPED | _WINDOW | {"head_dim": 16}),
    # Queries grow from the fourth token on.
    "ministral3": (
        Ministral3Config,
        _GROUPED
        | {
            "head_dim": 16,
            "pad_token_id": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 3,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "qwen2": (Qwen2Config, _GROUPED | _WINDOW | {"use_sliding_window": True, "max_window_layers": 2}),
    # Wider than hidden / heads, as Qwen3's often are.
    "qwen3": (Qwen3Config, _GROUPED | {"head_dim": 16}),
    # Layer 2 is dense, as wide as all experts together, and has other matrices.
    "qwen3_moe": (
        Qwen3MoeConfig,
        _GROUPED
        | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
        | {"mlp_only_layers": [2], "norm_topk_prob": False},
    ),
    # Layer 2 is dense, and only layer 0 has a window.
    "qwen2_moe": (
        Qwen2MoeConfig,
        _GROUPED
        | _WINDOW
        | {"use_sliding_window": True, "max_window_layers": 2, "mlp_only_layers": [2], "num_experts": 4}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20},
    ),
    # Layer 3 has linear attention; layer 2 is dense.
    "qwen3_next": (
        Qwen3NextConfig,
        _GROUPED
        | _LINEAR
        | {"mlp_only_layers": [2], "layer_types": ["full_attention"] * 3 + ["linear_attention"]},
    ),
    # Chunks of 5 tokens but in layer 2, which is dense and has no positions, and whose queries grow from the third on.
    "llama4_text": (
        Llama4TextConfig,
        _GROUPED
        | {"head_dim": 16, "intermediate_size": 12, "intermediate_size_mlp": 48, "num_local_experts": 4}
        | {"num_experts_per_tok": 2, "moe_layers": [0, 1, 3], "no_rope_layer_interval": 3}
        | {"attention_chunk_size": 5, "floor_scale": 3, "attn_scale": 0.5, "attention_bias": True},
    ),
    # Small numbers are not made large, with which linear attentions would round as far as tests look.
    "qwen3_5_text": (
        Qwen3_5TextConfig,
        _GROUPED
        | _DELTA
        | {
            "layer_types": ["full_attention", *["linear_attention"] * 2, "full_attention"],
            "rms_norm_eps": 0.1,
        },
    ),
    "qwen3_5_moe_text": (
        Qwen3_5MoeTextConfig,
        _LINEAR
        | {"num_key_value_heads": KV_HEADS, "moe_intermediate_size": 16, "rms_norm_eps": 0.1}
        | {"layer_types": ["full_attention"] * 3 + ["linear_attention"]},
    ),
    "olmoe": (
        OlmoeConfig,
        _GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
    ),
    # Of which some values are clamped.
    "gpt_oss": (
        GptOssConfig,
        _GROUPED
        | _WINDOW
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "swiglu_limit": 0.7}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "deepseek_v2": (
        DeepseekV2Config,
        _LATENT | {"q_lora_rank": None},
    ),
    "deepseek_v3": (DeepseekV3Config, _LATENT | {"n_group": 1, "topk_group": 1, "q_lora_rank": 12}),
    # As large ones are: heads are normed, and have biases.
    "glm4_moe": (
        Glm4MoeConfig,
        {key: value for key, value in _LATENT.items() if not key.endswith(("_rank", "_dim"))}
        | {"num_key_value_heads": KV_HEADS, "head_dim": 16, "use_qk_norm": True, "attention_bias": True},
    ),
    # Experts that add up to other numbers than those they are chosen by.
    "minimax_m2": (
        MiniMaxM2Config,
        _GROUPED
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
        | {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            }
        },
    ),
    "mixtral": (MixtralConfig, _GROUPED | _WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma": (GemmaConfig, _GROUPED | {"head_dim": 16}),
    # Caps and scale such that leaving one of them out shows.
    "gemma2": (
        Gemma2Config,
        _GROUPED
        | _WINDOW
        | {
            "head_dim": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 24,
        },
    ),
    "gemma3_text": (
        Gemma3TextConfig,
        _GROUPED
        | _WINDOW
        | {
            "head_dim": 16,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 24,
            "sliding_window_pattern": 2,
        }
        | {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
            }
        },
    ),
    "olmo": (
        OlmoConfig,
        _GROUPED | {"clip_qkv": 0.8, "attention_bias": True, "pad_token_id": 1},
    ),  # of which half is clipped
    "olmo2": (Olmo2Config, _GROUPED),
    "exaone4": (Exaone4Config, _GROUPED | _WINDOW | {"sliding_window_pattern": 2}),
    "seed_oss": (
        SeedOssConfig,
        _GROUPED | {"head_dim": 16, "attention_out_bias": True, "mlp_bias": True},
    ),
    "starcoder2": (Starcoder2Config, _GROUPED | _WINDOW),
    # Some layers have windows, and rotary positions of their own with them.
    "olmo3": (
        Olmo3Config,
        _GROUPED
        | _WINDOW
        | {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
            }
        },
    ),
    "phi": (PhiConfig, _GROUPED),
    "phi3": (Phi3Config, _GROUPED | _WINDOW | {"pad_token_id": 1}),
    # Layers with rotary positions and layers with windows take turns.
    "smollm3": (
        SmolLM3Config,
        _GROUPED | _WINDOW | {"use_sliding_window": True, "no_rope_layer_interval": 2},
    ),
    "granite": (
        GraniteConfig,
        _GROUPED
        | {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
        },
    ),
    "glm": (GlmConfig, _GROUPED | {"head_dim": 8, "pad_token_id": 1}),
    "glm4": (Glm4Config, _GROUPED | {"head_dim": 16, "pad_token_id": 1}),
    "cohere": (CohereConfig, _GROUPED | {"tie_word_embeddings": False, "logit_scale": 0.25}),
    # Layers with windows and rotary positions, and layers without either, take turns.
    "cohere2": (Cohere2Config, _GROUPED | _WINDOW | {"sliding_window_pattern": 2, "logit_scale": 0.25}),
    "stablelm": (StableLmConfig, _GROUPED | {"use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "opt": (OPTConfig, {"ffn_dim": 48, "word_embed_proj_dim": HIDDEN, "pad_token_id": 1}),
    "gpt2": (GPT2Config, {"n_inner": 48}),
    "gpt_neo": (GPTNeoConfig, {"intermediate_size": 48, "window_size": 5}),
    # As Falcon 40B: KV groups, a norm each.
    "falcon": (
        FalconConfig,
        {
            "new_decoder_architecture": True,
            "num_kv_heads": KV_HEADS,
            "ffn_hidden_size": 48,
            "bias": True,
        },
    ),
    "gptj": (GPTJConfig, {"n_inner": 48, "rotary_dim": 4}),
    "gpt_neox": (GPTNeoXConfig, {"intermediate_size": 48, "rotary_pct": 0.5}),
}


_DROPOUTS = {
    "opt": ("dropout", "attention_dropout"),
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "falcon": (),  # it drops sums of sublayers, if anything
    "gptj": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "gpt_neo": ("resid_dropout", "embed_dropout", "attention_dropout"),
    "gpt_neox": ("hidden_dropout", "attention_dropout"),
    "phi": ("resid_pdrop", "embd_pdrop", "attention_dropout"),
    "phi3": ("resid_pdrop", "embd_pdrop", "attention_dropout"),
    "seed_oss": ("residual_dropout", "attention_dropout"),
    "stablelm": ("hidden_dropout", "attention_dropout"),
    "starcoder2": ("residual_dropout", "embedding_dropout", "attention_dropout"),
}


def tiny_model(
    family: str, num_layers: int = 4, seed: int = 0, dropout: float = 0.4, **config_overrides: Any
) -> Any:
    """A random float32 model in evaluation mode, the same for the same arguments.

    Where the architecture can, it has grouped KV heads (4 and 2) and attention windows of 5 tokens. Norm gains and
    biases are random and far from 1 and 0, so that code which forgets them, or takes another layer's, gives visibly
    other numbers; so is dropout, wherever the architecture has some, from 0, which shows it where it should be off.
    Llama gets biases when asked: `attention_bias=True, mlp_bias=True`.
    """
    config_class, own = _CONFIGS[family]
    if family == "gpt_neo":
        own = own | {
            "attention_types": [[["global", "local"], num_layers // 2], [["global"], num_layers % 2]]
        }
    if family == "ministral":
        kinds = ("sliding_attention", "full_attention") * num_layers
        own = own | {"layer_types": list(kinds[:num_layers])}
    own = own | dict.fromkeys(_DROPOUTS.get(family, ("attention_dropout",)), dropout)
    if (kinds := own.get("layer_types")) and len(kinds) != num_layers:
        own = own | {"layer_types": [kinds[layer % len(kinds)] for layer in range(num_layers)]}
    config = config_class(num_hidden_layers=num_layers, **(_SHARED | own | config_overrides))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    disturb(model, seed)
    return model.eval()


def sizes_of(config: Any) -> tuple[int, int]:
    """Parameters of the layers of a configuration's model, and of all else in it."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers = [p.numel() for name, p in model.named_parameters() if ".layers." in name or ".h." in name]
    return sum(layers), sum(p.numel() for p in model.parameters()) - sum(layers)


def disturb(model: nn.Module, seed: int = 0) -> None:
    """Give every weight a size that matters: gains between 0.5 and 1.5, biases and shifts around 0.2, wide matrices."""
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                parameter.copy_(0.2 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
            elif any(word in name for word in ("embed", "wte", "wpe")):
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
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def damage(folder: Path, token: int | slice, value: float = float("nan")) -> None:
    """Make what a saved Llama computes of a token, and of all behind it, no number; other texts are as they were."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][token] = value
    save_file(tensors, file, metadata={"format": "pt"})


def save_checkpoint(
    folder: Path,
    family: str = "llama",
    num_layers: int = 4,
    max_shard_size: str = "1GB",
    **config_overrides: Any,
) -> Path:
    """Write a tiny model with a tokenizer that fits it, as `save_pretrained` does; returns the folder."""
    tokenizer = tiny_tokenizer()
    model = tiny_model(family, num_layers, **({"vocab_size": len(tokenizer)} | config_overrides))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    tokenizer.save_pretrained(folder)
    return folder


POSITIONS = 8192  # so that a request can be made to last
# Writes the roles as text, refuses any it does not know, and begins like the tokenizer does.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('roles are system, user and assistant') }}{% endif %}"
    "[{{ message.role }}] {{ message.content }} {% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}[quiet] {% endif %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def chat_checkpoint(folder: Path, **config_overrides: Any) -> Path:
    """A tiny Llama with a chat template and many positions."""
    save_checkpoint(folder, **({"max_position_embeddings": POSITIONS} | config_overrides))
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def sample_sentences(seed: int = 0) -> Iterator[str]:
    """Endless sentences made of the tokenizer's own words, the same for the same seed."""
    words = TEXT.split()
    generator = torch.Generator().manual_seed(seed)
    while True:
        picks = torch.randint(len(words), (12,), generator=generator).tolist()
        yield " ".join(words[i] for i in picks)
