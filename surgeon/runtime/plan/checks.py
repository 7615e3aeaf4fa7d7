"""Checks that a model can run on so many ranks, and its plan, before any rank starts.

Only this module of the runtime needs `transformers`; ranks start faster without it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack, get_args

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from surgeon.checkpoint.config import open_stored
from surgeon.checkpoint.stored import StoredModel
from surgeon.checkpoint.tensor_file import read_json
from surgeon.language.program import Program
from surgeon.language.sublayer import ATTENTION, FEED_FORWARD, KINDS
from surgeon.models.families import Family
from surgeon.models.families.base import (
    attention_windows,
    long_rotary_angles,
    longest_text,
    rope_kinds,
    rope_of,
    rotary_angles,
    rotated_layers,
)
from surgeon.models.families.specs import Growth
from surgeon.models.shapes import check_layers
from surgeon.models.weights import ModelWeights, require_sliceable
from surgeon.runtime.plan.placement import cached_latent, check_division, shared_units
from surgeon.runtime.plan.specification import (
    OWN_ACTIVATIONS,
    Arithmetic,
    Balance,
    Decoding,
    HalvesMode,
    KvMode,
    LowRankMode,
    Mixtures,
    MixtureSize,
    Plan,
    Rotary,
    Ways,
    balance_of,
    require_low_rank,
)
from surgeon.words import did_you_mean, first_line, show_value

DTYPES = ("float32", "bfloat16", "float16")
WAYS: dict[str, tuple[str, tuple[Any, ...]]] = {  # what is said of a word that is none of those known
    "dtype": ("dtype {!r} to compute in", ("auto", *DTYPES)),
    "decoding": ("decoding {!r}", get_args(Decoding)),
    "low_rank": ("way {!r} of sharing factors among ranks", get_args(LowRankMode)),
    "kv": ("kv {!r}", get_args(KvMode)),
    "halves": ("mode {!r} of computing passes in halves", get_args(HalvesMode)),
}
ROPE_TYPES = ("default", *ROPE_INIT_FUNCTIONS)
MOST_RANKS = 1024  # of one machine


def make_plan(
    model: str | Path | StoredModel,
    ranks: int,
    max_tokens: int | None,
    program: Program | str | None = None,
    device: str = "cpu",
    *,
    sliced: bool = False,
    halves: str = "off",
    **ways: Unpack[Ways],
) -> Plan:
    """Check that a checkpoint's program can run on this many ranks with texts this long, and gather what they need.

    Args:
        model: a checkpoint folder (edited by surgeon or not), a hub name, or a model that is open.
        max_tokens: tokens of prompt and output together; None for as many as the model takes.
        program: run this one instead of the checkpoint's own.
        device: "cpu" or "cuda".
        sliced, halves: as of `Plan`.
        ways: how it is computed.

    Raises:
        FileNotFoundError: if there is no such model or a file of it is missing.
        ValueError: if the architecture or something in its configuration is not supported, the program names what the
            model does not have, ranks are more than heads and neurons, there is no such dtype or way of decoding,
            `kv` is "lowrank" and no attention has factors of k and v, `halves` is "on" and there is one rank, or the
            text is longer than the model's positions.
    """
    if not 1 <= ranks <= MOST_RANKS:
        raise ValueError(f"the number of ranks must lie in 1..{MOST_RANKS}, not {ranks}")
    stored = open_stored(model)
    # None of them are read
    config = stored.config
    family = stored.family
    source = stored.weights
    layers = source.count_layers()
    parsed = stored.program
    if isinstance(program, str):
        parsed = Program.parse(program)
    elif program is not None:
        parsed = program
    check_layers(parsed, layers)
    family.require_ranked(parsed)
    for piece in (sublayer for sublayer in parsed.sublayers() if sublayer.piece is not None):
        require_sliceable(family.spec(piece.kind, piece.layers[0]), family)
    _check_shapes(parsed, source, config)
    chosen = _all_ways({"halves": halves, **ways}, ranks)
    mixtures = Mixtures.of(partial(mixture_size, source), layers)
    latent = cached_latent(family.latent(config))
    check_division(parsed, shared_units(source.units, latent), ranks, mixtures)
    positions = longest_text(family, config)
    if family.positions.embedding is not None:
        positions = source.shape(f"{family.positions.embedding}.weight")[0] - family.positions.offset
    max_tokens = _text_length(max_tokens, positions)

    kv = chosen["kv"]
    dtype = chosen["dtype"]
    if dtype == "auto":
        dtype = str(stored.compute_dtype(device)).removeprefix("torch.")
    if note := stored.describe_dequantising(dtype):
        warnings.warn(note, stacklevel=1)
    vocabulary, hidden = source.shape(f"{family.embedding}.weight")
    arithmetic = arithmetic_of(stored, layers, max_tokens)
    if any(rotary.beyond is not None for rotary in arithmetic.rotaries):
        kv = _whole_keys(kv, max_tokens)
    plan = Plan(
        folder=stored.folder,
        family=family,
        program=str(parsed),
        ranks=ranks,
        head_dim=source.head_dim if latent is None else latent.width,
        hidden=hidden,
        vocabulary=vocabulary,
        layers=layers,
        max_tokens=max_tokens,
        tied=bool(config.tie_word_embeddings),
        dtype=dtype,
        arithmetic=arithmetic,
        ends=_end_tokens(stored.folder, config),
        windows=attention_windows(family, config, layers),
        mixtures=mixtures,
        latent=latent,
        decoding=chosen["decoding"],
        halves=chosen["halves"],
        low_rank=chosen["low_rank"],
        kv=kv,
        sliced=sliced,
        balance=None if latent or mixtures.sizes else _balance(parsed, source),
    )
    if kv == "lowrank":
        require_low_rank(plan)
    return plan


def _balance(program: Program, source: ModelWeights) -> Balance | None:
    """Return the balance of layers of one size."""
    wholes = {replace(one, piece=None, width=None, ranks=()) for one in program.sublayers()}
    sizes = []
    for kind in KINDS:
        found = [source.units(one) for one in wholes if one.kind == kind]
        if not found or found.count(found[0]) < len(found):
            return None
        sizes.append(found[0])
    hidden = source.shape(f"{source.family.embedding}.weight")[1]
    return balance_of(source.family, hidden, source.head_dim, *sizes)


def _text_length(max_tokens: int | None, positions: int) -> int:
    if max_tokens is None:
        return positions
    if max_tokens > positions:
        raise ValueError(
            f"prompt and output together are {max_tokens} tokens, and the model has {positions} positions; "
            "shorten the prompt or ask for fewer tokens"
        )
    return max_tokens


def arithmetic_of(stored: StoredModel, layers: int, max_tokens: int) -> Arithmetic:
    """Read what a model's configuration says of its numbers, in texts of so many tokens."""
    config = stored.config
    family = stored.family
    by_layer = rotaries_by_layer(config, family, layers, max_tokens)
    rotaries = tuple(dict.fromkeys(one for one in by_layer if one is not None))
    rotary_layers = places_among(rotaries, by_layer)
    growth = family.attention.head_stage(Growth)
    if growth is not None:
        rotaries += (Rotary((0.0,) * (stored.weights.head_dim // 2), 1.0, growth),)
    activation = str(getattr(config, family.activation))
    if activation not in OWN_ACTIVATIONS:
        from transformers.activations import ACT2FN

        if activation not in ACT2FN:
            raise ValueError(
                f"there is no activation {activation!r}; {did_you_mean(activation, ACT2FN)}"
            )
    mixture = family.mixture
    clamped_gate = None
    if mixture is not None and mixture.clamped_gate is not None:
        clamped_gate = mixture.clamped_gate(config)
    return Arithmetic(
        epsilon=family.norms.epsilon(config),
        activation=activation,
        rotaries=rotaries,
        rotary_layers=rotary_layers,
        query_factor=None if growth is None else len(rotaries) - 1,
        attention_scale=family.scales.attention(config),
        attention_softcap=_softcap(config, family.scales.attention_cap),
        embedding_scale=family.scales.embedding(config),
        output_scale=family.scales.output(config),
        logit_scale=family.scales.logits(config),
        logit_softcap=_softcap(config, family.scales.logit_cap),
        routing=None if mixture is None else mixture.routing(config),
        clamped_gate=clamped_gate,
    )


def mixture_size(source: ModelWeights, layer: int) -> MixtureSize | None:
    """The experts of a stored layer; None where it is no mixture."""
    experts = source.stored_experts(layer)
    if experts is None:
        return None
    return MixtureSize(experts, source.stored_width(FEED_FORWARD, layer))


def _all_ways(ways: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """Check all ways; "auto" where nothing is chosen."""
    for name, wanted in ways.items():
        what, choices = WAYS[name]
        if wanted not in choices:
            raise ValueError(f"there is no {what.format(wanted)}; {did_you_mean(wanted, choices)}")
    if ways.get("halves") == "on" and ranks == 1:
        raise ValueError(
            "halves take turns so that one computes while the other's reductions are on their way, and one rank has "
            "nothing to reduce; use more ranks, or halves off"
        )
    return dict.fromkeys(WAYS, "auto") | dict(ways)


def _check_shapes(program: Program, source: ModelWeights, config: Any) -> None:
    """Refuse weights that are missing or do not fit each other, before a rank trips over them."""
    if not config.tie_word_embeddings:  # the head does not stand for the embedding
        source.store.shape(source.names.own(f"{source.family.embedding}.weight"))
    for path, expected in _expected_shapes(program, source, config).items():
        found = source.shape(path)
        if len(found) != len(expected) or any(
            e not in (None, f) for e, f in zip(expected, found, strict=True)
        ):
            wanted = ", ".join("any" if size is None else str(size) for size in expected)
            raise ValueError(
                f"tensor {path} has the shape {found}, where the configuration asks for ({wanted})"
            )
    hidden = int(config.hidden_size)
    for sublayer in dict.fromkeys(program.sublayers()):
        units = source.units(sublayer)
        for projection in source.family.spec(sublayer.kind, sublayer.layers[0]).projections:
            role = projection.role
            rank = sublayer.rank(projection.role)
            whole = replace(sublayer, piece=None, ranks=())
            for each in source.each_expert(whole) if projection.stacked else (whole,):
                outputs, inputs = source.matrix(each, role).shape
                size = f"{outputs} x {inputs}"
                if (inputs if projection.reads_stream else outputs) != hidden:
                    raise ValueError(
                        f"{role} of {each} is a matrix of {size}, and the stream is {hidden} wide"
                    )
                if rank is not None and rank > min(outputs, inputs):
                    raise ValueError(
                        f"{each}: rank {rank} of {role} is above that of a matrix of {size}"
                    )
        if "kv_heads" in units and units["heads"] % units["kv_heads"]:
            raise ValueError(
                f"{sublayer} has {units['heads']} heads, which do not divide among {units['kv_heads']} KV heads"
            )


def _expected_shapes(
    program: Program, source: ModelWeights, config: Any
) -> dict[str, tuple[int | None, ...]]:
    """Shapes by path, as far as the configuration says them (None: layers may differ in width)."""
    family = source.family
    hidden = int(config.hidden_size)
    latent = source.family.latent(config)
    shapes: dict[str, tuple[int | None, ...]] = {f"{family.embedding}.weight": (None, hidden)}
    norms = [family.final_norm]
    if not config.tie_word_embeddings:
        shapes[f"{family.head}.weight"] = (source.shape(f"{family.embedding}.weight")[0], hidden)
    if family.head_bias:
        shapes[f"{family.head}.bias"] = (source.shape(f"{family.embedding}.weight")[0],)
    if family.positions.embedding is not None:
        shapes[f"{family.positions.embedding}.weight"] = (None, hidden)
    for sublayer in dict.fromkeys(program.sublayers()):
        spec = family.spec(sublayer.kind, sublayer.layers[0])
        for prefix in (f"{family.layers}.{layer}." for layer in sublayer.layers):
            norms += [f"{prefix}{norm}" for norm in spec.stream_norms.values()]
            turns = (None,) if spec.head_norm.gains in ("turns", "each") else ()
            width = None if spec.joins_heads else source.head_dim
            shapes |= {
                f"{prefix}{norm}.weight": (*turns, width) for norm in spec.head_norm.paths.values()
            }
            for projection in spec.projections:
                shape = (hidden, None) if projection.divided_dim else (None, hidden)
                if source.own_matrix(sublayer.layers[0], sublayer.kind, projection) is None:
                    shapes[f"{prefix}{projection.weight}"] = (
                        (None, *shape) if projection.stacked else shape
                    )
            if spec.mixture is not None:
                shapes[f"{prefix}{spec.mixture.router}.weight"] = (None, hidden)
            if latent is not None and sublayer.kind == ATTENTION:
                inside = f"{prefix}{spec.module}."
                shapes |= {
                    f"{inside}{name}.weight": size for name, size in latent.shapes(hidden).items()
                }
    return shapes | {f"{norm}.{part}": (hidden,) for norm in norms for part in family.norms.parts[:1]}


def _whole_keys(kv: str, max_tokens: int) -> str:
    """Refuse rank space for keys that turn by the length of their text, and cannot be made again."""
    if kv == "lowrank":
        raise ValueError(
            f"rotary positions depend on the length of a text here, up to {max_tokens} tokens, and keys in rank space "
            "would be turned again whenever they are read; use kv full or auto, or shorter texts"
        )
    if kv == "auto":
        return "full"
    return kv


def rotaries_by_layer(config: Any, family: Family, layers: int, max_tokens: int) -> list[Rotary | None]:
    """The rotary positions of each layer's attention, None where it has none."""

    def of_each(attribute: str | None, listed: list[Any]) -> list[Any]:
        if len(set(listed)) == 1:
            return listed[:1] * layers
        if len(listed) != layers:
            raise ValueError(
                f"{attribute} in config.json has an entry for each of {len(listed)} layers, and the checkpoint holds "
                f"{layers}; rotary positions need one for each"
            )
        return listed

    rotates = of_each(family.positions.layers, rotated_layers(family, config))
    if not any(rotates):
        return [None] * layers
    kinds = of_each("layer_types", rope_kinds(family, config))
    found = {}
    for kind in set(kinds):
        rope = rope_of(family, config, kind)
        scaling = rope["rope_type"]
        if scaling not in ROPE_TYPES:
            raise ValueError(
                f"rope_type in config.json must be known, not {show_value(scaling)}; "
                f"{did_you_mean(str(scaling), ROPE_TYPES)}"
            )
        described = (
            f"config.json describes no rotary positions: rope_parameters are {show_value(rope, 200)}"
        )
        try:
            rotary = Rotary(*rotary_angles(family, config, kind))
            longer = long_rotary_angles(family, config, kind)
        except Exception as error:  # whatever it trips over is a fault of the file
            raise ValueError(f"{described} ({type(error).__name__}: {first_line(error)})") from error
        if longer is not None and longer[0] < max_tokens:
            beyond, frequencies, stretch = longer
            rotary = replace(rotary, beyond=beyond, longer_frequencies=frequencies, stretch=stretch)
        numbers = [*rotary.inverse_frequencies, rotary.scale, *rotary.longer_frequencies, rotary.stretch]
        if not all(map(math.isfinite, numbers)):
            raise ValueError(f"{described} (an angle is infinite, or no number)")
        found[kind] = rotary
    return [found[kind] if turns else None for kind, turns in zip(kinds, rotates, strict=True)]


def places_among(
    rotaries: tuple[Rotary, ...], by_layer: Sequence[Rotary | None]
) -> tuple[int | None, ...]:
    """Each layer's place among rotary positions; nothing where all have the first, or there are none."""
    places = tuple(None if one is None else rotaries.index(one) for one in by_layer)
    if rotaries and any(place != 0 for place in places):
        return places
    return ()


def _softcap(config: Any, attribute: str | None) -> float | None:
    bound = None
    if attribute is not None:
        bound = getattr(config, attribute)
    if bound is None:
        return None
    if bound <= 0:
        raise ValueError(f"{attribute} must be above 0, not {bound}")
    return float(bound)


def _end_tokens(folder: Path, config: Any) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    ends = None
    if path.is_file():
        ends = read_json(path).get("eos_token_id")
    if ends is None:
        path = folder / "config.json"
        ends = getattr(config, "eos_token_id", None)
    found = ends if isinstance(ends, list) else [] if ends is None else [ends]
    for end in found:
        if type(end) is not int:
            raise ValueError(
                f"{path}: eos_token_id must be a token's number, or a list of them, not {show_value(ends)}"
            )
    return tuple(found)
