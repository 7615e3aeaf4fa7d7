"""What a family is: where an architecture keeps its norms, attention, MLP and projections, and which flags it has.

A family is data. Code that needs a weight asks the family for a role ("q", "down"), never for a module by name, so
that adding an architecture is adding one description. See docs/extending.md, "Adding a family".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal

from surgeon.language.program import Program
from surgeon.language.sublayer import ATTENTION, FEED_FORWARD, LayerShapes, MixtureShapes
from surgeon.models.families.specs import NEURONS, Latent, MixtureSpec, SublayerSpec, Unit
from surgeon.words import layer_list

Scale = Callable[[Any], float | None]  # of a config: a factor; None where the architecture has none


@dataclass(frozen=True)
class Factor:
    """A factor that a config has in an attribute, where 1 is none."""

    attribute: str

    def __call__(self, config: Any) -> float | None:
        factor = float(getattr(config, self.attribute))
        if factor == 1:
            return None
        return factor


def _unvaried(family: Family, _: Any) -> Family:
    return family


def _nothing_else(*_: Any) -> dict[str, Any]:
    return {}


def _none(_: Any) -> None:
    return None


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        name: as users know it.
        model_type: as `config.json` has it.
        summary: a sentence on what is particular to it.
        layers: path of the decoder's list of layers, from the causal language model.
        embedding, final_norm, head: paths from the causal language model.
        head_bias: whether the head has a bias (Phi, GPT-J).
        stored_head: what checkpoints call the head, where that is not its path.
        attention, mlp: where a layer keeps its two sublayers.
        layer_specs: the same of single layers that differ from the others, by kind and layer; a `variant` gives them.
        stored_names: what files call modules of a layer, by pairs: how a path begins in the model, and in files.
        norm_kind: "rms" (a gain), "layer" (a gain and a shift), "centred" (a layer norm with a gain alone) or "plain"
            (one with neither).
        unit_offset: whether norms multiply by 1 + their stored gain (Gemma2).
        norm_epsilon: the config attribute that holds the norms' epsilon, or the number itself.
        activation: the config attribute that names the MLP's activation.
        intermediate: the config attribute that holds the MLP's width.
        kv_heads: the config attribute that holds the number of KV heads, where there is one, or the number itself.
        gated: whether the MLP multiplies an activated gate with an up projection.
        rotary: whether positions enter by rotary embedding in each attention.
        partly_rotary: whether only some features of a head may; other classes rotate all, whatever the config says.
        rope: of a config: what it says of rotary positions, in the words of `rope_parameters`.
        rotary_neighbours: whether features 2i and 2i + 1 turn as a pair (GLM), not i and that half a width further on.
        position_embedding: path of a learned position embedding, if any.
        position_offset: how many entries of it come before position 0 (OPT has 2).
        positions_from_mask: whether positions count what the attention mask lets through, unless they are given.
        rotary_layers: the config attribute that says of each layer whether it has rotary positions; all have where
            there is none.
        rotary_in_windows: whether the layers with rotary positions are those with a window (Cohere2).
        dropout: the config attribute with the dropout probability of sublayer outputs while training, if any.
        module_dropout: the same where the sublayers' own modules do it.
        mlp_dropout: the same of what MLPs add alone, done by a module.
        attention_dropout: the same of attention weights, if any.
        embedding_dropout: the same of the stream before the first layer, if any.
        steps_per_layer: 2, or 1 where attention and MLP of a layer read the same stream (GPT-NeoX, Cohere).
        adds_in_turn: whether a layer of one step adds attention's output to the stream and then the MLP's, not both at
            once: what differs is rounding.
        softcap: the config attribute with the bound c of output logits that are c * tanh(logits / c), if any.
        attention_softcap: the same for the scores of attentions.
        window: the config attribute with how many tokens an attention looks at, itself the last of them, if any.
        window_layers: the config attribute that says which layers have the window; all of them where there is none.
        chunked: whether a window is a chunk of the text instead: a token looks back to the last position that is a
            multiple of the window (Llama 4).
        layer_counts: entries of config.json that say how many layers there are, by numbers or by lists with numbers.
        layer_lists: config attributes with one item per layer that says something of its attention.
        heads_fill_stream: whether all heads together are as wide as the stream; others have a head_dim of their own.
        embedding_scale: what embeddings are multiplied by.
        attention_scale: what products of queries and keys are multiplied by; by default 1 / sqrt(head_dim).
        computes_anew: whether generation computes a text again as it grows beyond the length from which its rotary
            positions are others (Phi3); else keys stay in the cache as they were turned.
        output_scale: what is multiplied with the output of every sublayer before it is added (Granite).
        logit_scale: what output logits are multiplied by, before they are capped.
        arguments: names of what the decoder hands a layer by position after the stream.
        returns_tuple: whether a layer returns its stream as the first item of a tuple.
        variant: the description of a model with this config, where it depends on more than the model type.
        follow: config entries that describe layers in another way than one list item per layer, rewritten so that
            layer i is described as layer `sources[i]` was.
        follow_mlp: config entries that say how layers' feed-forwards differ (dense ones among mixtures), likewise.
        follow_width: config entries that say the stream's width once more, for a stream of another width.
        off_ranks: why ranks run no program of it, if they do not; a `variant` says it.
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
    norm_kind: Literal["rms", "layer", "centred", "plain"]
    norm_epsilon: str | float
    activation: str
    intermediate: str
    gated: bool
    rotary: bool
    partly_rotary: bool = False
    kv_heads: str | int = "num_key_value_heads"
    rope: Callable[[Any], dict[str, Any]] = attrgetter("rope_parameters")
    rotary_neighbours: bool = False
    position_embedding: str | None = None
    position_offset: int = 0
    positions_from_mask: bool = False
    rotary_layers: str | None = None
    rotary_in_windows: bool = False
    head_bias: bool = False
    stored_head: str | None = None
    dropout: str | None = None
    module_dropout: str | None = None
    mlp_dropout: str | None = None
    attention_dropout: str | None = "attention_dropout"
    embedding_dropout: str | None = None
    steps_per_layer: int = 2
    adds_in_turn: bool = False
    unit_offset: bool = False
    softcap: str | None = None
    attention_softcap: str | None = None
    window: str | None = None
    window_layers: str | None = None
    chunked: bool = False
    layer_specs: tuple[tuple[str, int, SublayerSpec], ...] = ()
    stored_names: tuple[tuple[str, str], ...] = ()
    layer_counts: tuple[str, ...] = ("num_hidden_layers",)
    layer_lists: tuple[str, ...] = ("layer_types",)
    heads_fill_stream: bool = False
    embedding_scale: Scale = _none
    attention_scale: Scale = _none
    computes_anew: bool = False
    output_scale: Scale = _none
    logit_scale: Scale = _none
    arguments: tuple[str, ...] = ()
    returns_tuple: bool = False
    variant: Callable[[Family, Any], Family] = _unvaried
    follow: Callable[[Any, Sequence[int]], dict[str, Any]] = _nothing_else
    follow_mlp: Callable[[Any, Sequence[int]], dict[str, Any]] = _nothing_else
    follow_width: Callable[[Any, int], dict[str, Any]] = _nothing_else
    off_ranks: str | None = None
    unsupported: Callable[[Any], str | None] = _none
    unfusable: Callable[[Any], str | None] = _none

    def spec(self, kind: str, layer: int | None = None) -> SublayerSpec:
        """The description of a sublayer of kind "A" or "F" in a layer; without one, in most of them."""
        own = None if layer is None else self._layer_specs.get((kind, layer))
        return own or (self.attention if kind == ATTENTION else self.mlp)

    @cached_property
    def _layer_specs(self) -> dict[tuple[str, int], SublayerSpec]:
        return {(kind, layer): spec for kind, layer, spec in self.layer_specs}

    def specs(self) -> list[SublayerSpec]:
        """All descriptions of sublayers that some layer has, each once."""
        return list(dict.fromkeys((self.attention, self.mlp, *(spec for _, _, spec in self.layer_specs))))

    @property
    def mixture(self) -> MixtureSpec | None:
        """What most layers' feed-forwards have as mixtures of experts, if they are."""
        return self.mlp.mixture

    def latent(self, config: Any) -> Latent | None:
        """The sizes of its attentions under this config, where they are latent ones."""
        if self.attention.latent is None:
            return None
        return self.attention.latent(config)

    @property
    def attentions(self) -> list[SublayerSpec]:
        """All descriptions of attentions that some layer has, each once."""
        others = (spec for kind, _, spec in self.layer_specs if kind == ATTENTION)
        return list(dict.fromkeys((self.attention, *others)))

    def attentions_like(self, spec: SublayerSpec) -> str:
        """Which attentions these are, in words: those of the family, or of the layers that have others than most."""
        layers = [layer for kind, layer, own in self.layer_specs if kind == ATTENTION and own == spec]
        if layers:
            where = f" in layer{'s' * (len(layers) > 1)} {layer_list(layers)}"
        else:
            where = ""
        return f"attentions of {self.name}{where}"

    def apart(self, program: Program) -> str | None:
        """What of a program ranks have none of, mostly attentions, and why, in words; None if they have all."""
        if self.off_ranks is not None:
            return f"{self.name} here: {self.off_ranks}"
        for spec in dict.fromkeys(self.spec(one.kind, one.layers[0]) for one in program.sublayers()):
            if spec.apart is not None:
                return f"{self.attentions_like(spec)}: {spec.apart}"
        return None

    def require_ranked(self, program: Program) -> None:
        """Refuse a program with something that ranks have none of.

        Raises:
            ValueError: saying which and why.
        """
        if (why_not := self.apart(program)) is not None:
            raise ValueError(f"ranks do not run {why_not}; transformers does")

    @property
    def off_vllm(self) -> str | None:
        """Why vLLM runs no program of these attentions; None if it does."""
        if self.chunked:
            return "they look at chunks of a text"
        return None

    @property
    def shares_norm(self) -> bool:
        """Whether a layer's two sublayers have one norm between them (Cohere)."""
        norm = self.attention.stream_norms.get("norm")
        return norm is not None and norm == self.mlp.stream_norms.get("norm")

    @property
    def norm_parts(self) -> tuple[str, ...]:
        """The parameters of a norm of the stream."""
        return {"layer": ("weight", "bias"), "plain": ()}.get(self.norm_kind, ("weight",))

    def epsilon(self, config: Any) -> float:
        """The norms' epsilon under this config."""
        if isinstance(self.norm_epsilon, str):
            return float(getattr(config, self.norm_epsilon))
        return self.norm_epsilon

    def units(self, config: Any, layer: int | None = None) -> dict[Unit, int]:
        """How many heads, KV heads and neurons (of each expert) a layer has under this config."""
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
        """How many features of a projection one head or neuron has."""
        if unit in NEURONS:
            return 1
        return self.head_dim(config)

    def layer_shapes(self, config: Any) -> LayerShapes:
        """The shapes of a layer's matrices under this config; biases and norms are left out."""
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
            shapes[projection.role] = (divided, hidden) if projection.reads_stream else (hidden, divided)
        counts = {ATTENTION: units["kv_heads"], FEED_FORWARD: units["neurons"]}
        if attention.kept is not None:
            del counts[ATTENTION]
        latent = None if attention.latent is None else attention.latent(config)
        if latent:
            beside = {ATTENTION: sum(map(math.prod, latent.shapes(hidden).values()))}
        else:
            beside = {}
        if attention.numbers is not None:
            beside = {ATTENTION: attention.numbers(config)}
        mixture = None
        if mlp.mixture is not None:
            shared = 0 if mlp.mixture.shared_router is None else hidden
            experts = int(getattr(config, mlp.mixture.count))
            mixture = MixtureShapes(experts, mlp.mixture.routing(config).top_k, hidden, shared)
        return LayerShapes(shapes, norms=beside, units=counts, mixture=mixture)

    def attention_entries(self, config: Any, sources: Sequence[int]) -> dict[str, Any]:
        """The entries of a `transformers` config that describe single attentions, for others in their place.

        Args:
            sources: for each new layer, the layer whose description it gets.
        """
        lists = {key: getattr(config, key, None) for key in self.layer_lists}
        entries = {key: [values[k] for k in sources] for key, values in lists.items() if values is not None}
        return entries | self.follow(config, sources)

    def per_layer_entries(
        self, config: Any, sources: Sequence[int], feed_forwards: Sequence[int] | None = None
    ) -> dict[str, Any]:
        """All entries of a `transformers` config that describe single layers, for other layers in their place.

        Args:
            sources: for each new layer, the layer whose description it gets.
            feed_forwards: that of its feed-forward, where this is of other layers.
        """
        return self.attention_entries(config, sources) | self.follow_mlp(config, feed_forwards or sources)

    def head_dim(self, config: Any) -> int:
        """The width of one head under this config."""
        return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
