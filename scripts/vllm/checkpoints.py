"""The checkpoints that cases.py tries: models as they are, and every form that surgeon export makes of them."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from surgeon.checkpoint.forms.program import needs_plugin
from surgeon.exports.export import plan_export, write_export
from surgeon.exports.saving import edit
from surgeon.language.operations import ladder, lowrank, pair, parallel, prune, repeat, tracks, width
from surgeon.language.program import Program
from surgeon.language.sublayer import Sublayer
from surgeon.models.families import Family, family_of
from surgeon.opened import Model, open_model
from surgeon.training.scratch.tracks import narrow
from tests.tiny_models import disturb, tiny_model

# Heads of a width that vLLM's attention on CPUs has; tied random embeddings would only ever repeat the last token.
TINY = {"hidden_size": 128, "num_attention_heads": 4, "tie_word_embeddings": False}
OVERRIDES: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": False},  # vLLM's own Qwen2 has a window in all layers or none
    "qwen3": {"head_dim": 64},
    # vLLM's own Gemma2 and Gemma3 have a tied head, whose large logits a low cap would make equal.
    "gemma2": {"head_dim": 32, "tie_word_embeddings": True, "final_logit_softcapping": 1e3},
    "gemma3_text": {"head_dim": 32, "tie_word_embeddings": True, "final_logit_softcapping": 1e3},
    "opt": {"word_embed_proj_dim": 128},
    "gpt_neo": {"attention_types": [[["global"], 1], [["local"], 2], [["global"], 1]]},
    "smollm3": {"no_rope_layers": [1, 0, 0, 1], "use_sliding_window": False},
    **{name: {"head_dim": 32} for name in ("glm", "glm4", "ministral", "ministral3")},
    **{name: {"tie_word_embeddings": True} for name in ("cohere", "cohere2")},  # as vLLM's own asks
}
NARROWEST = 32  # features of a head that vLLM's attention on CPUs has code for


@dataclass(frozen=True)
class Case:
    """One checkpoint to be tried.

    Attributes:
        model: what it was made of.
        form: "dense" for the model itself, the form of the edited checkpoint, or what the program form holds.
        plugin: whether it needs surgeon's plugin; without it, vLLM runs where there is no surgeon.
    """

    model: str
    form: str
    folder: Path
    plugin: bool = False


def random_source(folder: Path, model_type: str) -> Path:
    """A tiny random model of an architecture, norms and biases far from ones and zeros."""
    tiny_model(model_type, 4, **TINY | OVERRIDES.get(model_type, {})).save_pretrained(folder)
    return folder


def cases_of(
    name: str, source: Path, folder: Path, with_plugin: bool, forms: Collection[str] | None = None
) -> Iterator[Case]:
    """Write a model's checkpoints into a folder: pruned, fused where it can be, narrow, of low rank, and the plugin's.

    Low-rank ones are for the plugin, too, where unmodified vLLM does not run them.

    Args:
        forms: only these, by their names; by default all that the model can have.

    Raises:
        ValueError: if one of them cannot be exported.
    """
    original = open_model(source)
    layers = int(original.config.num_hidden_layers)
    dense = Program.dense(layers, original.family.steps_per_layer)

    def exported(programs: dict[str, Program], plugin: bool, form: str | None = "auto") -> Iterator[Case]:
        for named, program in programs.items():
            if forms is None or named in forms:
                write_export(plan_export(original, program, form or named.split()[-1]), folder / named)
                yield Case(name, named, folder / named, plugin)

    if forms is None or "dense" in forms:
        yield Case(name, "dense", source)
    programs = {"plain": prune(dense, range(layers // 2, layers // 2 + 1))}
    if original.family.attention.post_norm is None:
        programs["fused"] = pair(dense, range(1, layers - 1))
    yield from exported(programs | narrow_programs(dense, original), plugin=False, form=None)  # that of its name
    plugin = needs_plugin(dense, original.family, original.config, layers) is not None
    if with_plugin or not plugin:
        yield from exported(low_rank_programs(dense, original), plugin)
    if with_plugin:
        yield from exported(plugin_programs(dense, layers, original.family), plugin=True, form="program")
        # Where heads fill the stream they would get a width that vLLM has not.
        for form in ("native", "one head") if not original.family.heads_fill_stream else ():
            if forms is None or form in forms:
                yield Case(name, form, native_tracks(folder / form, original.config, form == "one head"), plugin=True)


def native_tracks(folder: Path, config: Any, single: bool = False) -> Path:
    """A random model of two tracks, which meet every two layers, as wide as a model's layers allow.

    Args:
        single: with one head in each track, fewer than there are ranks.
    """
    if single:
        config = copy.deepcopy(config)
        config.head_dim = family_of(config).head_dim(config)
        config.num_attention_heads = config.num_key_value_heads = 2
    narrowed, program = narrow(config, count=2, depth=2)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(narrowed, dtype=torch.float32).eval()
    disturb(model)
    edit(model, program).save_pretrained(folder)
    return folder


def low_rank_programs(dense: Program, original: Model) -> dict[str, Program]:
    """Every matrix at a share of its parameters; and in some of them a rank that two ranks cannot divide."""
    family, config = original.family, original.config

    def odd(sublayer: Sublayer) -> Sublayer:
        roles = [projection.role for projection in family.spec(sublayer.kind).projections]
        some = [[], roles, roles[-1:], roles[:-1]][sublayer.layers[0] % 4]  # the first layer is whole
        return replace(sublayer, ranks=tuple((role, 7) for role in some))

    kept = lowrank(dense, range(int(config.num_hidden_layers)), family.layer_shapes(config), keep=0.6)
    return {"keep 0.6": kept, "odd ranks": dense.renamed(odd)}


def narrow_programs(dense: Program, original: Model) -> dict[str, Program]:
    """Half the neurons everywhere, and one KV group where config.json can say it; and in some layers only."""
    family, layers = original.family, int(original.config.num_hidden_layers)
    shapes = family.layer_shapes(original.config)
    heads = None if family.heads_fill_stream else 1
    found = {"narrow plain": width(dense, range(layers), shapes, heads=heads, neurons=0.5)}
    if family.attention.post_norm is None:
        found["narrow fused"] = width(dense, range(1, layers - 1), shapes, neurons=0.5)
    return found


def plugin_programs(dense: Program, layers: int, family: Family) -> dict[str, Program]:
    """What cannot be fused: late steps, and branches that ranks run apart, also with other numbers of attentions."""
    inner = range(1, layers - 1)
    found = {
        "ladder": ladder(dense, range(1, layers)),
        "ladder+LP": ladder(pair(dense, inner), range(1, layers)),
        "fork": parallel(dense, inner),
        "uneven": Program.parse("{A0 F0 A1 | F1 F0} A0 F1"),
        "narrow": Program.parse("A0 F0#20 >[A1#1 A2#1] >F1#8 F2#20"),
        "repeat": ladder(repeat(dense, inner), range(1, 2)),
        "low rank": Program.parse("A0@q16,k8,v8,o16 F0@up24,down24 >A1@o12 >F1"),
    }
    if family.attention.post_norm is None:
        found["tracks"] = tracks(dense, inner, count=2, depth=2)
    return found


def with_wide_heads(source: Path, target: Path) -> Path:
    """A copy of a Llama whose heads are too narrow for vLLM's attention on CPUs, padded with zeros; or the source.

    It computes the same: rotary pairs keep their angles under another base, and queries are multiplied by what the
    wider heads' scale takes from them.

    Raises:
        ValueError: if its heads are too narrow and cannot be padded.
    """
    config = json.loads((source / "config.json").read_text())
    narrow = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if narrow >= NARROWEST:
        return source
    rope, factor = config.get("rope_parameters") or {}, NARROWEST // narrow
    if config["model_type"] != "llama" or rope.get("rope_type") != "default" or NARROWEST % narrow:
        raise ValueError(f"{source} has heads of {narrow}, for which vLLM has no attention on CPUs, and which stay so")
    tensors = load_file(source / "model.safetensors")
    kept = torch.arange(narrow).unflatten(0, (2, -1)) + torch.tensor([[0], [(NARROWEST - narrow) // 2]])
    for name, tensor in tensors.items():
        role = name.split(".")[-2][0] if "self_attn" in name else ""
        if role in tuple("qkv"):
            wide = tensor.new_zeros(len(tensor) // narrow, NARROWEST, *tensor.shape[1:])
            wide[:, kept.flatten()] = tensor.unflatten(0, (-1, narrow)) * (factor**0.5 if role == "q" else 1)
            tensors[name] = wide.flatten(0, 1)
        elif role == "o" and tensor.dim() == 2:
            wide = tensor.new_zeros(len(tensor), tensor.shape[1] // narrow, NARROWEST)
            wide[:, :, kept.flatten()] = tensor.unflatten(1, (-1, narrow))
            tensors[name] = wide.flatten(1)
    target.mkdir()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    rope = rope | {"rope_theta": rope["rope_theta"] ** factor}
    (target / "config.json").write_text(json.dumps(config | {"head_dim": NARROWEST, "rope_parameters": rope}))
    return target
