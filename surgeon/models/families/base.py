"""Families: architectures as data.

Code that needs a weight asks the family for a role ("q", "down"), never for a module by name, so that adding an
architecture is adding one description. See docs/extending.md, "Adding a family". What a configuration says of positions
follows: layers with windows, angles, the longest text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal

from surgeon.language.program import Program
from surgeon.language.sublayer import ATTENTION, FEED_FORWARD, LayerShapes, MixtureShapes
from surgeon.models.families.specs import NEURONS, HeadStage, Latent, MixtureSpec, SublayerSpec, Unit
from surgeon.words import layer_list

Scale = Callable[[Any], float | None]  # of a config: a factor; None where the architecture has none


@dataclass(frozen=True)
class Factor:
    """A factor, or its inverse, that a config has in an attribute, where 1 is none."""

    attribute: str
    inverse: bool = False

    def __call__(self, config: Any) -> float | None:
        factor = float(getattr(config, self.attribute))
        if factor == 1:
            return None
        if self.inverse:
            return 1 / factor
        return factor


def _same_family(family: Family, _: Any) -> Family:
    return family


def _nothing_else(*_: Any) -> dict[str, Any]:
    return {}


def _none(_: Any) -> None:
    return None


@dataclass(frozen=True)
class Norms:
    """The norms of the stream.

    Attributes:
        kind: "rms" (a gain), "layer" (a gain and a shift), "centred" (a layer norm with a gain alone) or "plain"
            (neither).
        stored_epsilon: the config attribute that holds their epsilon, or the number itself.
        unit_offset: whether all norms, those of heads too, multiply by 1 + their stored gain (Gemma2).
    """

    kind: Literal["rms", "layer", "centred", "plain"] = "rms"
    stored_epsilon: str | float = "rms_norm_eps"
    unit_offset: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """The parameters of one."""
        return {"layer": ("weight", "bias"), "plain": ()}.get(self.kind, ("weight",))

    def epsilon(self, config: Any) -> float:
        if isinstance(self.stored_epsilon, str):
            return float(getattr(config, self.stored_epsilon))
        return self.stored_epsilon


@dataclass(frozen=True)
class Positions:
    """Positions, by which queries and keys turn (rotary) unless there is an embedding of them.

    Attributes:
        embedding: path of the embedding.
        offset: its entries before that of position 0 (OPT has 2).
        from_mask: whether positions count what the attention mask lets through, unless they are given.
        partial: whether only some features of a head may turn; other classes turn all, whatever the config says.
        neighbours: whether features 2i and 2i + 1 turn as a pair (GLM), not i and that half a width further on.
        rope: of a config: entries on rotary positions, as in `rope_parameters`.
        layers: the config attribute that says of each layer whether its heads turn, if not all do.
        in_windows: whether heads turn in layers with a window, and in no others (Cohere2).
        computes_anew: whether generation computes a text again as it grows beyond the length from which positions turn
            otherwise (Phi3); else keys stay in the cache as they were turned.
    """

    embedding: str | None = None
    offset: int = 0
    from_mask: bool = False
    partial: bool = False
    neighbours: bool = False
    rope: Callable[[Any], dict[str, Any]] = attrgetter("rope_parameters")
    layers: str | None = None
    in_windows: bool = False
    computes_anew: bool = False

    @property
    def rotary(self) -> bool:
        return self.embedding is None


@dataclass(frozen=True)
class AttentionWindow:
    """The window of attentions.

    Attributes:
        tokens: the config attribute that counts its tokens, the one that looks among them.
        layers: the config attribute that says which layers have the window, if not all have.
        chunked: whether a token looks back to the last position that is a multiple of the window (Llama 4).
    """

    tokens: str | None = None
    layers: str | None = None
    chunked: bool = False


@dataclass(frozen=True)
class Scales:
    """Factors and bounds.

    Attributes:
        embedding: of embeddings.
        attention: of products of queries and keys, in place of 1 / sqrt(head_dim).
        output: of the output of every sublayer before it is added (Granite).
        logits: of output logits, before they are capped.
        attention_cap, logit_cap: the config attribute with the bound c of scores, or output logits, that are
            c * tanh(score / c).
    """

    embedding: Scale = _none
    attention: Scale = _none
    output: Scale = _none
    logits: Scale = _none
    attention_cap: str | None = None
    logit_cap: str | None = None


@dataclass(frozen=True)
class Dropouts:
    """Config attributes with the dropout probabilities of training.

    Attributes:
        output: of sublayer outputs, dropped by the layer.
        module: of sublayer outputs, dropped by their own modules.
        mlp: of MLPs' outputs alone, dropped by a module.
        attention: of attention weights.
        embedding: of the stream before the first layer.
    """

    output: str | None = None
    module: str | None = None
    mlp: str | None = None
    attention: str | None = "attention_dropout"
    embedding: str | None = None


@dataclass(frozen=True)
class ConfigEntries:
    """Entries of config.json that follow from its layers.

    Attributes:
        counts: those that count layers, as numbers or lists with numbers.
        lists: those with one item per layer on its attention.
        follow: rewrites others that describe layers, so that layer i is described as layer `sources[i]` was.
        follow_mlp: likewise of those on layers' feed-forwards (dense ones among mixtures).
        follow_width: rewrites others with the stream's width.
    """

    counts: tuple[str, ...] = ("num_hidden_layers",)
    lists: tuple[str, ...] = ("layer_types",)
    follow: Callable[[Any, Sequence[int]], dict[str, Any]] = _nothing_else
    follow_mlp: Callable[[Any, Sequence[int]], dict[str, Any]] = _nothing_else
    follow_width: Callable[[Any, int], dict[str, Any]] = _nothing_else


@dataclass(frozen=True)
class Family:
    """One architecture; paths are from the causal language model, or from a layer.

    Attributes:
        name: as users know it.
        model_type: as `config.json` has it.
        summary: a sentence on its particulars.
        layers: path of the decoder's list of layers.
        activation: the config attribute that names the MLP's activation.
        intermediate: the config attribute that holds the MLP's width.
        kv_heads: the config attribute that holds the number of KV heads, if any, or the number itself.
        head_bias: whether the head has a bias (Phi, GPT-J).
        stored_head: the head's name in checkpoints, where that is not its path.
        steps_per_layer: 2, or 1 where attention and MLP of a layer read the same stream (GPT-NeoX, Cohere).
        adds_in_turn: whether a layer of one step adds attention's output to the stream and then the MLP's, not both at
            once, which is rounded otherwise.
        layer_specs: sublayers of single layers that differ from the others, by kind and layer; a `variant` gives them.
        stored_names: names of layers' modules in files, by pairs: the beginning of a path in the model, and in files.
        heads_fill_stream: whether all heads together are as wide as the stream; others have a head_dim of their own.
        arguments: names of the decoder's positional arguments for a layer, after the stream.
        returns_tuple: whether a layer returns its stream as the first item of a tuple.
        variant: the description of a model with this config, where it depends on more than the model type.
        off_ranks: why ranks run no program of it; a `variant` says it.
        unsupported: says why a config of this family cannot be operated on, or returns None.
        unfusable: says why its layers cannot be stored side by side in one, or returns None.
    """

    name: str
    model_type: str
    summary: str
    layers: str
    embedding: str
    final_norm: str
    head: str
    attention: SublayerSpec
    mlp: SublayerSpec
    activation: str
    intermediate: str
    norms: Norms = Norms()
    positions: Positions = Positions()
    window: AttentionWindow = AttentionWindow()
    scales: Scales = Scales()
    dropout: Dropouts = Dropouts()
    entries: ConfigEntries = ConfigEntries()
    kv_heads: str | int = "num_key_value_heads"
    head_bias: bool = False
    stored_head: str | None = None
    steps_per_layer: int = 2
    adds_in_turn: bool = False
    layer_specs: tuple[tuple[str, int, SublayerSpec], ...] = ()
    stored_names: tuple[tuple[str, str], ...] = ()
    heads_fill_stream: bool = False
    arguments: tuple[str, ...] = ()
    returns_tuple: bool = False
    variant: Callable[[Family, Any], Family] = _same_family
    off_ranks: str | None = None
    unsupported: Callable[[Any], str | None] = _none
    unfusable: Callable[[Any], str | None] = _none

    def spec(self, kind: str, layer: int | None = None) -> SublayerSpec:
        """Return the sublayer of kind "A" or "F" of a layer; without one, of most of them."""
        own = self._layer_specs.get((kind, layer))
        return own or (self.attention if kind == ATTENTION else self.mlp)

    def with_spec(self, kind: str, layers: Iterable[int], spec: SublayerSpec) -> Family:
        """Give some layers another sublayer of a kind."""
        return replace(self, layer_specs=(*self.layer_specs, *((kind, layer, spec) for layer in layers)))

    def with_heads(self, *stages: HeadStage) -> Family:
        """Give most layers' attentions other stages of heads."""
        return replace(self, attention=replace(self.attention, heads=stages))

    @cached_property
    def _layer_specs(self) -> dict[tuple[str, int | None], SublayerSpec]:
        return {(kind, layer): spec for kind, layer, spec in self.layer_specs}

    def specs(self) -> list[SublayerSpec]:
        """Return the sublayers of all layers, each once."""
        return list(
            dict.fromkeys((self.attention, self.mlp, *(spec for _, _, spec in self.layer_specs)))
        )

    @property
    def mixture(self) -> MixtureSpec | None:
        """The experts of most layers' feed-forwards, if they are mixtures."""
        return self.mlp.mixture

    def latent(self, config: Any) -> Latent | None:
        """Return the sizes of latent attentions under this config."""
        if self.attention.latent is None:
            return None
        return self.attention.latent(config)

    @property
    def attentions(self) -> list[SublayerSpec]:
        """The attentions of all layers, each once."""
        others = (spec for kind, _, spec in self.layer_specs if kind == ATTENTION)
        return list(dict.fromkeys((self.attention, *others)))

    def attentions_like(self, spec: SublayerSpec) -> str:
        """Name these attentions: those of the family, or of the layers that have others than most."""
        layers = [layer for kind, layer, own in self.layer_specs if kind == ATTENTION and own == spec]
        if layers:
            where = f" in layer{'s' * (len(layers) > 1)} {layer_list(layers)}"
        else:
            where = ""
        return f"attentions of {self.name}{where}"

    def apart(self, program: Program) -> str | None:
        """Say which part of a program ranks have none of, and why; None if they have all."""
        if self.off_ranks is not None:
            return f"{self.name} here: {self.off_ranks}"
        for spec in dict.fromkeys(self.spec(one.kind, one.layers[0]) for one in program.sublayers()):
            if spec.apart is not None:
                return f"{self.attentions_like(spec)}: {spec.apart}"
        return None

    def require_ranked(self, program: Program) -> None:
        """Refuse a program with something that ranks have none of."""
        if (why_not := self.apart(program)) is not None:
            raise ValueError(f"ranks do not run {why_not}; transformers does")

    @property
    def off_vllm(self) -> str | None:
        """Why vLLM runs no program of these attentions; None if it does."""
        if self.window.chunked:
            return "they look at chunks of a text"
        return None

    @property
    def shares_norm(self) -> bool:
        """Tell whether a layer's two sublayers have one norm between them (Cohere)."""
        norm = self.attention.stream_norms.get("norm")
        return norm is not None and norm == self.mlp.stream_norms.get("norm")

    @property
    def embeddings(self) -> tuple[str, ...]:
        """Paths of the embeddings: of tokens, and of positions where these are learned."""
        return tuple(path for path in (self.embedding, self.positions.embedding) if path is not None)

    def units(self, config: Any, layer: int | None = None) -> dict[Unit, int]:
        """Count a layer's heads, KV heads and neurons (of each expert) under this config."""
        heads = int(config.num_attention_heads)
        kv_heads = self.kv_heads
        if isinstance(kv_heads, str):
            kv_heads = int(getattr(config, kv_heads, None) or 0)
        spec = self.spec(FEED_FORWARD, layer)
        neurons = getattr(config, spec.width or self.intermediate)
        units: dict[Unit, int] = {
            "heads": heads,
            "kv_heads": kv_heads or heads,
            "neurons": int(neurons or 4 * config.hidden_size),  # as GPT-2 fills it in
        }
        if spec.mixture is not None and spec.mixture.shared is not None:
            units["shared_neurons"] = spec.mixture.shared(config)
        return units

    def unit_width(self, config: Any, unit: Unit) -> int:
        """Count the features of a projection for one head or neuron."""
        if unit in NEURONS:
            return 1
        return self.head_dim(config)

    def layer_shapes(self, config: Any) -> LayerShapes:
        """Return the shapes of layers' matrices under this config; biases and norms are left out."""
        others = {layer: self._shapes_of(config, layer) for _, layer, _ in self.layer_specs}
        return replace(self._shapes_of(config, None), others=others)

    def _shapes_of(self, config: Any, layer: int | None) -> LayerShapes:
        units = self.units(config, layer)
        hidden = int(config.hidden_size)
        attention = self.spec(ATTENTION, layer)
        mlp = self.spec(FEED_FORWARD, layer)
        shapes = {}
        for projection in (*attention.projections, *mlp.projections):
            divided = units[projection.unit] * self.unit_width(config, projection.unit)
            if projection.reads_stream:
                shapes[projection.role] = (divided, hidden)
            else:
                shapes[projection.role] = (hidden, divided)
        counts = {ATTENTION: units["kv_heads"], FEED_FORWARD: units["neurons"]}
        if attention.kept is not None:
            del counts[ATTENTION]
        beside: dict[str, int] = {}
        if attention.latent is not None:
            parts = attention.latent(config).shapes(hidden)
            beside[ATTENTION] = sum(map(math.prod, parts.values()))
        if attention.numbers is not None:
            beside[ATTENTION] = attention.numbers(config)
        mixture = None
        if mlp.mixture is not None:
            if mlp.mixture.shared_router is None:
                shared = 0
            else:
                shared = hidden
            experts = int(getattr(config, mlp.mixture.count))
            mixture = MixtureShapes(experts, mlp.mixture.routing(config).top_k, hidden, shared)
        return LayerShapes(shapes, norms=beside, units=counts, mixture=mixture)

    def attention_entries(self, config: Any, sources: Sequence[int]) -> dict[str, Any]:
        """Return a config's entries on single attentions for new layers.

        Args:
            sources: for each new layer, the layer whose description it gets.
        """
        lists = {key: getattr(config, key, None) for key in self.entries.lists}
        entries = {
            key: [values[k] for k in sources] for key, values in lists.items() if values is not None
        }
        return entries | self.entries.follow(config, sources)

    def per_layer_entries(
        self, config: Any, sources: Sequence[int], feed_forwards: Sequence[int] | None = None
    ) -> dict[str, Any]:
        """Return a config's entries on single layers for new layers.

        Args:
            sources: for each new layer, the layer whose description it gets.
            feed_forwards: that of its feed-forward, where this is of other layers.
        """
        return self.attention_entries(config, sources) | self.entries.follow_mlp(
            config, feed_forwards or sources
        )

    def head_dim(self, config: Any) -> int:
        return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


# What configs call layers whose attention has a window.
LOCAL = ("sliding_attention", "local", "chunked_attention")


def windowed_layers(family: Family, config: Any) -> list[bool]:
    """Tell of each layer whether its attention looks at a window only."""
    layers = int(config.num_hidden_layers)
    if family.window.tokens is None or getattr(config, family.window.tokens) is None:
        return [False] * layers
    if family.window.layers is None:
        return [True] * layers
    return [kind in LOCAL for kind in getattr(config, family.window.layers)]


def attention_windows(family: Family, config: Any, layers: int) -> tuple[int | None, ...]:
    """Count the tokens that each layer's attention looks at; nothing if all of them look at everything.

    Raises:
        ValueError: if the configuration does not say which layers have a window, or it is below 1.
    """
    if family.window.tokens is None or (window := getattr(config, family.window.tokens)) is None:
        return ()
    if family.window.layers is None:
        windowed = [True] * layers
    else:
        windowed = windowed_layers(family, config)
    if len(windowed) != layers:
        raise ValueError(
            f"{family.window.layers} in config.json has an entry for each of {len(windowed)} layers, and the "
            f"checkpoint holds {layers}; attention windows need one for each"
        )
    if not any(windowed):  # Qwen2-MoE's window is 0 then
        return ()
    if window < 1:
        raise ValueError(f"{family.window.tokens} must be at least 1 token, not {window}")
    return tuple(window if here else None for here in windowed)


def rotated_layers(family: Family, config: Any) -> list[bool]:
    """Tell of each layer whether its attention has rotary positions."""
    positions = family.positions
    if positions.in_windows:
        return windowed_layers(family, config)
    if positions.layers is None or getattr(config, positions.layers) is None:
        return [positions.rotary] * int(config.num_hidden_layers)
    return list(map(bool, getattr(config, positions.layers)))


def rope_kinds(family: Family, config: Any) -> list[str | None]:
    """Name each layer's rotary positions as the config does, where not all layers have the same; else None."""
    kinds = getattr(config, "layer_types", None) or []
    if any(kind in family.positions.rope(config) for kind in kinds):
        return list(kinds)
    return [None] * int(config.num_hidden_layers)


def rope_of(family: Family, config: Any, kind: str | None = None) -> dict[str, Any]:
    """Return a config's entries on the rotary positions of one of `rope_kinds`."""
    rope = family.positions.rope(config)
    if kind is not None:
        rope = rope[kind]
    return rope


def rotary_angles(
    family: Family, config: Any, kind: str | None = None
) -> tuple[tuple[float, ...], float]:
    """Return the angle of each pair of features per position, and the factor on cosine and sine.

    Args:
        kind: of `rope_kinds`.
    """
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = rope_of(family, config, kind)
    if rope["rope_type"] in ROPE_INIT_FUNCTIONS:
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, layer_type=kind)
        return tuple(frequencies.tolist()), float(scale)
    # Plain ones, in float32 as `transformers` has them: its own stand in modeling files, which take long to import.
    width = family.head_dim(config)
    if family.positions.partial:
        width = int(width * rope.get("partial_rotary_factor", 1.0))
    powers = torch.arange(0, width, 2, dtype=torch.float32) / width
    return tuple((1.0 / rope["rope_theta"] ** powers).tolist()), 1.0


def long_rotary_angles(
    family: Family, config: Any, kind: str | None = None
) -> tuple[int, tuple[float, ...], float] | None:
    """Return the rotary positions of long texts, as of `Rotary`.

    Returns:
        The length beyond which they are others, the angle of each pair of features per position, and by how much of the
        length that is stretched; None where texts of all lengths turn alike.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = rope_of(family, config, kind)
    if rope["rope_type"] == "dynamic":
        return (
            int(config.max_position_embeddings),
            rotary_angles(family, config, kind)[0],
            float(rope["factor"]),
        )
    if rope["rope_type"] != "longrope":
        return None
    beyond = rope["original_max_position_embeddings"]
    frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=beyond + 1, layer_type=kind)
    return beyond, tuple(frequencies.tolist()), 0.0


def longest_text(family: Family, config: Any) -> int:
    """Count the tokens that a text may have under this config; learned positions are counted where they are stored."""
    times: Any = 1
    if family.positions.rotary:
        rope = family.positions.rope(config) or {}
        if rope.get("rope_type") == "dynamic":
            times = rope.get("factor")
    # `rotary_angles` cannot be had then.
    if not isinstance(times, int | float) or not 1 <= times < math.inf:
        times = 1
    return int(config.max_position_embeddings * times)
