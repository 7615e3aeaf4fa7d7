"""The checkpoints that cases.py tries: models as they are, and every form that surgeon export makes of them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from surgeon.checkpoint.forms.program import needs_plugin
from surgeon.exports.export import plan_export, write_export
from surgeon.exports.in_memory import edit
from surgeon.language.operations import (
    experts,
    ladder,
    lowrank,
    pair,
    parallel,
    prune,
    repeat,
    tracks,
    width,
)
from surgeon.language.program import Program
from surgeon.language.sublayer import ROLES, Sublayer
from surgeon.models.families import family_of
from surgeon.opened import Model, open_model
from surgeon.training.scratch.tracks import narrow
from tests.tiny_models import disturb, tiny_model

# Heads have a width that vLLM's attention on CPUs knows; tied random embeddings would only ever repeat the last token.
TINY = {"hidden_size": 128, "num_attention_heads": 4, "tie_word_embeddings": False}
LATENT = {"qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 32}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
OVERRIDES: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": False},  # vLLM's own Qwen2 has a window in all layers or none
    **{name: {"head_dim": 64} for name in ("qwen3", "qwen3_moe")},
    # vLLM's own knows these positions only.
    "gpt_oss": {"head_dim": 64, "rope_parameters": YARN},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT | {"topk_method": "noaux_tc"},  # as all that were published have it
    "gemma": {"head_dim": 32, "tie_word_embeddings": True},  # as vLLM's own has it
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


# These go by the name of a form, and raise a ValueError where surgeon knows that there is none.
Programs = dict[str, Callable[[], Program]]


@dataclass(frozen=True)
class Case:
    """One checkpoint to be tried.

    Attributes:
        model: what it was made of.
        form: "dense" for the model itself, the form of the edited checkpoint, or what the program form holds.
        plugin: whether it needs surgeon's plugin; without it, vLLM runs where there is no surgeon.
        refused: why surgeon writes no such checkpoint, where it says that there is none.
    """

    model: str
    form: str
    folder: Path
    plugin: bool = False
    refused: str | None = None


def random_source(folder: Path, model_type: str) -> Path:
    """A tiny random model of an architecture, norms and biases far from ones and zeros."""
    tiny_model(model_type, 4, **TINY | OVERRIDES.get(model_type, {})).save_pretrained(folder)
    return folder


def cases_of(
    name: str, source: Path, folder: Path, with_plugin: bool, forms: Collection[str] | None = None
) -> Iterator[Case]:
    """Write a model's checkpoints into a folder: pruned, fused where it can be, narrow, of low rank, and the plugin's.

    What the model cannot have is a case that says so.

    Args:
        forms: only these, by their names; by default all that the model can have.
    """
    if forms is None or "dense" in forms:
        yield Case(name, "dense", source)
    for form, plugin, write in checkpoints_of(source, with_plugin):
        if forms is None or form in forms:
            case = Case(name, form, folder / form, plugin)
            try:
                write(case.folder)
            except ValueError as error:
                case = replace(case, refused=str(error))
            yield case


def checkpoints_of(source: Path, with_plugin: bool) -> Iterator[tuple[str, bool, Callable[[Path], Any]]]:
    """The form of each checkpoint, whether it is for the plugin, and what writes it.

    Low-rank ones are for the plugin, too, where unmodified vLLM does not run them.
    """
    original = open_model(source)
    family = original.family
    layers = int(original.config.num_hidden_layers)
    dense = Program.dense(layers, family.steps_per_layer)

    def export(made: Callable[[], Program], form: str) -> Callable[[Path], Any]:
        return lambda folder: write_export(plan_export(original, made(), form), folder)

    programs: Programs = {"plain": lambda: prune(dense, range(layers // 2, layers // 2 + 1))}
    programs["fused"] = lambda: pair(dense, range(1, layers - 1))
    for named, made in (programs | narrow_programs(dense, original)).items():
        yield named, False, export(made, named.split()[-1])
    for_plugin = needs_plugin(dense, family, original.config, layers) is not None
    if with_plugin or not for_plugin:
        for named, made in low_rank_programs(dense, original).items():
            yield named, for_plugin, export(made, "auto")
    if with_plugin:
        for named, made in plugin_programs(dense, original).items():
            yield named, True, export(made, "program")
        # Where heads fill the stream they would get a width that vLLM has not.
        if not family.heads_fill_stream:
            yield "native", True, lambda to: native_tracks(to, original.config)
            yield "one head", True, lambda to: native_tracks(to, original.config, single=True)


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


def low_rank_programs(dense: Program, original: Model) -> Programs:
    """Every matrix at a share of its parameters; and in some of them a rank that two ranks cannot divide."""
    family = original.family
    config = original.config

    def odd(sublayer: Sublayer) -> Sublayer:
        there = {projection.role for projection in family.spec(sublayer.kind).projections}
        roles = [role for role in ROLES[sublayer.kind] if role in there]
        some = [[], roles, roles[-1:], roles[:-1]][sublayer.layers[0] % 4]  # the first layer is whole
        return replace(sublayer, ranks=tuple((role, 7) for role in some))

    layers = range(int(config.num_hidden_layers))
    shapes = family.layer_shapes(config)
    return {
        "keep 0.6": lambda: lowrank(dense, layers, shapes, keep=0.6),
        "odd ranks": lambda: dense.map_sublayers(odd),
    }


def narrow_programs(dense: Program, original: Model) -> Programs:
    """Half the neurons everywhere, and one KV group where config.json can say it; and in some layers only.

    A mixture keeps the neurons of its experts, and two experts in place of all.
    """
    family = original.family
    layers = int(original.config.num_hidden_layers)
    shapes = family.layer_shapes(original.config)
    heads = None if family.heads_fill_stream else 1
    inner = range(1, layers - 1)
    if family.mixture is not None:
        return {
            "narrow plain": lambda: width(dense, range(layers), shapes, heads=heads),
            "experts plain": lambda: experts(dense, range(layers), shapes, keep=[0, 1]),
        }
    return {
        "narrow plain": lambda: width(dense, range(layers), shapes, heads=heads, neurons=0.5),
        "narrow fused": lambda: width(dense, inner, shapes, neurons=0.5),
    }


def plugin_programs(dense: Program, original: Model) -> Programs:
    """What cannot be fused: late steps, and branches that ranks run apart, also with other numbers of attentions."""
    layers = int(original.config.num_hidden_layers)
    mixture = original.family.mixture is not None
    inner = range(1, layers - 1)
    narrow = "A0 F0 >[A1#1 A2#1] >F1!e1 F3!e0" if mixture else "A0 F0#20 >[A1#1 A2#1] >F1#8 F2#20"
    ranked = (
        "A0@q16,k8,v8,o16 F0@up8,down8 >A1@o12 >F1"
        if mixture
        else "A0@q16,k8,v8,o16 F0@up24,down24 >A1@o12 >F1"
    )
    return {
        "ladder": lambda: ladder(dense, range(1, layers)),
        "ladder+LP": lambda: ladder(pair(dense, inner), range(1, layers)),
        "fork": lambda: parallel(dense, inner),
        "uneven": lambda: Program.parse("{A0 F0 A1 | F1 F0} A0 F1"),
        "narrow": lambda: Program.parse(narrow),
        "repeat": lambda: ladder(repeat(dense, inner), range(1, 2)),
        "low rank": lambda: Program.parse(ranked),
        "tracks": lambda: tracks(dense, inner, count=2, depth=2),
    }


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
    rope = config.get("rope_parameters") or {}
    factor = NARROWEST // narrow
    if config["model_type"] != "llama" or rope.get("rope_type") != "default" or NARROWEST % narrow:
        raise ValueError(
            f"{source} has heads of {narrow}, for which vLLM has no attention on CPUs, and which stay so"
        )
    tensors = load_file(source / "model.safetensors")
    kept = torch.arange(narrow).unflatten(0, (2, -1)) + torch.tensor([[0], [(NARROWEST - narrow) // 2]])
    for name, tensor in tensors.items():
        role = name.split(".")[-2][0] if "self_attn" in name else ""
        if role in tuple("qkv"):
            wide = tensor.new_zeros(len(tensor) // narrow, NARROWEST, *tensor.shape[1:])
            wide[:, kept.flatten()] = tensor.unflatten(0, (-1, narrow)) * (
                factor**0.5 if role == "q" else 1
            )
            tensors[name] = wide.flatten(0, 1)
        elif role == "o" and tensor.dim() == 2:
            wide = tensor.new_zeros(len(tensor), tensor.shape[1] // narrow, NARROWEST)
            wide[:, :, kept.flatten()] = tensor.unflatten(1, (-1, narrow))
            tensors[name] = wide.flatten(1)
    target.mkdir()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    rope = rope | {"rope_theta": rope["rope_theta"] ** factor}
    (target / "config.json").write_text(
        json.dumps(config | {"head_dim": NARROWEST, "rope_parameters": rope})
    )
    return target
