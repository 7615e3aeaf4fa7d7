"""The models of the papers' tables, as far as their papers or their public configurations say what they are.

Facts of configurations, in the words of `transformers`. What a paper leaves open is chosen here and said in `ASSUMED`.
"""

from __future__ import annotations

from typing import Any

LONG = {"max_position_embeddings": 131072, "dtype": "bfloat16"}
LLAMA = {"model_type": "llama"} | LONG
QWEN = {"model_type": "qwen3", "head_dim": 128} | LONG

CONFIGS: dict[str, dict[str, Any]] = {}


def _model(name: str, base: dict[str, Any], sizes: tuple[int, int, int, int, int, int], tied: bool = False) -> None:
    """Layers, hidden size, heads, KV heads, neurons, vocabulary."""
    layers, hidden, heads, kv_heads, neurons, vocabulary = sizes
    CONFIGS[name] = {
        **base,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": neurons,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }


_model("llama2-7b", LLAMA, (32, 4096, 32, 32, 11008, 32000))
_model("llama3.2-1b", LLAMA | {"head_dim": 64}, (16, 2048, 32, 8, 8192, 128256), tied=True)
_model("llama3.2-3b", LLAMA, (28, 3072, 24, 8, 8192, 128256), tied=True)
_model("llama3-8b", LLAMA, (32, 4096, 32, 8, 14336, 128256))
_model("llama-34b", LLAMA, (48, 8192, 64, 8, 22016, 32000))
_model("llama3-70b", LLAMA, (80, 8192, 64, 8, 28672, 128256))
_model("llama-65b", LLAMA, (80, 8192, 64, 64, 22016, 32000))
_model("llama3-405b", LLAMA, (126, 16384, 128, 16, 53248, 128256))
_model("bloom-176b", LLAMA, (70, 14336, 112, 112, 38400, 250880), tied=True)
_model("qwen3-4b", QWEN, (36, 2560, 32, 8, 9728, 151936), tied=True)
_model("qwen3-14b", QWEN, (40, 5120, 40, 8, 17408, 151936))
_model("track-30b", LLAMA, (48, 8192, 64, 8, 18432, 153600), tied=True)
CONFIGS["opt-30b"] = {
    "model_type": "opt",
    **LONG,
    "num_hidden_layers": 48,
    "hidden_size": 7168,
    "word_embed_proj_dim": 7168,
    "num_attention_heads": 56,
    "ffn_dim": 28672,
    "vocab_size": 50272,
    "tie_word_embeddings": True,
}

ASSUMED = {
    "llama3-405b": "16 KV heads in place of 8, as 16 ranks each hold one",
    "bloom-176b": "gated, with the neurons that gpt-fast takes where none are said: two thirds of 4 h",
    "track-30b": "hidden size 64 heads x 128; neurons and vocabulary such that there are 30B parameters",
    "llama-34b": "Code Llama's 34B",
}
