"""Native Parallel Track: n narrow transformers derived from a dense model's configuration, and their program.

Parallel Track Transformers, section 2.2, algorithm 1 and table 1: n tracks of L layers begin with the same embedded
text, and after every D layers their streams are reduced to one; heads and KV heads are "evenly distributed across
tracks", each of which "operates at a reduced dimensionality". Here that is a program over n x L narrow layers: for each
block a fork of n branches of D layers. The paper leaves open (docs/training.md):

- **The join.** Algorithm 1 says h = all-reduce(h_1, ..., h_n) of whole streams, which would count the stream that all
began with n times. Here a join gives x + (h_1 - x) + ... + (h_n - x), as every fork does.
- **The width** d_t of the tracks' streams: the dense model's over sqrt(n), since n matrices of d_t x d_t then have as
many numbers as one of d x d. The width of a head stays, where the architecture has one of its own; where all heads fill
the stream (GPT-2, OPT, GPT-Neo, GPT-NeoX), heads are wider by sqrt(n).
- **The neurons**: as many as make the parameters of all layers together the dense model's, within 1% (of streams less
than about a hundred wide: as near as a single neuron of each track).
- **Mixtures of experts** (PT-MoE, section 2.2): each layer of a track has a router and as many experts, of which as
many get a token, as in the dense model, with fewer neurons each, a multiple of 8.
- **The ends**: embedding, learned positions, final norm and head are those of one model of width d_t, with a sqrt(n)-th
of the dense model's parameters. So whole models are equal in their layers only.

An architecture whose layers are one step (GPT-NeoX) has branches of D steps, and joins L/D times in place of L
synchronisations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from surgeon.language.program import Fork, Program, layer_nodes
from surgeon.language.sublayer import FEED_FORWARD
from surgeon.models.families import Family, family_of

WIDTH_STEP = 8  # widths of streams, or of heads that fill one, are multiples of it
MOST_OFF = 0.005  # of the dense model's parameters, by which rounding neurons may miss them
# Multiples that are kind to hardware and ranks, the kindest first.
ROUND_NEURONS = (128, 64, 32, 16, 8, 4, 2)


def narrow(config: PreTrainedConfig, count: int, depth: int) -> tuple[PreTrainedConfig, Program]:
    """Derive a model of native tracks that has the layers' parameters of a dense one.

    Args:
        config: the dense model's, of any family.
        count: of tracks, n in the paper.
        depth: layers of a track between two joins, D in the paper. Where it does not divide the layers, the last block
            is shorter, since tracks meet at the end.

    Returns:
        The configuration of the stored layers, all of them narrow, and the program over them. They are numbered block
            by block, within a block track by track: of L layers, block b of track t has (b n + t) D to (b n + t) D + D
            - 1.

    Raises:
        ValueError: if `count` is below 2 or `depth` below 1, heads or KV heads do not divide by `count`, layers have
            attentions of different kinds, the model is too small for so many tracks, or its configuration cannot be
            that of narrower layers.
    """
    family = family_of(config)
    if count < 2:
        raise ValueError(
            f"count must be at least 2 tracks, not {count}; a single track is the dense model"
        )
    if depth < 1:
        raise ValueError(f"depth must be at least 1 layer, not {depth}")
    for other in family.attentions[1:]:  # whose heads are counted elsewhere
        raise ValueError(f"tracks have no narrower {family.attentions_like(other)}: {other.kept}")
    units = family.units(config)
    all_heads = units["heads"]
    kv_heads = units["kv_heads"]
    if all_heads % count or kv_heads % count:
        shared = math.gcd(all_heads, kv_heads)
        fits = [str(number) for number in range(2, shared + 1) if shared % number == 0]
        can = f"{' or '.join(fits)} tracks can" if fits else "no number of tracks can"
        raise ValueError(
            f"{all_heads} heads and {kv_heads} KV heads do not divide among {count} tracks; {can}"
        )
    program, sources = track_program(int(config.num_hidden_layers), count, depth, family.steps_per_layer)
    entries = {"num_hidden_layers": len(sources), **family.per_layer_entries(config, sources)}
    heads = all_heads // count
    # Some configurations want streams that heads divide, whatever the heads' own width.
    step = heads * WIDTH_STEP if family.heads_fill_stream else math.lcm(heads, WIDTH_STEP)
    width = step * max(1, round(config.hidden_size / math.sqrt(count) / step))
    own = {} if family.heads_fill_stream else {"head_dim": family.head_dim(config)}
    entries |= {"num_attention_heads": heads, "hidden_size": width} | own
    entries |= family.entries.follow_width(config, width)
    if isinstance(family.kv_heads, str) and getattr(config, family.kv_heads, None) is not None:
        entries[family.kv_heads] = kv_heads // count
    neurons = {
        width: _matching_neurons(config, family, entries, count, layer)
        for width, layer in layer_of_each_width(config, family).items()
    }
    return _change_config(config, entries | neurons), program


def track_program(
    layers: int, count: int, depth: int, steps_per_layer: int = 2
) -> tuple[Program, list[int]]:
    """Make the program of tracks over narrow layers, and list each layer's number in its own track."""
    forks = []
    sources = list[int]()
    for start in range(0, layers, depth):
        block = range(start, min(start + depth, layers))
        branches = []
        for _ in range(count):
            stored = range(len(sources), len(sources) + len(block))
            branches.append(
                tuple(node for layer in stored for node in layer_nodes(layer, steps_per_layer))
            )
            sources += block
        forks.append(Fork(tuple(branches)))
    return Program(tuple(forks)), sources


def _width_of(family: Family, layer: int) -> str:
    return family.spec(FEED_FORWARD, layer).width or family.intermediate


def layer_of_each_width(config: PreTrainedConfig, family: Family) -> dict[str, int]:
    """The first layer for each of these entries."""
    layers = reversed(range(int(config.num_hidden_layers)))
    return {_width_of(family, layer): layer for layer in layers}


def _matching_neurons(
    config: PreTrainedConfig, family: Family, entries: Mapping[str, Any], count: int, layer: int
) -> int:
    """Find the neurons of a narrow layer with which `count` of them have as many parameters as one of the dense model.

    Parameters are counted, not derived: biases and norms differ from family to family.
    """
    wanted = _layer_size(config, family, layer) / count
    described = {**entries, **family.per_layer_entries(config, [layer]), "num_hidden_layers": 1}
    width = _width_of(family, layer)
    one, two = (_layer_size(_change_config(config, {**described, width: n}), family, 0) for n in (1, 2))
    each = two - one
    exact = (wanted - one) / each + 1
    step = next((step for step in ROUND_NEURONS if step / 2 * each <= MOST_OFF * wanted), 1)
    if family.spec(FEED_FORWARD, layer).mixture is not None:
        step = max(step, WIDTH_STEP)  # PyTorch's products of many experts at once need rows of 16 bytes
    neurons = step * round(exact / step)
    if neurons < 1:
        raise ValueError(
            f"a stream of {config.hidden_size} is too narrow for {count} tracks: their attentions alone have more "
            f"parameters than the dense model's layers; use fewer tracks or a wider model"
        )
    return neurons


def _change_config(config: PreTrainedConfig, entries: Mapping[str, Any]) -> PreTrainedConfig:
    named = {config.attribute_map.get(key, key): value for key, value in entries.items()}
    try:
        changed: PreTrainedConfig = type(config).from_dict(config.to_dict() | named)
    except Exception as error:  # whatever the architecture's own checks raise
        raise ValueError(f"this {config.model_type} model has no narrow layers: {error}") from error
    changed.name_or_path = ""  # no folder has such a model
    return changed


def _layer_size(config: PreTrainedConfig, family: Family, layer: int) -> int:
    described = {"num_hidden_layers": 1, **family.per_layer_entries(config, [layer])}
    changed = _change_config(config, described)
    try:
        with torch.device("meta"):  # without numbers
            model = AutoModelForCausalLM.from_config(changed)
    except Exception as error:  # whatever the architecture trips over
        raise ValueError(f"there is no {config.model_type} model with such layers: {error}") from error
    return sum(each.numel() for each in model.get_submodule(family.layers).parameters())
