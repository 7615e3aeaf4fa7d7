"""Models that others wrapped, decomposed or pruned, seen as if they were stored alone in the program form.

A wrapper is a model around a text decoder, which is a causal language model of its own family. Vision towers,
projectors and whatever else is around it are written again as they were. What others do to layers, and how the program
form has it:

    SVD-LLM   q_proj is q_u_proj behind q_v_proj              A0@q64
    ASVD      q_proj is q_proj.ALinear behind q_proj.BLinear  A0@q64
    Palu      k_proj is k_proj.U.0, k_proj.U.1 ... behind k_proj.VT: each makes some heads of a part of VT's output,
              which is one factor with these in blocks along its diagonal
    DeciLM    `block_configs` says which layers have no attention or no MLP, and how wide the others are
    GPT-2     `scale_attn_by_inverse_layer_idx` divides scores by the number of the layer, from 1: so are queries

Only config.json and the tensors' names and shapes are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from surgeon.checkpoint.tensor_file import Derived, StoredTensor, TensorFiles
from surgeon.language.program import Program
from surgeon.language.sublayer import ATTENTION, FEED_FORWARD, ROLES, Sublayer
from surgeon.models.edit import PROGRAM_KEY, PROGRAM_PREFIX
from surgeon.models.families import FAMILIES, Family
from surgeon.models.weights import Names, Store
from surgeon.models.weights.layers import modules_of
from surgeon.words import show_value

Entries = dict[str, Any]  # of a config.json
# What names of tensors begin with, in files and in the text model alone; the first pair that fits counts.
Prefixes = tuple[tuple[str, str], ...]

# Most checkpoints on the hub have this prefix, and transformers writes it.
_BEFORE_ALL = (("language_model.", ""),)
_INSIDE = (("model.language_model.", "model."), ("lm_head.", "lm_head."))
# Of the whole model, where config.json says it of the text decoder, too.
_SHARED = ("dtype", "torch_dtype", "quantization_config", "bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Wrapper:
    """One architecture around a text decoder.

    Attributes:
        name: as users know it.
        model_type: as `config.json` has it.
        decoder_type: the `model_type` of the text decoder, where its configuration does not say it.
        text: the entry of `config.json` that is the text decoder's configuration.
        decoder: path of the text decoder, where a causal language model has "model".
        head: path of what a causal language model has as "lm_head".
        names: ways in which checkpoints name tensors.
        tied: whether embedding and head are one matrix where `config.json` does not say.
        plainly_rotary: the `model_type` of a text decoder whose positions have three parts (time, height, width), all
            the same in a text: without them it is of that family.
        fed: the entry of the vision tower's configuration that has an item for each of the first layers with features
            of images added behind them.
    """

    name: str
    model_type: str
    decoder_type: str
    text: str = "text_config"
    decoder: str = "model.language_model"
    head: str = "lm_head"
    names: tuple[Prefixes, ...] = (_BEFORE_ALL, _INSIDE)
    tied: bool = True
    plainly_rotary: str | None = None
    fed: str | None = None

    def text_entries(self, entries: Entries) -> Entries:
        """Return the text decoder's `config.json` as a causal language model, or raise ValueError without one."""
        own = entries.get(self.text)
        if not isinstance(own, dict):
            raise ValueError(
                f"the config.json of a {self.name} has its text decoder's configuration as {self.text}, "
                f"not {show_value(own)}; is it damaged?"
            )
        given = {"model_type": self.decoder_type} | own
        given |= {key: entries[key] for key in _SHARED if key in entries and own.get(key) is None}
        given |= {key: value for key, value in entries.items() if key.startswith(PROGRAM_PREFIX)}
        given["tie_word_embeddings"] = entries.get("tie_word_embeddings", self.tied)
        if self.plainly_rotary is None:
            return given
        for key in ("rope_parameters", "rope_scaling"):
            if isinstance(rope := given.get(key), dict):
                kept = {name: value for name, value in rope.items() if not name.startswith("mrope")}
                if "mrope" in (kept.get("type"), kept.get("rope_type")):
                    kept |= {"type": "default", "rope_type": "default"}
                given[key] = kept
        return given | {"model_type": self.plainly_rotary}

    @property
    def places(self) -> Prefixes:
        """Beginnings of paths in the wrapper, and in a causal language model."""
        return (f"{self.decoder}.", "model."), (f"{self.head}.", "lm_head.")

    def path_inside(self, path: str) -> str:
        """Return the path in the wrapper of what lies here in a causal language model."""
        return replace_prefix(path, [(own, place) for place, own in self.places]) or path

    def path_around(self, name: str) -> str:
        """Return the path in the wrapper of what is not of the text decoder, by its stored name."""
        if self.decoder.startswith("model.") and not name.startswith("model."):
            return f"model.{name}"
        return name


def replace_prefix(name: str, prefixes: Iterable[tuple[str, str]]) -> str | None:
    """Give a name another beginning; None if none of the prefixes is its own."""
    return next((new + name.removeprefix(old) for old, new in prefixes if name.startswith(old)), None)


def wrapper_of(entries: Entries) -> Wrapper | None:
    """Return the wrapper that a config.json describes; None if it is of a causal language model."""
    model_type = str(entries.get("model_type"))
    return WRAPPERS.get(
        model_type.removeprefix(PROGRAM_PREFIX) if PROGRAM_KEY in entries else model_type
    )


def text_entries(entries: Entries) -> Entries:
    """Return the entries of a config.json, or as `Wrapper.text_entries` those of the text decoder inside."""
    wrapper = wrapper_of(entries)
    if wrapper is None:
        return entries
    return wrapper.text_entries(entries)


WRAPPERS = {
    wrapper.model_type: wrapper
    for wrapper in (
        Wrapper("Mistral 3", "mistral3", "mistral"),
        Wrapper("Gemma 3", "gemma3", "gemma3_text"),
        Wrapper(
            "Qwen3-VL",
            "qwen3_vl",
            "qwen3_vl_text",
            tied=False,
            plainly_rotary="qwen3",
            fed="deepstack_visual_indexes",
        ),
        Wrapper("Qwen3.5", "qwen3_5", "qwen3_5_text", tied=False),
        Wrapper("Qwen3.5-MoE", "qwen3_5_moe", "qwen3_5_moe_text", tied=False),
        Wrapper(
            "Llama 4",
            "llama4",
            "llama4_text",
            decoder="language_model.model",
            head="language_model.lm_head",
            names=(_BEFORE_ALL,),
            tied=False,
        ),
    )
}


BLOCKS_KEY = "block_configs"
BY_LAYER_KEY = "scale_attn_by_inverse_layer_idx"
# What others call a model whose layers are those of an architecture that there is.
BASE_TYPES = {
    "nemotron-nas": "llama",
    "deci": "llama",
    "asvd_llama": "llama",
    "palullama": "llama",
    "palumistral": "mistral",
    "paluqwen2": "qwen2",
    "paluqwen3": "qwen3",
    "kimi_k2": "deepseek_v3",
}
# Names of the two factors of a matrix at a path: its parent, and its last name without "_proj".
STYLES = (
    ("{parent}{stem}_v_proj", "{parent}{stem}_u_proj"),  # SVD-LLM
    ("{path}.BLinear", "{path}.ALinear"),  # ASVD
    ("{path}.VT", "{path}.U"),  # Palu
)
_ROUNDED_TO = 256  # neurons, by DeciLM's ffn_mult


def translate_entries(entries: Entries) -> tuple[Entries, dict[int, int]]:
    """Return config.json as in the program form, where it has `block_configs`; else as it is.

    Returns:
        Its entries; and by layer with fewer KV heads than others, how often each is repeated to have as many.
    """
    model_type = str(entries.get("model_type"))
    if model_type in BASE_TYPES:
        entries = entries | {"model_type": BASE_TYPES[model_type]}
    if entries.get(BY_LAYER_KEY):
        return entries | {BY_LAYER_KEY: False}, {}
    blocks = entries.get(BLOCKS_KEY)
    if blocks is None or PROGRAM_KEY in entries or entries["model_type"] not in FAMILIES:
        return entries, {}
    if not isinstance(blocks, list) or not all(isinstance(one, dict) for one in blocks) or not blocks:
        raise ValueError(
            f"{BLOCKS_KEY} in config.json has an object for each layer, not {show_value(blocks)}"
        )
    family = FAMILIES[entries["model_type"]]
    heads = int(entries["num_attention_heads"])
    sizes_of = [_sizes(one, entries, layer) for layer, one in enumerate(blocks)]
    attentions = [attention for attention, _ in sizes_of if attention is not None]
    kv_heads = max((kv for own, kv in attentions if own == heads), default=heads)
    widest = max((width for _, width in sizes_of if width is not None), default=0)
    nodes = []
    repeats = {}
    for layer, (attention, width) in enumerate(sizes_of):
        if attention is not None:
            own, kv = attention
            times, rest = divmod(own * kv_heads, heads * kv)
            if rest or times < 1:
                raise ValueError(
                    f"layer {layer} has {own} heads that share {kv} KV heads, and others {heads} that share "
                    f"{kv_heads}, which no program can say"
                )
            groups = kv * times
            if times > 1:
                repeats[layer] = times
            nodes.append(Sublayer(ATTENTION, (layer,), width=None if groups == kv_heads else groups))
        if width is not None:
            nodes.append(Sublayer(FEED_FORWARD, (layer,), width=None if width == widest else width))
    sizes = {
        "num_key_value_heads": kv_heads,
        family.intermediate: widest,
        "num_hidden_layers": len(blocks),
    }
    kept = {key: value for key, value in entries.items() if key != BLOCKS_KEY}
    kept |= {key: value for key, value in sizes.items() if value} | {
        PROGRAM_KEY: " ".join(map(str, nodes))
    }
    return kept, repeats


def translate_model(entries: Entries, store: TensorFiles) -> tuple[Entries, dict[str, StoredTensor]]:
    """Return config.json and the tensors of a model as they would be in the program form."""
    found, repeats = translate_entries(entries)
    tensors = dict(store.tensors)
    family = FAMILIES.get(str(found.get("model_type")))
    if family is None or (layers := Names(store, family).prefix_of_layers) is None:
        return found, tensors
    ranks = translate_factors(family, layers, store, tensors)
    for layer, times in repeats.items():
        for role in ("k", "v"):
            path = f"{layers}{layer}.{family.attention.projection(role).path}"
            for name in {f"{path}.weight", f"{path}.bias"} & tensors.keys():
                rows, *others = tensors[name].shape
                make = partial(repeat_heads, rows * times // int(found["num_key_value_heads"]), times)
                tensors[name] = Derived([tensors[name]], (rows * times, *others), make)
    if entries.get(BY_LAYER_KEY):  # of the first layer it divides by 1
        path = re.escape(family.attention.projection("q").path)
        for name in store.names():
            if one := re.fullmatch(rf"{re.escape(layers)}([1-9]\d*)\.{path}\.(weight|bias)", name):
                make = partial(divide_queries, int(one[1]) + 1)
                tensors[name] = Derived([tensors[name]], tensors[name].shape, make)
    return add_ranks(found, family, ranks), tensors


def _part(block: Entries, name: str, layer: int) -> Entries | None:
    """Return a layer's entry for its attention or MLP; None if it has none."""
    part = block.get(name)
    if part is None or part.get("no_op"):
        return None
    for key in ("replace_with_linear", "window_length", "num_sink_tokens", "moe", "mamba"):
        if part.get(key):
            raise ValueError(
                f"layer {layer} has {key}: {show_value(part[key])} in {BLOCKS_KEY}, which no program can say"
            )
    found: Entries = part
    return found


def _sizes(block: Entries, entries: Entries, layer: int) -> tuple[tuple[int, int] | None, int | None]:
    """Return a layer's heads and KV heads, None without attention; and its neurons, None without an MLP."""
    heads = None
    if (part := _part(block, "attention", layer)) is not None:
        own = int(part.get("num_attention_heads") or entries["num_attention_heads"])
        shared = part.get("num_key_value_heads") or own // int(part.get("n_heads_in_group") or 1)
        heads = own, int(shared)
    if (part := _part(block, "ffn", layer)) is None:
        return heads, None
    if part.get("intermediate_size"):
        neurons = int(part["intermediate_size"])
    elif part.get("ffn_mult"):
        wide = int(2 * float(part["ffn_mult"]) * int(entries["hidden_size"]) / 3)
        neurons = -(-wide // _ROUNDED_TO) * _ROUNDED_TO
    else:
        neurons = int(entries["intermediate_size"])
    return heads, neurons


def repeat_heads(head_dim: int, times: int, tensors: list[Tensor]) -> Tensor:
    """Repeat every head of the rows of a KV projection."""
    (rows,) = tensors
    heads: Tensor = rows.unflatten(0, (-1, head_dim))
    return heads.repeat_interleave(times, 0).flatten(0, 1)


def divide_queries(number: int, tensors: list[Tensor]) -> Tensor:
    """Divide queries, which come before as many keys and as many values."""
    (whole,) = tensors
    queries, *others = whole.chunk(3, -1)
    return torch.cat([(queries.float() / number).to(whole.dtype), *others], -1)


def translate_factors(
    family: Family, layers: str, store: Store, tensors: dict[str, StoredTensor]
) -> dict[tuple[str, int], dict[str, int]]:
    """Rename matrices that are stored as two factors, and return their ranks by role, of each kind and layer."""
    alone = {
        path: (kind, packed[0].role)
        for kind, spec in ((ATTENTION, family.attention), (FEED_FORWARD, family.mlp))
        for path, packed in modules_of(spec).items()
        if len(packed) == 1 and not packed[0].transposed and not packed[0].stacked
    }
    inside: dict[int, set[str]] = {}
    for name in store.names():
        if (found := re.fullmatch(rf"{re.escape(layers)}(\d+)\.(.+)", name)) is not None:
            inside.setdefault(int(found[1]), set()).add(found[2])
    ranks: dict[tuple[str, int], dict[str, int]] = {}
    for layer, names in inside.items():
        for path, (kind, role) in alone.items():
            if f"{path}.weight" in names:
                continue
            pair = _pair(f"{layers}{layer}.", path, names, store)
            if pair is None:
                continue
            first, seconds, biases = pair
            rank = store.shape(first)[0]
            outputs = sum(store.shape(name)[0] for name in seconds)
            place = f"{layers}{layer}.{path}"
            tensors[f"{place}.first.weight"] = tensors.pop(first)
            for name, stored, shape, make in (
                ("second.weight", seconds, (outputs, rank), join_blocks),
                ("second.bias", biases, (outputs,), torch.cat),
            ):
                parts = [tensors.pop(one) for one in stored]
                if len(parts) == 1:
                    tensors[f"{place}.{name}"] = parts[0]
                elif parts:
                    tensors[f"{place}.{name}"] = Derived(parts, shape, make)
            ranks.setdefault((kind, layer), {})[role] = rank
    return ranks


def _pair(
    prefix: str, path: str, names: set[str], store: Store
) -> tuple[str, list[str], list[str]] | None:
    """Find the factors of a matrix: the first, and the seconds, of which each maps a part of it, with their biases."""
    parent, _, name = path.rpartition(".")
    words = {"path": path, "parent": f"{parent}." if parent else "", "stem": name.removesuffix("_proj")}
    for first, second in ((a.format(**words), b.format(**words)) for a, b in STYLES):
        if f"{first}.weight" not in names:
            continue
        blocks = sorted(
            (one for one in names if re.fullmatch(rf"{re.escape(second)}(\.\d+)?\.weight", one)),
            key=lambda one: [int(digits) for digits in re.findall(r"\d+", one)],
        )
        rank = store.shape(f"{prefix}{first}.weight")[0]
        parts = [store.shape(f"{prefix}{one}") for one in blocks]
        if sum(shape[1] for shape in parts) != rank:
            raise ValueError(
                f"{prefix}{first}.weight gives {rank} features, and what follows it ({second}) takes "
                f"{sum(shape[1] for shape in parts)}: two factors of {prefix}{path} have to fit together"
            )
        if any(f"{place}.inv_perm" in names for place in (path, parent)):
            raise ValueError(
                f"{prefix}{path} gives its features in another order (inv_perm), which no program can say"
            )
        biases = (one.removesuffix("weight") + "bias" for one in blocks)
        return (
            f"{prefix}{first}.weight",
            [f"{prefix}{one}" for one in blocks],
            [f"{prefix}{one}" for one in biases if one in names],
        )
    return None


def add_ranks(
    entries: Entries, family: Family, ranks: Mapping[tuple[str, int], dict[str, int]]
) -> Entries:
    """Return config.json in the program form, with the ranks of factors by role, of each kind and layer."""
    if not ranks:
        return entries
    own = entries.get(PROGRAM_KEY)
    if own is None:
        layers = next(entries[key] for key in ("num_hidden_layers", "n_layer") if key in entries)
        program = Program.dense(int(layers), family.steps_per_layer)
    else:
        program = Program.parse(own)

    def add_rank(sublayer: Sublayer) -> Sublayer:
        found = ranks.get((sublayer.kind, sublayer.layers[0]), {})
        return replace(
            sublayer, ranks=tuple((role, found[role]) for role in ROLES[sublayer.kind] if role in found)
        )

    return entries | {PROGRAM_KEY: str(program.map_sublayers(add_rank))}


def join_blocks(tensors: list[Tensor]) -> Tensor:
    """Join several factors as blocks along the diagonal of one."""
    made: Tensor = torch.block_diag(*tensors)
    return made.to(tensors[0].dtype)
