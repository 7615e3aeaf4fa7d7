"""Models drawn at random: every family, with what its configuration can say, and a program for it.

A few fixed configurations have hidden grave mistakes; hypothesis draws others, and makes those that fail small.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

from surgeon.language.program import Fork, Node, Program, Step
from surgeon.language.sublayer import KINDS, Sublayer
from surgeon.models.families import FAMILIES, Family
from tests.tiny_models import tiny_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ACTIVATIONS = ("silu", "gelu", "relu", "gelu_new", "gelu_pytorch_tanh")
Draw = Callable[[Any], Any]


@dataclass(frozen=True)
class Case:
    """A tiny model and a program that it can run.

    Attributes:
        config: what is said otherwise than in the tiny models.
        dtype: of the stored weights.
    """

    family: str
    layers: int
    dropout: float
    dtype: str
    program: str
    config: dict[str, Any] = field(default_factory=dict)

    def model(self) -> Any:
        """The model in float32, its weights rounded to the dtype they are stored in."""
        made = tiny_model(self.family, self.layers, dropout=self.dropout, **self.config)
        for parameter in made.parameters():  # and no buffer: rotary frequencies are not stored
            parameter.data = parameter.data.to(DTYPES[self.dtype]).float()
        return made


@st.composite
def cases(draw: st.DrawFn, family: str) -> Case:
    """A case of one family."""
    layers = draw(st.integers(2, 4))
    config = draw(configurations(family, layers))
    return Case(
        family,
        layers,
        draw(st.sampled_from((0.0, 0.3))),
        draw(st.sampled_from(("float32", "bfloat16", "float16"))),
        str(draw(programs(layers, FAMILIES[family]))),
        config,
    )


@st.composite
def configurations(draw: st.DrawFn, family: str, layers: int) -> dict[str, Any]:
    """What a configuration of a family says otherwise than in the tiny models; of some families little."""
    of_family = _OF_FAMILY.get(family)
    return {"tie_word_embeddings": draw(st.booleans())} | (
        of_family(draw, layers) if of_family is not None else {}
    )


@st.composite
def programs(draw: st.DrawFn, layers: int, family: Family) -> Program:
    """Programs over so many layers; slices are halves, which everything that is drawn divides into."""
    sliceable = not family.attention.norms_output
    roles = {kind: [projection.role for projection in family.spec(kind).projections] for kind in KINDS}

    @st.composite
    def sublayers(draw: st.DrawFn) -> Sublayer:
        those = draw(st.lists(st.integers(0, layers - 1), min_size=1, max_size=2, unique=True))
        piece = draw(st.sampled_from((None, None, (0, 2), (1, 2)))) if sliceable else None
        kind = draw(st.sampled_from("AF"))
        width = draw(st.sampled_from((None, 2 if kind == "A" else 12))) if len(those) == 1 else None
        if width is not None and kind == "A":
            piece = None  # two heads may be left, which are those of two ranks
        ranks = st.lists(
            # As the keys of two heads of 4 features.
            st.tuples(st.sampled_from(roles[kind]), st.integers(1, 8)),
            max_size=3,
            unique_by=lambda r: r[0],
        )
        return Sublayer(
            kind, tuple(those), piece, tuple(draw(ranks) if draw(st.booleans()) else ()), width
        )

    wholes = st.lists(sublayers(), min_size=1, max_size=3).map(tuple)
    steps = st.builds(Step, wholes, st.booleans())
    branches = st.lists(st.lists(steps, min_size=1, max_size=2).map(tuple), min_size=2, max_size=2).map(
        tuple
    )
    nodes: st.SearchStrategy[Node] = st.one_of(steps, steps, st.builds(Fork, branches))
    return Program(tuple(draw(st.lists(nodes, min_size=1, max_size=5))))


def _heads(draw: Draw, grouped: bool = True) -> dict[str, Any]:
    """Numbers of heads that two ranks can share of a slice, as neurons do below."""
    heads = draw(st.sampled_from((4, 8)))
    if not grouped:
        return {"num_attention_heads": heads}
    groups = draw(st.sampled_from((2, 4)))
    return {"num_attention_heads": heads, "num_key_value_heads": groups}


def _rope(draw: Draw, head_dim: int, partly: bool = False) -> dict[str, Any]:
    """Rotary positions, of every type that the texts of the tests stay within."""
    kind = draw(st.sampled_from(("default", "linear", "dynamic", "llama3", "yarn", "longrope")))
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": draw(st.sampled_from((100.0, 1e4, 5e5)))}
    rotated = head_dim
    if partly:
        rope["partial_rotary_factor"] = draw(st.sampled_from((0.5, 1.0) if head_dim > 4 else (1.0,)))
        rotated = int(head_dim * rope["partial_rotary_factor"])
    if kind in ("linear", "dynamic", "llama3", "yarn"):
        rope["factor"] = draw(st.sampled_from((2.0, 8.0)))
    if kind in ("llama3", "yarn", "longrope"):
        rope["original_max_position_embeddings"] = draw(st.sampled_from((32, 64)))
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "longrope":
        factors = st.lists(
            st.sampled_from((1.0, 1.5, 3.0)), min_size=rotated // 2, max_size=rotated // 2
        )
        times = 128 / rope["original_max_position_embeddings"]
        rope |= {"short_factor": draw(factors), "long_factor": draw(factors), "factor": times}
    return {"rope_parameters": rope}


def _gated(draw: Draw, head_dims: tuple[int, ...] = (8, 16)) -> dict[str, Any]:
    """What Llama and its relatives can be configured to do."""
    head_dim = draw(st.sampled_from(head_dims))
    return (
        _heads(draw)
        | _rope(draw, head_dim)
        | {
            "head_dim": head_dim,
            "intermediate_size": draw(st.sampled_from((16, 52))),
            "hidden_act": draw(st.sampled_from(ACTIVATIONS)),
            "rms_norm_eps": draw(st.sampled_from((1e-6, 1e-2))),
        }
    )


def _window(draw: Draw) -> dict[str, Any]:
    return {"sliding_window": draw(st.sampled_from((None, 3, 200)))}


def _layer_types(draw: Draw, layers: int) -> dict[str, Any]:
    kinds = st.sampled_from(("full_attention", "sliding_attention"))
    types = draw(st.lists(kinds, min_size=layers, max_size=layers))
    return {"sliding_window": 4, "use_sliding_window": True, "layer_types": types}


def _llama(draw: Draw, layers: int) -> dict[str, Any]:  # noqa: ARG001 - the same for all
    return _gated(draw) | {"attention_bias": draw(st.booleans()), "mlp_bias": draw(st.booleans())}


def _mistral(draw: Draw, layers: int) -> dict[str, Any]:  # noqa: ARG001
    return _gated(draw) | _window(draw)


def _qwen2(draw: Draw, layers: int) -> dict[str, Any]:
    # It has no head_dim of its own to configure: 32 features divide among the heads.
    heads = _heads(draw)
    return _gated(draw, (32 // heads["num_attention_heads"],)) | heads | _layer_types(draw, layers)


def _qwen3(draw: Draw, layers: int) -> dict[str, Any]:
    return _gated(draw) | _layer_types(draw, layers) | {"attention_bias": draw(st.booleans())}


def _ministral(draw: Draw, layers: int) -> dict[str, Any]:
    types = _layer_types(draw, layers)
    del types["use_sliding_window"]
    return _gated(draw) | types


def _ministral3(draw: Draw, layers: int) -> dict[str, Any]:  # noqa: ARG001
    drawn = _gated(draw) | _window(draw)
    growth = {
        "llama_4_scaling_beta": draw(st.sampled_from((0.1, 0.5))),
        "original_max_position_embeddings": 4,
    }
    drawn["rope_parameters"] = growth | drawn["rope_parameters"]
    return drawn


def _smollm3(draw: Draw, layers: int) -> dict[str, Any]:
    # As with Qwen2, heads divide 32 features; layers have rotary positions or not, and windows or not, as it comes.
    heads = _heads(draw)
    rotary = st.lists(st.integers(0, 1), min_size=layers, max_size=layers)
    drawn = _gated(draw, (32 // heads["num_attention_heads"],)) | heads | _layer_types(draw, layers)
    del drawn["head_dim"]
    return drawn | {
        "no_rope_layers": draw(rotary),
        "attention_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
    }


def _granite(draw: Draw, layers: int) -> dict[str, Any]:
    factors = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    return _llama(draw, layers) | {factor: draw(st.sampled_from((0.25, 1, 1.5))) for factor in factors}


def _gemma2(draw: Draw, layers: int) -> dict[str, Any]:
    drawn = _gated(draw) | _layer_types(draw, layers)
    drawn["hidden_activation"] = drawn.pop("hidden_act")
    caps = st.sampled_from((None, 2.0, 30.0))
    return drawn | {
        "attention_bias": draw(st.booleans()),
        "attn_logit_softcapping": draw(caps),
        "final_logit_softcapping": draw(caps),
        "query_pre_attn_scalar": draw(st.sampled_from((8, 24))),
    }


def _gemma3(draw: Draw, layers: int) -> dict[str, Any]:
    drawn = _gemma2(draw, layers)
    del drawn["attn_logit_softcapping"]  # which the class ignores
    kinds = ("sliding_attention", "full_attention")
    return drawn | {
        "rope_parameters": {kind: _rope(draw, drawn["head_dim"])["rope_parameters"] for kind in kinds}
    }


def _olmo(draw: Draw, layers: int) -> dict[str, Any]:  # noqa: ARG001
    drawn = _gated(draw) | {"clip_qkv": draw(st.sampled_from((None, 0.5, 8.0)))}
    del drawn["rms_norm_eps"]
    return drawn | {"attention_bias": draw(st.booleans())}


def _olmo2(draw: Draw, layers: int) -> dict[str, Any]:  # noqa: ARG001
    return _gated(draw) | {"attention_bias": draw(st.booleans())}


def _olmo3(draw: Draw, layers: int) -> dict[str, Any]:
    drawn = _olmo2(draw, layers) | _layer_types(draw, layers)
    kinds = ("sliding_attention", "full_attention")
    return drawn | {
        "rope_parameters": {kind: _rope(draw, drawn["head_dim"])["rope_parameters"] for kind in kinds}
    }


def _exaone4(draw: Draw, layers: int) -> dict[str, Any]:
    whole = {"sliding_window": None, "layer_types": ["full_attention"] * layers}
    return _gated(draw) | (_layer_types(draw, layers) if draw(st.booleans()) else whole)


def _seed_oss(draw: Draw, layers: int) -> dict[str, Any]:
    return _llama(draw, layers) | {"attention_out_bias": draw(st.booleans())}


def _starcoder2(draw: Draw, layers: int) -> dict[str, Any]:  # noqa: ARG001
    drawn = _gated(draw) | _window(draw) | {"use_bias": draw(st.booleans())}
    return drawn | {"norm_epsilon": drawn.pop("rms_norm_eps")}


def _phi(draw: Draw, layers: int) -> dict[str, Any]:  # noqa: ARG001
    # Heads divide 32 features, as Qwen2's do.
    heads = _heads(draw)
    head_dim = 32 // heads["num_attention_heads"]
    drawn = _gated(draw, (head_dim,)) | heads | _rope(draw, head_dim, partly=True)
    del drawn["head_dim"]
    return drawn | {"layer_norm_eps": drawn.pop("rms_norm_eps")}


def _stablelm(draw: Draw, layers: int) -> dict[str, Any]:
    own = {"use_qkv_bias": draw(st.booleans()), "use_parallel_residual": draw(st.booleans())}
    return _phi(draw, layers) | own


def _phi3(draw: Draw, layers: int) -> dict[str, Any]:  # noqa: ARG001
    heads = _heads(draw)
    head_dim = 32 // heads["num_attention_heads"]
    rope = _rope(draw, head_dim, partly=True)
    # All that this family's class admits.
    if rope["rope_parameters"]["rope_type"] not in ("default", "longrope"):
        rope = {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
        }
        rope["rope_parameters"]["partial_rotary_factor"] = 1.0 if head_dim == 4 else 0.5
    if "original_max_position_embeddings" in rope["rope_parameters"]:
        rope["original_max_position_embeddings"] = rope["rope_parameters"][
            "original_max_position_embeddings"
        ]
    return _gated(draw, (head_dim,)) | heads | rope | _window(draw)


def _glm(draw: Draw, layers: int) -> dict[str, Any]:  # noqa: ARG001
    drawn = _gated(draw)
    return drawn | _rope(draw, drawn["head_dim"], partly=True) | {"attention_bias": draw(st.booleans())}


def _cohere(draw: Draw, layers: int) -> dict[str, Any]:  # noqa: ARG001
    # Heads divide 32 features, as Qwen2's do.
    heads = _heads(draw)
    drawn = _gated(draw, (32 // heads["num_attention_heads"],)) | heads
    del drawn["head_dim"], drawn["rms_norm_eps"]
    return drawn | {
        "layer_norm_eps": draw(st.sampled_from((1e-5, 1e-2))),
        "logit_scale": draw(st.sampled_from((0.0625, 1.0))),
        "attention_bias": draw(st.booleans()),
        "use_qk_norm": draw(st.booleans()),
    }


def _cohere2(draw: Draw, layers: int) -> dict[str, Any]:
    types = _layer_types(draw, layers)
    del types["use_sliding_window"]
    drawn = _cohere(draw, layers) | types | {"sliding_window": draw(st.sampled_from((4, 200)))}
    del drawn["use_qk_norm"]
    return drawn


def _opt(draw: Draw, layers: int) -> dict[str, Any]:  # noqa: ARG001
    return _heads(draw, grouped=False) | {
        "ffn_dim": draw(st.sampled_from((16, 52))),
        "activation_function": draw(st.sampled_from(ACTIVATIONS)),
        "enable_bias": draw(st.booleans()),
        "layer_norm_elementwise_affine": draw(st.booleans()),
    }


def _gpt2(draw: Draw, layers: int) -> dict[str, Any]:  # noqa: ARG001
    return _heads(draw, grouped=False) | {
        "n_inner": draw(st.sampled_from((None, 52))),
        "activation_function": draw(st.sampled_from(ACTIVATIONS)),
        "scale_attn_weights": draw(st.booleans()),
        "layer_norm_epsilon": draw(st.sampled_from((1e-5, 1e-2))),
    }


def _gpt_neo(draw: Draw, layers: int) -> dict[str, Any]:
    kinds = draw(st.lists(st.sampled_from(("global", "local")), min_size=layers, max_size=layers))
    return _heads(draw, grouped=False) | {
        "attention_types": [[[kind], 1] for kind in kinds],
        "window_size": draw(st.sampled_from((3, 200))),
        "intermediate_size": draw(st.sampled_from((None, 52))),
        "activation_function": draw(st.sampled_from(ACTIVATIONS)),
    }


def _gptj(draw: Draw, layers: int) -> dict[str, Any]:  # noqa: ARG001
    heads = _heads(draw, grouped=False)
    return heads | {
        "rotary_dim": draw(st.sampled_from((2, 32 // heads["num_attention_heads"]))),
        "n_inner": draw(st.sampled_from((None, 52))),
        "activation_function": draw(st.sampled_from(ACTIVATIONS)),
        "layer_norm_epsilon": draw(st.sampled_from((1e-5, 1e-2))),
    }


def _falcon(draw: Draw, layers: int) -> dict[str, Any]:  # noqa: ARG001
    heads = _heads(draw)
    kind, kv_heads = (
        draw(st.sampled_from(("new", "new with one norm", "old", "in turn"))),
        heads.pop("num_key_value_heads"),
    )
    return (
        heads
        | _rope(draw, 32 // heads["num_attention_heads"])
        | {
            "new_decoder_architecture": kind.startswith("new"),
            "num_ln_in_parallel_attn": 1 if kind == "new with one norm" else None,
            "num_kv_heads": kv_heads if kind.startswith("new") else heads["num_attention_heads"],
            "multi_query": False,  # of which two ranks would share a head
            "parallel_attn": kind != "in turn",
            "bias": draw(st.booleans()),
            "ffn_hidden_size": draw(st.sampled_from((16, 52))),
            "activation": draw(st.sampled_from(ACTIVATIONS)),
            "layer_norm_epsilon": draw(st.sampled_from((1e-5, 1e-2))),
        }
    )


def _gpt_neox(draw: Draw, layers: int) -> dict[str, Any]:  # noqa: ARG001
    heads = _heads(draw, grouped=False)
    return (
        heads
        | _rope(draw, 32 // heads["num_attention_heads"], partly=True)
        | {
            "intermediate_size": draw(st.sampled_from((16, 52))),
            "hidden_act": draw(st.sampled_from(ACTIVATIONS)),
            "use_parallel_residual": draw(st.booleans()),
            "attention_bias": draw(st.booleans()),
            "layer_norm_eps": draw(st.sampled_from((1e-5, 1e-2))),
        }
    )


_OF_FAMILY: dict[str, Callable[[Draw, int], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "ministral": _ministral,
    "ministral3": _ministral3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "smollm3": _smollm3,
    "granite": _granite,
    "gemma": _olmo2,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "olmo": _olmo,
    "olmo2": _olmo2,
    "exaone4": _exaone4,
    "seed_oss": _seed_oss,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
    "olmo3": _olmo3,
    "phi": _phi,
    "phi3": _phi3,
    "glm": _glm,
    "glm4": _glm,
    "cohere": _cohere,
    "cohere2": _cohere2,
    "opt": _opt,
    "gpt2": _gpt2,
    "gpt_neo": _gpt_neo,
    "falcon": _falcon,
    "gptj": _gptj,
    "gpt_neox": _gpt_neox,
}
